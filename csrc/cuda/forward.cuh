// SPDX-License-Identifier: BSD-3-Clause
// Unpooling of windows of 2x2 or 3x3 outputs, 2 apart, or of 4x4, 4 apart, in one pass over the
// output. Each output has one owner, a thread, which writes it once, zero or not. So nothing is
// filled with zeros beforehand, and no two threads write one place.
//
// Example: a plane of 4 x 4 cells, 8 x 8 outputs, 3x3 windows with stride 2 and padding 1, float32
// values and int64 indices. A thread owns two cells, and the outputs at them (see
// forward_tile.cuh). Numbers are those of pooled elements, and of positions in the output plane, as
// indices have them.
//
//   pooled elements     outputs
//     0   1   2   3      0  1  2  3   4  5  6  7      Thread 2 owns elements 4 and 5, and writes
//   [ 4   5]( 6)  7      8  9 10 11  12 13 14 15      the outputs in brackets. The windows of 6, 8,
//   ( 8   9)(10) 11    [16 17 18 19] 20 21 22 23      9 and 10 cover some of these, too: that of 9
//    12  13  14  15    [24 25 26 27] 28 29 30 31      begins at row 3 and column 1, and covers 25,
//                       32 33 34 35  36 37 38 39      26, 27, 33 and so on.
//
// The thread reads the indices and the values of 4 and 5 as vectors, those of 8 and 9 as well, and
// those of 6 and 10 one by one. The windows of 0 to 3 end at row 1, those of 7 and 11 begin at
// column 5, and those of 12 to 15 begin at row 5.
//
//   element    4   5   6   8   9  10      No index names 16, 18, 19, 24, 25 or 26: they are 0.
//   index     17  27  21  33  27  37      Output 17 is 1. Output 27 is 5, the later value of two;
//   value      1   2   3   4   5   6      with "sum" it is 2 + 5. Others write 21, 33 and 37.
//
// The thread stores 16 to 19 as one vector, and 24 to 27 as another.
//
// It also checks the indices of the elements that it owns. An index that lies out of the window of
// its own element may name an output whose owner does not read that element. The thread then flags
// its chunk of work items, and the fix-up kernel of slots.cuh recomputes the image.
//
// From combine.cuh comes how elements add up, from indices.cuh how an index is loaded, from
// report.cuh the loop over a thread's work items, which also writes the flags; forward_checks.cuh
// has the checks.
#pragma once

#include "combine.cuh"
#include "forward_checks.cuh"
#include "forward_tile.cuh"
#include "indices.cuh"
#include "report.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

// The index of a cell that does not exist, also after it was narrowed. It names no output: a plane
// has fewer than 2^31 positions, and a window fewer offsets.
template <class Index>
constexpr Index kNoIndex = static_cast<Index>(-1);

// Flat indices are loaded as 64 bits, as one kernel takes int32 and int64, and used as 32.
// Narrowing an index waits for its load, so it comes after the last load. Until then an index takes
// two registers. If a thread has more than 12 indices, as four cells of four elements have, these
// do not fit, and each is narrowed at once.
template <class Traits>
constexpr bool kNarrowsLate =
    !Traits::kOffsets && Traits::kCells * Traits::kCells * Traits::kCount <= 12;

template <class Traits>
using LoadedIndex = std::conditional_t<kNarrowsLate<Traits>, uint64_t, uint32_t>;

// What a thread holds of the cells whose windows cover its outputs, [row][column][element]. Row and
// column kOwn are those of its own elements. Indices and values have an array each, as in memory.
template <class Traits, class Item>
using Neighbourhood = Item[Traits::kCells][Traits::kCells][Traits::kCount];

// ---- Loads

// Loads the elements of one cell in a thread's planes, the first of which has the number `element`.
template <class Traits, class Index>
__device__ __forceinline__ void load_planes(
    const ThreadTile<Traits>& tile,
    uint32_t element,
    const typename Traits::Element* input,
    const AnyIndices& indices,
    Index (&index)[Traits::kCount],
    typename Traits::Register (&value)[Traits::kCount]) {
#pragma unroll
  for (int n = 0; n < Traits::kCount; ++n) {
    const uint32_t of_plane = element + tile.element_distance[n];
    index[n] = index_as<Index>(load_indices<Traits::kOffsets, 1>(indices, of_plane)[0]);
    value[n] = static_cast<typename Traits::Register>(input[of_plane]);
  }
}

