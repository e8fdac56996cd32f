// SPDX-License-Identifier: BSD-3-Clause
// Unpooling of usual windows in one pass over the output: 2x2 and 3x3 outputs, 2 apart; 4x4, 4
// apart; 3x3 and 5x5, 1 apart. Each output has one owner, a thread, which writes it once, zero or
// not. So nothing is filled with zeros beforehand, and no two threads write one place.
//
// The outputs *at* a cell (row, column) are the S x S ones that begin at (S * row, S * column), S
// being the stride. All are in the cell's window, which is larger if windows overlap. The thread
// that owns the cell owns them.
//
// Example: a plane of 4 x 4 cells, 8 x 8 outputs, 3x3 windows with stride 2 and padding 1, float32
// values and int64 indices. A thread owns two cells (see cells.cuh). Numbers are those of pooled
// elements, and of positions in the output plane, as indices have them.
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
//   index     17  27  21  33  27  37      Output 17 is 60. Output 27 is 64, the later value of two;
//   value     60  61  62  63  64  65      with "sum" it is 61 + 64. Others write 21, 33 and 37.
//
// The thread stores 16 to 19 as one vector, and 24 to 27 as another.
//
// With stride 1, an output has 9 or 25 cells, and neighbouring outputs have most of them in common.
// Example: 3x3 windows; the thread that owns a column of 4 cells, c in brackets, owns the outputs
// at the same places, and reads 18 cells, row after row:
//
//   c  c  c
//   c [c] c      The window of the first cell begins one row and one column before the first output
//   c [c] c      in brackets, which is at its offset 8. That output is at the offsets 8 7 6, 5 4 3
//   c [c] c      and 2 1 0 of the cells in the first three rows. With the index of each it compares
//   c [c] c      that offset or, if indices are flat, its own position.
//   c  c  c
//
// A thread also checks the indices of its own cells. An index that lies out of its cell's window
// may name an output whose owner does not read that cell. The thread then flags its chunk of work
// items, and the fix-up kernel recomputes the image.
//
// From combine.cuh comes how elements add up, from tiling.cuh which cells a thread owns, from
// report.cuh the loop over a thread's items, which writes the flags.
#pragma once

#include "cells.cuh"
#include "combine.cuh"
#include "divider.cuh"
#include "indices.cuh"
#include "report.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace maxunpool_cuda {

// The windows that `forward` is compiled for: K rows and columns, S apart, with padding P.
template <int kKernel, int kStride, int kPadding>
struct Square {
  static_assert(kPadding + kStride <= kKernel); // the outputs at a cell are in its window
  static constexpr int K = kKernel;
  static constexpr int S = kStride;
  static constexpr int P = kPadding;
  static constexpr bool kDisjoint = K == S;

  // In one dimension, the outputs at a cell are covered by its own window, by those of kBefore
  // cells before it, and by those of kAfter cells after it. Of windows of 3, 2 apart, the outputs
  // 2r and 2r + 1 at cell r are covered
  // - without padding by the windows of cells r - 1 and r, which begin at 2r - 2 and 2r;
  // - with padding 1 by the windows of cells r and r + 1, which begin at 2r - 1 and 2r + 1.
  static constexpr int kBefore = (K - 1 - P) / S;
  static constexpr int kAfter = (S - 1 + P) / S;
};

// How many elements a thread owns: fewer where else registers spill (nvcc 13.0). With windows of
// 5x5, 8 cells of a row and 2 bytes would spill 48 bytes (sm_90); with windows of 3x3, 4 cells of a
// column and 8 bytes would spill 32 (sm_75).
template <class T, bool kOffsets, class Window, Form kForm>
constexpr int forward_elements() {
  const int usual = elements_of_thread<T, kOffsets, kForm>(Window::S, !Window::kDisjoint);
  if (Window::K > 4) {
    return std::min(usual, 4);
  }
  const bool is_large = sizeof(T) == sizeof(uint64_t) && !Window::kDisjoint;
  return kForm == Form::column && is_large ? 2 : usual;
}
template <class T, bool kOffsets, class Window, Form kForm>
using OwnedByForward = Owned<kForm, forward_elements<T, kOffsets, Window, kForm>()>;

