// SPDX-License-Identifier: BSD-3-Clause
// Kernels of max pooling. A tap is a window's element, see pool_taps.cuh.
//
// pool_rows, for contiguous tensors: windows of K = 2 or 3 elements in height and width, S apart. A
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
//
// pool_channels: a thread owns V channels of one window, vectors.
//
// pool_windows, for windows of any dilation that the others are not compiled for: a thread owns one
// window, of one channel. It looks at one tap after the other.
#pragma once

#include "../geometry.h"
#include "divider.cuh"
#include "pool_taps.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <cstdint>

namespace maxunpool_cuda {

// Coordinate below `size` that is nearest to `at`. Where a window without dilation leaves the
// input, one of its own elements is read again, under that element's name. So the window's maximum
// stays the same.
__device__ inline uint32_t brought_inside(uint32_t at, uint32_t size) {
  const auto wanted = static_cast<int32_t>(at), last = static_cast<int32_t>(size - 1);
  const int32_t inside = wanted > 0 ? wanted : 0;
  return static_cast<uint32_t>(inside < last ? inside : last);
}

// Calls look(r, row, name, is_first) for the rows, r < kRows, of windows of K elements in height
// and width that begin at `front` and `top` and have no dilation, for all their slices in order.
// `row` is a row's position in the plane, `name` its first name; is_first: in the first slice.
// kPeels: the first slice has code of its own, in which is_first is known. That takes fewer
// registers in pool_rows, and more in pool_channels.
template <int K, int kRows, bool kPeels, class Look>
__device__ inline void for_each_row(
    const Geometry<uint32_t>& g, uint32_t front, uint32_t top, bool as_offsets, const Look& look) {
  const auto look_at_slice = [&](uint32_t k, bool is_first) {
    const uint32_t z = brought_inside(front + k, g.axis[0].out);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const uint32_t y = brought_inside(top + r, g.axis[1].out);
      const uint32_t row = (z * g.axis[1].out + y) * g.axis[2].out;
      look(r, row, as_offsets ? ((z - front) * K + y - top) * K : row, is_first);
    }
  };
  if (kPeels) {
    look_at_slice(0, true);
  }
#pragma unroll 1
  for (uint32_t k = kPeels ? 1 : 0; k < g.axis[0].kernel; ++k) {
    look_at_slice(k, !kPeels && k == 0);
  }
}

// kEven: rows, of the input and of the windows, divide into vectors, and a thread's first window
// begins where its vector does, or one element left of it if K is 3. Else V is 1, under any
// padding: neighbouring threads still write neighbouring elements, and R rows share the work.
template <class T, int K, int S, int V, int R, bool kEven>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads)
    pool_rows(Tiling<uint32_t> tiling, const T* __restrict__ input, Pooled<T> pooled) {
  static_assert(kEven ? S == 2 : V == 1);
  constexpr int kColumns = (V - 1) * S + K, kRows = (R - 1) * S + K;
  for_each_item(tiling.items, [&](uint32_t i) {
    const Geometry<uint32_t>& g = tiling.geometry;
    const bool as_offsets = pooled.takes_offsets();
    const auto [outer, p, group] = tiling.item(i, false, g.rank == 3);
    const uint32_t own = p[2] * (V * S);
    const uint32_t left = own - (kEven ? K - S : g.axis[2].padding); // may wrap around
    const uint32_t top = p[1] * (R * S) - g.axis[1].padding;
    const uint32_t front = p[0] * g.axis[0].stride - g.axis[0].padding;
    const T* image = input + outer * tiling.out_plane + (kEven ? own : 0);
    uint32_t columns[kColumns]; // of the input; kEven: counted from `left` on
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if constexpr (kEven) {
        columns[c] = K == 3 && c == 0 && own == 0 ? 1 : c;
      } else {
        columns[c] = brought_inside(left + c, g.axis[2].out);
      }
    }

    Best<T> best[R][V]{};
    for_each_row<K, kRows, true>(
        g, front, top, as_offsets, [&](int r, uint32_t row, uint32_t name, bool is_first) {
          Tap<T> taps[kColumns];
          if constexpr (kEven) {
            unpack(load<V * S>(image + row), taps + (K - S));
            if constexpr (K != S) {
              taps[0] = Tap<T>::of((image + row)[static_cast<int32_t>(columns[0]) - 1]);
            }
          } else {
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
              taps[c] = Tap<T>::of(image[row + columns[c]]);
            }
          }
#pragma unroll
          for (int v = 0; v < V; ++v) {
            Best<T> of_row{taps[v * S], columns[v * S]};
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
        });
    const uint32_t to = tiling.pooled(outer, {{p[0], p[1] * R, p[2] * V}}, 0);
#pragma unroll
    for (int w = 0; w < R; ++w) {
      if (w == 0 || p[1] * R + w < g.axis[1].in) {
#pragma unroll
        for (int v = 0; v < V; ++v) { // columns were counted from `left` on, or from 0
          best[w][v].name += as_offsets ? (kEven ? 0 : -left) - (w * S * K + v * S)
                             : kEven    ? left
                                        : 0;
        }
        pooled.store_best(to + w * g.axis[2].in, best[w]);
      }
    }
  });
}

