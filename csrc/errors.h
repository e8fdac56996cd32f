// SPDX-License-Identifier: BSD-3-Clause
// Errors for out-of-bounds indices, on every backend. Takes Geometry and the words from geometry.h.
//
// Example: an 8x8 plane has the indices 0 to 63. Let a contiguous pooled tensor [2, 5, 4, 4] have
// the index 99 in its element 118 = 7 * 16 + 6. The message of that element is
//
//   max_unpool2d: expected indices in the output plane but got 99 at position 6 of plane 7
//   (Found an invalid max index: 99; output volumes are of size 8x8)
//
// The words in parentheses are PyTorch's own, as its tests look for them.
#pragma once

#include "geometry.h"

#include <c10/util/ArrayRef.h>
#include <c10/util/StringUtil.h>

#include <cstdint>
#include <string>

namespace maxunpool_cuda {

// The message. `element` counts the elements of the pooled tensor in the order of memory.
// `is_window_offset`: the index is a window offset.
inline std::string invalid_index(
    const Geometry<int64_t>& geometry, bool is_window_offset, int64_t index, int64_t element) {
  // In memory the axes are [outer][position in the plane][inner].
  const int64_t inner = element % geometry.inner;
  const int64_t position = element / geometry.inner % geometry.in_plane();
  const int64_t outer = element / geometry.inner / geometry.in_plane();
  const auto& [depth, height, width] = geometry.axis;
  const int64_t sizes[] = {depth.out, height.out, width.out};
  const c10::ArrayRef<int64_t> of_callers_rank =
      c10::ArrayRef<int64_t>(sizes).slice(Geometry<int64_t>::kAxes - geometry.rank);
  return c10::str(
      "max_unpool",
      geometry.rank,
      "d: expected indices in the output plane but got ",
      index,
      is_window_offset ? ", an offset in its window," : "",
      " at position ",
      position,
      " of plane ",
      outer * geometry.inner + inner,
      " (Found an invalid max index: ",
      index,
      "; output volumes are of size ",
      c10::Join("x", of_callers_rank),
      ")");
}

// maxunpool_cuda.check_errors() of Python. The CPU kernels raise an error before they return. CUDA
// kernels record it, and csrc/cuda/operators.cu waits for the current stream of every device that
// was asked to unpool, and raises what was recorded there.
#ifdef WITH_CUDA
void check_errors();
#else
inline void check_errors() {}
#endif

} // namespace maxunpool_cuda