// All that is fixed when `forward` is compiled.
template <class TheCombine, bool kWindowOffsets, class Window, Form kForm>
struct ForwardTraits
    : Window, // has K, S, P, kBefore, kAfter
      OwnedByForward<typename TheCombine::Element, kWindowOffsets, Window, kForm> { // has R, V, C
  using Combine = TheCombine;
  using Element = typename Combine::Element;
  using Register = typename Combine::Register;
  using Own = OwnedByForward<Element, kWindowOffsets, Window, kForm>;
  using Row = RowOfCells<Own, Window::kBefore, Window::kAfter>;

  static constexpr bool kOffsets = kWindowOffsets; // indices are window offsets, else positions
  static constexpr int kRows = Window::kBefore + Own::R + Window::kAfter; // of cells that are read
  // Rows that are loaded before the thread looks at the first: as many as fit kRegisters, with an
  // index and a value for each element. With more, windows 1 apart spill.
  static constexpr int kRegisters = Window::S > 1 ? 32 : 72 / Window::K;
  static constexpr int kAhead = std::clamp(kRegisters / (2 * Row::kPlaces), 1, kRows);
};

// What a thread owns. In 2d, all depths are 0.
struct ForwardTile {
  uint32_t row; // of its first cell
  uint32_t column;
  uint32_t depth;
  uint32_t output_depth;    // of its outputs
  uint32_t depth_in_window; // of its outputs, counted from the depth where their windows begin
  // Rows of cells, and rows and columns of outputs, from its first one to the end of the plane; 0
  // or less if there is none. If no window covers the depth of its outputs, so few rows of cells
  // that none is read.
  int cell_rows_left;
  int output_rows_left;
  int output_columns_left;
  uint32_t position;      // of its first output, in the output plane
  uint32_t first_element; // the number of its first element in the pooled tensor
  uint32_t first_output;  // the number of its first output in the unpooled tensor
};

// Finds the tile of a work item. All divisions but those of decoded() are here. If an output plane
// is larger than S times the pooled one, the outputs beyond the last cell have owners, too, whose
// own cells do not exist.
//
// In 3d, an item is a tile at one depth of the output. Example: windows 2 deep, 3 apart, and 2
// cells in depth. Output depths 0 and 1 have the cell at depth 0, with depth_in_window 0 and 1;
// output depth 2 is not covered; 3 and 4 have the cell at depth 1.
template <class Traits>
__device__ __forceinline__ ForwardTile
locate(const Tiling<uint32_t>& tiling, const Divider<uint32_t>& depth_stride, uint32_t item) {
  constexpr int S = Traits::S;
  const Geometry<uint32_t>& geometry = tiling.geometry;
  const auto& [depth, height, width] = geometry.axis;
  const auto [outer_and_depth, coordinates, channel_vector] =
      tiling.item(item, !Traits::kOfCells && geometry.inner != 1, false);
  ForwardTile tile{};
  tile.row = Traits::R * coordinates[1];
  tile.column = Traits::V * coordinates[2];
  tile.position = S * tile.row * width.out + S * tile.column;
  tile.cell_rows_left = static_cast<int>(height.in - tile.row);
  tile.output_rows_left = static_cast<int>(height.out - S * tile.row);
  tile.output_columns_left = static_cast<int>(width.out - S * tile.column);
  uint32_t outer = outer_and_depth;
  if (S > 1 && tiling.deep) { // windows 1 apart are in 2d
    tile.output_depth = outer_and_depth;
    outer = split(tile.output_depth, tiling.tiles[0]);
    uint32_t depth_in_window = tile.output_depth;
    tile.depth = split(depth_in_window, depth_stride);
    const bool is_covered = tile.depth < depth.in && depth_in_window < depth.kernel;
    tile.cell_rows_left = is_covered ? tile.cell_rows_left : -Traits::K;
    // Where no window is, this is 0, for no cell is read.
    tile.depth_in_window = is_covered ? depth_in_window : 0;
    tile.position += tile.output_depth * height.out * width.out;
  }
  const uint32_t channel = Traits::C * channel_vector;
  tile.first_element = tiling.pooled(outer, {{tile.depth, tile.row, tile.column}}, channel);
  tile.first_output = (outer * tiling.out_plane + tile.position) * geometry.inner + channel;
  return tile;
}

