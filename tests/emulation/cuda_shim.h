// SPDX-License-Identifier: BSD-3-Clause
// Enough of CUDA for g++ to compile csrc/cuda. Threads are fibers of one thread of the operating
// system; grid.cpp runs them. The device is the CPU: its memory is the host's.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

// The language

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct Dim3 {
  unsigned x = 1;
};
inline Dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace shim {

// Runs a grid, whose threads all call `thread`. Blocks come in any order, and so does what the
// threads of a block do between two barriers or atomic operations.
void run_grid(
    const void* kernel,
    unsigned blocks,
    unsigned threads,
    size_t shared_bytes,
    const std::function<void()>& thread);

// What a thread calls. barrier_or() returns whether the predicate of any thread of the block holds.
void barrier();
bool barrier_or(bool predicate);
void let_others_run();
void* shared_memory();

// launch(kernel, blocks, threads, shared_bytes, stream)(arguments...)
template <class... Parameters>
auto launch(
    void (*kernel)(Parameters...),
    unsigned blocks,
    unsigned threads,
    size_t shared_bytes = 0,
    void* = nullptr) {
  return [=](const std::type_identity_t<Parameters>&... arguments) {
    run_grid(reinterpret_cast<const void*>(kernel), blocks, threads, shared_bytes, [&] {
      kernel(arguments...);
    });
  };
}

} // namespace shim

inline void __syncthreads() {
  shim::barrier();
}
inline int __syncthreads_or(int predicate) {
  return shim::barrier_or(predicate != 0);
}

inline int __clz(int value) {
  return std::countl_zero(static_cast<unsigned>(value));
}
inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(uint64_t{a} * b >> 32);
}

// Atomic operations order nothing else. Other threads may run before one, but not within it.
template <class T, class Change>
T atomically(T* to, const Change& change) {
  shim::let_others_run();
  const T before = __atomic_load_n(to, __ATOMIC_RELAXED);
  __atomic_store_n(to, change(before), __ATOMIC_RELAXED);
  return before;
}
template <class T>
T atomicExch(T* to, T value) {
  return atomically(to, [=](T) { return value; });
}
template <class T>
T atomicMax(T* to, T value) {
  return atomically(to, [=](T before) { return std::max(before, value); });
}
template <class T>
T atomicOr(T* to, T value) {
  return atomically(to, [=](T before) { return before | value; });
}

// The host's functions of CUDA. The device does at once whatever it is asked, and nothing fails.

enum cudaError_t { cudaSuccess };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone };
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed };
enum { cudaHostAllocMapped, cudaDevAttrMultiProcessorCount };
using cudaStream_t = void*;

#define DOES_NOTHING(function)                 \
  template <class... Any>                      \
  inline cudaError_t function(const Any&...) { \
    return cudaSuccess;                        \
  }
DOES_NOTHING(cudaGetLastError)
DOES_NOTHING(cudaStreamSynchronize)
DOES_NOTHING(cudaStreamIsCapturing)
DOES_NOTHING(cudaThreadExchangeStreamCaptureMode)

inline cudaError_t cudaDeviceGetAttribute(int* processors, int, int) {
  *processors = 8; // so if planes are fewer, several blocks of ordered.cuh share one
  return cudaSuccess;
}
template <class T>
cudaError_t cudaGetSymbolAddress(void** to, T& symbol) {
  *to = &symbol;
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t) {
  std::memset(to, value, size);
  return cudaSuccess;
}
inline cudaError_t cudaHostAlloc(void** to, size_t size, unsigned) {
  *to = std::memset(::operator new(size), 0xa5, size);
  return cudaSuccess;
}

// PyTorch's functions for CUDA that csrc/torch.h calls, where nothing fails. A CUDA build of
// PyTorch has them, too: __init__.py links the library so that it calls these.

extern "C" {

inline AOTITorchError torch_c10_cuda_check_msg(
    int32_t, const char*, const char*, uint32_t, bool, char**) {
  return AOTI_TORCH_SUCCESS;
}
inline void torch_c10_cuda_free_error_msg(char*) {}
inline AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**) {
  return AOTI_TORCH_SUCCESS;
}
inline AOTITorchError aoti_torch_create_cuda_guard(int32_t, CUDAGuardHandle*) {
  return AOTI_TORCH_SUCCESS;
}
inline AOTITorchError aoti_torch_delete_cuda_guard(CUDAGuardHandle) {
  return AOTI_TORCH_SUCCESS;
}

} // extern "C"
