// Max pooling in one pass: every thread reads the windows of a few outputs and writes what it
// found. The choice among the kernels is here too, all but the launch itself; see dispatch.cuh.
#pragma once

#include "../dtypes.h"
#include "../reduction.h"
#include "dispatch.cuh"
#include "divider.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace maxunpool_cuda {

// Half types compare as float.
template <class T>
__device__ inline bool takes(T value, T best) {
  if constexpr (std::is_integral_v<T>) {
    return value > best;
  } else {
    const auto v = static_cast<Accumulator<T>>(value), b = static_cast<Accumulator<T>>(best);
    return (v > b) | (v != v);
  }
}

// The windows of a call, in so far as the geometry does not say. Offset is as in Tiling.
template <class Offset>
struct PoolCells {
  Divider<Offset> dilation[3];

  // The cells of window p along axis a that lie in the input: numbers [first, end). Coordinates are
  // counted from the padding's begin on, where `start` is cell 0.
  struct Span {
    Offset start, first, end;
  };
  __device__ Span span(const Geometry<Offset>& geometry, int a, Offset p) const {
    const Axis<Offset>& axis = geometry.axis[a];
    const Offset start = p * axis.stride, reach = axis.out + axis.padding;
    const Offset end = start < reach ? dilation[a].divide(reach - start - 1) + 1 : 0;
    return {start, first(axis, a, start), end < axis.kernel ? end : axis.kernel};
  }
  __device__ Offset first(const Axis<Offset>& axis, int a, Offset start) const {
    return start < axis.padding ? dilation[a].divide(axis.padding - start - 1) + 1 : 0;
  }
  // The coordinate in the input of a cell of the span.
  __device__ Offset at(const Geometry<Offset>& geometry, int a, Offset start, Offset k) const {
    return start + k * dilation[a].divisor() - geometry.axis[a].padding;
  }
};

// The index that a cell gets: its number in the window, or its position in the plane.
template <class Index, class Offset>
__device__ inline Offset name_of(Offset number, Offset position) {
  return kIsWindowOffset<Index> ? number : position;
}

// One thread: V channels of one window.
template <class T, class Index, class Offset, int V>
__global__ void __launch_bounds__(kThreads, sizeof(Offset) == 4 ? 4 : 1) pool_channels(
    Tiling<Offset> tiling,
    PoolCells<Offset> cells,
    T lowest,
    const T* __restrict__ input,
    T* __restrict__ values,
    Index* __restrict__ indices) {
  constexpr int kAhead = V < 8 ? 3 : 2; // cells that are loaded before any is looked at
  for_each_item(tiling.items, [&](Offset i) {
    const Geometry<Offset>& g = tiling.geometry;
    const auto item = tiling.item(i);
    const auto& p = item.tile;
    const auto zs = cells.span(g, 0, p.at[0]);
    const auto ys = cells.span(g, 1, p.at[1]);
    const auto xs = cells.span(g, 2, p.at[2]);
    const Offset channel = item.channels * V;
    const T* slab = input + item.outer * tiling.out_plane * g.inner + channel;
    const auto name = [&](Offset z, Offset y, Offset x) {
      const Offset row = cells.at(g, 0, zs.start, z) * g.axis[1].out + cells.at(g, 1, ys.start, y);
      return name_of<Index>(
          (z * g.axis[1].kernel + y) * g.axis[2].kernel + x,
          row * g.axis[2].out + cells.at(g, 2, xs.start, x));
    };
    const Offset step = name_of<Index>(Offset{1}, cells.dilation[2].divisor());
    Vector<T, V> best;
    Offset won[V];
#pragma unroll
    for (int v = 0; v < V; ++v) {
      best.at[v] = lowest;
      won[v] = name(zs.first, ys.first, xs.first);
    }
    for (Offset z = zs.first; z < zs.end; ++z) {
      for (Offset y = ys.first; y < ys.end; ++y) {
        const Offset row =
            (cells.at(g, 0, zs.start, z) * g.axis[1].out + cells.at(g, 1, ys.start, y)) *
            g.axis[2].out;
        const Offset begin = name(z, y, 0);
        for (Offset x = xs.first; x < xs.end; x += kAhead) {
          Vector<T, V> next[kAhead];
#pragma unroll
          for (int k = 0; k < kAhead; ++k) {
            if (x + k < xs.end) {
              next[k] = load<V>(slab + (row + cells.at(g, 2, xs.start, x + k)) * g.inner);
            }
          }
#pragma unroll
          for (int k = 0; k < kAhead; ++k) {
#pragma unroll
            for (int v = 0; v < V; ++v) {
              if (x + k < xs.end && takes(next[k].at[v], best.at[v])) {
                best.at[v] = next[k].at[v];
                won[v] = begin + (x + k) * step;
              }
            }
          }
        }
      }
    }
    const Offset to =
        (tiling.pooled_row(item.outer, p.at[0], p.at[1]) + p.at[2]) * g.inner + channel;
    Vector<Index, V> named;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      named.at[v] = static_cast<Index>(won[v]);
    }
    store(values + to, best);
    store(indices + to, named);
  });
}