// ---- Loads

// A row of the cells whose windows cover outputs of the thread. An element that does not exist has
// index kNowhere, which names no output, and a value that is never used. Window offsets count from
// the depth of the thread's outputs, so that they are compared with constants.
template <class Traits>
struct CellRow {
  uint32_t index[Traits::Row::kPlaces];
  uint32_t upper_halves; // in the columns of own cells, or-ed: see load_indices()
  typename Traits::Register value[Traits::Row::kPlaces];
};

// Loads row y of these.
template <class Traits>
__device__ __forceinline__ void load_row(
    const Geometry<uint32_t>& geometry,
    const ForwardTile& tile,
    int y,
    const typename Traits::Element* input,
    const AnyIndices& indices,
    CellRow<Traits>& cells) {
  const auto& [depth, height, width] = geometry.axis;
  const int down = y - Traits::kBefore; // from the first own cell
  const bool row_exists =
      (down < tile.cell_rows_left) & (down >= 0 || tile.row >= static_cast<uint32_t>(-down));
  const uint32_t own = tile.first_element + down * width.in * geometry.inner;
  const uint32_t first_offset = tile.depth_in_window * Traits::K * Traits::K;
  cells.upper_halves = 0;
#pragma unroll
  for (int i = 0; i < Traits::Row::kPlaces; ++i) {
    cells.index[i] = kNowhere;
    cells.value[i] = {};
  }
  Traits::Row::for_each_vector(
      geometry, row_exists, tile.column, own, [&]<int N>(int place, int64_t element) {
        uint32_t index[N];
        typename Traits::Register value[N];
        const uint32_t upper_halves = load_indices<Traits::kOffsets>(indices, element, index);
        load_registers(input + element, value);
        cells.upper_halves |= place == Traits::Row::kFirst ? upper_halves : 0;
#pragma unroll
        for (int n = 0; n < N; ++n) {
          cells.index[place + n] = index[n] - (Traits::kOffsets ? first_offset : 0);
          cells.value[place + n] = value[n];
        }
      });
}

// ---- Checks

// Whether the window of own cell n of a row may lack a column. Of a vector of cells, whose row has
// S outputs for each cell, only those may that reach beyond the outputs at the vector.
template <class Traits>
constexpr bool may_lack_columns(int n) {
  constexpr int kColumns = Traits::S * Traits::V; // of outputs at the cells
  const int left = Traits::S * n - Traits::P;
  return !Traits::kOfCells || left < 0 || left + Traits::K > kColumns;
}

// The window of an own cell, for a tile whose outputs are in the window's first depth.
struct OwnWindow {
  uint32_t front; // where it begins; in the padding, coordinates wrap around
  uint32_t top;
  uint32_t left;
  uint32_t depths; // how many of its depths exist
  // If it is disjoint: how many rows and columns of outputs there are from its begin on.
  int output_rows_left;
  int output_columns_left;
};

// Whether the window offset is in its window. Of a disjoint window, doubts all offsets if a column
// is clipped, and of an overlapping one all beyond its first depth.
template <class Traits>
__device__ __forceinline__ bool offset_inside(
    const Geometry<uint32_t>& geometry,
    const OwnWindow& window,
    bool may_lack_columns,
    uint32_t offset) {
  constexpr int K = Traits::K;
  if constexpr (Traits::kDisjoint) {
    // If rows are clipped, as for planes of one row, the offsets of those that exist come first.
    const uint32_t of_rows = K * std::max(window.output_rows_left, 0);
    const uint32_t end = window.output_rows_left >= K ? K * K * window.depths : of_rows;
    return (offset < end) & (window.output_columns_left >= K);
  }
  // A bit for each offset, whether its row and its column exist. Example: a window of 3x3 that
  // begins one column before the plane lacks the offsets 0, 3 and 6: the bits are 0b110110110.
  constexpr uint32_t kRow = (1u << K) - 1;
  constexpr uint32_t kColumn = ((1ull << K * K) - 1) / kRow; // bit 0 of each row
  uint32_t rows = 0;
  uint32_t columns = 0;
#pragma unroll
  for (int i = 0; i < K; ++i) {
    rows |= window.top + i < geometry.axis[1].out ? kRow << K * i : 0;
    columns |= !may_lack_columns || window.left + i < geometry.axis[2].out ? kColumn << i : 0;
  }
  constexpr uint32_t kNone = 31; // a bit that is never set
  return (rows & columns) >> std::min(offset, kNone) & 1;
}

