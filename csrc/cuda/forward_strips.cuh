// SPDX-License-Identifier: BSD-3-Clause
// Unpooling of windows of 3x3 or 5x5 outputs, 1 apart, padded on all sides by half a window, in one
// pass over the output. As in forward.cuh, each output has one owner, a thread, which reads all
// cells whose windows cover it. Here so many windows cover an output that neighbouring outputs have
// most of their cells in common. So a thread owns a strip: 4 outputs of a column, one below the
// other, and the 4 cells at the same places.
//
// Example: 3x3 windows. The thread that owns the outputs o (rows 4 to 7 of column 2) reads the 18
// cells of rows 3 to 8 and columns 1 to 3, row after row:
//
//   column   0 1 2 3 4       The window of cell (4, 1) begins at row 3 and column 0. Output (4, 2)
//   row 3    . c c c .       is in row 1 and column 2 of that window, so window offset 5 of that
//   row 4    . c o c .       cell names it; so does, in rows of 10 outputs, flat index 42.
//   row 5    . c o c .
//   row 6    . c o c .       Each output has 9 such cells. For output (4, 2) they are rows 3 to 5
//   row 7    . c o c .       of the cells c and o, and the indices that it looks for there are
//   row 8    . c c c .       the offsets 8 7 6, 5 4 3, 2 1 0, or index 42 in each.
//
// Neighbouring threads own neighbouring columns (in channels_last, channels), so they access
// neighbouring elements whatever the width and the alignment of a row.
//
// The thread also checks the indices of its own cells, as in forward.cuh: first by comparisons, and
// if these doubt one, by the decoder of indices.cuh. From combine.cuh comes how elements add up,
// from tiling.cuh which strip a thread owns, from report.cuh the loop over a thread's strips, which
// also writes the flags.
#pragma once

#include "combine.cuh"
#include "indices.cuh"
#include "report.cuh"
#include "tiling.cuh"

#include <algorithm>
#include <cstdint>

namespace maxunpool_cuda {

// Outputs of a strip.
constexpr int kStrip = 4;

// All that is fixed when the kernel is compiled, for windows of kKernel rows and columns.
template <class Combine, bool kWindowOffsets, int kKernel>
struct StripTraits {
  using Element = typename Combine::Element;

