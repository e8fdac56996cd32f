// SPDX-License-Identifier: BSD-3-Clause
// Window: the arguments of a call that say where its windows lie, as the caller gave them. They are
// not checked yet; checks.h does that. Takes the limits kAxes and kMostOffsets from geometry.h.
//
// Example: max_pool2d(x, kernel_size=3, stride=2, padding=1) is
//
//   Window<int64_t>{
//       .op = "max_pool", .kernel_size = {3, 3}, .stride = {2, 2}, .padding = {1, 1},
//       .dilation = {1, 1}}
//
// Its rank() is 2, its name() "max_pool2d", and its text in messages
// "kernel_size=[3, 3], stride=[2, 2], padding=[1, 1], dilation=[1, 1]".
#pragma once

#include "geometry.h"

#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <string>

namespace maxunpool_cuda {

// Size is int64_t in an eager call. In a call that is traced, as by torch.compile with dynamic
// shapes, it is c10::SymInt, which may be symbolic: a number that only the later calls know.
//
// Each list has a number for each spatial axis. They are borrowed from the caller.
template <class Size>
struct Window {
  const char* op; // as messages name it, without its rank: "max_pool" or "max_unpool"
  c10::ArrayRef<Size> kernel_size;
  c10::ArrayRef<Size> stride;
  c10::ArrayRef<Size> padding;
  c10::ArrayRef<Size> dilation; // empty for max unpooling, which has none

  // The number of spatial axes. If the lists differ in length, that of `padding` counts: callers
  // mostly leave it to its default, which has the right length.
  size_t rank() const { return padding.size(); }
  std::string name() const { return op + std::to_string(rank()) + "d"; }

  // Whether the lists have one length, of 1, 2 or 3. `dilation` is not looked at.
  bool has_one_length() const {
    return rank() >= 1 && rank() <= Geometry<Size>::kAxes && kernel_size.size() == rank() &&
           stride.size() == rank();
  }

  // Whether uint8 can count the positions of a window, as window offsets need. Dilated windows do
  // not fit: unpooling knows only their extent, and would read other offsets.
  bool fits_uint8() const {
    // A product beyond the limit is set to limit + 1, as further factors could overflow. Sizes are
    // positive, so it stays beyond the limit.
    const Size too_many(kMostOffsets + 1);
    Size volume = 1;
    for (const Size& size : kernel_size) {
      const bool is_beyond = size > kMostOffsets || volume > kMostOffsets;
      volume = is_beyond ? too_many : volume * size;
    }
    const auto is_one = [](const Size& step) { return step == 1; };
    return volume <= kMostOffsets && std::all_of(dilation.begin(), dilation.end(), is_one);
  }

  friend std::ostream& operator<<(std::ostream& stream, const Window& window) {
    stream << "kernel_size=" << window.kernel_size << ", stride=" << window.stride
           << ", padding=" << window.padding;
    if (!window.dilation.empty()) {
      stream << ", dilation=" << window.dilation;
    }
    return stream;
  }
};

// Numbers of a window are below this, so that sums of a few of them stay below 2^63.
constexpr int64_t kWindowLimit = int64_t{1} << 60;

} // namespace maxunpool_cuda
