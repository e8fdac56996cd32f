// Max pooling of contiguous tensors, in vectors: windows of 2 or 3 cells in height and width, two
// apart. A thread owns V x R windows and reads their rows once (here 3x3, V = 2, R = 2):
//
//      | 0 | a   b   c   d |      a row of the input: the 2 V cells from the thread's first
//      '---'-------.-------'      column on are one vector, and where windows are padded, the
//      [ window 0  ]       |      cell before it is read too
//              [ window 1  ]
//
//   Each row gives each of the V windows that it crosses one best cell; those of K rows together
//   are a window's. Row 2 is window 0's last and, one below, window 2's first.
#pragma once

#include "pool_cell.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <cstdint>

namespace maxunpool_cuda {

// Windows of K cells whose first column is K == 3 cells left of the thread's vector. Rows of the
// input and of the windows divide into the vectors.
template <class T, class Index, int K, int V, int R>
__global__ void __launch_bounds__(kThreads, 4) pool_rows(
    Tiling<uint32_t> tiling,
    const T* __restrict__ input,
    T* __restrict__ values,
    IndexArray<Index> indices) {
  constexpr int S = 2, kBefore = K - S, kColumns = V * S, kRows = (R - 1) * S + K;
  for_each_item(tiling.items, [&](uint32_t i) {
    const Geometry<uint32_t>& g = tiling.geometry;
    const bool deep = g.rank == 3;
    const auto item = deep ? tiling.template row_item<true>(i) : tiling.template row_item<false>(i);
    const Position<uint32_t>& p = item.tile;
    const uint32_t top = p.at[1] * (R * S) - g.axis[1].padding, left = p.at[2] * (V * S);
    const uint32_t front = p.at[0] * g.axis[0].stride - g.axis[0].padding;
    const uint32_t first = left < kBefore ? kBefore : 0; // of the cells read that is in the input

    // The windows' best cells k deep in them.
    const auto look = [&](uint32_t k, Best<T, uint32_t>(&best)[R][V]) {
      const uint32_t z = deep ? brought_inside(front + k, g.axis[0].out) : 0;
      const T* plane = input + (item.outer * tiling.out_plane + left);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const uint32_t y = brought_inside(top + r, g.axis[1].out);
        const uint32_t row = (z * g.axis[1].out + y) * g.axis[2].out;
        Cell<T> cells[kBefore + kColumns];
        unpack(load<kColumns>(plane + row), cells + kBefore);
        if constexpr (kBefore != 0) {
          cells[0] = Cell<T>::of((plane + row)[static_cast<int32_t>(first) - 1]);
        }
        const uint32_t name =
            indices.takes_numbers() ? (k * K + y - top) * K : row + left - kBefore;
#pragma unroll
        for (int v = 0; v < V; ++v) {
          Best<T, uint32_t> of_row{cells[v * S], v == 0 ? first : v * S};
#pragma unroll
          for (int c = v * S + 1; c < v * S + K; ++c) {
            of_row.look_at(cells[c], c);
          }
#pragma unroll
          for (int w = 0; w < R; ++w) {
            if (r == w * S) {
              best[w][v] = {of_row.cell, name + of_row.name};
            } else if (r > w * S && r < w * S + K) {
              best[w][v].look_at(of_row.cell, name + of_row.name);
            }
          }
        }
      }
    };
    Best<T, uint32_t> best[R][V];
    look(0, best);
    if (deep) {
      for (uint32_t k = 1; k < g.axis[0].kernel; ++k) {
        Best<T, uint32_t> next[R][V];
        look(k, next);
#pragma unroll
        for (int w = 0; w < R; ++w) {
#pragma unroll
          for (int v = 0; v < V; ++v) {
            best[w][v].look_at(next[w][v].cell, next[w][v].name);
          }
        }
      }
    }
    const uint32_t to = tiling.pooled_row(item.outer, p.at[0], p.at[1] * R) + p.at[2] * V;
#pragma unroll
    for (int w = 0; w < R; ++w) {
      if (w == 0 || p.at[1] * R + w < g.axis[1].in) {
        if (indices.takes_numbers()) { // they were counted from the thread's first cell
#pragma unroll
          for (int v = 0; v < V; ++v) {
            best[w][v].name -= w * S * K + v * S;
          }
        }
        store_values(values + to + w * g.axis[2].in, best[w]);
        indices.store_names(to + w * g.axis[2].in, best[w]);
      }
    }
  });
}

} // namespace maxunpool_cuda