// Whether the position is in its window, which is disjoint. Doubts all positions if a column is
// clipped, and those of its third depth and beyond.
template <class Traits>
__device__ __forceinline__ bool position_inside(
    const Geometry<uint32_t>& geometry, const OwnWindow& window, uint32_t position) {
  constexpr int K = Traits::K;
  const auto& [depth, height, width] = geometry.axis;
  // It is 0 to K - 1 beyond the begin of a row of the window. Each minimum takes off a depth or a
  // row, if the position lies that far. If it does not, the difference wraps around, and is not the
  // minimum. Example: the window of 2x2 at row 2 and column 4 of a plane with rows of 8 begins at
  // position 20. Position 29 is 9 beyond that, less a row is 1: inside.
  const uint32_t row = window.front * height.out + window.top;
  uint32_t distance = position - (row * width.out + window.left);
  distance = std::min(distance, distance - (window.depths > 1 ? height.out * width.out : 0));
#pragma unroll
  for (int i = 1; i < K; ++i) {
    distance = std::min(distance, distance - (i < window.output_rows_left ? width.out : 0));
  }
  return (distance < K) & (window.output_rows_left > 0) & (window.output_columns_left >= K);
}

// Whether the index is in its window. May doubt a good one.
template <class Traits>
__device__ __forceinline__ bool index_inside(
    const Tiling<uint32_t>& tiling,
    const OwnWindow& window,
    bool may_lack_columns,
    uint32_t index) {
  if constexpr (Traits::kOffsets && Traits::K <= 4) {
    return offset_inside<Traits>(tiling.geometry, window, may_lack_columns, index);
  } else if constexpr (!Traits::kOffsets && Traits::kDisjoint) {
    return position_inside<Traits>(tiling.geometry, window, index);
  } else { // the divisions take less time than minima, or fewer registers than 25 bits
    const Position<uint32_t> start{{window.front, window.top, window.left}};
    return decoded<Traits::kOffsets>(tiling, index, start).in_window;
  }
}

// Whether the indices of the own cells of row y lie in their windows. A cell that does not exist
// counts as inside. May doubt a good index, but passes no wrong one. Means something only if the
// tile's outputs are in the first depth of their windows.
template <class Traits>
__device__ __forceinline__ bool own_indices_inside(
    const Tiling<uint32_t>& tiling, const ForwardTile& tile, int y, const CellRow<Traits>& cells) {
  constexpr int S = Traits::S;
  constexpr int P = Traits::P;
  const Geometry<uint32_t>& geometry = tiling.geometry;
  const auto& [depth, height, width] = geometry.axis;
  const int own_row = y - Traits::kBefore;
  bool inside = cells.upper_halves == 0;
#pragma unroll
  for (int n = 0; n < Traits::V * Traits::C; ++n) {
    const int cell = Traits::kOfCells ? n : 0;
    const bool may_lack = may_lack_columns<Traits>(cell);
    const OwnWindow window{
        .front = tile.output_depth,
        .top = S * (tile.row + own_row) - P,
        .left = S * (tile.column + cell) - P,
        .depths = S > 1 && tiling.deep ? std::min(depth.kernel, depth.out - tile.output_depth) : 1,
        .output_rows_left = tile.output_rows_left - S * own_row,
        .output_columns_left = Traits::kOfCells ? Traits::K : tile.output_columns_left};
    const uint32_t index = cells.index[Traits::Row::kFirst + n];
    inside &= index_inside<Traits>(tiling, window, may_lack, index);
  }
  const bool exists =
      (own_row < tile.cell_rows_left) & (Traits::kOfCells || tile.column < width.in);
  return inside | !exists;
}

