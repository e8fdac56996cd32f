// Processor: what kernels ask of it beyond C++, longer vectors and prefetching.
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

// Result of work(), which is compiled a second time for processors with longer vectors. Work, and
// all that it calls, has to be MAXUNPOOL_INLINE.
template <class Work>
inline auto in_vectors(const Work& work) {
#if defined(MAXUNPOOL_AVX2)
  if (kHasAvx2) {
    return with_avx2(work);
  }
#endif
  return work();
}

// Prefetches memory. `base + elements` need not be a valid address.
template <class T>
inline void prefetch(const T* base, int64_t elements) {
#if defined(__GNUC__)
  const auto bytes = static_cast<uintptr_t>(elements) * sizeof(T);
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(base) + bytes));
#endif
}

} // namespace maxunpool_cuda
