// SPDX-License-Identifier: BSD-3-Clause
// Where windows lie in the output plane, and whether indices lie in their own windows.
//
// It takes the geometry from ../geometry.h, and from plan.h how elements divide into chunks.
//
// Example: a plane of 4x5 cells and 8x10 outputs, 2x2 windows. The window of the cell (1, 2) begins
// at (2, 4), which is position 2 * 10 + 4 = 24. The flat indices 24, 25, 34 and 35 lie in it.
#pragma once

#include "../calls.h"
#include "../dtypes.h"
#include "../geometry.h"
#include "machine.h"
#include "plan.h"

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {
namespace { // Internal linkage: GCC inlines these more readily.

struct Coordinates {
  int64_t z;
  int64_t y;
  int64_t x;
};

class Windows {
 public:
  explicit Windows(const Geometry<int64_t>& geometry) : geometry_(geometry) {}

  // How far the window of an image's element lies from the first window of its plane.
  Coordinates step_to(int64_t element) const {
    const auto& [depth, height, width] = geometry_.axis;
    const int64_t cell = element / geometry_.inner;
    const int64_t row = cell / width.in;
    return {
        .z = row / height.in * depth.stride,
        .y = row % height.in * height.stride,
        .x = cell % width.in * width.stride};
  }

  // Where the window of an image's element begins, before it is clipped.
  Coordinates begin_of(int64_t element) const {
    const auto& [depth, height, width] = geometry_.axis;
    const auto [z, y, x] = step_to(element);
    return {.z = z - depth.padding, .y = y - height.padding, .x = x - width.padding};
  }

  // Position in the output plane. Unsigned, because coordinates far outside of the plane may wrap
  // around; such positions are not used.
  int64_t position(uint64_t z, uint64_t y, uint64_t x) const {
    return static_cast<int64_t>((z * geometry_.axis[1].out + y) * geometry_.axis[2].out + x);
  }
  int64_t position(const Coordinates& at) const { return position(at.z, at.y, at.x); }

  // Whether a window may lie outside of the plane in part.
  bool may_be_clipped() const {
    return std::any_of(geometry_.axis, geometry_.axis + 3, [](const Axis<int64_t>& axis) {
      return axis.padding > 0 || (axis.in - 1) * axis.stride + axis.kernel > axis.out;
    });
  }

 private:
  const Geometry<int64_t>& geometry_;
};

// Where the window of each element of a group's first chunk begins, before it is clipped. Other
// chunks need no table: a chunk is whole rows or a piece of one, so from chunk to chunk all its
// windows move as far as the first one does.
struct WindowTable {
  // A position in the plane, in 32 bits that may wrap around, and coordinates. Aligned, so that no
  // vector of 32 bytes lies in two cache lines.
  alignas(64) uint32_t position[Chunk::kMost];
  alignas(64) int32_t x[Chunk::kMost];
  alignas(64) int32_t y[Chunk::kMost];

  void fill(const Plan& plan) {
    const Geometry<int64_t>& geometry = plan.geometry;
    const Windows windows(geometry);
    const int64_t image = std::min(plan.longest_chunk, geometry.in_image());
    for (int64_t row = 0; row < image; row += geometry.axis[2].in * geometry.inner) {
      fill_row(geometry, windows.begin_of(row), row, image);
    }
    for (int64_t i = image; i < plan.longest_chunk; ++i) { // other images of the group
      position[i] = position[i - image];
      x[i] = x[i - image];
      y[i] = y[i - image];
    }
  }

 private:
  // Fills in a row of cells from element i on, unless the table ends before.
  void fill_row(const Geometry<int64_t>& geometry, Coordinates begin, int64_t i, int64_t end) {
    const Axis<int64_t>& width = geometry.axis[2];
    const Windows windows(geometry);
    for (int64_t cell = 0; cell < width.in && i < end; ++cell, begin.x += width.stride) {
      const auto cell_position = static_cast<uint32_t>(windows.position(begin));
      for (int64_t channel = 0; channel < geometry.inner && i < end; ++channel, ++i) {
        position[i] = cell_position;
        x[i] = static_cast<int32_t>(begin.x);
        y[i] = static_cast<int32_t>(begin.y);
      }
    }
  }
};

// Tells whether the flat indices of a chunk lie in their own windows. If windows do not overlap, no
// two such indices of a plane are equal.
class OwnWindows {
 public:
  // Whether no two windows overlap, none is clipped, and plane and windows are small enough.
  static bool can_tell(const Geometry<int64_t>& geometry) {
    return disjoint(geometry) && geometry.out_plane() >> 31 == 0 &&
           !Windows(geometry).may_be_clipped() &&
           geometry.axis[0].kernel * geometry.axis[1].kernel <= kMostRows;
  }

  OwnWindows(const UnpoolCall& call, const Plan& plan)
      : call_(call), plan_(plan), windows_(plan.geometry) {
    table_.fill(plan);
    const auto& [depth, height, width] = plan.geometry.axis;
    rows_ = depth.kernel * height.kernel;
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t position = windows_.position(row / height.kernel, row % height.kernel, 0);
      row_begin_[row] = static_cast<uint32_t>(position);
    }
  }

  // Whether all indices of these elements, a chunk, lie in their own windows.
  bool hold(int64_t group, const Range& elements) const {
    bool all = false;
    using enum c10::ScalarType;
    with_type_of<Int, Long>(call_.index_type, [&]<class Index>(std::type_identity<Index>) {
      const auto* indices = static_cast<const Index*>(call_.indices) + plan_.pooled(group);
      static_assert(kMostRows == 4);
      with_one_of<1, 2, 3, 4>(
          rows_, [&](auto rows) { all = hold_all<rows>(indices + elements.begin, elements); });
    });
    return all;
  }

 private:
  static constexpr int64_t kMostRows = 4; // of a window; each is a comparison of every index

  template <int kRows, class Index>
  bool hold_all(const Index* indices, const Range& elements) const {
    const int64_t count = elements.size();
    const Coordinates step = windows_.step_to(elements.begin); // chunks begin in the first image
    const auto first = static_cast<uint64_t>(windows_.position(step));
    const auto columns = static_cast<uint32_t>(plan_.geometry.axis[2].kernel);
    return in_vectors([=, this]() MAXUNPOOL_INLINE {
      uint64_t distances = 0; // the bits of all distances from the chunk's first window
      uint32_t farthest = 0;  // from the begin of a row of the own window
      for (int64_t i = 0; i < count; ++i) {
        const uint64_t distance = static_cast<uint64_t>(int64_t{indices[i]}) - first;
        distances |= distance;
        const uint32_t in_window = static_cast<uint32_t>(distance) - table_.position[i];
        // The distance from the last row that begins at or before the index is the smallest:
        // earlier rows are farther, and later ones wrap around.
        uint32_t in_row = in_window;
        for (int row = 1; row < kRows; ++row) {
          in_row = std::min(in_row, in_window - row_begin_[row]);
        }
        farthest = std::max(farthest, in_row);
      }
      return distances >> 32 == 0 && farthest < columns;
    });
  }

  const UnpoolCall& call_;
  const Plan& plan_;
  const Windows windows_;
  WindowTable table_;
  int64_t rows_;                  // of a window
  uint32_t row_begin_[kMostRows]; // positions from the window's begin to the begin of each row
};

} // namespace
} // namespace maxunpool_cuda
