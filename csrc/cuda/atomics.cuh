// Accesses to memory that other threads, or the host, access at the same time.
#pragma once

#include <cstdint>

namespace maxunpool_cuda {

// Loads what another thread may write meanwhile.
__device__ inline uint32_t load_relaxed(const uint32_t* from) {
#ifdef __CUDA_ARCH__
  return *static_cast<const volatile uint32_t*>(from);
#else
  return __atomic_load_n(from, __ATOMIC_RELAXED);
#endif
}

// Stores what the host waits for, after all that this thread has stored before.
__device__ inline void store_for_host(uint32_t* to, uint32_t value) {
#ifdef __CUDA_ARCH__
  __threadfence_system();
  *static_cast<volatile uint32_t*>(to) = value;
#else
  __atomic_store_n(to, value, __ATOMIC_RELEASE);
#endif
}

} // namespace maxunpool_cuda
