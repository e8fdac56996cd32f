// Max pooling, one window at a time. A thread owns V channels of a window:
//
//      x x x          x: a vector of V channels. Of each of the K rows of K vectors, the best is
//      x x x          found first, and then compared with the best of the rows before.
//      x x x
#pragma once

#include "pool_tap.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <cstdint>

namespace maxunpool_cuda {

// Kernel for windows of K elements in width and height (or 1, in inputs of one row), undilated.
template <class T, class Index, int K, int V>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads) pool_channels(
    Tiling<uint32_t> tiling, const T* __restrict__ input, T* __restrict__ values,
    IndexArray<Index> indices) {
  for_each_item(tiling.items, [&](uint32_t i) {
    const Geometry<uint32_t>& g = tiling.geometry;
    const auto item = tiling.item(i);
    const Position<uint32_t>& p = item.tile;
    const uint32_t channel = item.group * V;
    const auto start = window_start(tiling, p);
    const T* slab = input + (item.outer * tiling.out_plane * g.inner + channel);
    uint32_t columns[K], names[K];
#pragma unroll
    for (int c = 0; c < K; ++c) {
      const uint32_t x = brought_inside(start[2] + c, g.axis[2].out);
      columns[c] = x * g.inner;
      names[c] = indices.takes_offsets() ? x - start[2] : x;
    }
    Best<T, uint32_t> best[V]{};
    const auto look = [&](int r, uint32_t row, uint32_t name, bool is_first) {
      Tap<T> taps[K][V];
#pragma unroll
      for (int c = 0; c < K; ++c) {
        unpack(load<V>(slab + (row * g.inner + columns[c])), taps[c]);
      }
#pragma unroll
      for (int v = 0; v < V; ++v) {
        Best<T, uint32_t> of_row{taps[0][v], names[0]};
#pragma unroll
        for (int c = 1; c < K; ++c) {
          of_row.look_at(taps[c][v], names[c]);
        }
        best[v].look_at(of_row.tap, name + of_row.name, is_first && r == 0);
      }
    };
    for_each_row<K, K>(g, start[0], start[1], indices.takes_offsets(), look);
    const uint32_t to = tiling.pooled(item.outer, p, channel);
    store_values(values + to, best);
    indices.store_names(to, best);
  });
}

} // namespace maxunpool_cuda