// ---- Outputs

// The outputs at a row of own cells, by their row and their element in it. (A struct, since
// nvcc 13.0 does not initialize an array whose type is the alias of an array type.)
template <class Traits>
struct OutputRows {
  typename Traits::Combine at[Traits::S][Traits::S * Traits::V * Traits::C];
};

// Combines into the outputs at own row i the elements of row y that name them. All loops are
// unrolled, so the place of an output in a window is a constant, and the windows that do not cover
// it leave no code. In the example at the top, outputs 25 and 27 are in row 2, column 2 of the own
// window, row 2, column 0 of the one to the right, row 0, column 2 of the one below, and row 0,
// column 0 of the last.
template <class Traits>
__device__ __forceinline__ void combine_cells(
    const Geometry<uint32_t>& geometry,
    const ForwardTile& tile,
    int y,
    int i,
    const CellRow<Traits>& cells,
    OutputRows<Traits>& outputs) {
  constexpr int K = Traits::K;
  constexpr int S = Traits::S;
  constexpr int C = Traits::C;
#pragma unroll
  for (int x = 0; x < Traits::Row::kCells; ++x) {
#pragma unroll
    for (int row = 0; row < S; ++row) {
#pragma unroll
      for (int column = 0; column < S * Traits::V; ++column) {
        const int row_in_window = S * (i + Traits::kBefore - y) + row + Traits::P;
        const int column_in_window = S * (Traits::kBefore - x) + column + Traits::P;
        if (row_in_window < 0 || row_in_window >= K || column_in_window < 0 ||
            column_in_window >= K) {
          continue;
        }
        const uint32_t offset = row_in_window * K + column_in_window;
        const uint32_t position = tile.position + (S * i + row) * geometry.axis[2].out + column;
#pragma unroll
        for (int channel = 0; channel < C; ++channel) {
          outputs.at[row][column * C + channel].add_if(
              cells.index[x * C + channel] == (Traits::kOffsets ? offset : position),
              cells.value[x * C + channel]);
        }
      }
    }
  }
}

// Stores N outputs of a row, from number `first` on, as a vector, for which `to` is aligned.
template <int N, class Traits>
__device__ __forceinline__ void store_neighbours(
    typename Traits::Element* to, const OutputRows<Traits>& outputs, int row, int first) {
  typename Traits::Register values[N];
#pragma unroll
  for (int n = 0; n < N; ++n) {
    values[n] = outputs.at[row][first + n].value; // store_registers() narrows it
  }
  store_registers(to, values);
}

// Stores a row of the outputs at own row i.
template <class Traits>
__device__ __forceinline__ void store_row(
    const Geometry<uint32_t>& geometry,
    const ForwardTile& tile,
    int i,
    int row,
    const OutputRows<Traits>& outputs,
    typename Traits::Element* output) {
  using Element = typename Traits::Element;
  constexpr int S = Traits::S;
  const uint32_t down = (S * i + row) * geometry.axis[2].out * geometry.inner;
  Element* const to = output + (tile.first_output + down);
  if constexpr (Traits::kOfCells) {
    return store_neighbours<S * Traits::V>(to, outputs, row, 0);
  }
  // If rows have an odd width, the pairs of every second row are aligned.
  const bool may_be_pair = S == 2 && !Traits::kOfChannels && geometry.inner == 1;
  if (may_be_pair && tile.output_columns_left > 1 &&
      reinterpret_cast<uintptr_t>(to) % sizeof(Element[2]) == 0) {
    return store_neighbours<2>(to, outputs, row, 0);
  }
#pragma unroll
  for (int column = 0; column < S; ++column) {
    if (column < tile.output_columns_left) {
      store_neighbours<Traits::C>(to + column * geometry.inner, outputs, row, column * Traits::C);
    }
  }
}

