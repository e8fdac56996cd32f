// SPDX-License-Identifier: BSD-3-Clause
// What kernels ask of the machine beyond C++: longer vectors, prefetching, huge pages, memory that
// other threads change. GCC and Clang have it, on Linux, where alone setup.py builds kernels. It
// takes nothing from other files.
//
// Example: sums of two arrays, 8 floats at a time where the processor has AVX2, else 4:
//   in_vectors([=]() MAXUNPOOL_INLINE {
//     for (int64_t i = 0; i < count; ++i) sum[i] = a[i] + b[i];
//   });
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

namespace maxunpool_cuda {

constexpr int64_t kLine = 64; // bytes of a cache line

#define MAXUNPOOL_INLINE __attribute__((always_inline))
// Of any address: one outside of all memory does no harm. A macro, since GCC drops the calls of a
// function that only prefetches.
#define MAXUNPOOL_PREFETCH(address) __builtin_prefetch(reinterpret_cast<const void*>(address))

#if defined(__x86_64__)
template <class Work>
__attribute__((target("avx2"))) inline auto with_avx2(const Work& work) {
  return work();
}
#endif

// Returns work(), which is compiled twice: for every processor, and for those with AVX2. Work has
// to be MAXUNPOOL_INLINE. So has what it calls, or that is compiled without AVX2, unless it is as
// trivial as std::max.
template <class Work>
inline auto in_vectors(const Work& work) {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  if (has_avx2) {
    return with_avx2(work);
  }
#endif
  return work();
}

// From here on the compiler does not know where the values in `memory` came from. So it reads them
// there, and never once more from an array that they were copied from, which may have changed.
//
// Example: another thread may write to `shared` at any time, but this adds no number above 9:
//   std::copy_n(shared, 8, own);
//   forget_source(own);
//   for (int i = 0; i < 8; ++i) sum += own[i] <= 9 ? own[i] : 0;
MAXUNPOOL_INLINE inline void forget_source(const void* memory) {
  asm volatile("" : : "r"(memory) : "memory");
}

// Asks for huge pages. The first write to a page of fresh memory is a page fault, and for large
// results the faults of 4 KiB pages take longer than the kernel. Most Linux systems give huge pages
// only on request. It does no harm if they are refused.
inline void use_huge_pages(void* result, size_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr size_t kFewest = 4 << 20; // bytes: at least one whole page of 2 MiB lies in them
  if (bytes < kFewest) {
    return;
  }
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)); // bytes
  const auto start = reinterpret_cast<uintptr_t>(result);
  const uintptr_t begin = (start + page - 1) / page * page;
  const uintptr_t end = (start + bytes) / page * page;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

} // namespace maxunpool_cuda