// Loads neighbours in memory, of which the first has the number `element`.
template <class Traits, class Index>
__device__ __forceinline__ void load_vectors(
    uint32_t element,
    const typename Traits::Element* input,
    const AnyIndices& indices,
    Index (&index)[Traits::kCount],
    typename Traits::Register (&value)[Traits::kCount]) {
  const auto loaded = load_indices<Traits::kOffsets, Traits::kCount>(indices, element);
  load_registers(input + element, value);
#pragma unroll
  for (int n = 0; n < Traits::kCount; ++n) {
    index[n] = index_as<Index>(loaded[n]);
  }
}

// Makes neighbours[n] the element on one side of own[n]: on the right (kSide 1) or left (-1). The
// neighbour of the last element on that side is `outer`.
template <int kSide, int N, class Item>
__device__ __forceinline__ void shift_from_side(
    const Item (&own)[N], Item outer, Item (&neighbours)[N]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    constexpr int kLast = kSide > 0 ? N - 1 : 0;
    neighbours[n] = n == kLast ? outer : own[n + kSide];
  }
}

// For Elements::cells, fills in the other column of cells in one row: of a thread's cells, all but
// one have a neighbour that the thread has loaded already. `element` is the number of the first. In
// the example at the top, index[kOwn] is that of elements 4 and 5. Their neighbours on the right
// are 5 and 6, so this loads 6 alone, and makes index[kOther] that of 5 and 6.
template <class Traits, class Index>
__device__ __forceinline__ void load_side(
    const Geometry<uint32_t>& geometry,
    const ThreadTile<Traits>& tile,
    bool row_exists,
    uint32_t element,
    const typename Traits::Element* input,
    const AnyIndices& indices,
    Index (&index)[Traits::kCells][Traits::kCount],
    typename Traits::Register (&value)[Traits::kCells][Traits::kCount]) {
  constexpr int kOwn = Traits::kOwn;
  constexpr int kOther = 1 - kOwn;
  constexpr int kSide = kOther - kOwn;
  constexpr int kOuter = kSide > 0 ? Traits::kCount : -1; // the one that is loaded, from `element`
  Index outer_index = kNoIndex<Index>;
  typename Traits::Register outer_value{};
  if (row_exists && tile.column + static_cast<uint32_t>(kOuter) < geometry.axis[2].in) {
    outer_index = index_as<Index>(load_indices<Traits::kOffsets, 1>(indices, element, kOuter)[0]);
    outer_value = static_cast<typename Traits::Register>((input + element)[kOuter]);
  }
  shift_from_side<kSide>(index[kOwn], outer_index, index[kOther]);
  shift_from_side<kSide>(value[kOwn], outer_value, value[kOther]);
}

// Indices as 32 bits, at last (see kNarrowsLate).
template <class Traits, class Index>
__device__ __forceinline__ void narrow_indices(
    const Neighbourhood<Traits, Index>& from, Neighbourhood<Traits, uint32_t>& to) {
#pragma unroll
  for (int y = 0; y < Traits::kCells; ++y) {
#pragma unroll
    for (int x = 0; x < Traits::kCells; ++x) {
#pragma unroll
      for (int n = 0; n < Traits::kCount; ++n) {
        if constexpr (Traits::kOffsets) {
          to[y][x][n] = from[y][x][n];
        } else {
          to[y][x][n] = index_as<uint32_t>(from[y][x][n]);
        }
      }
    }
  }
}

