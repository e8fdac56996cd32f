// SPDX-License-Identifier: BSD-3-Clause
// Errors for out-of-bounds indices, on every backend.
#pragma once

#include "geometry.h"

#include <c10/util/ArrayRef.h>
#include <c10/util/StringUtil.h>

#include <cstdint>
#include <string>

namespace maxunpool_cuda {

// Message for the out-of-bounds index of this element of a pooled tensor. `in_window`: the index is
// a window offset.
inline std::string invalid_index(
    const Geometry<int64_t>& geometry, bool in_window, int64_t index, int64_t element) {
  const int64_t cell = element / geometry.inner, channel = element % geometry.inner;
  const int64_t outer = cell / geometry.in_plane(), position = cell % geometry.in_plane();
  const auto& [depth, height, width] = geometry.axis;
  const int64_t out[] = {depth.out, height.out, width.out};
  const auto volume = c10::Join("x", c10::ArrayRef<int64_t>(out).slice(3 - geometry.rank));
  return c10::str(
      "max_unpool",
      geometry.rank,
      "d: expected indices in the output plane but got: Found an invalid max index: ",
      index,
      in_window ? " (an offset in its window)" : "",
      " (output volumes are of size ",
      volume,
      ") at position ",
      position,
      " of plane ",
      outer * geometry.inner + channel);
}

#ifdef WITH_CUDA
// Waits for every device that has run a kernel of this library, and raises what was reported there.
void check_errors();
#else
inline void check_errors() {} // CPU kernels raise at once
#endif

} // namespace maxunpool_cuda
