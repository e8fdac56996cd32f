// Errors for bad indices.
#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/StringUtil.h>

#include <cstdint>
#include <string>

namespace maxunpool_cuda {

// Message for a bad index. `position` is its cell in the pooled plane, `plane` counts batch *
// channels. `out` holds the output sizes of three axes, of which the caller named the last `rank`.
// `in_window`: the index is a window offset.
inline std::string invalid_index(
    int rank, const int64_t (&out)[3], bool in_window, int64_t index, int64_t position,
    int64_t plane) {
  const auto volume = c10::Join("x", c10::ArrayRef<int64_t>(out).slice(3 - rank));
  return c10::str(
      "max_unpool", rank,
      "d: expected indices in the output plane but got: Found an invalid max index: ", index,
      in_window ? " (an offset in its window)" : "", " (output volumes are of size ", volume,
      ") at position ", position, " of plane ", plane);
}

#ifdef WITH_CUDA
// Waits for every device that has run a kernel of this library, and raises what was reported there.
void check_errors();
#else
inline void check_errors() {} // CPU kernels raise at once
#endif

} // namespace maxunpool_cuda
