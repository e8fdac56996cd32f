// SPDX-License-Identifier: BSD-3-Clause
// Errors, on every backend: fail(), and the words for out-of-bounds indices. Takes Geometry from
// geometry.h.
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

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

namespace maxunpool_cuda {

// Raises a RuntimeError in Python. Its message joins the arguments.
template <class... Words>
[[noreturn]] void fail(const Words&... words) {
  std::ostringstream message;
  (message << ... << words);
  throw std::runtime_error(message.str());
}

// The sizes of the output plane, as messages have them: 8x8.
inline std::string output_sizes(const Geometry<int64_t>& geometry) {
  std::string sizes;
  for (int axis = Geometry<int64_t>::kAxes - geometry.rank; axis < geometry.kAxes; ++axis) {
    sizes += sizes.empty() ? "" : "x";
    sizes += std::to_string(geometry.axis[axis].out);
  }
  return sizes;
}

// The message. `element` counts the elements of the pooled tensor in the order of memory.
// `is_window_offset`: the index is a window offset.
inline std::string invalid_index(
    const Geometry<int64_t>& geometry, bool is_window_offset, int64_t index, int64_t element) {
  // In memory the axes are [outer][position in the plane][inner].
  const int64_t inner = element % geometry.inner;
  const int64_t position = element / geometry.inner % geometry.in_plane();
  const int64_t outer = element / geometry.inner / geometry.in_plane();
  std::ostringstream message;
  message << "max_unpool" << geometry.rank << "d: expected indices in the output plane but got "
          << index << (is_window_offset ? ", an offset in its window," : "") << " at position "
          << position << " of plane " << outer * geometry.inner + inner
          << " (Found an invalid max index: " << index << "; output volumes are of size "
          << output_sizes(geometry) << ")";
  return message.str();
}

} // namespace maxunpool_cuda
