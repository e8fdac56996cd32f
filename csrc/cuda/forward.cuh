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

// What forward_rows is compiled for: windows of kKernel every kStride, in width and height, with
// kPadding. A thread takes V tiles that are neighbours in a row of a contiguous tensor (inner ==
// 1); tiles are kStride wide and high.
//
// - kEven: rows divide into vectors (out width by N, in width by V), which start where a tile does,
//   and all pointers are aligned.
// - otherwise the thread's outputs are moved to the left until they start at a multiple of 16
//   bytes, by less than 16 bytes, which is another distance in every row; only the result need be
//   aligned. Vectors are stored all the same, but at a row's ends; pooled elements are read one by
//   one.
// - kDeep: the plane has a depth, of any windows. Otherwise in and out depth are 1.
template <
    class Element,
    int kKernelSize,
    int kStrideSize,
    int kPaddingSize,
    bool kIsEven,
    bool kIsDeep>
struct RowShape {
  static constexpr int kKernel = kKernelSize, kStride = kStrideSize, kPadding = kPaddingSize;
  static constexpr bool kEven = kIsEven, kDeep = kIsDeep;
  static constexpr bool kDisjoint = kKernel <= kStride && kPadding == 0; // then it sums as well
  // Elements stored at a time: 16 bytes, or less where more would not fit the registers.
  static constexpr int kGrain = std::min<int>(kVectorBytes / sizeof(Element), kStride == 3 ? 4 : 8);
  static constexpr int V = kStride == 3 ? kGrain : std::max(1, kGrain / kStride);
  static constexpr int N = V * kStride; // outputs of a thread in a row
  static_assert(N % kGrain == 0);

  static constexpr int first(int e) { return first_cell(kKernel, kStride, kPadding, e); }
  static constexpr int last(int e) { return last_cell(kStride, kPadding, e); }
  // An uneven row's outputs are moved by whole tiles, then by up to kSlack.
  static constexpr int kSlack = kEven ? 0 : kStride - 1;
  // The cells a thread reads in a row, counted from its first tile's own.
  static constexpr int kFrom = first(-kSlack), kTo = last(N - 1) + 1;
  // As many resident blocks as need no registers spilled. Offsets in windows that overlap take some
  // for what they name in other tiles.
  static constexpr int blocks(bool offsets) {
    return 6 - (kDeep ? 1 : 0) - (kKernel > kStride ? 1 : 0) -
           (kKernel > kStride && offsets ? 1 : 0) - (kStride > 2 ? 6 - kStride : 0) -
           (V >= 4 ? 1 : 0) - (V >= 8 ? 2 : 0);
  }
};

// Cells kFrom to kTo - 1 of a row, counted from column `base`; what does not exist matches nothing.
template <class Element, int kFrom, int kTo>
struct RowCells {
  static constexpr uint32_t kNowhere = ~0u;

  uint32_t target[kTo - kFrom];
  Element value[kTo - kFrom];

  // `row`: where the row begins, of cells whose indices name what `named` says. kVector: cells base
  // to base + kVector - 1 are an aligned vector, or none of them exists.
  template <int kVector, class Index>
  __device__ void read(
      const Element* __restrict__ input,
      const Index* __restrict__ indices,
      const CellRow<Index, uint32_t>& named,
      uint32_t row,
      uint32_t base, // may wrap around to the left of the row
      uint32_t width) {
#pragma unroll
    for (int j = kFrom; j < kTo; ++j) {
      if (kVector == 0 || j < 0 || j >= kVector) {
        const uint32_t column = base + static_cast<uint32_t>(j);
        const bool exists = column < width;
        target[j - kFrom] = exists ? named.target(indices[row + column], column) : kNowhere;
        value[j - kFrom] = exists ? input[row + column] : Element{};
      }
    }
    if constexpr (kVector > 0) {
      Vector<Index, kVector> in_vector;
      Vector<Element, kVector> values{};
      const bool exists = base < width;
      if (exists) {
        in_vector = load<kVector>(indices + (row + base));
        values = load<kVector>(input + (row + base));
      }
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        target[j - kFrom] = exists ? named.target(in_vector.at[j], base + j) : kNowhere;
        value[j - kFrom] = values.at[j];
      }
    }
  }
};