// Loads all cells before one is looked at, so that no load waits for another. A cell that does not
// exist gets kNoIndex and 0. The 0 is never used, so the instructions that set it (up to 2 % of the
// kernel's) only make the values defined. With Elements::cells, the loop over x loads the column of
// the thread's own cells alone, and load_side() fills in the other.
template <class Traits>
__device__ __forceinline__ void load_neighbourhood(
    const Geometry<uint32_t>& geometry,
    const ThreadTile<Traits>& tile,
    const typename Traits::Element* input,
    const AnyIndices& indices,
    Neighbourhood<Traits, uint32_t>& index,
    Neighbourhood<Traits, typename Traits::Register>& value) {
  using Register = typename Traits::Register;
  constexpr int kCells = Traits::kCells;
  constexpr auto kNone = kNoIndex<LoadedIndex<Traits>>;
  const auto& [depth, height, width] = geometry.axis;
  Neighbourhood<Traits, LoadedIndex<Traits>> loaded;
#pragma unroll
  for (int y = 0; y < kCells; ++y) {
    const int down = y - Traits::kOwn;
    const bool row_exists = tile.is_covered && tile.row + down < height.in;
    const uint32_t row = tile.first_element + down * width.in * geometry.inner;
#pragma unroll
    for (int x = 0; x < kCells; ++x) {
      const int right = x - Traits::kOwn;
#pragma unroll
      for (int n = 0; n < Traits::kCount; ++n) {
        loaded[y][x][n] = kNone;
        value[y][x][n] = Register{};
      }
      const uint32_t element = row + right * geometry.inner;
      const bool column_exists = Traits::kOfCells ? right == 0 : tile.column + right < width.in;
      // Keep `|`: with `||`, a branch would stand between the loads.
      if (!row_exists | !column_exists) {
        continue;
      }
      if constexpr (Traits::kOfPlanes) {
        load_planes(tile, element, input, indices, loaded[y][x], value[y][x]);
      } else {
        load_vectors<Traits>(element, input, indices, loaded[y][x], value[y][x]);
      }
    }
    if constexpr (Traits::kOfCells && kCells > 1) {
      load_side(geometry, tile, row_exists, row, input, indices, loaded[y], value[y]);
    }
  }
  narrow_indices<Traits, LoadedIndex<Traits>>(loaded, index);
}

// ---- Outputs of a row

// Combines into each output of one row of the tile, outputs[column][element], the elements whose
// indices name it, in row-major order of the cells. All loops are unrolled, so the place of an
// output in a window is a constant, and the windows that do not cover it leave no code. In the
// example at the top, the outputs in row 1, column 1 of their squares (25 and 27) are in row 2,
// column 2 of the own window, row 2, column 0 of the one to the right, row 0, column 2 of the one
// below, and row 0, column 0 of the last.
template <class Traits>
__device__ __forceinline__ void combine_row(
    const Geometry<uint32_t>& geometry,
    const ThreadTile<Traits>& tile,
    int row,
    const Neighbourhood<Traits, uint32_t>& index,
    const Neighbourhood<Traits, typename Traits::Register>& value,
    typename Traits::OutputAccumulator (&outputs)[Traits::S][Traits::kCount]) {
  constexpr int K = Traits::K;
  constexpr int S = Traits::S;
#pragma unroll
  for (int y = 0; y < Traits::kCells; ++y) {
#pragma unroll
    for (int x = 0; x < Traits::kCells; ++x) {
#pragma unroll
      for (int column = 0; column < S; ++column) {
        // The place of the output in the window of cell (y, x). (kOwn, kOwn) is the own cell.
        const int row_in_window = row - S * (y - Traits::kOwn) + Traits::P;
        const int column_in_window = column - S * (x - Traits::kOwn) + Traits::P;
        if (row_in_window < 0 || row_in_window >= K || column_in_window < 0 ||
            column_in_window >= K) {
          continue;
        }
        const uint32_t offset = (tile.depth_in_window * K + row_in_window) * K + column_in_window;
        const uint32_t position = tile.position + row * geometry.axis[2].out + column;
#pragma unroll
        for (int n = 0; n < Traits::kCount; ++n) {
          const uint32_t right = Traits::kOfCells ? S * n : 0; // from the tile's first cell
          const uint32_t name = Traits::kOffsets ? offset : position + right;
          outputs[column][n].add_if(index[y][x][n] == name, value[y][x][n]);
        }
      }
    }
  }
}

// Stores a row of outputs at neighbouring cells: `to` is the first, and they follow each other.
// (store_registers() narrows an accumulator's value; result() does so for one stored by itself.)
template <class Traits>
__device__ __forceinline__ void store_cells(
    typename Traits::Element* to,
    const typename Traits::OutputAccumulator (&outputs)[Traits::S][Traits::kCount]) {
  typename Traits::Register row[Traits::S * Traits::kCount];
#pragma unroll
  for (int i = 0; i < Traits::S * Traits::kCount; ++i) {
    row[i] = outputs[i % Traits::S][i / Traits::S].value;
  }
  store_registers(to, row);
}

// Stores the outputs at one cell in neighbouring channels, a vector for each column.
template <class Traits>
__device__ __forceinline__ void store_channels(
    const Geometry<uint32_t>& geometry,
    const ThreadTile<Traits>& tile,
    typename Traits::Element* to,
    const typename Traits::OutputAccumulator (&outputs)[Traits::S][Traits::kCount]) {
#pragma unroll
  for (int column = 0; column < Traits::S; ++column) {
    if (tile.column_exists[column]) {
      typename Traits::Register channels[Traits::kCount];
#pragma unroll
      for (int n = 0; n < Traits::kCount; ++n) {
        channels[n] = outputs[column][n].value;
      }
      store_registers(to + column * geometry.inner, channels);
    }
  }
}

