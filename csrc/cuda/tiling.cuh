// Which thread owns what, and which windows can reach a position.
#pragma once

#include "../geometry.h"
#include "divider.cuh"
#include "windows.cuh"

#include <cstdint>

namespace maxunpool_cuda {

constexpr int kThreads = 128; // in a block of a first kernel
constexpr int kMostTile = 4;  // outputs of a tile in a dimension

template <class Offset>
struct Range {
  Offset first, end;
};

// The pooled positions, in one dimension, whose windows cover output coordinate o.
template <class Offset>
__device__ inline Range<Offset> windows_over(
    const Axis<Offset>& axis, const Divider<Offset>& stride, Offset o) {
  const Offset shifted = o + axis.padding;
  const Offset first = shifted < axis.kernel ? 0 : stride.divide(shifted - axis.kernel) + 1;
  const Offset end = stride.divide(shifted) + 1;
  return {first, end < axis.in ? end : axis.in};
}

// A geometry with what a kernel needs to find its way in it.
//
// The forward kernels cut the output into tiles. Thread (outer, t, channels) owns tile t, that is
// the outputs [t * tile, (t + 1) * tile) in each dimension, clipped to the output; it also vouches
// for the indices of the pooled cells t * cells .. (t + 1) * cells, as far as there are any. So
// every output has one owner, and every index is looked at. Any tile size is right.
template <class Offset>
struct Tiling : Windows<Offset> {
  using Windows<Offset>::geometry, Windows<Offset>::out_width, Windows<Offset>::out_height;

  Offset items; // threads' worth of work
  Offset tile[3];
  Divider<Offset> tiles[3]; // how many, per dimension
  Divider<Offset> channels; // groups of them
  Divider<Offset> stride[3];

  // Splits an item into (outer, tile, group of channels).
  struct Item {
    Offset outer;
    Position<Offset> tile;
    Offset channels;
  };
  __device__ Item item(Offset i) const {
    Item item;
    Offset rest = split_last(i, channels, item.channels);
    rest = split_last(rest, tiles[2], item.tile.at[2]);
    rest = split_last(rest, tiles[1], item.tile.at[1]);
    item.outer = split_last(rest, tiles[0], item.tile.at[0]);
    return item;
  }
  // The same where there is one group of channels and, unless kDeep, one tile in depth.
  template <bool kDeep>
  __device__ Item row_item(Offset i) const {
    Item item{};
    item.outer = split_last(i, tiles[2], item.tile.at[2]);
    item.outer = split_last(item.outer, tiles[1], item.tile.at[1]);
    if constexpr (kDeep) {
      item.outer = split_last(item.outer, tiles[0], item.tile.at[0]);
    }
    return item;
  }

  __device__ bool is_cell(const Position<Offset>& p) const {
    return p.at[0] < geometry.axis[0].in && p.at[1] < geometry.axis[1].in &&
           p.at[2] < geometry.axis[2].in;
  }
  __device__ Offset cell(const Position<Offset>& p) const {
    return (p.at[0] * geometry.axis[1].in + p.at[1]) * geometry.axis[2].in + p.at[2];
  }
  // Where the row of cells, or of outputs, at (d, h) of a slab begins, counted in positions.
  __device__ Offset pooled_row(Offset outer, Offset d, Offset h) const {
    return ((outer * geometry.axis[0].in + d) * geometry.axis[1].in + h) * geometry.axis[2].in;
  }
  __device__ Offset output_row(Offset outer, Offset d, Offset h) const {
    return ((outer * geometry.axis[0].out + d) * geometry.axis[1].out + h) * geometry.axis[2].out;
  }

  // The outputs of a cell's window. Rows are counted through the plane; width is not clipped, and
  // wraps around where the window begins left of the output.
  struct Window {
    Offset row, depths, heights, left;
  };
  __device__ Window window(const Position<Offset>& p) const {
    const Range<Offset> d = covered(0, p.at[0]), h = covered(1, p.at[1]);
    return {
        d.first * geometry.axis[1].out + h.first,
        d.end - d.first,
        h.end - h.first,
        p.at[2] * geometry.axis[2].stride - geometry.axis[2].padding};
  }
  // Does the window hold this position of the plane?
  __device__ bool holds(const Window& window, Offset target) const {
    const Offset height = geometry.axis[1].out;
    const Offset row = out_width.divide(target), below = row - window.row;
    const Offset column = target - row * geometry.axis[2].out, depth = out_height.divide(below);
    return (column - window.left < geometry.axis[2].kernel) & (below < window.depths * height) &
           (depth < window.depths) & (below - depth * height < window.heights);
  }

  // The tile's outputs in dimension a.
  __device__ Range<Offset> outputs(int a, Offset t) const {
    const Offset first = t * tile[a], end = first + tile[a];
    return {first, end < geometry.axis[a].out ? end : geometry.axis[a].out};
  }

 private:
  // What cell p's window covers in dimension a.
  __device__ Range<Offset> covered(int a, Offset p) const {
    const Axis<Offset>& axis = geometry.axis[a];
    const Offset start = p * axis.stride, stop = start + axis.kernel;
    const Offset first = start > axis.padding ? start - axis.padding : 0;
    const Offset end = stop > axis.padding ? stop - axis.padding : 0;
    const Offset clipped = end < axis.out ? end : axis.out;
    return {first, first < clipped ? clipped : first};
  }
  __device__ static Offset split_last(Offset n, const Divider<Offset>& by, Offset& last) {
    const Offset quotient = split(n, by);
    last = n;
    return quotient;
  }
};

// The position in the plane that a window offset of a cell leads to, or one that no plane has.
template <class Offset>
__device__ inline Offset target_of_offset(
    const Tiling<Offset>& tiling, const Position<Offset>& cell, Offset offset) {
  const Axis<Offset>* axis = tiling.geometry.axis;
  Position<Offset> at{{0, 0, offset}};
  at.at[1] = split(at.at[2], tiling.kernel_width);
  at.at[0] = split(at.at[1], tiling.kernel_height);
  bool inside = at.at[0] < axis[0].kernel;
  for (int a = 0; a < 3; ++a) {
    at.at[a] += cell.at[a] * axis[a].stride - axis[a].padding;
    inside &= at.at[a] < axis[a].out; // also where it wraps around
  }
  return inside ? (at.at[0] * axis[1].out + at.at[1]) * axis[2].out + at.at[2]
                : static_cast<Offset>(-1);
}

// This thread's share of `items`, under any grid and block size.
template <class Offset, class Visit>
__device__ inline void for_each_item(Offset items, const Visit& visit) {
  const Offset step = static_cast<Offset>(gridDim.x) * blockDim.x;
  for (Offset i = static_cast<Offset>(blockIdx.x) * blockDim.x + threadIdx.x; i < items;
       i += step) {
    visit(i);
  }
}

} // namespace maxunpool_cuda
