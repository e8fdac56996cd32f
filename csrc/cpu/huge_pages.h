// Huge pages for large results, which then cost fewer page faults.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <cstddef>
#include <cstdint>

namespace maxunpool_cuda {

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
