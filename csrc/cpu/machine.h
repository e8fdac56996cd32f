// SPDX-License-Identifier: BSD-3-Clause
// What kernels ask of the machine beyond C++: longer vectors, prefetching, huge pages.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <cstddef>
#include <cstdint>

namespace maxunpool_cuda {

#if defined(__GNUC__)
#define MAXUNPOOL_INLINE __attribute__((always_inline))
// Any address will do. A macro: GCC drops the calls of a function that only prefetches.
#define MAXUNPOOL_PREFETCH(address) __builtin_prefetch(reinterpret_cast<const void*>(address))
#else
#define MAXUNPOOL_INLINE
#define MAXUNPOOL_PREFETCH(address) static_cast<void>(address)
#endif

#if defined(__x86_64__) && defined(__GNUC__)
template <class Work>
__attribute__((target("avx2"))) inline auto with_avx2(const Work& work) {
  return work();
}
#endif

// Result of work(), which is compiled a second time for processors with longer vectors. Work, and
// all that it calls, has to be MAXUNPOOL_INLINE.
template <class Work>
inline auto in_vectors(const Work& work) {
#if defined(__x86_64__) && defined(__GNUC__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  if (has_avx2) {
    return with_avx2(work);
  }
#endif
  return work();
}

// Asks for huge pages. Fresh memory costs a page fault per page, which takes longer for large
// results than the kernel. Most Linux systems give huge pages on request.
inline void use_huge_pages(void* result, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr size_t kWorthwhile = 4 << 20; // two huge pages
  if (bytes < kWorthwhile) {
    return;
  }
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto start = reinterpret_cast<uintptr_t>(result);
  const uintptr_t begin = (start + page - 1) / page * page, end = (start + bytes) / page * page;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE); // no matter if refused
#endif
}

} // namespace maxunpool_cuda
