// SPDX-License-Identifier: BSD-3-Clause
// Where windows lie in the output plane, and channels and images among the outputs.
//
// It takes the geometry from ../geometry.h, and from plan.h how elements divide into chunks.
//
// Example: a plane of 4x5 cells and 8x10 outputs, 2x2 windows. The window of the cell (1, 2) begins
// at (2, 4), which is position 2 * 10 + 4 = 24. In channels_last with 64 channels the output of its
// channel 7 there is 24 * 64 + 7.
#pragma once

#include "../geometry.h"
#include "plan.h"

#include <algorithm>
#include <cstdint>

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

// What to add to a position, times the channels, to get an output: an element's channel, and the
// begin of its image in the group. The table is of a group's first chunk. A chunk that begins
// inside a cell adds the channel of its first element.
struct FirstOutputs {
  alignas(64) uint32_t output[Chunk::kMost]; // no vector of it lies in two cache lines

  void fill(const Plan& plan) {
    const int64_t inner = plan.geometry.inner;
    const int64_t image = std::min(plan.longest_chunk, plan.geometry.in_image());
    for (int64_t i = 0; i < image; ++i) {
      output[i] = i < inner ? static_cast<uint32_t>(i) : output[i - inner]; // the channel
    }
    for (int64_t i = image; i < plan.longest_chunk; ++i) { // other images of the group
      output[i] = output[i - image] + static_cast<uint32_t>(plan.geometry.out_image());
    }
  }
};

// Whether the targets of a call are positions less a constant: its groups are planes.
inline bool groups_are_planes(const Plan& plan) {
  return plan.geometry.inner == 1 && plan.images == 1;
}

} // namespace
} // namespace maxunpool_cuda
