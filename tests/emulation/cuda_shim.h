// SPDX-License-Identifier: BSD-3-Clause
// Enough of CUDA for g++ to compile csrc/cuda. Threads are fibers of one thread of the operating
// system; grid.cpp runs them. The device is the CPU: its memory is the host's.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/FunctionRef.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
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
    c10::function_ref<void()> thread);

// What a thread calls. barrier() returns whether any thread of the block gave a predicate.
bool barrier(bool predicate);
void let_others_run();
void* shared_memory();
extern bool skips_barriers; // a race on purpose

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
  if (!shim::skips_barriers) {
    shim::barrier(false);
  }
}
inline int __syncthreads_or(int predicate) {
  return shim::barrier(predicate != 0);
}

inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(uint64_t{a} * b >> 32);
}

// Atomic operations order nothing else. Others run before one, never within it.
template <class T>
T atomicExch(T* to, T value) {
  shim::let_others_run();
  return __atomic_exchange_n(to, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicMax(T* to, T value) {
  shim::let_others_run();
  const T before = __atomic_load_n(to, __ATOMIC_RELAXED);
  __atomic_store_n(to, std::max(before, value), __ATOMIC_RELAXED);
  return before;
}

template <class T>
T atomicOr(T* to, T value) {
  shim::let_others_run();
  const T before = __atomic_load_n(to, __ATOMIC_RELAXED);
  __atomic_store_n(to, before | value, __ATOMIC_RELAXED);
  return before;
}
inline int __clz(int value) {
  return std::countl_zero(static_cast<unsigned>(value));
}

// The host's functions. The device does at once whatever it is asked.

#define C10_CUDA_CHECK(call) static_cast<void>(call)
#define C10_CUDA_KERNEL_LAUNCH_CHECK() static_cast<void>(0)
#define cudaStreamSynchronize(stream) static_cast<void>(stream)
#define cudaGetSymbolAddress(to, symbol) static_cast<void>(*(to) = &(symbol))
#define cudaDeviceGetAttribute(to, attribute, device) static_cast<void>(*(to) = 1)

using cudaStream_t = void*;
enum { cudaHostAllocMapped, cudaStreamCaptureModeRelaxed };

inline void cudaHostAlloc(void** to, size_t size, unsigned) {
  *to = std::memset(::operator new(size), 0xa5, size);
}

namespace c10::cuda {

enum class CaptureStatus { None };
inline CaptureStatus currentStreamCaptureStatusMayInitCtx() {
  return CaptureStatus::None;
}
struct [[maybe_unused]] CUDAGuard {
  explicit CUDAGuard(Device) {}
  explicit CUDAGuard(int) {}
};
using CUDAStreamCaptureModeGuard = CUDAGuard;
struct CUDAStream {
  cudaStream_t stream() const { return nullptr; }
};
inline CUDAStream getCurrentCUDAStream() {
  return {};
}

} // namespace c10::cuda
