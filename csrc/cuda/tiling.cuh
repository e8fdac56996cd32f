// SPDX-License-Identifier: BSD-3-Clause
// Tiling: which part of the work a thread does. The work of a kernel is a number of items; a thread
// finds out from an item's number which cells, channels and planes the item is. From indices.cuh
// comes the Decoder, the geometry with its divisors, which a Tiling extends; from device.cuh the
// size of a block and the limit of 32-bit offsets.
//
// Example: each of 5 planes has 4 rows of 6 cells, and a tile is 2 cells of a row. So a
// plane has 1 x 4 x 3 tiles (depth, height, width), and there are 60 items. Item 41 is split from
// the last dimension on:
//
//   41 = 13 * 3 + 2    the tile 2 of a row: its cells are in columns 4 and 5
//   13 =  3 * 4 + 1    row 1
//    3                 plane 3
//
// pooled(3, {0, 1, 4}, 0) is the number of the tile's first element in the pooled tensor:
// (3 * 4 + 1) * 6 + 4 = 82.
#pragma once

#include "../geometry.h"
#include "device.cuh"
#include "divider.cuh"
#include "indices.cuh"

#include <algorithm>
#include <cstdint>

namespace maxunpool_cuda {

// What the threads of a kernel own. A thread owns one item at a time. An item is a tile, of one
// cell or several, in one vector of channels. Offset is as in Decoder.
template <class Offset>
struct Tiling : Decoder<Offset> {
  using Decoder<Offset>::geometry;

  Offset items;
  Divider<Offset> tiles[3];        // how many, in each dimension
  Divider<Offset> channel_vectors; // how many; a vector may be one channel

  // A Tiling of `count` tiles in each dimension and `channel_vector_count` vectors of channels.
  Tiling(const Geometry<int64_t>& from, const int64_t (&count)[3], int64_t channel_vector_count)
      : Decoder<Offset>(from), channel_vectors(Divider<Offset>(channel_vector_count)) {
    const int64_t vectors = from.outer * channel_vector_count;
    items = static_cast<Offset>(vectors * count[0] * count[1] * count[2]);
    for (int a = 0; a < 3; ++a) {
      tiles[a] = Divider<Offset>(count[a]);
    }
  }

  struct Item {
    Offset outer;
    Position<Offset> tile;
    Offset channel_vector;
  };
  // Item number i. Without `has_channels`, there is one vector of channels; without `deep`, one
  // tile in depth. Both spare divisions. (If there are several tiles in depth all the same, `outer`
  // counts these, too, as locate() in forward.cuh wants it.)
  __device__ Item item(Offset i, bool has_channels = true, bool deep = true) const {
    Item item{i, {}, 0};
    // Returns the last coordinate of what is left of i, and takes it off.
    const auto split_off = [&](const Divider<Offset>& divider) {
      Offset last = item.outer;
      item.outer = split(last, divider);
      return last;
    };
    if (has_channels) {
      item.channel_vector = split_off(channel_vectors);
    }
    item.tile[2] = split_off(tiles[2]);
    item.tile[1] = split_off(tiles[1]);
    if (deep) {
      item.tile[0] = split_off(tiles[0]);
    }
    return item;
  }

  // Number of an element in the pooled tensor: that of a cell, in a channel.
  __device__ Offset pooled(Offset outer, const Position<Offset>& cell, Offset channel) const {
    const auto& [depth, height, width] = geometry.axis;
    const Offset row = (outer * depth.in + cell[0]) * height.in + cell[1];
    return (row * width.in + cell[2]) * geometry.inner + channel;
  }
};

// Whether all values that a kernel uses stay below kMost32BitOffset; the place of an output that
// does not exist may wrap around. `dilation` is that of a pool. A thread of a pool that owns
// several windows of a column may own some that do not exist: up to `more` beyond the last. The
// function computes bounds, not exact values, and in floating point, which does not overflow.
inline bool fits_32bit(
    const Geometry<int64_t>& geometry, const int64_t (&dilation)[3] = {1, 1, 1}, int64_t more = 0) {
  double elements = static_cast<double>(geometry.outer) * static_cast<double>(geometry.inner);
  double kernel_volume = 1;
  double largest_coordinate = 0;
  for (int a = 0; a < 3; ++a) {
    const Axis<int64_t>& axis = geometry.axis[a];
    const int64_t windows = axis.in + (a > 0 ? more : 0);
    const auto size = static_cast<double>(std::max(windows, axis.out));
    const auto kernel = static_cast<double>(axis.kernel);
    const auto step = static_cast<double>(dilation[a]);
    elements *= step == 1 ? size : size + step; // a dilated window may begin that far outside
    kernel_volume *= kernel;
    // Above the end of every window, whether coordinates count from the input or from the padding.
    const double end_of_windows = (size + 1) * static_cast<double>(axis.stride) + size +
                                  static_cast<double>(axis.padding) + (kernel + 1) * step;
    largest_coordinate = std::max(largest_coordinate, end_of_windows);
  }
  const double largest = std::max({elements, kernel_volume, largest_coordinate});
  return largest < static_cast<double>(kMost32BitOffset);
}

// How many outer indices one launch does: all, or all halved until fits_32bit() holds, or 0 if not
// even one fits. See for_each_range_of_images().
inline int64_t outer_that_fits(
    Geometry<int64_t> geometry, const int64_t (&dilation)[3] = {1, 1, 1}, int64_t more = 0) {
  while (geometry.outer > 0 && !fits_32bit(geometry, dilation, more)) {
    geometry.outer /= 2;
  }
  return geometry.outer;
}

// Calls visit(i) for this thread's share of `items`, under any grid and block size.
template <class Offset, class Visit>
__device__ inline void for_each_item(Offset items, const Visit& visit) {
  const Offset step = static_cast<Offset>(gridDim.x) * blockDim.x;
  for (Offset i = static_cast<Offset>(blockIdx.x) * blockDim.x + threadIdx.x; i < items;
       i += step) {
    visit(i);
  }
}

} // namespace maxunpool_cuda
