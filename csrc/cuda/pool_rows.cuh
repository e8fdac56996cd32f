// Max pooling of contiguous tensors: windows of K = 2 or 3 elements in height and width, S apart. A
// thread owns V x R windows and reads their rows once (here K = 3, S = 2, V = 2):
//
//      | 0 | a   b   c   d |      a row of the input: the 2 V elements from the thread's first
//      '---'-------.-------'      column on are one vector, and where windows are padded, the
//      [ window 0  ]       |      element before it is read too
//              [ window 1  ]
//
//   Each row gives one best element to each of the V windows that cross it. The best of K rows is
//   the window's. If R > 1, a row between two windows is the last of the one and the first of the
//   other.
#pragma once

#include "pool_tap.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <cstdint>

namespace maxunpool_cuda {

// Kernel. kEven: rows, of the input and of the windows, divide into vectors, and the windows' first
// column is K == 3 elements left of the thread's vector. Else V is 1, under any padding:
// neighbouring threads still write neighbouring elements, and R rows share the work.
template <class T, class Index, int K, int S, int V, int R, bool kEven>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads) pool_rows(
    Tiling<uint32_t> tiling, const T* __restrict__ input, T* __restrict__ values,
    IndexArray<Index> indices) {
  static_assert(kEven ? S == 2 : V == 1);
  constexpr int kColumns = (V - 1) * S + K, kRows = (R - 1) * S + K;
  for_each_item(tiling.items, [&](uint32_t i) {
    const Geometry<uint32_t>& g = tiling.geometry;
    const bool deep = g.rank == 3;
    const auto item = tiling.item(i, false, deep);
    const Position<uint32_t>& p = item.tile;
    const uint32_t own = p[2] * (V * S);
    const uint32_t left = own - (kEven ? K - S : g.axis[2].padding); // may wrap around
    const uint32_t top = p[1] * (R * S) - g.axis[1].padding;
    const uint32_t front = p[0] * g.axis[0].stride - g.axis[0].padding;
    const T* slab = input + item.outer * tiling.out_plane + (kEven ? own : 0);
    uint32_t columns[kColumns]; // of the input; kEven: counted from `left` on
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if constexpr (kEven) {
        columns[c] = K == 3 && c == 0 && own == 0 ? 1 : c;
      } else {
        columns[c] = brought_inside(left + c, g.axis[2].out);
      }
    }

    Best<T, uint32_t> best[R][V]{};
    const auto look = [&](int r, uint32_t row, uint32_t name, bool is_first) {
      const T* from = slab + row;
      Tap<T> taps[kColumns];
      if constexpr (kEven) {
        unpack(load<V * S>(from), taps + (K - S));
        if constexpr (K != S) {
          taps[0] = Tap<T>::of(from[static_cast<int32_t>(columns[0]) - 1]);
        }
      } else {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          taps[c] = Tap<T>::of(from[columns[c]]);
        }
      }
#pragma unroll
      for (int v = 0; v < V; ++v) {
        Best<T, uint32_t> of_row{taps[v * S], columns[v * S]};
#pragma unroll
        for (int c = v * S + 1; c < v * S + K; ++c) {
          of_row.look_at(taps[c], columns[c]);
        }
#pragma unroll
        for (int w = 0; w < R; ++w) {
          if (r >= w * S && r < w * S + K) {
            best[w][v].look_at(of_row.tap, name + of_row.name, is_first && r == w * S);
          }
        }
      }
    };
    const bool as_offsets = indices.takes_offsets();
    for_each_row<K, kRows>(g, front, top, as_offsets, look);
    const uint32_t to = tiling.pooled(item.outer, {{p[0], p[1] * R, p[2] * V}}, 0);
#pragma unroll
    for (int w = 0; w < R; ++w) {
      if (w == 0 || p[1] * R + w < g.axis[1].in) {
#pragma unroll
        for (int v = 0; v < V; ++v) { // columns were counted from `left` on, or from 0
          best[w][v].name += as_offsets ? (kEven ? 0 : -left) - (w * S * K + v * S)
                             : kEven    ? left
                                        : 0;
        }
        store_values(values + to + w * g.axis[2].in, best[w]);
        indices.store_names(to + w * g.axis[2].in, best[w]);
      }
    }
  });
}

} // namespace maxunpool_cuda
