// Max pooling, one window at a time. A thread owns V channels of a window:
//
//      x x x          x: a vector of V channels. With kernel K, all K x K of them are read at
//      x x x          once, and a row's best is found before it meets the other rows'.
//      x x x
//
// Windows that neither this nor pool_rows is compiled for are pool_windows', of one channel a
// thread. A contiguous tensor is one of one channel.
#pragma once

#include "divider.cuh"
#include "pool_cell.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <cstdint>

namespace maxunpool_cuda {

// Windows of K cells in height (or 1, in inputs of one row) and width, without dilation.
template <class T, class Index, int K, int V>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads) pool_channels(
    Tiling<uint32_t> tiling,
    const T* __restrict__ input,
    T* __restrict__ values,
    IndexArray<Index> indices) {
  for_each_item(tiling.items, [&](uint32_t i) {
    const Geometry<uint32_t>& g = tiling.geometry;
    const auto item = tiling.item(i);
    const Position<uint32_t>& p = item.tile;
    const uint32_t channel = item.channels * V;
    const auto start = window_start(tiling, p);
    const T* slab = input + (item.outer * tiling.out_plane * g.inner + channel);
    uint32_t columns[K], names[K];
#pragma unroll
    for (int c = 0; c < K; ++c) {
      const uint32_t x = brought_inside(start.at[2] + c, g.axis[2].out);
      columns[c] = x * g.inner;
      names[c] = indices.takes_numbers() ? x - start.at[2] : x;
    }
    Best<T, uint32_t> best[V]{};
    const auto look = [&](int r, uint32_t row, uint32_t name, bool is_first) {
      Cell<T> cells[K][V];
#pragma unroll
      for (int c = 0; c < K; ++c) {
        unpack(load<V>(slab + (row * g.inner + columns[c])), cells[c]);
      }
#pragma unroll
      for (int v = 0; v < V; ++v) {
        Best<T, uint32_t> of_row{cells[0][v], names[0]};
#pragma unroll
        for (int c = 1; c < K; ++c) {
          of_row.look_at(cells[c][v], names[c]);
        }
        best[v].look_at(of_row.cell, name + of_row.name, is_first && r == 0);
      }
    };
    for_each_row<K, K>(g, start.at[0], start.at[1], indices.takes_numbers(), look);
    const uint32_t to = tiling.pooled(item.outer, p, channel);
    store_values(values + to, best);
    indices.store_names(to, best);
  });
}

// What the geometry does not say of windows. Offset is as in Tiling.
template <class Offset>
struct PoolCells {
  Divider<Offset> dilation[3];

  // The cells of window p, along axis a, that lie in the input: numbers [first, end).
  __device__ Range<Offset> inside(const Axis<Offset>& axis, int a, Offset p) const {
    const Offset start = p * axis.stride, reach = axis.out + axis.padding; // after the padding's
    const Offset end = start < reach ? dilation[a].divide(reach - start - 1) + 1 : 0;
    const Offset first =
        start < axis.padding ? dilation[a].divide(axis.padding - start - 1) + 1 : 0;
    return {first, end < axis.kernel ? end : axis.kernel};
  }
  __device__ Offset step(int a) const { return dilation[a].divisor(); }
};

// Any windows, of one channel a thread.
template <class T, class Offset>
__global__ void __launch_bounds__(kThreads, sizeof(Offset) == 4 ? 1024 / kThreads : 1) pool_windows(
    Tiling<Offset> tiling,
    PoolCells<Offset> cells,
    T lowest,
    const T* __restrict__ input,
    T* __restrict__ values,
    IndexArray<void> indices) {
  for_each_item(tiling.items, [&](Offset i) {
    const Geometry<Offset>& g = tiling.geometry;
    const auto item = tiling.item(i);
    const auto& p = item.tile;
    const auto [front, top, left] = window_start(tiling, p).at;
    const Offset first = (front * g.axis[1].out + top) * g.axis[2].out + left;
    const auto zs = cells.inside(g.axis[0], 0, p.at[0]), ys = cells.inside(g.axis[1], 1, p.at[1]),
               xs = cells.inside(g.axis[2], 2, p.at[2]);
    const T* plane = input + (item.outer * tiling.out_plane * g.inner + item.channels);
    const bool numbers = indices.takes_numbers();
    const Offset step = cells.step(2), name_step = numbers ? 1 : step;
    const auto row_of = [&](Offset z, Offset y) { // where it begins, or wraps around to
      return first + (z * cells.step(0) * g.axis[1].out + y * cells.step(1)) * g.axis[2].out;
    };
    const auto name_of = [&](Offset z, Offset y) { // of the row's first cell, if it had one
      return numbers ? (z * g.axis[1].kernel + y) * g.axis[2].kernel : row_of(z, y);
    };
    // Of no cells, the first is named that the padding before them leaves.
    Best<T, Offset> best[1] = {
        {Cell<T>::of(lowest), name_of(zs.first, ys.first) + xs.first * name_step}};
    for (Offset z = zs.first; z < zs.end; ++z) {
      for (Offset y = ys.first; y < ys.end; ++y) {
        Offset at = (row_of(z, y) + xs.first * step) * g.inner;
        Offset name = name_of(z, y) + xs.first * name_step;
        for (Offset x = xs.first; x < xs.end; ++x) {
          best[0].look_at(Cell<T>::of(plane[at]), name);
          at += step * g.inner;
          name += name_step;
        }
      }
    }
    const Offset to = tiling.pooled(item.outer, p, item.channels);
    store_values(values + to, best);
    indices.store_names(to, best);
  });
}

} // namespace maxunpool_cuda
