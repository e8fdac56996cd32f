// Enough of CUDA for g++ to compile csrc/cuda. Threads are fibers of one thread of the operating
// system; grid.cpp runs them. The device is the CPU: its memory is the host's.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/FunctionRef.h>
#include <torch/library.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

// The language

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)

struct Dim3 {
  unsigned x = 1;
};
inline Dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace shim {

// Runs a grid, whose threads all call `thread`. Blocks come in any order, and so does what the
// threads of a block do between two barriers or atomic operations.
void run_grid(
    const void* kernel, unsigned blocks, unsigned threads, size_t shared_bytes,
    c10::function_ref<void()> thread);

// What a thread calls. barrier() returns whether any thread of the block gave a predicate.
bool barrier(bool predicate);
void let_others_run();
void* shared_memory();
extern bool skips_barriers; // a race on purpose

// launch(kernel, blocks, threads, shared_bytes, stream)(arguments...)
template <class... Parameters>
auto launch(
    void (*kernel)(Parameters...), unsigned blocks, unsigned threads, size_t shared_bytes = 0,
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

// Atomic operations order nothing else.
template <class T>
T atomicExch(T* to, T value) {
  shim::let_others_run();
  return __atomic_exchange_n(to, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicMax(T* to, T value) {
  shim::let_others_run();
  T seen = __atomic_load_n(to, __ATOMIC_RELAXED);
  while (seen < value && !__atomic_compare_exchange_n(
                             to, &seen, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return seen;
}

// The host's functions. The device does at once whatever it is asked.

#define C10_CUDA_CHECK(call) static_cast<void>(call)
#define C10_CUDA_KERNEL_LAUNCH_CHECK() static_cast<void>(0)

#define SHIM_DOES_NOTHING(name) \
  template <class... Arguments> \
  int name(Arguments...) {      \
    return 0;                   \
  }

using cudaStream_t = void*;
enum { cudaHostAllocMapped, cudaStreamNonBlocking, cudaStreamCaptureModeRelaxed };

SHIM_DOES_NOTHING(cudaStreamCreateWithFlags)
SHIM_DOES_NOTHING(cudaStreamDestroy)
SHIM_DOES_NOTHING(cudaStreamSynchronize)

inline int cudaMalloc(void** to, size_t size) {
  *to = std::memset(::operator new(size), 0xa5, size);
  return 0;
}
inline int cudaHostAlloc(void** to, size_t size, unsigned) {
  return cudaMalloc(to, size);
}
inline int cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t) {
  std::memset(to, value, size);
  return 0;
}

namespace c10::cuda {

enum class CaptureStatus { None };
inline CaptureStatus currentStreamCaptureStatusMayInitCtx() {
  return CaptureStatus::None;
}
struct [[maybe_unused]] CUDAGuard {
  explicit CUDAGuard(Device) {}
  explicit CUDAGuard(DeviceIndex) {}
};
struct [[maybe_unused]] CUDAStreamCaptureModeGuard {
  explicit CUDAStreamCaptureModeGuard(int) {}
};
struct CUDAStream {
  cudaStream_t stream() const { return nullptr; }
};
inline CUDAStream getCurrentCUDAStream() {
  return {};
}

} // namespace c10::cuda
