// Which thread owns what, and which windows can reach a position.
#pragma once

#include "../geometry.h"
#include "divider.cuh"

#include <cstdint>

namespace maxunpool_cuda {

template <class Offset>
struct Position {
  Offset at[3];
};

template <class Offset>
struct Range {
  Offset first;
  Offset count;
};

// The pooled positions, in one dimension, whose windows cover output coordinate o.
template <class Offset>
__device__ inline Range<Offset> windows_over(
    const Axis<Offset>& axis, const Divider<Offset>& stride, Offset o) {
  const Offset shifted = o + axis.padding;
  const Offset first = shifted < axis.kernel ? 0 : stride.divide(shifted - axis.kernel) + 1;
  const Offset last = stride.divide(shifted);
  const Offset end = last < axis.in ? last + 1 : axis.in;
  return {first, first < end ? end - first : 0};
}

// A geometry with what a kernel needs to find its way in it. Offset is uint32_t where every
// intermediate value stays below 2^31, else uint64_t.
//
// The forward kernels cut the output into tiles. Thread (outer, t, channels) owns tile t, that is
// the outputs [t * tile, (t + 1) * tile) in each dimension, clipped to the output; it also vouches
// for the index of pooled cell t, if there is one. So there are max(in, ceil(out / tile)) tiles in
// a dimension, every output has one owner, and every index is looked at. Any tile size is right.
template <class Offset>
struct Tiling {
  Geometry<Offset> geometry;
  Offset items; // threads' worth of work
  Offset tile[3];
  Divider<Offset> tiles[3]; // how many, per dimension
  Divider<Offset> channels; // groups of them
  Divider<Offset> stride[3];
  Divider<Offset> out_height, out_width;

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

  __device__ bool is_cell(const Position<Offset>& p) const {
    return p.at[0] < geometry.axis[0].in && p.at[1] < geometry.axis[1].in &&
           p.at[2] < geometry.axis[2].in;
  }
  __device__ Offset cell(const Position<Offset>& p) const {
    return (p.at[0] * geometry.axis[1].in + p.at[1]) * geometry.axis[2].in + p.at[2];
  }
  __device__ Offset output(Offset d, Offset h, Offset w) const {
    return (d * geometry.axis[1].out + h) * geometry.axis[2].out + w;
  }
  __device__ Position<Offset> coordinates(Offset output) const {
    Position<Offset> o;
    const Offset rest = split_last(output, out_width, o.at[2]);
    o.at[0] = split_last(rest, out_height, o.at[1]);
    return o;
  }

  // Does the window of cell p hold this index?
  __device__ bool in_window(const Position<Offset>& p, int64_t index) const {
    if (index < 0 || index >= static_cast<int64_t>(geometry.out_plane())) {
      return false;
    }
    const Position<Offset> o = coordinates(static_cast<Offset>(index));
    bool inside = true;
    for (int a = 0; a < 3; ++a) {
      const Axis<Offset>& axis = geometry.axis[a];
      const Offset shifted = o.at[a] + axis.padding, start = p.at[a] * axis.stride;
      inside = inside && shifted >= start && shifted - start < axis.kernel;
    }
    return inside;
  }

  // Calls visit(cell) for the cells whose windows cover o, in row-major order or in reverse, until
  // it returns false.
  template <bool kReverse, class Visit>
  __device__ void for_each_window_over(const Position<Offset>& o, const Visit& visit) const {
    Range<Offset> range[3];
    for (int a = 0; a < 3; ++a) {
      range[a] = windows_over(geometry.axis[a], stride[a], o.at[a]);
    }
    for (Offset d = 0; d < range[0].count; ++d) {
      for (Offset h = 0; h < range[1].count; ++h) {
        for (Offset w = 0; w < range[2].count; ++w) {
          const Position<Offset> p{
              {pick<kReverse>(range[0], d),
               pick<kReverse>(range[1], h),
               pick<kReverse>(range[2], w)}};
          if (!visit(cell(p))) {
            return;
          }
        }
      }
    }
  }

 private:
  __device__ static Offset split_last(Offset n, const Divider<Offset>& by, Offset& last) {
    const Offset quotient = split(n, by);
    last = n;
    return quotient;
  }
  template <bool kReverse>
  __device__ static Offset pick(const Range<Offset>& range, Offset i) {
    return range.first + (kReverse ? range.count - 1 - i : i);
  }
};

// This thread's items, under any grid and block size.
template <class Offset, class Visit>
__device__ inline void for_each_item(Offset items, const Visit& visit) {
  const Offset step = static_cast<Offset>(gridDim.x) * blockDim.x;
  for (Offset i = static_cast<Offset>(blockIdx.x) * blockDim.x + threadIdx.x; i < items;
       i += step) {
    visit(i);
  }
}

} // namespace maxunpool_cuda
