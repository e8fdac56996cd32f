// SPDX-License-Identifier: BSD-3-Clause
// Gradient of the input: each pooled element gets the gradient of the output that its index names.
// A thread writes each element that it owns once. If an index is out of window, the thread flags
// that (see Report), and the fix-up kernel rewrites the image.
//
// A thread owns two to eight neighbours, or four cells of a column (cells.cuh). It gathers: it
// reads the gradient where its indices lead. Of a contiguous tensor with windows of 2x2, threads
// 0, 1, 2 .. of a warp own and read
//
//   indices, grad_input    grad_output
//   0 0 1 1 2 2 ..         0 0 0 0 1 1 1 1 2 2 2 2 ..    of each window, the element that the index
//                          0 0 0 0 1 1 1 1 2 2 2 2 ..    names
//
// If windows overlap, several cells may name one output. "last" gives its gradient to the last of
// them, and 0 to the others, the losers. So a thread compares an index with those of four later
// cells. Example: windows of 3x3, 2 apart; cells
//
//   a b c    The windows of c, d, e and f share outputs with that of b, which the thread of b owns.
//   d e f    If b and e both name output 57, e gets its gradient, and b gets 0.
//
// What it takes from others: tiling.cuh places a thread's cells, cells.cuh and indices.cuh read and
// decode indices, and report.cuh has the loop over a thread's items, whose flags it writes.
#pragma once

#include "../geometry.h"
#include "assert.cuh"
#include "cells.cuh"
#include "indices.cuh"
#include "report.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <cstdint>

