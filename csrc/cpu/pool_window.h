// SPDX-License-Identifier: BSD-3-Clause
// The window of a pooled cell in the input of max pooling, and its elements that lie in the input.
//
// It takes an Axis of the geometry (../geometry.h), whose unpooled side is the input.
//
// Example: a row of 8 elements, windows of 3, stride 2, padding 1. Window 0 would begin at
// coordinate -1, so its elements [1, 3) lie in the row. With dilation 2 its elements would have the
// coordinates -1, 1 and 3, and again [1, 3) of them lie in the row.
#pragma once

#include "../geometry.h"

#include <algorithm>
#include <array>
#include <cstdint>

namespace maxunpool_cuda {

// Elements [begin, end) of window p lie in the input, along an axis. Element 0 has, or would have,
// the coordinate `start`.
struct Span {
  int64_t start;
  int64_t begin;
  int64_t end;

  Span(const Axis<int64_t>& axis, int64_t dilation, int64_t p)
      : start(p * axis.stride - axis.padding), begin(0), end(axis.kernel) {
    if (start < 0) { // divisions cost as much as short rows
      begin = divide_up(-start, dilation);
    }
    if (start + dilation * (axis.kernel - 1) >= axis.out) {
      end = divide_up(axis.out - start, dilation);
    }
  }

  // All elements of window p, whether they lie in the input or not.
  static Span unclipped(const Axis<int64_t>& axis, int64_t p) {
    return {p * axis.stride - axis.padding, 0, axis.kernel};
  }

  int64_t size() const { return std::max<int64_t>(0, end - begin); }

 private:
  Span(int64_t start, int64_t begin, int64_t end) : start(start), begin(begin), end(end) {}
};

// Elements along the three axes.
using Box = std::array<int64_t, 3>;

struct PoolWindow {
  Span z;
  Span y;
  Span x;

  Box box() const { return {z.size(), y.size(), x.size()}; }
  bool empty() const { return z.size() * y.size() * x.size() == 0; }
};

} // namespace maxunpool_cuda
