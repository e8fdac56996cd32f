// Fewer page faults for large results.
#pragma once

#include <ATen/core/Tensor.h>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <cstddef>
#include <cstdint>

namespace maxunpool_cuda {

// Memory fresh from the system costs a page fault per page, for large outputs more than the kernel
// that fills them. Where Linux gives huge pages to those who ask (the default of most systems),
// ask.
inline void use_huge_pages(const at::Tensor& result) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr size_t kWorthwhile = 4 << 20; // two huge pages
  const size_t bytes = result.nbytes();
  if (bytes < kWorthwhile) {
    return;
  }
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto start = reinterpret_cast<uintptr_t>(result.mutable_data_ptr());
  const uintptr_t begin = (start + page - 1) / page * page, end = (start + bytes) / page * page;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE); // no matter if refused
#endif
}

} // namespace maxunpool_cuda
