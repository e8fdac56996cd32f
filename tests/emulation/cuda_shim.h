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

// Runs a grid, whose threads all call `thread`. Blocks, threads and what they do between two
// barriers or atomic operations come in any order.
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
T atomicAdd(T* to, std::type_identity_t<T> value) {
  shim::let_others_run();
  if constexpr (std::is_floating_point_v<T>) {
    T seen, sum;
    __atomic_load(to, &seen, __ATOMIC_RELAXED);
    do {
      sum = seen + value;
    } while (
        !__atomic_compare_exchange(to, &seen, &sum, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return seen;
  } else {
    return __atomic_fetch_add(to, value, __ATOMIC_RELAXED);
  }
}
// In global memory a GPU takes subnormal numbers for zero here.
float atomicAdd(float*, float) = delete;
template <class T>
T atomicCAS(T* to, T expected, T desired) {
  shim::let_others_run();
  __atomic_compare_exchange_n(to, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
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

// The host's functions. A small GPU, which does at once whatever it is asked.

#define C10_CUDA_CHECK(call) static_cast<void>(call)
#define C10_CUDA_KERNEL_LAUNCH_CHECK() static_cast<void>(0)

using cudaStream_t = void*;
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor,
};
enum {
  cudaHostAllocMapped,
  cudaStreamNonBlocking,
  cudaStreamCaptureModeRelaxed,
  cudaMemcpyDefault
};

inline int cudaDeviceGetAttribute(int* value, cudaDeviceAttr what, int) {
  *value = what == cudaDevAttrMultiProcessorCount ? 2 : 100 << 10;
  return 0;
}
inline int cudaMalloc(void** to, size_t size) {
  *to = std::memset(::operator new(size), 0xa5, size);
  return 0;
}
inline int cudaHostAlloc(void** to, size_t size, unsigned) {
  return cudaMalloc(to, size);
}
inline int cudaMemcpyAsync(void* to, const void* from, size_t size, int, cudaStream_t) {
  std::memcpy(to, from, size);
  return 0;
}
inline int cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t) {
  std::memset(to, value, size);
  return 0;
}
inline int cudaStreamCreateWithFlags(cudaStream_t*, unsigned) {
  return 0;
}
inline int cudaStreamDestroy(cudaStream_t) {
  return 0;
}
inline int cudaStreamSynchronize(cudaStream_t) {
  return 0;
}
inline int cudaDeviceSynchronize() {
  return 0;
}

namespace shim {

// The device of a CPU tensor, which csrc/cuda takes for a GPU: c10::Device stands for this there.
struct Device {
  c10::Device cpu;

  Device(c10::Device device) : cpu(device) {}
  Device(c10::DeviceIndex) : cpu(c10::kCPU) {}
  operator c10::Device() const { return cpu; }
  bool is_cuda() const { return cpu.is_cpu(); }
  c10::DeviceIndex index() const { return 0; }
  friend std::ostream& operator<<(std::ostream& to, const Device& device) {
    return to << device.cpu;
  }
};

} // namespace shim

namespace c10::cuda {

enum class CaptureStatus { None };
inline CaptureStatus currentStreamCaptureStatusMayInitCtx() {
  return CaptureStatus::None;
}
inline DeviceIndex device_count() {
  return 1;
}
struct CUDAGuard {
  explicit CUDAGuard(const shim::Device&) {}
  ~CUDAGuard() {}
};
struct CUDAStreamCaptureModeGuard {
  explicit CUDAStreamCaptureModeGuard(int) {}
  ~CUDAStreamCaptureModeGuard() {}
};
struct CUDAStream {
  cudaStream_t stream() const { return nullptr; }
};
inline CUDAStream getCurrentCUDAStream() {
  return {};
}

} // namespace c10::cuda