// One thread: V neighbouring windows of a row of a contiguous tensor. kPairs: two cells wide, side
// by side without padding, in rows that divide into vectors; else `even` says whether the pooled
// ones do.
template <class T, class Index, int V, bool kPairs>
__global__ void pool_rows(
    Tiling<uint32_t> tiling,
    PoolCells<uint32_t> cells,
    bool even,
    T lowest,
    const T* __restrict__ input,
    T* __restrict__ values,
    Index* __restrict__ indices) {
  using Offset = uint32_t;
  for_each_item(tiling.items, [&](Offset i) {
    const Geometry<Offset>& g = tiling.geometry;
    const auto item = tiling.item(i);
    const auto& p = item.tile;
    const auto zs = cells.span(g, 0, p.at[0]);
    const auto ys = cells.span(g, 1, p.at[1]);
    const Axis<Offset>& width = g.axis[2];
    const Offset left = p.at[2] * V, start = left * width.stride;
    const T* plane = input + item.outer * tiling.out_plane;
    const auto row_of = [&](Offset z, Offset y) {
      return (cells.at(g, 0, zs.start, z) * g.axis[1].out + cells.at(g, 1, ys.start, y)) *
             width.out;
    };
    Vector<T, V> best;
    Vector<Index, V> won;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const Offset from = start + v * width.stride, k = cells.first(width, 2, from);
      best.at[v] = lowest;
      won.at[v] = static_cast<Index>(name_of<Index>(
          (zs.first * g.axis[1].kernel + ys.first) * width.kernel + k,
          row_of(zs.first, ys.first) + cells.at(g, 2, from, k)));
    }
    for (Offset z = zs.first; z < zs.end; ++z) {
      for (Offset y = ys.first; y < ys.end; ++y) {
        const Offset row = row_of(z, y), number = (z * g.axis[1].kernel + y) * width.kernel;
        const auto look = [&](int v, Offset k, Offset column, T value) {
          if (takes(value, best.at[v])) {
            best.at[v] = value;
            won.at[v] = static_cast<Index>(name_of<Index>(number + k, row + column));
          }
        };
        if constexpr (kPairs) {
          const Vector<T, 2 * V> next = load<2 * V>(plane + row + start);
#pragma unroll
          for (int v = 0; v < 2 * V; ++v) {
            look(v / 2, v % 2, start + v, next.at[v]);
          }
        } else {
          for (Offset k = 0; k < width.kernel; ++k) {
            const Offset column = cells.at(g, 2, start, k); // wraps around in the padding
            T next[V];
#pragma unroll
            for (int v = 0; v < V; ++v) {
              const Offset at = column + v * width.stride;
              next[v] = at < width.out ? plane[row + at] : lowest;
            }
#pragma unroll
            for (int v = 0; v < V; ++v) {
              look(v, k, column + v * width.stride, next[v]);
            }
          }
        }
      }
    }
    const Offset to = tiling.pooled_row(item.outer, p.at[0], p.at[1]) + left;
    if (kPairs || even) {
      store(values + to, best);
      store(indices + to, won);
    } else if constexpr (!kPairs) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (left + v < width.in) {
          values[to + v] = best.at[v];
          indices[to + v] = won.at[v];
        }
      }
    }
  });
}

struct PoolArguments {
  Geometry<int64_t> geometry;
  int64_t dilation[3];
  c10::ScalarType type;
  c10::ScalarType index_type;
  const void* input;
  void* values;
  void* indices;
  int64_t narrow = int64_t{1} << 31; // as in Limits
};

template <class Launch>
class PoolDispatch {
 public:
  PoolDispatch(const Launch& launch, const PoolArguments& arguments)
      : launch_(launch), arguments_(arguments) {}

  void run() const {
    with_ordered_type(arguments_.type, [&]<class T>(std::type_identity<T>) {
      with_index_type(arguments_.index_type, [&]<class Index>(std::type_identity<Index>) {
        if constexpr (std::is_integral_v<T>) { // rarely pooled: one kernel will do
          run_channels<T, Index, uint64_t, 1>();
        } else {
          run_numbers<T, Index>();
        }
      });
    });
  }