  static constexpr bool kOffsets = kWindowOffsets; // indices are window offsets, else positions
  static constexpr int K = kKernel;
  static constexpr int P = kKernel / 2;        // padding; cell (r, c) is the middle of its window
  static constexpr int kRows = kStrip + 2 * P; // of cells, whose windows cover outputs of a strip
  // Rows of cells that are loaded before the thread looks at the first: as many as 24 registers
  // hold, with an index and a value for each of the K cells of a row.
  static constexpr int kAhead = std::min(kRows, 24 / (2 * K));
};

// What locate_strip() finds out about a thread's strip.
template <class Traits>
struct Strip {
  uint32_t row; // of its first output, and of its first own cell
  uint32_t column;
  uint32_t first_element;        // the number of that cell in the pooled tensor
  uint32_t first_output;         // the number of that output in the unpooled tensor
  bool column_exists[Traits::K]; // of the cells around the strip
};

template <class Traits>
__device__ __forceinline__ Strip<Traits> locate_strip(
    const Tiling<uint32_t>& tiling, uint32_t item) {
  const Geometry<uint32_t>& geometry = tiling.geometry;
  const auto& [depth, height, width] = geometry.axis;
  const auto [outer, tile, channel] = tiling.item(item, geometry.inner != 1, false);
  Strip<Traits> strip;
  strip.row = kStrip * tile[1];
  strip.column = tile[2];
  strip.first_element = tiling.pooled(outer, {{0, strip.row, strip.column}}, channel);
  strip.first_output =
      ((outer * height.out + strip.row) * width.out + strip.column) * geometry.inner + channel;
#pragma unroll
  for (int x = 0; x < Traits::K; ++x) {
    strip.column_exists[x] = strip.column + x - Traits::P < width.in; // below 0, it wraps around
  }
  return strip;
}

// A row of cells around a strip. Of an index of 64 bits, it has the lower half. An index whose
// upper half is not 0 is out of bounds, but its lower half may name an output: that of 2^32 + 5
// names output 5. So the owner of the cell looks at the upper half, too, and flags the chunk, as
// for an index out of window. The fix-up kernel then repairs output 5.
template <class Traits>
struct CellRow {
  uint32_t index[Traits::K]; // of a cell that does not exist, kNowhere
  uint32_t upper_half;       // of the index of the strip's own cell; of 32 bits, the index itself
  typename Traits::Element value[Traits::K];
};

// Loads row y of the cells around a strip. (The values of cells that do not exist are never used.)
template <class Traits>
__device__ __forceinline__ void load_row(
    const Geometry<uint32_t>& geometry,
    const Strip<Traits>& strip,
    int y,
    const typename Traits::Element* input,
    const AnyIndices& indices,
    CellRow<Traits>& cells) {
  const auto& [depth, height, width] = geometry.axis;
  const int down = y - Traits::P; // from the first own cell
  const bool row_exists = strip.row + down < height.in;
  // 64 bits, and indices as bytes: then one addition leads from an address to the next.
  const int64_t next = geometry.inner;
  const int64_t first = strip.first_element + (down * int64_t{width.in} - Traits::P) * next;
  const int64_t index_bytes = Traits::kOffsets ? 1 : indices.bytes;
  const typename Traits::Element* value = input + first;
  const char* index = static_cast<const char*>(indices.data) + first * index_bytes;
  cells.upper_half = 0;
#pragma unroll
  for (int x = 0; x < Traits::K; ++x, value += next, index += next * index_bytes) {
    cells.index[x] = kNowhere;
    cells.value[x] = {};
    // Keep `|`: `||` compiles to a branch between the loads.
    if (!row_exists | !strip.column_exists[x]) {
      continue;
    }
    cells.value[x] = *value;
    if constexpr (Traits::kOffsets) {
      cells.index[x] = *reinterpret_cast<const uint8_t*>(index);
    } else {
      cells.index[x] = *reinterpret_cast<const uint32_t*>(index);
      if (x == Traits::P && down >= 0 && down < kStrip) {
        // The last 4 bytes of the index.
        cells.upper_half = *reinterpret_cast<const uint32_t*>(index + index_bytes - 4);
      }
    }
  }
}

// Combines into each output of the strip the elements of row y whose indices name it.
template <class Traits, class Combine>
__device__ __forceinline__ void combine_cells(
    const Geometry<uint32_t>& geometry,
    const Strip<Traits>& strip,
    int y,
    const CellRow<Traits>& cells,
    Combine (&outputs)[kStrip]) {
  constexpr int K = Traits::K;
#pragma unroll
  for (int x = 0; x < K; ++x) {
    const auto value = static_cast<typename Combine::Register>(cells.value[x]);
#pragma unroll
    for (int i = 0; i < kStrip; ++i) {
      const int row_in_window = i - y + 2 * Traits::P;
      if (row_in_window < 0 || row_in_window >= K) {
        continue;
      }
      const uint32_t offset = row_in_window * K + (K - 1 - x);
      const uint32_t position = (strip.row + i) * geometry.axis[2].out + strip.column;
      outputs[i].add_if(cells.index[x] == (Traits::kOffsets ? offset : position), value);
    }
  }
}

// Whether the window offset is in the window that begins at that row and column. It is
// decoded_offset() for a window whose size is known.
template <class Traits>
__device__ __forceinline__ bool offset_inside(
    const Geometry<uint32_t>& geometry, uint32_t top, uint32_t left, uint32_t offset) {
  constexpr uint32_t K = Traits::K;
  const auto& [depth, height, width] = geometry.axis;
  return (offset < K * K) & (top + offset / K < height.out) & (left + offset % K < width.out);
}

// Whether the position is in the window that begins at that row and column: 0 to K - 1 beyond the
// begin of one of its K rows, in a column that is not clipped. May doubt a good one if rows are
// shorter than K.
template <class Traits>
__device__ __forceinline__ bool position_inside(
    const Tiling<uint32_t>& tiling, uint32_t top, uint32_t left, uint32_t position) {
  const auto& [depth, height, width] = tiling.geometry.axis;
  // Each minimum takes off a row, if the position lies that far. If it does not, the difference
  // wraps around, and is not the minimum. What is left is a column of the window.
  uint32_t distance = position - top * width.out - left;
#pragma unroll
  for (int i = 1; i < Traits::K; ++i) {
    distance = std::min(distance, distance - width.out);
  }
  return (position < tiling.out_plane) & (distance < Traits::K) & (left + distance < width.out);
}

// Whether the index of the strip's own cell in row y is in its window, or there is no such cell.
// May doubt a good index.
template <class Traits>
__device__ __forceinline__ bool own_index_inside(
    const Tiling<uint32_t>& tiling,
    const Strip<Traits>& strip,
    int y,
    const AnyIndices& indices,
    const CellRow<Traits>& cells) {
  const uint32_t row = strip.row + y - Traits::P;
  const uint32_t top = row - Traits::P;
  const uint32_t left = strip.column - Traits::P;
  const uint32_t index = cells.index[Traits::P];
  bool inside;
  if constexpr (Traits::kOffsets) {
    inside = offset_inside<Traits>(tiling.geometry, top, left, index);
  } else {
    inside = position_inside<Traits>(tiling, top, left, index);
    inside &= (indices.bytes != sizeof(int64_t)) | (cells.upper_half == 0);
  }
  return inside | (row >= tiling.geometry.axis[1].in) | !strip.column_exists[Traits::P];
}

// Reports the out-of-bounds indices of the strip's own cells. Returns whether the image needs the
// fix-up kernel.
template <class Traits>
__device__ __forceinline__ bool report_own_cells(
    const Tiling<uint32_t>& tiling,
    const Strip<Traits>& strip,
    const AnyIndices& indices,
    const Errors& errors) {
  const auto& [depth, height, width] = tiling.geometry.axis;
  bool all_inside = true;
#pragma unroll 1 // rare, so short code counts
  for (uint32_t i = 0; i < kStrip && strip.row + i < height.in; ++i) {
    const uint32_t element = strip.first_element + i * width.in * tiling.geometry.inner;
    const auto start = tiling.window_start({{0, strip.row + i, strip.column}});
    all_inside &= decoded_or_reported(tiling, errors, indices, element, start).in_window;
  }
  return !all_inside;
}

// Stores the strip's outputs, as far as they exist.
template <class Combine, class Traits>
__device__ __forceinline__ void store_strip(
    const Geometry<uint32_t>& geometry,
    const Strip<Traits>& strip,
    const Combine (&outputs)[kStrip],
    typename Traits::Element* output) {
  const auto& [depth, height, width] = geometry.axis;
#pragma unroll
  for (int i = 0; i < kStrip; ++i) {
    if (strip.row + i < height.out && strip.column < width.out) {
      output[strip.first_output + i * width.out * geometry.inner] = outputs[i].result();
    }
  }
}

// Unpools a call whose numbers fit 32 bits: one work item of `tiling` is one strip. 768 threads on
// a processor leave 80 registers for each. With 64, ptxas spills in some forms.
template <class Combine, bool kOffsets, int K>
__global__ void __launch_bounds__(kThreads, 768 / kThreads) forward_strips(
    Tiling<uint32_t> tiling,
    Report report,
    const typename Combine::Element* __restrict__ input,
    AnyIndices indices,
    typename Combine::Element* __restrict__ output) {
  using Traits = StripTraits<Combine, kOffsets, K>;
  const Geometry<uint32_t>& geometry = tiling.geometry;
  for_each_flagged_item<!kOffsets>(tiling.items, report, [&](uint32_t item) {
    const auto strip = locate_strip<Traits>(tiling, item);
    CellRow<Traits> rows[Traits::kRows];
    Combine outputs[kStrip];
    bool all_inside = true;
#pragma unroll
    for (int y = 0; y < Traits::kAhead; ++y) {
      load_row(geometry, strip, y, input, indices, rows[y]);
    }
#pragma unroll
    for (int y = 0; y < Traits::kRows; ++y) {
      if (y + Traits::kAhead < Traits::kRows) {
        load_row(geometry, strip, y + Traits::kAhead, input, indices, rows[y + Traits::kAhead]);
      }
      combine_cells(geometry, strip, y, rows[y], outputs);
      if (y >= Traits::P && y < Traits::P + kStrip) {
        all_inside &= own_index_inside(tiling, strip, y, indices, rows[y]);
      }
    }
    store_strip(geometry, strip, outputs, output);
    return !all_inside && report_own_cells(tiling, strip, indices, report.errors);
  });
}

} // namespace maxunpool_cuda
