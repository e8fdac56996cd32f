// Atomic operations that CUDA does not have under one name, or one meaning, for every type.
#pragma once

#include <cstdint>

namespace maxunpool_cuda {

using Unsigned64 = unsigned long long; // what CUDA's 64-bit atomics are declared for

// Loads what another thread may write meanwhile.
__device__ inline uint32_t load_relaxed(const uint32_t* from) {
#ifdef __CUDA_ARCH__
  return *static_cast<const volatile uint32_t*>(from);
#else
  return __atomic_load_n(from, __ATOMIC_RELAXED);
#endif
}

// Stores what the host, or another device, may read meanwhile. Orders nothing else.
__device__ inline void store_for_host(uint32_t* to, uint32_t value) {
#ifdef __CUDA_ARCH__
  *static_cast<volatile uint32_t*>(to) = value; // relaxed, of system scope
#else
  __atomic_store_n(to, value, __ATOMIC_RELAXED);
#endif
}

__device__ inline void atomic_max(uint32_t* to, uint32_t value) {
  atomicMax(to, value);
}
__device__ inline void atomic_max(uint64_t* to, uint64_t value) {
  atomicMax(reinterpret_cast<Unsigned64*>(to), static_cast<Unsigned64>(value));
}

// Adds. atomicAdd(float*) flushes subnormal numbers to zero in global memory.
__device__ inline void atomic_add(float* to, float value) {
  auto* const bits = reinterpret_cast<uint32_t*>(to);
  uint32_t seen = load_relaxed(bits), before;
  do {
    before = seen;
    const float sum = __builtin_bit_cast(float, before) + value;
    seen = atomicCAS(bits, before, __builtin_bit_cast(uint32_t, sum));
  } while (seen != before);
}
__device__ inline void atomic_add(double* to, double value) {
  atomicAdd(to, value);
}

} // namespace maxunpool_cuda
