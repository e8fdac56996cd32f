// Tilings: which thread owns what, and which windows cover a position.
#pragma once

#include "../geometry.h"
#include "decoder.cuh"
#include "divider.cuh"

#include <cstdint>

namespace maxunpool_cuda {

constexpr int kThreads = 128; // in a block of a first kernel
constexpr int kMostTile = 4;  // outputs of a tile in a dimension

template <class Offset>
struct Range {
  Offset first, end;
};

// Tiling: what the threads of a kernel own, each an item, which is a tile of a group of channels.
//
// forward_windows cuts the output into tiles. Thread (outer, t, group) owns tile t, which is the
// outputs [t * tile, (t + 1) * tile) in each dimension, clipped to the output; it also checks the
// index of pooled cell t, if there is one. So every output has one owner, and every index is
// checked. In other kernels a tile is a cell, some cells of a row, or some windows.
template <class Offset>
struct Tiling : Decoder<Offset> {
  using Decoder<Offset>::geometry;

  Offset items;
  Offset tile[3];           // outputs of one; in forward_windows alone
  Divider<Offset> tiles[3]; // how many, per dimension
  Divider<Offset> groups;   // of channels
  Divider<Offset> stride[3];

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

  __device__ bool is_cell(const Position<Offset>& p) const {
    const auto& [depth, height, width] = geometry.axis;
    return p[0] < depth.in && p[1] < height.in && p[2] < width.in;
  }
  // Number of a cell in its plane, and of its element, of a channel, in the pooled tensor.
  __device__ Offset cell(const Position<Offset>& p) const {
    return (p[0] * geometry.axis[1].in + p[1]) * geometry.axis[2].in + p[2];
  }
  __device__ Offset pooled(Offset outer, const Position<Offset>& p, Offset channel) const {
    const auto& [depth, height, width] = geometry.axis;
    const Offset row = (outer * depth.in + p[0]) * height.in + p[1];
    return (row * width.in + p[2]) * geometry.inner + channel;
  }

  // Outputs of a tile in dimension a.
  __device__ Range<Offset> outputs(int a, Offset t) const {
    const Offset first = t * tile[a], end = first + tile[a];
    return {first, end < geometry.axis[a].out ? end : geometry.axis[a].out};
  }
  // Cells, in dimension a, whose windows cover output coordinate o.
  __device__ Range<Offset> windows_over(int a, Offset o) const {
    const Axis<Offset>& axis = geometry.axis[a];
    const Offset shifted = o + axis.padding;
    const Offset first = shifted < axis.kernel ? 0 : stride[a].divide(shifted - axis.kernel) + 1;
    const Offset end = stride[a].divide(shifted) + 1;
    return {first, end < axis.in ? end : axis.in};
  }
};

// Tiling of so many `tiles` in each dimension, `groups` of channels, and `slabs` to a thread.
template <class Offset>
Tiling<Offset> make_tiling(
    const Geometry<int64_t>& geometry, const int64_t (&tiles)[3], int64_t groups,
    int64_t slabs = 1) {
  Tiling<Offset> tiling{};
  static_cast<Decoder<Offset>&>(tiling) = decoder_of<Offset>(geometry);
  tiling.items = static_cast<Offset>(
      divide_up(geometry.outer, slabs) * tiles[0] * tiles[1] * tiles[2] * groups);
  for (int a = 0; a < 3; ++a) {
    tiling.tiles[a] = divider<Offset>(tiles[a]);
    tiling.stride[a] = divider<Offset>(geometry.axis[a].stride);
  }
  tiling.groups = divider<Offset>(groups);
  return tiling;
}

// Tiling whose tile is a cell, or for pooling `rows` x `columns` windows.
template <class Offset>
Tiling<Offset> tile_cells(
    const Geometry<int64_t>& geometry, int64_t groups, int64_t slabs = 1, int64_t rows = 1,
    int64_t columns = 1) {
  const auto& [depth, height, width] = geometry.axis;
  return make_tiling<Offset>(
      geometry, {depth.in, divide_up(height.in, rows), divide_up(width.in, columns)}, groups,
      slabs);
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
