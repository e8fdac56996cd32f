// SPDX-License-Identifier: BSD-3-Clause
// Tilings: which thread owns what.
#pragma once

#include "../geometry.h"
#include "divider.cuh"
#include "indices.cuh"

#include <algorithm>
#include <cstdint>

namespace maxunpool_cuda {

constexpr int kThreads = 128; // of a block that does items

// Tiling: what the threads of a kernel own. Each owns an item: a tile of a group of channels.
// Offset is as in Decoder.
template <class Offset>
struct Tiling : Decoder<Offset> {
  using Decoder<Offset>::geometry;

  Offset items;
  Divider<Offset> tiles[3]; // how many, per dimension
  Divider<Offset> groups;   // of channels

  // Tiling by `count` tiles in each dimension and groups of channels, of `images` images a thread.
  Tiling(
      const Geometry<int64_t>& from,
      const int64_t (&count)[3],
      int64_t group_count,
      int64_t images = 1)
      : Decoder<Offset>(from), groups(Divider<Offset>(group_count)) {
    const int64_t planes = divide_up(from.outer, images) * group_count;
    items = static_cast<Offset>(planes * count[0] * count[1] * count[2]);
    for (int a = 0; a < 3; ++a) {
      tiles[a] = Divider<Offset>(count[a]);
    }
  }

  struct Item {
    Offset outer;
    Position<Offset> tile;
    Offset group;
  };
  // Item i. Unless `has_groups`, there is one group of channels; unless `deep`, one tile in depth.
  __device__ Item item(Offset i, bool has_groups = true, bool deep = true) const {
    Item item{i, {}, 0};
    const auto split_off = [&](const Divider<Offset>& by) {
      Offset last = item.outer;
      item.outer = split(last, by);
      return last;
    };
    if (has_groups) {
      item.group = split_off(groups);
    }
    item.tile[2] = split_off(tiles[2]);
    item.tile[1] = split_off(tiles[1]);
    if (deep) {
      item.tile[0] = split_off(tiles[0]);
    }
    return item;
  }

  // Number of a cell's element, of a channel, in the pooled tensor.
  __device__ Offset pooled(Offset outer, const Position<Offset>& p, Offset channel) const {
    const auto& [depth, height, width] = geometry.axis;
    const Offset row = (outer * depth.in + p[0]) * height.in + p[1];
    return (row * width.in + p[2]) * geometry.inner + channel;
  }
};

// Planes: a thread owns the same tile in several of them.
//
//   plane 0  0 1 2 3 4 5 ..    Threads 0, 1, 2 .. of a warp own neighbouring tiles, whatever the
//   plane 1  0 1 2 3 4 5 ..    width of a row, so they access neighbouring elements; the reads of
//   plane 2  0 1 2 3 4 5 ..    two planes do not wait for each other; and the place of a tile is
//                              computed once for all planes.
//
// In a channels_last tensor, neighbouring threads own neighbouring channels. A thread's planes are
// channels of one image, if the number of channels divides by that of the planes.
struct Planes {
  uint32_t images;                   // that a thread's planes lie in: one for each, or one
  uint32_t next_pooled, next_output; // from one of its planes to the next, in elements
  bool deep;                         // depth is not one everywhere
  Divider<uint32_t> depth_stride;

  explicit Planes(const Geometry<int64_t>& g, int64_t count = 1) {
    const bool of_channels = g.inner % count == 0;
    images = of_channels ? 1 : static_cast<uint32_t>(count);
    next_pooled = static_cast<uint32_t>(of_channels ? g.inner / count : g.in_image());
    next_output = static_cast<uint32_t>(of_channels ? g.inner / count : g.out_image());
    deep = g.axis[0].in != 1 || g.axis[0].out != 1 || g.axis[0].kernel != 1;
    depth_stride = Divider<uint32_t>(g.axis[0].stride);
  }
};

// Whether all intermediate values of all kernels stay below 2^31, for windows of that dilation, and
// `more` rows of windows beyond those of the geometry.
inline bool fits_32bit(
    const Geometry<int64_t>& geometry, const int64_t (&dilation)[3] = {1, 1, 1}, int64_t more = 0) {
  constexpr int64_t kMost32BitOffset = int64_t{1} << 31;
  double elements = static_cast<double>(geometry.outer) * static_cast<double>(geometry.inner);
  double kernel_volume = 1, extent = 0;
  for (int a = 0; a < 3; ++a) {
    const Axis<int64_t>& axis = geometry.axis[a];
    const auto size = static_cast<double>(std::max(axis.in + (a == 1 ? more : 0), axis.out));
    const auto kernel = static_cast<double>(axis.kernel), apart = static_cast<double>(dilation[a]);
    elements *= apart == 1 ? size : size + apart;
    kernel_volume *= kernel;
    extent = std::max(
        extent,
        (size + 1) * static_cast<double>(axis.stride) + size + static_cast<double>(axis.padding) +
            (kernel + 1) * apart);
  }
  return std::max({elements, extent, kernel_volume}) < static_cast<double>(kMost32BitOffset);
}

// How many outer indices a call may have for fits_32bit(), at most all; 0: not even one. Calls that
// have more are cut into parts, which halving makes about equal.
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