// Stores the two outputs at one cell in several planes, as a pair or one by one. If rows have an
// odd width, the pairs of every second row are aligned.
template <class Traits>
__device__ __forceinline__ void store_planes(
    const Geometry<uint32_t>& geometry,
    const ThreadTile<Traits>& tile,
    typename Traits::Element* to,
    const typename Traits::OutputAccumulator (&outputs)[Traits::S][Traits::kCount]) {
  static_assert(Traits::S == 2);
  using Element = typename Traits::Element;
#pragma unroll
  for (int n = 0; n < Traits::kCount; ++n) {
    Element* const of_plane = to + tile.output_distance[n];
    const bool is_aligned = reinterpret_cast<uintptr_t>(of_plane) % sizeof(Element[2]) == 0;
    if (geometry.inner == 1 && tile.column_exists[1] && is_aligned) {
      const typename Traits::Register pair[] = {outputs[0][n].value, outputs[1][n].value};
      store_registers(of_plane, pair);
      continue;
    }
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      if (tile.column_exists[column]) {
        of_plane[column * geometry.inner] = outputs[column][n].result();
      }
    }
  }
}

// Stores one row of a tile's outputs.
template <class Traits>
__device__ __forceinline__ void store_row(
    const Geometry<uint32_t>& geometry,
    const ThreadTile<Traits>& tile,
    int row,
    const typename Traits::OutputAccumulator (&outputs)[Traits::S][Traits::kCount],
    typename Traits::Element* output) {
  const uint32_t first = tile.first_output + row * geometry.axis[2].out * geometry.inner;
  if constexpr (Traits::kOfCells) {
    store_cells<Traits>(output + first, outputs);
  } else if constexpr (Traits::kOfChannels) {
    store_channels(geometry, tile, output + first, outputs);
  } else {
    store_planes(geometry, tile, output + first, outputs);
  }
}

// ---- The kernel

// Unpools a call whose numbers fit 32 bits: one work item of `tiling` is one tile. `negative_zero`
// is explained at added_to_zero(); an accumulator of sums needs none. 1024 threads on a processor
// leave 64 registers for each.
template <class Combine, bool kOffsets, class Window, Elements kElements>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads) forward(
    Tiling<uint32_t> tiling,
    Report report,
    Planes planes,
    typename Combine::Element negative_zero,
    const typename Combine::Element* __restrict__ input,
    AnyIndices indices,
    typename Combine::Element* __restrict__ output) {
  using Traits = ForwardTraits<Combine, kOffsets, Window, kElements>;
  const Geometry<uint32_t>& geometry = tiling.geometry;
  const auto& [depth, height, width] = geometry.axis;
  for_each_flagged_item<!kOffsets>(tiling.items, report, [&](uint32_t item) {
    const auto tile = locate<Traits>(tiling, planes, item);
    Neighbourhood<Traits, uint32_t> index;
    Neighbourhood<Traits, typename Traits::Register> value;
    load_neighbourhood(geometry, tile, input, indices, index, value);
    const bool all_inside =
        own_indices_inside(tiling, planes, tile, index[Traits::kOwn][Traits::kOwn]);
    if constexpr (Traits::kCells == 1) { // then sums have one element, which is only moved
#pragma unroll
      for (int n = 0; n < Traits::kCount; ++n) {
        value[0][0][n] = added_to_zero(value[0][0][n], negative_zero);
      }
    }
#pragma unroll
    for (int row = 0; row < Traits::S; ++row) {
      Combine outputs[Traits::S][Traits::kCount];
      combine_row(geometry, tile, row, index, value, outputs);
      if (tile.row_exists[row]) {
        store_row(geometry, tile, row, outputs, output);
      }
    }
    // In 3d, the tiles of all depths of a window have the same cells, and the first of them
    // reports. (As a function, this condition would take more registers.)
    const bool reports = tile.is_covered && tile.depth_in_window == 0 && tile.row < height.in &&
                         (Traits::kOfCells || tile.column < width.in);
    bool out_of_window = false;
    if (reports && !all_inside) {
      out_of_window = report_own_indices(tiling, planes, tile, indices, report.errors);
    }
    return out_of_window;
  });
}

} // namespace maxunpool_cuda
