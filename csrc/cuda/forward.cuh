// One pass over the output, for indices that lie in their own windows: every output element is
// written once, by its owner (see Tiling), zero or not. Slabs with other indices are reported, and
// written again by irregular.cuh.
#pragma once

#include "../reduction.h"
#include "report.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

// An index and an output position are compared in 64 bits unless both fit 32.
template <class Index, class Offset>
using Comparable = std::conditional_t<sizeof(Offset) == 4, Index, int64_t>;

// Windows that do not overlap (kernel <= stride, no padding): one window can reach a tile, that of
// the tile's own cell, so all reductions are alike and only move bytes. The tile is the stride.
//
// A thread takes V neighbours in pooled memory and writes vectors only:
// - kStrideWidth > 0: V cells of a row of a contiguous tensor (inner == 1); kStrideWidth is the
//   stride in width, out width == in width * stride, and an item's last tile coordinate counts
//   groups of V cells;
// - kStrideWidth == 0: V channels of one cell, strides as the geometry has them.
// Offsets are 32-bit; pointers are aligned for the vectors.
template <class Element, class Index, int V, int kStrideWidth>
__global__ void forward_disjoint(
    Tiling<uint32_t> tiling,
    Report<uint32_t> report,
    const Element* __restrict__ input,
    const Index* __restrict__ indices,
    Element* __restrict__ output) {
  constexpr bool kRow = kStrideWidth > 0;
  constexpr int kStored = kRow ? V * kStrideWidth : V; // elements written at a time
  const Geometry<uint32_t>& g = tiling.geometry;
  for_each_item(tiling.items, [&](uint32_t i) {
    const auto item = tiling.item(i);
    Position<uint32_t> p = item.tile;
    if constexpr (kRow) {
      p.at[2] *= V;
    }
    const uint32_t channel = kRow ? 0 : item.channels * V;
    const uint32_t source = item.outer * g.in_slab() + tiling.cell(p) * g.inner + channel;
    const bool is_cell = tiling.is_cell(p);
    Vector<Index, V> index;
    Vector<Element, V> value;
    if (is_cell) {
      index = load<V>(indices + source);
      value = load<V>(input + source);
    } else {
      for (int v = 0; v < V; ++v) {
        index.at[v] = -1;
        value.at[v] = Element{};
      }
    }

    uint32_t found = 0; // bit v: index v is one of the tile's outputs
    const auto write = [&](uint32_t target) {
      Vector<Element, kStored> stored;
#pragma unroll
      for (int e = 0; e < kStored; ++e) {
        const int v = kRow ? e / kStrideWidth : e;
        const bool hit = index.at[v] == static_cast<Index>(kRow ? target + e : target);
        stored.at[e] = hit ? value.at[v] : Element{};
        found |= static_cast<uint32_t>(hit) << v;
      }
      store(output + item.outer * g.out_slab() + target * g.inner + channel, stored);
    };
    const auto end = [&](int a) {
      const uint32_t stop = (p.at[a] + 1) * g.axis[a].stride;
      return stop < g.axis[a].out ? stop : g.axis[a].out;
    };
    for (uint32_t d = p.at[0] * g.axis[0].stride; d < end(0); ++d) {
      for (uint32_t h = p.at[1] * g.axis[1].stride; h < end(1); ++h) {
        if constexpr (kRow) {
          write(tiling.output(d, h, p.at[2] * kStrideWidth));
        } else {
          for (uint32_t w = p.at[2] * g.axis[2].stride; w < end(2); ++w) {
            write(tiling.output(d, h, w));
          }
        }
      }
    }

    if (is_cell && found != (1u << V) - 1) {
      Bad<uint32_t> bad;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if ((found >> v & 1) == 0) {
          const uint32_t cell = tiling.cell(p) + (kRow ? v : 0);
          report.outside_window(item.outer, cell, channel + (kRow ? 0 : v), index.at[v], bad);
        }
      }
      report.tell(bad);
    }
  });
}

// What an owner makes of the windows over an output, for forward_windows. Each names the order it
// wants them in; add() answers whether it wants more.
template <class T>
struct TakeLast {
  using Element = T;
  static constexpr bool kReverse = true;

  T value{};
  bool found = false;

  __device__ bool wants_more() const { return !found; }
  __device__ void add(T pooled) {
    value = pooled;
    found = true;
  }
  __device__ T result(Reduce) const { return value; }
};

template <class T>
struct TakeSum {
  using Element = T;
  static constexpr bool kReverse = false;

  Sum<T> sum{};

  __device__ bool wants_more() const { return true; }
  __device__ void add(T pooled) { sum.add(pooled); }
  __device__ T result(Reduce reduce) const { return sum.result(reduce); }
};

// Any windows, any layout, any tile. A thread takes V channels of its tile's outputs.
template <class Take, class Index, class Offset, int V>
__global__ void forward_windows(
    Tiling<Offset> tiling,
    Report<Offset> report,
    Reduce reduce,
    const typename Take::Element* __restrict__ input,
    const Index* __restrict__ indices,
    typename Take::Element* __restrict__ output) {
  using Compared = Comparable<Index, Offset>;
  const Geometry<Offset>& g = tiling.geometry;
  for_each_item(tiling.items, [&](Offset i) {
    const auto item = tiling.item(i);
    const Offset channel = item.channels * V;
    const auto source = [&](Offset cell) {
      return item.outer * g.in_slab() + cell * g.inner + channel;
    };
    if (tiling.is_cell(item.tile)) {
      const Offset cell = tiling.cell(item.tile);
      const auto index = load<V>(indices + source(cell));
      Bad<Offset> bad;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (!tiling.in_window(item.tile, index.at[v])) {
          report.outside_window(item.outer, cell, channel + v, index.at[v], bad);
        }
      }
      report.tell(bad);
    }

    Position<Offset> begin, end;
    for (int a = 0; a < 3; ++a) {
      begin.at[a] = item.tile.at[a] * tiling.tile[a];
      const Offset stop = begin.at[a] + tiling.tile[a];
      end.at[a] = stop < g.axis[a].out ? stop : g.axis[a].out;
    }
    for (Offset d = begin.at[0]; d < end.at[0]; ++d) {
      for (Offset h = begin.at[1]; h < end.at[1]; ++h) {
        for (Offset w = begin.at[2]; w < end.at[2]; ++w) {
          const Offset target = tiling.output(d, h, w);
          Take taken[V];
          tiling.template for_each_window_over<Take::kReverse>({{d, h, w}}, [&](Offset cell) {
            const auto index = load<V>(indices + source(cell));
            bool more = false;
#pragma unroll
            for (int v = 0; v < V; ++v) {
              if (taken[v].wants_more() &&
                  static_cast<Compared>(index.at[v]) == static_cast<Compared>(target)) {
                taken[v].add(input[source(cell) + v]);
              }
              more = more || taken[v].wants_more();
            }
            return more;
          });
          Vector<typename Take::Element, V> stored;
#pragma unroll
          for (int v = 0; v < V; ++v) {
            stored.at[v] = taken[v].result(reduce);
          }
          store(output + item.outer * g.out_slab() + target * g.inner + channel, stored);
        }
      }
    }
  });
}

} // namespace maxunpool_cuda
