// SPDX-License-Identifier: BSD-3-Clause
// The window of a pooled cell in the input of max pooling, and its elements that lie in the input.
//
// It takes an Axis of the geometry (../geometry.h), whose unpooled side is the input.
//
// Example: a row of 8 elements, windows of 3, stride 2, padding 1. Window 0 would begin at
// coordinate -1, so its elements [1, 3) lie in the row. With dilation 2 its elements would have the
// coordinates -1, 1 and 3, and again [1, 3) of them lie in the row.
//
// All is inlined: where GCC calls these functions, rows of tiny windows take 1.1 to 1.2 times as
// long.
#pragma once

#include "../geometry.h"
#include "machine.h"

#include <algorithm>
#include <cstdint>

namespace maxunpool_cuda {

// Elements [begin, end) of window p lie in the input, along an axis. Element 0 has, or would have,
// the coordinate `start`.
struct Span {
  int64_t start;
  int64_t begin;
  int64_t end;

  MAXUNPOOL_INLINE Span(const Axis<int64_t>& axis, int64_t dilation, int64_t p)
      : start(p * axis.stride - axis.padding), begin(0), end(axis.kernel) {
    if (start < 0) { // divisions cost as much as short rows
      begin = divide_up(-start, dilation);
    }
    if (start + dilation * (axis.kernel - 1) >= axis.out) {
      end = divide_up(axis.out - start, dilation);
    }
  }

  // All elements of window p, whether they lie in the input or not.
  MAXUNPOOL_INLINE static Span unclipped(const Axis<int64_t>& axis, int64_t p) {
    return {p * axis.stride - axis.padding, 0, axis.kernel};
  }

  MAXUNPOOL_INLINE int64_t size() const { return std::max<int64_t>(0, end - begin); }

 private:
  MAXUNPOOL_INLINE Span(int64_t start, int64_t begin, int64_t end)
      : start(start), begin(begin), end(end) {}
};

// Numbers of elements along the three axes.
struct Box {
  int64_t z = 0;
  int64_t y = 0;
  int64_t x = 0;

  MAXUNPOOL_INLINE bool operator==(const Box& other) const {
    return z == other.z && y == other.y && x == other.x;
  }
};

struct PoolWindow {
  Span z;
  Span y;
  Span x;

  MAXUNPOOL_INLINE Box box() const { return {z.size(), y.size(), x.size()}; }
  MAXUNPOOL_INLINE bool empty() const { return z.size() * y.size() * x.size() == 0; }
};

} // namespace maxunpool_cuda