// Offsets are 32-bit. The last coordinate of an item's tile counts groups of V tiles, and its outer
// one groups of `planes`, which the thread does one after the other: they share what is computed of
// the geometry.
template <class Element, class Index, class Shape>
__global__ void __launch_bounds__(kThreads, Shape::blocks(kIsWindowOffset<Index>)) forward_rows(
    Tiling<uint32_t> tiling,
    Report report,
    uint32_t planes,
    Element negative_zero,
    const Element* __restrict__ input,
    const Index* __restrict__ indices,
    Element* __restrict__ output) {
  constexpr int V = Shape::V, N = Shape::N, kStride = Shape::kStride, kGrain = Shape::kGrain;
  constexpr int kVector = Shape::kEven ? V : 0;
  using Cells = RowCells<Element, Shape::kFrom, Shape::kTo>;
  using Own = std::conditional_t<Shape::kEven, Cells, RowCells<Element, 0, V>>;
  constexpr int kOwnFrom = Shape::kEven ? Shape::kFrom : 0;
  const Geometry<uint32_t>& g = tiling.geometry;
  const uint32_t in_width = g.axis[2].in, out_width = g.axis[2].out;
  for_each_chunk<Index>(tiling.items, report, [&](uint32_t i) {
    const auto item = tiling.template row_item<Shape::kDeep>(i);
    const Position<uint32_t> p{{item.tile.at[0], item.tile.at[1], item.tile.at[2] * V}};
    const bool row_exists = (!Shape::kDeep || p.at[0] < g.axis[0].in) && p.at[1] < g.axis[1].in;
    const bool here = row_exists && p.at[2] < in_width;
    const auto exists = [&](int v) {
      return Shape::kEven ? here : row_exists && p.at[2] + v < in_width;
    };
    const auto window = tiling.template window<Shape::kDeep>(p);
    const Range<uint32_t> depth = Shape::kDeep ? tiling.outputs(0, p.at[0]) : Range<uint32_t>{0, 1};
    const uint32_t height = p.at[1] * kStride;
    bool astray = false;

    uint32_t plane = item.outer * planes;
#pragma unroll 1
    for (uint32_t left = planes; left > 0 && plane < g.outer; --left, ++plane) {
      // Where the row of cells (d, h) of this plane begins.
      const auto row_of_cells = [&](uint32_t d, uint32_t h) {
        return Shape::kDeep ? tiling.pooled_row(plane, d, h)
                            : (plane * g.axis[1].in + h) * in_width;
      };
      Own own;
      own.template read<kVector>(
          input,
          indices,
          {tiling, p.at[0], p.at[1]},
          row_of_cells(p.at[0], p.at[1]),
          p.at[2],
          row_exists ? in_width : 0);
      uint32_t target[V];
#pragma unroll
      for (int v = 0; v < V; ++v) {
        target[v] = own.target[v - kOwnFrom];
      }
      if (is_astray<true, Shape::kDeep>(
              tiling, report.error, plane, p, window, uint32_t{0}, target, exists, indices)) {
        astray = true;
        continue;
      }

#pragma unroll 1
      for (uint32_t d = depth.first; d < depth.end; ++d) {
        // The tile's rows: the first one's position in the plane, and outputs.
        const uint32_t first_row = (d * g.axis[1].out + height) * out_width;
        uint32_t begin[kStride], lead[kStride]; // begin may wrap around to the left of the row
        Vector<Element, kGrain> stored[kStride][N / kGrain]{};
#pragma unroll
        for (int r = 0; r < kStride; ++r) {
          const uint32_t start = plane * tiling.out_plane + first_row + r * out_width;
          lead[r] = Shape::kEven ? 0 : start % kGrain;
          begin[r] = item.tile.at[2] * N - lead[r];
        }
        const auto merge = [&](const Cells& cells, int r) {
          const uint32_t first = first_row + r * out_width + begin[r];
          // Counted from the cells' base, output e is in tile floor((e - lead % stride) / stride).
#pragma unroll
          for (int e = 0; e < N; ++e) {
#pragma unroll
            for (int j = Shape::first(e - Shape::kSlack); j <= Shape::last(e); ++j) {
              const bool match = cells.target[j - Shape::kFrom] - first == static_cast<uint32_t>(e);
              Element& to = stored[r][e / kGrain].at[e % kGrain];
              to = match ? cells.value[j - Shape::kFrom] : to;
            }
          }
        };
        const Range<uint32_t> depths =
            Shape::kDeep ? tiling.cells_around(p.at[0], d - depth.first) : Range<uint32_t>{0, 1};
#pragma unroll 1
        for (uint32_t from_d = depths.first; from_d < depths.end; ++from_d) {
#pragma unroll
          for (int j = Shape::first(0); j <= Shape::last(kStride - 1); ++j) {
            const uint32_t from_h = p.at[1] + static_cast<uint32_t>(j);
            if (from_h >= g.axis[1].in) {
              continue;
            }
            const auto reaches = [&](int r) { return j >= Shape::first(r) && j <= Shape::last(r); };
            const auto read = [&](auto& cells, uint32_t base) {
              cells.template read<kVector>(
                  input,
                  indices,
                  {tiling, from_d, from_h},
                  row_of_cells(from_d, from_h),
                  base,
                  in_width);
            };
            if constexpr (Shape::kEven) {
              Cells cells = own;
              if (j != 0 || (Shape::kDeep && from_d != p.at[0])) {
                read(cells, p.at[2]);
              }
#pragma unroll
              for (int r = 0; r < kStride; ++r) {
                if (reaches(r)) {
                  merge(cells, r);
                }
              }
            } else {
#pragma unroll
              for (int r = 0; r < kStride; ++r) {
                if (reaches(r)) {
                  Cells moved;
                  read(moved, p.at[2] - lead[r] / kStride);
                  merge(moved, r);
                }
              }
            }
          }
        }
#pragma unroll
        for (int r = 0; r < kStride; ++r) {
          if (height + r >= g.axis[1].out) {
            break;
          }
          if (Shape::kDisjoint && negative_zero != Element{}) {
#pragma unroll
            for (int e = 0; e < N; ++e) {
              Element& sum = stored[r][e / kGrain].at[e % kGrain];
              sum = added_to_zero(sum, negative_zero);
            }
          }
          const uint32_t start = plane * tiling.out_plane + first_row + r * out_width;
          if (Shape::kEven ? begin[r] < out_width
                           : begin[r] < out_width && N <= out_width - begin[r]) {
#pragma unroll
            for (int e = 0; e < N; e += kGrain) {
              store(output + (start + begin[r] + e), stored[r][e / kGrain]);
            }
          } else if constexpr (!Shape::kEven) {
#pragma unroll
            for (int e = 0; e < N; ++e) {
              if (begin[r] + e < out_width) {
                output[start + begin[r] + e] = stored[r][e / kGrain].at[e % kGrain];
              }
            }
          }
        }
      }
    }
    return astray;
  });
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

// What an owner makes of the pooled elements that name its output, in row-major order.
template <class T>
struct TakeLast {
  using Element = T;

  T value{};

  __device__ void add(T pooled) { value = pooled; }
  __device__ T result(Reduce) const { return value; }
};

template <class T>
struct TakeSum {
  using Element = T;

  Sum<T> sum{};

  __device__ void add(T pooled) { sum.add(pooled); }
  __device__ T result(Reduce reduce) const { return sum.result(reduce); }
};

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
                stored.at[v] = taken[o][v].result(reduce);
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