// Stores the rows of outputs to which row y of the cells is the last to add, as far as they exist.
// So few outputs are in registers at a time.
template <class Traits>
__device__ __forceinline__ void store_complete_rows(
    const Geometry<uint32_t>& geometry,
    const ForwardTile& tile,
    int y,
    const OutputRows<Traits> (&outputs)[Traits::R],
    typename Traits::Element* output) {
  constexpr int S = Traits::S;
#pragma unroll
  for (int row = 0; row < S; ++row) {
    // The last window that covers the row of the outputs at own row i is (row + P) / S further
    // down.
    const int i = y - Traits::kBefore - (row + Traits::P) / S;
    if (i >= 0 && i < Traits::R && S * i + row < tile.output_rows_left) {
      store_row(geometry, tile, i, row, outputs[i], output);
    }
  }
}

// ---- The kernel

// Calls visit with 0, 1 .. kCount - 1, each as a std::integral_constant. (nvcc does not always
// unroll a loop as long as that over rows, and then the arrays of rows are in memory.)
template <int kCount, class Visit>
__device__ __forceinline__ void for_each_number(const Visit& visit) {
  [&]<int... kNumbers>(std::integer_sequence<int, kNumbers...>) {
    (visit(std::integral_constant<int, kNumbers>{}), ...);
  }(std::make_integer_sequence<int, kCount>{});
}

// Threads that a processor has at least: 1024 leave 64 registers for each. With stride 1 some forms
// need 80.
template <class Window>
constexpr int kForwardThreads = Window::S == 1 ? 768 : 1024;

// Unpools a call whose numbers fit 32 bits: one work item of `tiling` is one tile. `negative_zero`
// is explained at added_to_zero(); where windows overlap, accumulators of sums need none.
template <class Combine, bool kOffsets, class Window, Form kForm>
__global__ void __launch_bounds__(kThreads, kForwardThreads<Window> / kThreads) forward(
    Tiling<uint32_t> tiling,
    Report report,
    Divider<uint32_t> depth_stride,
    typename Combine::Element negative_zero,
    const typename Combine::Element* __restrict__ input,
    AnyIndices indices,
    typename Combine::Element* __restrict__ output) {
  using Traits = ForwardTraits<Combine, kOffsets, Window, kForm>;
  constexpr int kRows = Traits::kRows;
  constexpr int kAhead = Traits::kAhead;
  const Geometry<uint32_t>& geometry = tiling.geometry;
  for_each_flagged_item<!kOffsets>(tiling.items, report, [&](uint32_t item) {
    const ForwardTile tile = locate<Traits>(tiling, depth_stride, item);
    CellRow<Traits> rows[kRows];
    OutputRows<Traits> outputs[Traits::R];
    bool all_inside = true;
#pragma unroll
    for (int y = 0; y < kAhead; ++y) {
      load_row(geometry, tile, y, input, indices, rows[y]);
    }
    for_each_number<kRows>([&](auto y) {
      if constexpr (y + kAhead < kRows) {
        load_row(geometry, tile, y + kAhead, input, indices, rows[y + kAhead]);
      }
      constexpr int own_row = y - Traits::kBefore;
      if (own_row >= 0 && own_row < Traits::R) {
        all_inside &= own_indices_inside(tiling, tile, y, rows[y]);
      }
      if constexpr (Traits::kDisjoint) { // then sums have one element, which is only moved
#pragma unroll
        for (auto& value : rows[y].value) {
          value = added_to_zero(value, negative_zero);
        }
      }
#pragma unroll
      for (int i = 0; i < Traits::R; ++i) {
        combine_cells(geometry, tile, y, i, rows[y], outputs[i]);
      }
      store_complete_rows(geometry, tile, y, outputs, output);
    });
    // In 3d, the tiles of all depths of a window have the same cells, and the first one reports.
    return tile.depth_in_window == 0 && !all_inside &&
           report_own_cells<typename Traits::Own>(
               tiling,
               report.errors,
               indices,
               {{tile.depth, tile.row, tile.column}},
               tile.first_element,
               tile.cell_rows_left,
               [](uint32_t, const Decoded<uint32_t>&) {});
  });
}

} // namespace maxunpool_cuda
