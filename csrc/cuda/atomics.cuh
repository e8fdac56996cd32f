// The atomic operations that CUDA does not have under one name for every type.
#pragma once

#include <c10/util/complex.h>

#include <cstdint>

namespace maxunpool_cuda {

using Unsigned64 = unsigned long long; // what CUDA's 64-bit atomics are declared for

// Another thread may write *from meanwhile.
__device__ inline uint32_t load_relaxed(const uint32_t* from) {
#ifdef __CUDA_ARCH__
  return *static_cast<const volatile uint32_t*>(from);
#else
  return __atomic_load_n(from, __ATOMIC_RELAXED);
#endif
}

__device__ inline void atomic_max(uint32_t* to, uint32_t value) {
  atomicMax(to, value);
}
__device__ inline void atomic_max(uint64_t* to, uint64_t value) {
  atomicMax(reinterpret_cast<Unsigned64*>(to), static_cast<Unsigned64>(value));
}

__device__ inline void atomic_add(float* to, float value) {
  atomicAdd(to, value);
}
__device__ inline void atomic_add(double* to, double value) {
  atomicAdd(to, value);
}
__device__ inline void atomic_add(uint64_t* to, uint64_t value) {
  atomicAdd(reinterpret_cast<Unsigned64*>(to), static_cast<Unsigned64>(value));
}
__device__ inline void atomic_add(int64_t* to, int64_t value) {
  atomicAdd(reinterpret_cast<Unsigned64*>(to), static_cast<Unsigned64>(value));
}
template <class T>
__device__ inline void atomic_add(c10::complex<T>* to, c10::complex<T> value) {
  T* parts = reinterpret_cast<T*>(to);
  atomicAdd(parts, value.real());
  atomicAdd(parts + 1, value.imag());
}

} // namespace maxunpool_cuda