namespace maxunpool_cuda {

// The way from a cell to another: so many rows down, and so many cells to the right.
struct Step {
  int down;
  int right;
};
// The later cells whose windows may overlap a cell's, if kernels are at most twice the strides. (A
// function, since device code cannot read an array of the host by a number.)
constexpr int kLaterCells = 4;
MAXUNPOOL_HOST_DEVICE constexpr Step step_to_later(int n) {
  constexpr Step kLater[kLaterCells] = {{0, 1}, {1, -1}, {1, 0}, {1, 1}};
  return kLater[n];
}

// What the host computes for the kernel.
struct BackwardPlan {
  bool takes_out_of_window; // out-of-window indices are valid: "sum"
  // For each later cell, a bit for each offset of the window of an earlier one: whether the later
  // cell's window covers the same output. See set_common_offsets().
  uint32_t common_offsets[kLaterCells];
};

constexpr int64_t kMostCommonOffsets = 32; // bits of BackwardPlan::common_offsets

// Whether the kernel can tell who loses: windows overlap no later windows than those of
// step_to_later(), and common_offsets has a bit for each offset.
inline bool overlaps_near_cells_only(const Geometry<int64_t>& geometry) {
  const auto& [depth, height, width] = geometry.axis;
  return depth.kernel == 1 && height.kernel <= 2 * height.stride &&
         width.kernel <= 2 * width.stride && height.kernel <= kMostCommonOffsets / width.kernel;
}

// Sets plan.common_offsets, which was 0, for windows with overlaps_near_cells_only(). Of a window
// of 3x3, 2 apart, the cell to the right covers offsets 2, 5 and 8, too: its bits are 0b100100100.
inline void set_common_offsets(BackwardPlan& plan, const Geometry<int64_t>& geometry) {
  const auto& [depth, height, width] = geometry.axis;
  for (int n = 0; n < kLaterCells; ++n) {
    // Where the later window begins, as a row and a column of the earlier one.
    const int64_t down = step_to_later(n).down * height.stride;
    const int64_t right = step_to_later(n).right * width.stride;
    for (int64_t offset = 0; offset < height.kernel * width.kernel; ++offset) {
      const int64_t row = offset / width.kernel;
      const int64_t column = offset % width.kernel;
      const bool is_common = row >= down && column >= right && column < width.kernel + right;
      plan.common_offsets[n] |= is_common ? 1u << offset : 0;
    }
  }
}

// What a thread owns; as much as with two outputs of a row at each cell, since these move vectors
// of the same lengths.
template <class T, bool kOffsets, bool kDropsLosers, Form kForm>
using OwnedByBackward = Owned<kForm, elements_of_thread<T, kOffsets, kForm>(2, kDropsLosers)>;

// All that is fixed when `backward` is compiled.
template <class T, bool kWindowOffsets, bool kDropsLosers, Form kForm>
struct BackwardTraits : OwnedByBackward<T, kWindowOffsets, kDropsLosers, kForm> { // has R, V, C
  using Own = OwnedByBackward<T, kWindowOffsets, kDropsLosers, kForm>;
  static constexpr bool kOffsets = kWindowOffsets; // indices are window offsets, else positions
  // Cells to the right, to the left and below share outputs with the own ones.
  static constexpr int kBeside = kDropsLosers ? 1 : 0;
  using Row = RowOfCells<Own, kBeside, kBeside>;
  static constexpr int kRows = Own::R + kBeside; // of cells that are read
  static constexpr int kOfRow = Own::V * Own::C; // own elements
};

// What a thread owns, and the indices that it reads.
template <class Traits>
struct OwnedCells {
  Position<uint32_t> cell; // the first
  uint32_t rows;           // how many rows exist, from the first on; may exceed R
  uint32_t element;        // number of the first element in the pooled tensor
  uint32_t next_row;       // from an element to that of the next row
  uint32_t output;         // number of the first element of its plane in the unpooled tensor
  // Those of cells that do not exist are kNowhere.
  uint32_t index[Traits::kRows][Traits::Row::kPlaces];
  uint32_t upper_halves; // of the own ones, or-ed: see load_indices()
};

// The cells of an item of the tiling. Loads all indices before one is looked at.
template <class Traits>
__device__ __forceinline__ OwnedCells<Traits> owned_cells(
    const Tiling<uint32_t>& tiling, const AnyIndices& indices, uint32_t item) {
  const Geometry<uint32_t>& geometry = tiling.geometry;
  const auto& [depth, height, width] = geometry.axis;
  const auto [outer, tile, channel_vector] =
      tiling.item(item, !Traits::kOfCells && geometry.inner != 1, tiling.deep);
  const uint32_t channel = Traits::C * channel_vector;
  OwnedCells<Traits> own;
  own.cell = {{tile[0], Traits::R * tile[1], Traits::V * tile[2]}};
  own.rows = height.in - own.cell[1];
  own.element = tiling.pooled(outer, own.cell, channel);
  own.next_row = width.in * geometry.inner;
  own.output = outer * tiling.out_plane * geometry.inner + channel;
  own.upper_halves = 0;
  MAXUNPOOL_ASSERT(own.element < geometry.outer * geometry.in_image());
#pragma unroll
  for (uint32_t y = 0; y < Traits::kRows; ++y) {
#pragma unroll
    for (uint32_t& index : own.index[y]) {
      index = kNowhere;
    }
    Traits::Row::for_each_vector(
        geometry,
        y < own.rows,
        own.cell[2],
        own.element + y * own.next_row,
        [&]<int N>(int place, int64_t element) {
          uint32_t index[N];
          const uint32_t upper_halves = load_indices<Traits::kOffsets>(indices, element, index);
          const bool is_own = place == Traits::Row::kFirst && y < Traits::R;
          own.upper_halves |= is_own ? upper_halves : 0;
#pragma unroll
          for (int n = 0; n < N; ++n) {
            own.index[y][place + n] = index[n];
          }
        });
  }
  return own;
}

// Gathers the gradients that the indices of the thread's elements name. Returns whether all indices
// are valid. The gradient of one that is not means nothing, and drop_invalid() makes it 0.
template <class Traits, class T>
__device__ __forceinline__ bool gather(
    const Tiling<uint32_t>& tiling,
    bool takes_out_of_window,
    const T* grad_output,
    const OwnedCells<Traits>& own,
    T (&grad)[Traits::R][Traits::kOfRow]) {
  const Geometry<uint32_t>& geometry = tiling.geometry;
  bool all_valid = own.upper_halves == 0;
#pragma unroll
  for (uint32_t y = 0; y < Traits::R; ++y) {
#pragma unroll
    for (uint32_t n = 0; n < Traits::kOfRow; ++n) {
      const uint32_t right = Traits::kOfCells ? n : 0;
      const uint32_t channel = Traits::kOfChannels ? n : 0;
      const auto start = tiling.window_start({{own.cell[0], own.cell[1] + y, own.cell[2] + right}});
      const uint32_t index = own.index[y][Traits::Row::kFirst + n];
      const auto named = decoded<Traits::kOffsets>(tiling, index, start);
      const bool is_valid = takes_out_of_window ? named.in_plane : named.in_window;
      all_valid &= is_valid | (y >= own.rows);
      const uint32_t target = is_valid ? named.target : 0;
      const uint32_t element = own.output + target * geometry.inner + channel;
      MAXUNPOOL_ASSERT(element < geometry.outer * geometry.out_image());
      grad[y][n] = grad_output[element];
    }
  }
  return all_valid;
}

// Sets the gradient of an element to 0 if a later cell of its plane names the same output.
template <class Traits, class T>
__device__ __forceinline__ void drop_losers(
    const Geometry<uint32_t>& geometry,
    const BackwardPlan& plan,
    const OwnedCells<Traits>& own,
    T (&grad)[Traits::R][Traits::kOfRow]) {
  const auto& [depth, height, width] = geometry.axis;
#pragma unroll
  for (int later = 0; later < kLaterCells; ++later) {
    // In the later window, the offset of the same output is less by so much: of 3x3 windows, 2
    // apart, offset 8 of a cell is offset 6 of the cell to the right, and offset 2 of the cell
    // below. For the cell on the lower left, 2 * 3 - 2 = 4.
    const int down = step_to_later(later).down;
    const int right = step_to_later(later).right;
    const uint32_t less = down * height.stride * width.kernel + right * width.stride;
#pragma unroll
    for (int y = 0; y < Traits::R; ++y) {
#pragma unroll
      for (int n = 0; n < Traits::kOfRow; ++n) {
        const int element = Traits::Row::kFirst + n;
        const uint32_t index = own.index[y][element];
        const uint32_t of_later = own.index[y + down][element + right * Traits::C];
        bool same = of_later == index;
        if constexpr (Traits::kOffsets) {
          same = of_later + less == index && (plan.common_offsets[later] >> index % 32 & 1) != 0;
        }
        grad[y][n] = same ? T{} : grad[y][n];
      }
    }
  }
}

// Sets the gradients of invalid indices to 0, and reports those that are out of bounds. Returns
// whether the image needs the fix-up kernel.
template <class Traits, class T>
__device__ __forceinline__ bool drop_invalid(
    const Tiling<uint32_t>& tiling,
    bool takes_out_of_window,
    const Errors& errors,
    const AnyIndices& indices,
    const OwnedCells<Traits>& own,
    T* grad_input) {
  return report_own_cells<typename Traits::Own>(
      tiling,
      errors,
      indices,
      own.cell,
      own.element,
      static_cast<int>(own.rows),
      [&](uint32_t element, const Decoded<uint32_t>& found) {
        if (takes_out_of_window ? !found.in_plane : !found.in_window) {
          grad_input[element] = T{};
        }
      });
}

// Gradient of a call whose numbers fit 32 bits. kOffsets: indices are uint8. kDropsLosers: the
// gradient of "last" for windows with overlaps_near_cells_only(); else each cell gets its gradient.
// 1024 threads on a processor leave 64 registers for each.
template <class T, bool kOffsets, bool kDropsLosers, Form kForm>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads) backward(
    Tiling<uint32_t> tiling,
    Report report,
    BackwardPlan plan,
    const T* __restrict__ grad_output,
    AnyIndices indices,
    T* __restrict__ grad_input) {
  using Traits = BackwardTraits<T, kOffsets, kDropsLosers, kForm>;
  const bool takes_out_of_window = !kDropsLosers && plan.takes_out_of_window;
  for_each_flagged_item<!kOffsets>(tiling.items, report, [&](uint32_t item) {
    const auto own = owned_cells<Traits>(tiling, indices, item);
    T grad[Traits::R][Traits::kOfRow];
    const bool all_valid = gather(tiling, takes_out_of_window, grad_output, own, grad);
    if constexpr (kDropsLosers) {
      drop_losers(tiling.geometry, plan, own, grad);
    }
#pragma unroll
    for (uint32_t y = 0; y < Traits::R; ++y) {
      if (y < own.rows) {
        store_registers(grad_input + own.element + y * own.next_row, grad[y]);
      }
    }
    return !all_valid &&
           drop_invalid(tiling, takes_out_of_window, report.errors, indices, own, grad_input);
  });
}

} // namespace maxunpool_cuda