// Windows of K elements in width and height (or 1, in inputs of one row), undilated.
template <class T, int K, int V>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads)
    pool_channels(Tiling<uint32_t> tiling, const T* __restrict__ input, Pooled<T> pooled) {
  for_each_item(tiling.items, [&](uint32_t i) {
    const Geometry<uint32_t>& g = tiling.geometry;
    const bool as_offsets = pooled.takes_offsets();
    const auto [outer, p, group] = tiling.item(i);
    const auto [front, top, left] = tiling.window_start(p).at;
    const T* image = input + (outer * tiling.out_plane * g.inner + group * V);
    uint32_t columns[K];
#pragma unroll
    for (int c = 0; c < K; ++c) {
      columns[c] = brought_inside(left + c, g.axis[2].out);
    }
    Best<T> best[V]{};
    for_each_row<K, K, false>(
        g, front, top, as_offsets, [&](int r, uint32_t row, uint32_t name, bool is_first) {
          Tap<T> taps[K][V];
#pragma unroll
          for (int c = 0; c < K; ++c) {
            unpack(load<V>(image + (row + columns[c]) * g.inner), taps[c]);
          }
#pragma unroll
          for (int v = 0; v < V; ++v) {
            Best<T> of_row{taps[0][v], columns[0]};
#pragma unroll
            for (int c = 1; c < K; ++c) {
              of_row.look_at(taps[c][v], columns[c]);
            }
            best[v].look_at(of_row.tap, name + of_row.name, is_first && r == 0);
          }
        });
    if (as_offsets) { // names of columns were counted from 0 on
#pragma unroll
      for (int v = 0; v < V; ++v) {
        best[v].name -= left;
      }
    }
    pooled.store_best(tiling.pooled(outer, p, group * V), best);
  });
}

// Dilation, which the geometry does not say. Offset is as in Decoder.
template <class Offset>
struct Dilation {
  struct Range {
    Offset first, end;
  };

  Divider<Offset> axis[3];

  // Taps of window p, in dimension a, that lie in the input: numbers [first, end).
  __device__ Range taps_inside(const Geometry<Offset>& g, int a, Offset p) const {
    const auto& [in, out, kernel, stride, padding] = g.axis[a];
    const Offset start = p * stride, last = out + padding - 1; // of the input; both count padding
    const Offset end = axis[a].divide(last - start) + 1;       // no window begins after that
    const Offset first = start < padding ? axis[a].divide(padding - start - 1) + 1 : 0;
    return {first, end < kernel ? end : kernel};
  }
  __device__ Offset step(int a) const { return axis[a].divisor(); }
};

// Blocks of a processor: 64-bit offsets leave each of 512 threads 128 registers, 32-bit ones 64.
template <class Offset>
constexpr int kWindowBlocks = (sizeof(Offset) == sizeof(uint32_t) ? 1024 : 512) / kThreads;

// Elements that a thread reads at a time; four with 64-bit offsets would spill.
template <class Offset>
constexpr int kElementsAtOnce = sizeof(Offset) == sizeof(uint32_t) ? 4 : 2;

template <class T, class Offset>
__global__ void __launch_bounds__(kThreads, kWindowBlocks<Offset>) pool_windows(
    Tiling<Offset> tiling,
    const T* __restrict__ input,
    Pooled<T> pooled,
    Dilation<Offset> dilation,
    T lowest) {
  for_each_item(tiling.items, [&](Offset i) {
    const Geometry<Offset>& g = tiling.geometry;
    const bool as_offsets = pooled.takes_offsets();
    const auto [outer, p, channel] = tiling.item(i);
    const auto [front, top, left] = tiling.window_start(p).at;
    const Offset first = (front * g.axis[1].out + top) * g.axis[2].out + left;
    const auto zs = dilation.taps_inside(g, 0, p[0]), ys = dilation.taps_inside(g, 1, p[1]),
               xs = dilation.taps_inside(g, 2, p[2]);
    const T* plane = input + (outer * tiling.out_plane * g.inner + channel);
    const Offset step = dilation.step(2), name_step = as_offsets ? 1 : step;
    const auto row_of = [&](Offset z, Offset y) { // where it begins; may wrap around
      return first + (z * dilation.step(0) * g.axis[1].out + y * dilation.step(1)) * g.axis[2].out;
    };
    const auto name_of = [&](Offset z, Offset y) { // of a row's first element, inside or not
      return as_offsets ? (z * g.axis[1].kernel + y) * g.axis[2].kernel : row_of(z, y);
    };
    // A window without taps in the input names the first after the padding before it.
    Best<T, Offset> best[1] = {
        {Tap<T>::of(lowest), name_of(zs.first, ys.first) + xs.first * name_step}};
    for (Offset z = zs.first; z < zs.end; ++z) {
      for (Offset y = ys.first; y < ys.end; ++y) {
        Offset at = (row_of(z, y) + xs.first * step) * g.inner;
        Offset name = name_of(z, y) + xs.first * name_step;
#pragma unroll(kElementsAtOnce<Offset>)
        for (Offset x = xs.first; x < xs.end; ++x) {
          best[0].look_at(Tap<T>::of(plane[at]), name);
          at += step * g.inner;
          name += name_step;
        }
      }
    }
    pooled.store_best(tiling.pooled(outer, p, channel), best);
  });
}

} // namespace maxunpool_cuda
