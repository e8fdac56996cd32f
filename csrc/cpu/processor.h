// What the kernels ask of the processor beyond C++: longer vectors, and memory ahead of time.
#pragma once

#include <cstdint>

#if defined(__x86_64__) && defined(__GNUC__)
#define MAXUNPOOL_AVX2 __attribute__((target("avx2")))
#define MAXUNPOOL_INLINE __attribute__((always_inline))
#else
#define MAXUNPOOL_INLINE
#endif

namespace maxunpool_cuda {

#if defined(MAXUNPOOL_AVX2)
inline const bool kHasAvx2 = __builtin_cpu_supports("avx2");

template <class Work>
MAXUNPOOL_AVX2 inline auto with_avx2(const Work& work) {
  return work();
}
#endif

// The result of work(), compiled a second time for the longer vectors of processors that have them.
// Work, and all that it calls, is to be MAXUNPOOL_INLINE.
template <class Work>
inline auto in_vectors(const Work& work) {
#if defined(MAXUNPOOL_AVX2)
  if (kHasAvx2) {
    return with_avx2(work);
  }
#endif
  return work();
}

// Fetches memory for later. There need not be any: the address is no pointer into an array.
template <class T>
inline void prefetch(const T* base, int64_t elements) {
#if defined(__GNUC__)
  const auto bytes = static_cast<uintptr_t>(elements) * sizeof(T);
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(base) + bytes));
#endif
}

} // namespace maxunpool_cuda
