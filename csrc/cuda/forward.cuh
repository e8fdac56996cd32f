// One pass over the output, for indices that lie in their own windows: every output element is
// written once, by its owner (see Tiling), zero or not. What other indices spoil is reported, and
// written again by irregular.cuh; a thread that finds such an index writes nothing itself.
//
// An owner compares the positions of its outputs with the indices of the cells around them, in
// row-major order, so that the last match is kept. It need not look whether a cell's window really
// covers an output: a match elsewhere means an index that its own owner reports.
#pragma once

#include "../reduction.h"
#include "report.cuh"
#include "take.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

constexpr int floor_div(int a, int b) {
  return a >= 0 ? a / b : -((b - 1 - a) / b);
}

// The cells, counted from a tile's own, whose windows reach the tile's output `e`, in a dimension
// where tiles are as wide as the stride.
constexpr int first_cell(int kernel, int stride, int padding, int e) {
  return floor_div(e + padding - kernel, stride) + 1;
}
constexpr int last_cell(int stride, int padding, int e) {
  return floor_div(e + padding, stride);
}

// The windows forward_channels is compiled for: as RowShape's; or, with kKernel == 0, any that do
// not overlap (kernel <= stride, no padding), in tiles of the stride.
template <int kKernelSize, int kStrideSize, int kPaddingSize>
struct ChannelShape {
  static constexpr int kStride = kStrideSize;
  static constexpr bool kAlone = kKernelSize == 0;
  static constexpr bool kDisjoint = kKernelSize <= kStride && kPaddingSize == 0;
  static constexpr int first(int e) {
    return kAlone ? 0 : first_cell(kKernelSize, kStride, kPaddingSize, e);
  }
  static constexpr int last(int e) { return kAlone ? 0 : last_cell(kStride, kPaddingSize, e); }
};

// A thread takes V channels of a tile. Offsets are 32-bit, pointers are aligned for the vectors;
// unless kAlone, the plane has no depth.
template <class Element, class Index, int V, class Shape>
__global__ void __launch_bounds__(kThreads, 4) forward_channels(
    Tiling<uint32_t> tiling,
    Report report,
    Element negative_zero,
    const Element* __restrict__ input,
    const Index* __restrict__ indices,
    Element* __restrict__ output) {
  constexpr bool kAlone = Shape::kAlone;
  constexpr int kStride = Shape::kStride;
  const Geometry<uint32_t>& g = tiling.geometry;
  for_each_chunk<Index>(tiling.items, report, [&](uint32_t i) {
    const auto item = tiling.item(i);
    const Position<uint32_t>& p = item.tile;
    const uint32_t channel = item.channels * V;
    const uint32_t own =
        (tiling.pooled_row(item.outer, p.at[0], p.at[1]) + p.at[2]) * g.inner + channel;
    using Pooled = Lanes<Element, V>;
    // The cell (y, x) further on.
    const auto read = [&](uint32_t y, uint32_t x, uint32_t (&target)[V], Pooled& value) {
      const uint32_t source = own + (y * g.axis[2].in + x) * g.inner;
      const CellRow<Index, uint32_t> named(tiling, p.at[0], p.at[1] + y);
      const auto index = load<V>(indices + source);
      value = Pooled::load(input + source, Shape::kDisjoint ? negative_zero : Element{});
#pragma unroll
      for (int v = 0; v < V; ++v) {
        target[v] = named.target(index.at[v], p.at[2] + x);
      }
    };
    uint32_t target[V];
    Pooled value;
    const bool here = tiling.is_cell(p);
    if (here) {
      read(0, 0, target, value);
      if (is_astray<false, kAlone>(
              tiling,
              report.error,
              item.outer,
              p,
              tiling.template window<kAlone>(p),
              channel,
              target,
              [](int) { return true; },
              indices)) {
        return true;
      }
    } else {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        target[v] = ~0u; // matches nothing
      }
    }
    const auto merge =
        [&](Pooled& stored, const auto& from, const Pooled& with, uint32_t position) {
#pragma unroll
          for (int v = 0; v < V; ++v) {
            stored.take(v, with, from[v] == position);
          }
        };
    const auto write = [&](const Pooled& stored, uint32_t position) {
      stored.store(output + (item.outer * tiling.out_plane + position) * g.inner + channel);
    };

    if constexpr (kAlone) {
      const auto depth = tiling.outputs(0, p.at[0]), height = tiling.outputs(1, p.at[1]),
                 width = tiling.outputs(2, p.at[2]);
#pragma unroll 1
      for (uint32_t d = depth.first; d < depth.end; ++d) {
#pragma unroll 1
        for (uint32_t h = height.first; h < height.end; ++h) {
          const uint32_t row = (d * g.axis[1].out + h) * g.axis[2].out;
#pragma unroll 1
          for (uint32_t w = width.first; w < width.end; ++w) {
            Pooled stored;
            merge(stored, target, value, row + w);
            write(stored, row + w);
          }
        }
      }
    } else {
      const uint32_t height = p.at[1] * kStride, width = p.at[2] * kStride;
      const uint32_t corner = height * g.axis[2].out + width;
      Pooled stored[kStride][kStride];
#pragma unroll
      for (int y = Shape::first(0); y <= Shape::last(kStride - 1); ++y) {
#pragma unroll
        for (int x = Shape::first(0); x <= Shape::last(kStride - 1); ++x) {
          uint32_t other_target[V];
          Pooled other_value;
          const bool is_own = y == 0 && x == 0;
          if (!is_own) {
            if (p.at[1] + y >= g.axis[1].in || p.at[2] + x >= g.axis[2].in) {
              continue;
            }
            read(y, x, other_target, other_value);
          }
#pragma unroll
          for (int r = 0; r < kStride; ++r) {
#pragma unroll
            for (int c = 0; c < kStride; ++c) {
              if (y >= Shape::first(r) && y <= Shape::last(r) && x >= Shape::first(c) &&
                  x <= Shape::last(c)) {
                merge(
                    stored[r][c],
                    is_own ? target : other_target,
                    is_own ? value : other_value,
                    corner + r * g.axis[2].out + c);
              }
            }
          }
        }
      }
#pragma unroll
      for (int r = 0; r < kStride; ++r) {
#pragma unroll
        for (int c = 0; c < kStride; ++c) {
          if (height + r < g.axis[1].out && width + c < g.axis[2].out) {
            write(stored[r][c], corner + r * g.axis[2].out + c);
          }
        }
      }
    }
    return false;
  });
}

