// SPDX-License-Identifier: BSD-3-Clause
// Rows of a contiguous input, copied so that the elements which neighbouring windows compare lie
// side by side.
//
// It takes the call from ../calls.h.
//
// Example: the row a b c d e f g h, four windows of 3 columns, stride 2, padding 1:
//   (- a b) (b c d) (d e f) (f g h)
// It is copied to as many phases as the stride, and the padding with it:
//   phase 0    - b d f h      the windows' columns 0, and from the second place on their columns 2
//   phase 1    a c e g .      the windows' columns 1
// A phase has the coordinates with one remainder modulo the stride; a place is a position in it. So
// column c of window i lies at place i + c / 2 of phase c % 2, and one vector of a phase has one
// column of as many windows.
#pragma once

#include "../calls.h"
#include "../dtypes.h"
#include "../geometry.h"
#include "machine.h"

#include <algorithm>
#include <cstdint>

namespace maxunpool_cuda {
namespace {

template <class Element>
class Stage {
 public:
  // `lowest`: what the padding is filled with. `lanes`: windows of a vector. `most_windows`: as
  // many as the caller compares at once, or 0 for no stage.
  Stage(const PoolCall& call, Element lowest, int64_t lanes, int64_t most_windows)
      : width_(call.geometry.axis[2]), dilation_(call.dilation[2]), lowest_(lowest) {
    const auto& [depth, height, width] = call.geometry.axis;
    // Rows of a window that lie in the input, at most.
    const int64_t rows = std::min(depth.kernel, depth.out) * std::min(height.kernel, height.out);
    more_ = dilation_ * (width_.kernel - 1) / width_.stride;
    const int64_t room = kMost / rows / width_.stride - more_;
    const int64_t useful = divide_up(width_.in, lanes) * lanes;
    windows_ = std::max<int64_t>(0, std::min({most_windows, room, useful}) / lanes * lanes);
    phase_ = windows_ + more_;
    // Vectors are compared whole, beyond the last element that is put there.
    std::fill_n(phases_, windows_ > 0 ? kMost : 0, Element{});
  }

  // How many windows of a row have room at once. 0: windows are too large for a stage, or none was
  // asked for.
  int64_t windows() const { return windows_; }

  // Where the windows' rows begin.
  const Element* begin() const { return phases_; }

  // Offset from there of an element of the first window. `row`: of the rows that were put.
  int64_t offset(int64_t row, int64_t column) const {
    const int64_t coordinate = column * dilation_;
    const int64_t phase = row * width_.stride + coordinate % width_.stride;
    return phase * phase_ + coordinate / width_.stride;
  }

  // Puts a row of the input there, as much of it as `count` windows need. `begin`: coordinate where
  // the first window begins. Inlined, as rows are often short.
  MAXUNPOOL_INLINE void put(int64_t row, const Element* input_row, int64_t begin, int64_t count) {
    const int64_t stride = width_.stride;
    const int64_t places = count + more_; // of a phase
    const int64_t length = places * stride;
    Element* phases = phases_ + row * stride * phase_;
    const int64_t left = std::clamp<int64_t>(-begin, 0, length); // places in the padding
    const int64_t right = std::clamp(width_.out - begin, left, length);
    const Element* from = input_row + begin;
    if (stride == 1 || right - left < length) {
      Element* padded = stride == 1 ? phases : padded_;
      std::fill(padded, padded + left, lowest_);
      std::copy(from + left, from + right, padded + left);
      std::fill(padded + right, padded + length, lowest_);
      from = padded;
    }
    const int64_t phase = phase_;
    const auto split = [=](auto steps) MAXUNPOOL_INLINE {
      for (int64_t i = 0; i < places; ++i) {
        for (int64_t k = 0; k < steps; ++k) {
          phases[k * phase + i] = from[i * steps + k];
        }
      }
    };
    if (stride > 1 && !with_one_of<2, 3, 4>(stride, split)) { // known to the compiler
      split(stride);
    }
  }

 private:
  static constexpr int64_t kMost = (1 << 15) / sizeof(Element); // elements of 32 KiB: a first cache

  const Axis<int64_t>& width_;
  const int64_t dilation_;
  const Element lowest_;
  int64_t more_;    // places of a phase beyond the number of windows
  int64_t windows_; // that have room
  int64_t phase_;   // places of a phase
  // Aligned, so that fewer vectors lie in two cache lines.
  alignas(64) Element padded_[kMost];
  alignas(64) Element phases_[kMost];
};

} // namespace
} // namespace maxunpool_cuda
