// SPDX-License-Identifier: BSD-3-Clause
// Whether the outputs that flat indices name lie in their own windows.
//
// It takes the places of windows from windows.h, and targets, which targets.h explains.
//
// Example: a plane of 4x5 cells and 8x10 outputs, 2x2 windows. The window of the cell (1, 2) begins
// at (2, 4), which is output 2 * 10 + 4 = 24. The outputs 24, 25, 34 and 35 lie in it.
#pragma once

#include "../dtypes.h"
#include "../geometry.h"
#include "machine.h"
#include "plan.h"
#include "windows.h"

#include <algorithm>
#include <cstdint>

namespace maxunpool_cuda {
namespace { // Internal linkage: GCC inlines these more readily.

// Tells whether the targets of a chunk lie in their own windows. If windows do not overlap, no two
// such targets are equal.
class OwnWindows {
 public:
  // Whether no two windows overlap, none is clipped, and images and windows are small enough.
  static bool can_tell(const Geometry<int64_t>& geometry) {
    return disjoint(geometry) && geometry.out_image() >> 31 == 0 &&
           !Windows(geometry).may_be_clipped() &&
           geometry.axis[0].kernel * geometry.axis[1].kernel <= kMostRows;
  }

  explicit OwnWindows(const Plan& plan) : plan_(plan), windows_(plan.geometry) {
    const auto inner = static_cast<uint32_t>(plan.geometry.inner);
    fill_begins(inner);
    const auto& [depth, height, width] = plan.geometry.axis;
    rows_ = depth.kernel * height.kernel;
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t position = windows_.position(row / height.kernel, row % height.kernel, 0);
      row_begin_[row] = static_cast<uint32_t>(position) * inner;
    }
    row_size_ = static_cast<uint32_t>(width.kernel) * inner;
  }

  // Whether all targets of a chunk lie in their own windows.
  bool hold(const Chunk& chunk, const uint32_t* targets) const {
    bool all = false;
    static_assert(kMostRows == 4);
    with_one_of<1, 2, 3, 4>(rows_, [&](auto rows) { all = hold_all<rows>(chunk, targets); });
    return all;
  }

 private:
  static constexpr int64_t kMostRows = 4; // of a window; each is a comparison of every target

  void fill_begins(uint32_t inner) {
    WindowTable table;
    table.fill(plan_);
    if (groups_are_planes(plan_)) {
      std::copy_n(table.position, plan_.longest_chunk, begin_);
      return;
    }
    FirstOutputs first_outputs;
    first_outputs.fill(plan_);
    for (int64_t i = 0; i < plan_.longest_chunk; ++i) {
      begin_[i] = table.position[i] * inner + first_outputs.output[i];
    }
  }

  template <int kRows>
  bool hold_all(const Chunk& chunk, const uint32_t* targets) const {
    const int64_t count = chunk.elements.size();
    const int64_t inner = plan_.geometry.inner;
    // From the group's first window to that of the chunk's first element.
    const int64_t step = windows_.position(windows_.step_to(chunk.elements.begin)) * inner;
    const int64_t channel = chunk.elements.begin % inner;
    const auto moved = static_cast<uint32_t>(step + channel - chunk.reach.begin);
    return in_vectors([=, this]() MAXUNPOOL_INLINE {
      uint32_t farthest = 0; // from the begin of a row of the own window
#pragma GCC unroll 4
      for (int64_t i = 0; i < count; ++i) {
        const uint32_t in_window = targets[i] - (begin_[i] + moved);
        // The distance from the last row that begins at or before the target is the smallest:
        // earlier rows are farther, and later ones wrap around.
        uint32_t in_row = in_window;
#pragma GCC unroll 4
        for (int row = 1; row < kRows; ++row) {
          in_row = std::min(in_row, in_window - row_begin_[row]);
        }
        farthest = std::max(farthest, in_row);
      }
      return farthest < row_size_;
    });
  }

  const Plan& plan_;
  const Windows windows_;
  // Where the window of each element of a group's first chunk begins, among the outputs of the
  // group. No vector of it lies in two cache lines.
  alignas(64) uint32_t begin_[Chunk::kMost];
  int64_t rows_;                  // of a window
  uint32_t row_begin_[kMostRows]; // outputs from the begin of a window to the begin of each row
  uint32_t row_size_;             // outputs from the begin of a row to its end
};

} // namespace
} // namespace maxunpool_cuda