// Any windows, any layout, any tile. A thread takes V channels of its tile's outputs; with V > 1
// it takes them in pairs in width, most of which the same cells can reach.
template <class Take, class Index, class Offset, int V>
__global__ void __launch_bounds__(kThreads, sizeof(Offset) == 4 ? 3 : 1) forward_windows(
    Tiling<Offset> tiling,
    Report report,
    Reduce reduce,
    const typename Take::Element* __restrict__ input,
    const Index* __restrict__ indices,
    typename Take::Element* __restrict__ output) {
  constexpr int kOutputs = V > 1 ? 2 : 1;
  const Geometry<Offset>& g = tiling.geometry;
  for_each_chunk<Index>(tiling.items, report, [&](Offset i) {
    const auto item = tiling.item(i);
    const Position<Offset>& p = item.tile;
    const Offset channel = item.channels * V;
    // Reads the indices of a cell of a row.
    const auto read =
        [&](const CellRow<Index, Offset>& named, Offset source, Offset column, Offset(&target)[V]) {
          const auto index = load<V>(indices + source);
#pragma unroll
          for (int v = 0; v < V; ++v) {
            target[v] = named.target(index.at[v], column);
          }
        };
    Offset target[V];
    if (tiling.is_cell(p)) {
      const Offset row = tiling.pooled_row(item.outer, p.at[0], p.at[1]);
      read({tiling, p.at[0], p.at[1]}, (row + p.at[2]) * g.inner + channel, p.at[2], target);
      if (is_astray<false, true>(
              tiling,
              report.error,
              item.outer,
              p,
              tiling.template window<true>(p),
              channel,
              target,
              [](int) { return true; },
              indices)) {
        return true;
      }
    }

    const auto depth = tiling.outputs(0, p.at[0]), height = tiling.outputs(1, p.at[1]),
               width = tiling.outputs(2, p.at[2]);
    for (Offset d = depth.first; d < depth.end; ++d) {
      const auto depths = windows_over(g.axis[0], tiling.stride[0], d);
      for (Offset h = height.first; h < height.end; ++h) {
        const auto heights = windows_over(g.axis[1], tiling.stride[1], h);
        for (Offset w = width.first; w < width.end; w += kOutputs) {
          auto widths = windows_over(g.axis[2], tiling.stride[2], w);
          if constexpr (kOutputs > 1) {
            widths.end = windows_over(g.axis[2], tiling.stride[2], w + kOutputs - 1).end;
          }
          const Offset first = (d * g.axis[1].out + h) * g.axis[2].out + w;
          Take taken[kOutputs][V];
          for (Offset from_d = depths.first; from_d < depths.end; ++from_d) {
            for (Offset from_h = heights.first; from_h < heights.end; ++from_h) {
              const Offset row = tiling.pooled_row(item.outer, from_d, from_h);
              const CellRow<Index, Offset> named(tiling, from_d, from_h);
              for (Offset from_w = widths.first; from_w < widths.end; ++from_w) {
                const Offset source = (row + from_w) * g.inner + channel;
                read(named, source, from_w, target);
                const auto value = load<V>(input + source);
#pragma unroll
                for (int v = 0; v < V; ++v) {
#pragma unroll
                  for (int o = 0; o < kOutputs; ++o) {
                    if (target[v] == first + o) {
                      taken[o][v].add(value.at[v]);
                    }
                  }
                }
              }
            }
          }
          typename Take::Element* to =
              output + (tiling.output_row(item.outer, d, h) + w) * g.inner + channel;
#pragma unroll
          for (int o = 0; o < kOutputs; ++o) {
            if (w + o < width.end) {
              Vector<typename Take::Element, V> stored;
#pragma unroll
              for (int v = 0; v < V; ++v) {
                stored.at[v] = taken[o][v].result();
              }
              store(to + o * g.inner, stored);
            }
          }
        }
      }
    }
    return false;
  });
}

} // namespace maxunpool_cuda
