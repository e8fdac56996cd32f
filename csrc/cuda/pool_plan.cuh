// Conditions on windows and sizes that the kernels of max pooling are compiled for.
#pragma once

#include "../geometry.h"

#include <algorithm>
#include <cstdint>

namespace maxunpool_cuda {

constexpr int kMostRows = 4; // rows of windows that a thread does

// Whether there is one row, with windows of one.
inline bool is_one_row(const Axis<int64_t>& height) {
  return height.kernel == 1 && height.out == 1 && height.in == 1;
}

// Whether windows are of `size` elements in height and width, without dilation. An input of one row
// may have windows of one row.
inline bool has_pool_windows(
    const Geometry<int64_t>& geometry, const int64_t (&dilation)[3], int64_t size) {
  const auto& [depth, height, width] = geometry.axis;
  return std::all_of(dilation, dilation + 3, [](int64_t d) { return d == 1; }) &&
         width.kernel == size && (height.kernel == size || is_one_row(height));
}

// Whether this is the stride. In one row, threads of several rows would have nothing to share.
inline bool has_pool_stride(
    const Geometry<int64_t>& geometry, int64_t stride, bool also_in_one_row) {
  const auto& [depth, height, width] = geometry.axis;
  return width.stride == stride && (is_one_row(height) ? also_in_one_row : height.stride == stride);
}

// Whether rows of windows with stride 2 divide into vectors of so many, of aligned arrays.
inline bool divides_into_rows(const Geometry<int64_t>& geometry, int64_t kernel, int64_t vector) {
  const Axis<int64_t>& width = geometry.axis[2];
  return width.padding == kernel - 2 && width.in % vector == 0 && width.out % (2 * vector) == 0 &&
         width.out >= 2 * width.in;
}

} // namespace maxunpool_cuda
