// SPDX-License-Identifier: BSD-3-Clause
// Cells: which ones a thread of `forward` and of `backward` owns, and the way through a row of them
// and their neighbours. indices.cuh has the indices of cells, vector.cuh the length of a vector.
//
// Example: planes of 4 x 4 cells. The thread owns the two elements in brackets. Numbers are those
// of pooled elements.
//
//   cells              channels                      column
//
//    0  1  2  3         0  1   2  3   4  5   6  7      0  1  2  3
//   [4  5] 6  7        [8  9] 10 11  12 13  14 15      4 [5] 6  7
//    8  9 10 11        16 17  18 19  20 21  22 23      8 [9]10 11
//   12 13 14 15        24 25  26 27  28 29  30 31     12 13 14 15
//
// In the middle, a cell has two channels. Neighbouring threads own neighbouring elements: the next
// thread owns 6 and 7 on the left, 10 and 11 in the middle, and 6 and 10 on the right.
#pragma once

#include "../geometry.h"
#include "indices.cuh"
#include "vector.cuh"

#include <algorithm>
#include <cstdint>

namespace maxunpool_cuda {

enum class Elements {
  cells,    // neighbours in a row: a vector in a contiguous tensor whose rows divide into vectors
  channels, // of one cell: a vector in a channels_last tensor whose channels divide into vectors
  column,   // cells one below the other, in a tensor of any layout, width and address
};

// The elements of a thread are R rows of V cells in C channels. At most one of the three is not 1.
template <Elements kElements, int kCount>
struct Owned {
  static constexpr bool kOfCells = kElements == Elements::cells;
  static constexpr bool kOfChannels = kElements == Elements::channels;
  static constexpr int R = kElements == Elements::column ? kCount : 1;
  static constexpr int V = kOfCells ? kCount : 1;
  static constexpr int C = kOfChannels ? kCount : 1;
};

// How many cells of a row a thread owns, if it owns `outputs` outputs of a row at each: as many as
// have a vector of outputs, but no more than `most`. Example: at a cell are 2 outputs of float32,
// and a vector has 4 of them, so a thread owns 2 cells.
template <class T>
constexpr int cells_of_thread(int outputs, int most) {
  constexpr int kVector = kVectorBytes / sizeof(T);
  return std::clamp(kVector, outputs, most) / outputs;
}
// Outputs of a row that a thread owns at most: with flat indices (int64 or int32) 4, since then two
// int64 are a vector, too.
template <bool kOffsets>
constexpr int kMostOutputs = kOffsets ? 8 : 4;

// How many channels of a cell, where windows of several cells cover an output or (`disjoint`) only
// its own. With more, ptxas (nvcc 13.0, sm_90) spills: 176 bytes for 8 elements of 2 bytes, offsets
// and windows of 3x3; 228 with flat indices.
template <class T, bool kOffsets>
constexpr int channels_of_thread(bool disjoint) {
  constexpr int kVector = kVectorBytes / sizeof(T);
  return kOffsets ? std::min(kVector, disjoint ? 8 : 4) : std::min(kVector / 2, 4);
}

// How many cells of a column: so many that reading a row more for its neighbours is a quarter more.
constexpr int kRowsOfColumn = 4;

// The cells that a thread reads of one row: its own ones, kBefore to the left of these, and kAfter
// to the right. Their elements are numbered from the left: the own ones begin at kFirst.
template <class Own, int kBefore, int kAfter>
struct RowOfCells {
  static constexpr int kCells = kBefore + Own::V + kAfter;
  static constexpr int kElements = kCells * Own::C;
  static constexpr int kFirst = kBefore * Own::C;

  // Calls load.operator()<N>(first, element) for all vectors of cells that exist: elements `first`
  // to first + N - 1 of the row are neighbours in the pooled tensor, from number `element` on. The
  // own cells begin at `column` of the plane, and with element number `own`.
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

} // namespace maxunpool_cuda