 private:
  template <class T, class Index>
  void run_numbers() const {
    constexpr int kVector = kVectorBytes / sizeof(T), kFew = std::min(4, kVector);
    const auto& [depth, height, width] = arguments_.geometry.axis;
    const int64_t inner = arguments_.geometry.inner;
    if (!fits()) {
      run_channels<T, Index, uint64_t, 1>();
    } else if (inner > 1) {
      inner % kVector == 0 && is_aligned() ? run_channels<T, Index, uint32_t, kVector>()
                                           : run_channels<T, Index, uint32_t, 1>();
    } else if (
        width.kernel == 2 && width.stride == 2 && width.padding == 0 &&
        arguments_.dilation[2] == 1 && width.out == 2 * width.in && width.in % kVector == 0 &&
        is_aligned()) {
      run_rows<T, Index, kVector, true>();
    } else {
      run_rows<T, Index, kFew, false>();
    }
  }

  bool is_aligned() const {
    const auto bits = reinterpret_cast<uintptr_t>(arguments_.input) |
                      reinterpret_cast<uintptr_t>(arguments_.values) |
                      reinterpret_cast<uintptr_t>(arguments_.indices);
    return bits % kVectorBytes == 0;
  }

  // Is every value that the kernels compute below the limit?
  bool fits() const {
    const Geometry<int64_t>& g = arguments_.geometry;
    double elements = static_cast<double>(g.outer) * static_cast<double>(g.inner), reach = 0;
    for (int a = 0; a < 3; ++a) {
      const Axis<int64_t>& axis = g.axis[a];
      const auto dilation = static_cast<double>(arguments_.dilation[a]);
      // The cells of a thread's windows may not all exist, nor be in the input.
      const int64_t more = a == 2 && g.inner == 1 ? kMostNeighbours : 0;
      const auto size = static_cast<double>(std::max(axis.in + more, axis.out));
      elements *= dilation == 1 ? size : size + dilation;
      reach = std::max(
          reach,
          (size + 1) * static_cast<double>(axis.stride) + static_cast<double>(axis.padding) +
              (static_cast<double>(axis.kernel) + 1) * dilation);
    }
    double number = 1;
    for (const Axis<int64_t>& axis : g.axis) {
      number *= static_cast<double>(axis.kernel);
    }
    return std::max({elements, reach, number}) < static_cast<double>(arguments_.narrow);
  }

  template <class T, class Index, class Offset, int V>
  void run_channels() const {
    const auto& [depth, height, width] = arguments_.geometry.axis;
    const auto tiling = make_tiling<Offset>(
        arguments_.geometry,
        {1, 1, 1},
        {depth.in, height.in, width.in},
        arguments_.geometry.inner / V);
    launch_(
        pool_channels<T, Index, Offset, V>,
        tiling.items,
        tiling,
        cells<Offset>(),
        lowest<T>(),
        static_cast<const T*>(arguments_.input),
        static_cast<T*>(arguments_.values),
        static_cast<Index*>(arguments_.indices));
  }

  template <class T, class Index, int V, bool kPairs>
  void run_rows() const {
    static_assert(V <= kMostNeighbours);
    const auto& [depth, height, width] = arguments_.geometry.axis;
    const auto tiling = make_tiling<uint32_t>(
        arguments_.geometry, {1, 1, 1}, {depth.in, height.in, divide_up(width.in, V)}, 1);
    launch_(
        pool_rows<T, Index, V, kPairs>,
        tiling.items,
        tiling,
        cells<uint32_t>(),
        width.in % V == 0 && is_aligned(),
        lowest<T>(),
        static_cast<const T*>(arguments_.input),
        static_cast<T*>(arguments_.values),
        static_cast<Index*>(arguments_.indices));
  }

  template <class Offset>
  PoolCells<Offset> cells() const {
    PoolCells<Offset> cells;
    for (int a = 0; a < 3; ++a) {
      cells.dilation[a] = Divider<Offset>(static_cast<Offset>(arguments_.dilation[a]));
    }
    return cells;
  }

  template <class T>
  static T lowest() {
    if constexpr (std::is_integral_v<T>) {
      return std::numeric_limits<T>::lowest();
    } else {
      return static_cast<T>(-std::numeric_limits<Accumulator<T>>::infinity());
    }
  }

  static constexpr int64_t kMostNeighbours = 8; // that a thread does

  const Launch& launch_;
  const PoolArguments& arguments_;
};

} // namespace maxunpool_cuda
