// SPDX-License-Identifier: BSD-3-Clause
// Cells: which ones a thread of `forward` and of `backward` owns, the way through a row of them and
// their neighbours, and what becomes of own cells whose indices are not in their windows. From
// tiling.cuh comes where cells lie, from report.cuh the decoder that reports, from indices.cuh what
// an index is, from vector.cuh the length of a vector.
//
// Example: planes of 4 x 4 cells. The thread owns the elements in brackets. Numbers are those of
// pooled elements.
//
//   cells              channels                      column
//
//    0  1  2  3         0  1   2  3   4  5   6  7      0 [1] 2  3
//   [4  5] 6  7        [8  9] 10 11  12 13  14 15      4 [5] 6  7
//    8  9 10 11        16 17  18 19  20 21  22 23      8 [9]10 11
//   12 13 14 15        24 25  26 27  28 29  30 31     12[13]14 15
//
// In the middle, a cell has two channels. Neighbouring threads own neighbouring elements: the next
// thread owns 6 and 7 on the left, 10 and 11 in the middle, and 2, 6, 10 and 14 on the right.
#pragma once

#include "../geometry.h"
#include "indices.cuh"
#include "report.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <algorithm>
#include <cstdint>

namespace maxunpool_cuda {

// What the elements of a thread are.
enum class Form {
  cells,    // neighbours in a row: a vector in a contiguous tensor whose rows divide into vectors
  channels, // of one cell: a vector in a channels_last tensor whose channels divide into vectors
  column,   // cells one below the other, in a tensor of any layout, width and address
};

// How many these are.
//   cells     whose outputs of a row, `outputs` at each, are a vector: but at most 8 outputs, and
//             with flat indices (int64 or int32) 4. Example: of float32, a vector has 4 outputs. If
//             there are 2 at a cell, the thread owns 2 cells, and their two int64 are a vector,
//             too.
//   channels  a vector, but at most 8, or 4 if the thread reads cells beside its own; with flat
//             indices half a vector, but at most 4. With more, ptxas (nvcc 13.0, sm_90) spills: 176
//             bytes for 8 offsets and elements of 2 bytes, and 228 with flat indices.
//   column    4 cells
template <class T, bool kOffsets, Form kForm>
constexpr int elements_of_thread(int outputs, bool reads_neighbours) {
  constexpr int kVector = kVectorBytes / sizeof(T);
  switch (kForm) {
    case Form::cells:
      return std::min(kVector, kOffsets ? 8 : 4) / outputs;
    case Form::channels:
      return kOffsets ? std::min(kVector, reads_neighbours ? 4 : 8) : std::min(kVector / 2, 4);
    default:
      return 4;
  }
}

// The elements of a thread are R rows of V cells in C channels. At most one of the three is not 1.
template <Form kForm, int kCount>
struct Owned {
  static constexpr bool kOfCells = kForm == Form::cells;
  static constexpr bool kOfChannels = kForm == Form::channels;
  static constexpr int R = kForm == Form::column ? kCount : 1;
  static constexpr int V = kOfCells ? kCount : 1;
  static constexpr int C = kOfChannels ? kCount : 1;
};

// The cells that a thread reads of one row: its own ones, kBefore to the left of these, and kAfter
// to the right. Their elements have places, counted from the left; the own ones begin at kFirst.
template <class Own, int kBefore, int kAfter>
struct RowOfCells {
  static constexpr int kCells = kBefore + Own::V + kAfter;
  static constexpr int kPlaces = kCells * Own::C;
  static constexpr int kFirst = kBefore * Own::C;

  // Calls load.operator()<N>(place, element) for all vectors of cells that exist: the places from
  // `place` to place + N - 1 have N neighbours of the pooled tensor, from number `element` on. The
  // own cells begin at `column` of the plane, and at element number `own`.
  template <class Load>
  __device__ static __forceinline__ void for_each_vector(
      const Geometry<uint32_t>& geometry,
      bool row_exists,
      uint32_t column,
      uint32_t own,
      const Load& load) {
#pragma unroll
    for (int x = 0; x < kCells; ++x) {
      const int right = x - kBefore; // of the first own cell
      const bool is_own = right >= 0 && right < Own::V;
      // Keep `|`: with `||`, a branch would stand between the loads.
      if ((is_own && right > 0) | !row_exists | !(column + right < geometry.axis[2].in)) {
        continue;
      }
      // Of a row in a contiguous tensor, the neighbours of an address are constants away.
      const int64_t element =
          Own::kOfCells ? int64_t{own} + right : int64_t{own + right * geometry.inner};
      if (is_own) {
        load.template operator()<Own::V * Own::C>(kFirst, element);
      } else {
        load.template operator()<Own::C>(x * Own::C, element);
      }
    }
  }
};

// Decodes the indices of the own cells, reports those that are out of bounds, and calls
// visit(element, decoded) for each. Returns whether one is not in its window. The cells begin at
// `cell`, with number `element` of the pooled tensor, and `rows` rows of them exist.
template <class Own, class Visit>
__device__ __forceinline__ bool report_own_cells(
    const Tiling<uint32_t>& tiling,
    const Errors& errors,
    const AnyIndices& indices,
    const Position<uint32_t>& cell,
    uint32_t element,
    int rows,
    const Visit& visit) {
  const uint32_t next_row = tiling.geometry.axis[2].in * tiling.geometry.inner;
  bool all_inside = true;
#pragma unroll 1 // rare, so short code counts
  for (int n = 0; n < Own::R * Own::V * Own::C; ++n) {
    const int row = Own::R > 1 ? n : 0;
    if (row >= rows) {
      break;
    }
    const uint32_t column = cell[2] + (Own::V > 1 ? n : 0);
    const uint32_t at = element + n * (Own::R > 1 ? next_row : 1);
    const auto start = tiling.window_start({{cell[0], cell[1] + row, column}});
    const auto found = decoded_or_reported(tiling, errors, indices, at, start);
    all_inside &= found.in_window;
    visit(at, found);
  }
  return !all_inside;
}

} // namespace maxunpool_cuda
