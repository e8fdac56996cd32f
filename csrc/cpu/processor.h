// What the kernels ask of the processor beyond C++: longer vectors, and memory ahead of time.
#pragma once

#include <cstdint>

// What loops over neighbouring elements is compiled twice on x86-64: the vectors that every such
// processor has are too short for it to pay.
#if defined(__x86_64__) && defined(__GNUC__)
#define MAXUNPOOL_AVX2 __attribute__((target("avx2")))
#define MAXUNPOOL_INLINE __attribute__((always_inline))
#else
#define MAXUNPOOL_INLINE
#endif

namespace maxunpool_cuda {

#if defined(MAXUNPOOL_AVX2)
inline bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2");
  return has;
}
#endif

// Fetches memory for later. There need not be any: the address is no pointer into an array.
template <class T>
inline void prefetch(const T* base, int64_t elements) {
#if defined(__GNUC__)
  const auto bytes = static_cast<uintptr_t>(elements) * sizeof(T);
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(base) + bytes));
#endif
}

} // namespace maxunpool_cuda
