// SPDX-License-Identifier: BSD-3-Clause
// Kernels of max pooling. pool_elements.cuh has the comparison of two elements and the store,
// tiling.cuh the items of a thread, vector.cuh the loads of several neighbours at once, divider.cuh
// the division by a dilation. max_pool.cuh chooses the kernel; large windows have pool_lanes.cuh.
// As in all of csrc, `out` is the unpooled side, which is the input here, and `in` the pooled one.
//
// pool_rows, for contiguous tensors: 2x2 or 3x3 windows without dilation. A thread owns kRows x
// kColumns windows, and reads the rows of the input that they cover once. Example: 3x3 windows, 2
// apart, padding 1. The thread that owns windows 2 and 3 of a row of windows reads of a row of the
// input:
//
//      column         3   4   5   6   7      elements 4 to 7 are one vector; 3 is read by itself
//      element        5 | 3   9   4   9
//      window 2      [5   3   9]             its best of this row: 9, of column 5
//      window 3              [9   4   9]     its best of this row: 9, of column 5, the first of two
//
//   The best of a window is then the best of its three rows. If kRows is 2, five rows are read, and
//   the third one counts for the windows above and below.
//
// pool_channels, for channels_last tensors: 2x2 or 3x3 windows without dilation. A thread owns one
// window in kChannels channels, which are one vector in each element of the window.
//
// pool_windows, for all else: a thread owns one window of one channel, of any size and dilation. It
// looks at one element after the other.
#pragma once

#include "../geometry.h"
#include "device.cuh"
#include "divider.cuh"
#include "pool_elements.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <cstdint>

namespace maxunpool_cuda {

// The coordinate nearest to this one that is in [0, size); a coordinate below 0 has wrapped around.
// Where a window without dilation leaves the input, it so reads one of its own elements again,
// under that element's index, and its maximum stays the same.
__device__ inline uint32_t clamped(uint32_t coordinate, uint32_t size) {
  const auto wanted = static_cast<int32_t>(coordinate);
  const auto last = static_cast<int32_t>(size - 1);
  const int32_t not_negative = wanted > 0 ? wanted : 0;
  return static_cast<uint32_t>(not_negative < last ? not_negative : last);
}

// A row of the input that the windows of a thread cover.
struct InputRow {
  int number;        // from 0, the first row of the thread's first window, on
  uint32_t position; // of its first element, in the plane
  uint32_t index;    // of its first element: the position, or the window offset in the first window
  bool is_first;     // of the first depth slice of the windows
};

// Calls visit(InputRow) for kInputRows rows in each depth slice of windows of kKernel rows and
// columns, which begin at `front` and `top`, without dilation. A row or a slice outside the input
// is replaced by the nearest one, with its index (see clamped). kPeels: the first slice has code of
// its own, in which is_first is known. That takes fewer registers in pool_rows, and more in
// pool_channels.
template <int kKernel, int kInputRows, bool kPeels, class Visit>
__device__ inline void for_each_row(
    const Geometry<uint32_t>& geometry,
    uint32_t front,
    uint32_t top,
    bool as_offsets,
    const Visit& visit) {
  const auto& [depth, height, width] = geometry.axis;
  const auto visit_slice = [&](uint32_t slice, bool is_first) {
    const uint32_t z = clamped(front + slice, depth.out);
#pragma unroll
    for (int number = 0; number < kInputRows; ++number) {
      const uint32_t y = clamped(top + number, height.out);
      const uint32_t position = (z * height.out + y) * width.out;
      // Computed even if it is not used: else nvcc compiles the loop twice, and one kernel spills
      // (sm_100).
      const uint32_t offset = ((z - front) * kKernel + y - top) * kKernel;
      visit(
          InputRow{
              .number = number,
              .position = position,
              .index = as_offsets ? offset : position,
              .is_first = is_first});
    }
  };
  if (kPeels) {
    visit_slice(0, true);
  }
#pragma unroll 1
  for (uint32_t slice = kPeels ? 1 : 0; slice < depth.kernel; ++slice) {
    visit_slice(slice, !kPeels && slice == 0);
  }
}

// What pool_rows is compiled for: windows of kKernel rows and columns, kStride apart, of which a
// thread owns kRows x kColumns.
//
// kVectors: rows, of the input and of the windows, divide into vectors, and a thread's first window
// begins where its vector does, or one element left of it if kKernel is 3. Else kColumns is 1, and
// any padding will do: neighbouring threads still write neighbouring elements, and an input row
// that two rows of windows cover is read once.
//
// In the example at the top, kKernel is 3 and kColumns 2 (of float32), so kVector is 4,
// kInputColumns 5 and kBefore 1. The thread has tile 1, so `left` is 3, and `columns` are 0 to 4.
template <class T, int kKernel, int kStride, int kColumns, int kRows, bool kVectors>
struct PoolRows {
  static_assert(kVectors ? kStride == 2 : kColumns == 1);
  static constexpr int kVector = kColumns * kStride; // input columns from one thread to the next
  static constexpr int kInputColumns = (kColumns - 1) * kStride + kKernel; // that a thread reads
  static constexpr int kInputRows = (kRows - 1) * kStride + kKernel;       // in a depth slice
  static constexpr int kBefore = kVectors ? kKernel - kStride : 0; // columns before the vector

  using Candidates = Candidate<T>[kRows][kColumns];

  uint32_t left;                   // where the first window begins; may wrap around
  uint32_t columns[kInputColumns]; // to read; counted from `left` if kVectors, else from 0

  // For the thread's tile at this number in its row.
  __device__ PoolRows(const Axis<uint32_t>& width, uint32_t tile) {
    left = tile * kVector - (kVectors ? kBefore : width.padding);
#pragma unroll
    for (int i = 0; i < kInputColumns; ++i) {
      if constexpr (kVectors) {
        // In place of a column left of the input, the next one is read twice.
        columns[i] = kBefore == 1 && i == 0 && tile == 0 ? 1 : i;
      } else {
        columns[i] = clamped(left + i, width.out);
      }
    }
  }

  // Loads the row of the input that begins at this position of the plane. kVectors: `plane` begins
  // at the vector's column.
  __device__ void load_row(
      const T* plane, uint32_t position, Element<T> (&elements)[kInputColumns]) const {
    if constexpr (kVectors) {
      const T* vector = plane + position;
      unpack(load<kVector>(vector), elements + kBefore);
      if constexpr (kBefore != 0) {
        elements[0] = Element<T>::of(vector[static_cast<int32_t>(columns[0]) - 1]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kInputColumns; ++i) {
        elements[i] = Element<T>::of(plane[position + columns[i]]);
      }
    }
  }

  // Compares a row of the input with the candidates of the windows that cross it.
  __device__ void update(
      Candidates& candidates,
      const Element<T> (&elements)[kInputColumns],
      const InputRow& row) const {
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      const int first = column * kStride;
      Candidate<T> of_row{elements[first], columns[first]};
#pragma unroll
      for (int i = first + 1; i < first + kKernel; ++i) {
        of_row.update(elements[i], columns[i]);
      }
#pragma unroll
      for (int window_row = 0; window_row < kRows; ++window_row) {
        const int top = window_row * kStride;
        if (row.number >= top && row.number < top + kKernel) {
          candidates[window_row][column].update(
              of_row.value, row.index + of_row.index, row.is_first && row.number == top);
        }
      }
    }
  }

  // What is added in the end to the index of a candidate, which until then is InputRow::index plus
  // one of `columns`.
  // - An offset has to count from its own window: take off the offset at which this window begins
  //   in the thread's first one; and `left`, unless `columns` count from there.
  // - A position has to count columns from the input's begin: add `left`, if they count from there.
  __device__ uint32_t index_correction(bool as_offsets, int window_row, int column) const {
    const uint32_t of_offset =
        (kVectors ? 0 : -left) - (window_row * kStride * kKernel + column * kStride);
    const uint32_t of_position = kVectors ? left : 0;
    return as_offsets ? of_offset : of_position;
  }
};

template <class T, int kKernel, int kStride, int kColumns, int kRows, bool kVectors>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads)
    pool_rows(Tiling<uint32_t> tiling, const T* __restrict__ input, PoolResult<T> result) {
  using Rows = PoolRows<T, kKernel, kStride, kColumns, kRows, kVectors>;
  for_each_item(tiling.items, [&](uint32_t item) {
    const auto& [depth, height, width] = tiling.geometry.axis;
    const bool as_offsets = result.takes_offsets();
    const auto [outer, tile, channel] = tiling.item(item, false, tiling.geometry.rank == 3);
    const uint32_t top = tile[1] * (kRows * kStride) - height.padding;
    const uint32_t front = tile[0] * depth.stride - depth.padding;
    const T* plane = input + outer * tiling.out_plane + (kVectors ? tile[2] * Rows::kVector : 0);
    const Rows rows(width, tile[2]);
    typename Rows::Candidates candidates{};
    for_each_row<kKernel, Rows::kInputRows, true>(
        tiling.geometry, front, top, as_offsets, [&](const InputRow& row) {
          Element<T> elements[Rows::kInputColumns];
          rows.load_row(plane, row.position, elements);
          rows.update(candidates, elements, row);
        });
    const uint32_t first =
        tiling.pooled(outer, {{tile[0], tile[1] * kRows, tile[2] * kColumns}}, 0);
#pragma unroll
    for (int window_row = 0; window_row < kRows; ++window_row) {
      if (window_row == 0 || tile[1] * kRows + window_row < height.in) {
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
          candidates[window_row][column].index +=
              rows.index_correction(as_offsets, window_row, column);
        }
        result.store_candidates(first + window_row * width.in, candidates[window_row]);
      }
    }
  });
}

// Windows of kKernel elements in width and height (or 1, in inputs of one row), without dilation.
template <class T, int kKernel, int kChannels>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads)
    pool_channels(Tiling<uint32_t> tiling, const T* __restrict__ input, PoolResult<T> result) {
  for_each_item(tiling.items, [&](uint32_t item) {
    const Geometry<uint32_t>& geometry = tiling.geometry;
    const bool as_offsets = result.takes_offsets();
    const auto [outer, cell, channel_vector] = tiling.item(item);
    const uint32_t channel = channel_vector * kChannels;
    const auto [front, top, left] = tiling.window_start(cell).at;
    const T* plane = input + (outer * tiling.out_plane * geometry.inner + channel);
    uint32_t columns[kKernel];
#pragma unroll
    for (int i = 0; i < kKernel; ++i) {
      columns[i] = clamped(left + i, geometry.axis[2].out);
    }
    Candidate<T> candidates[kChannels]{};
    for_each_row<kKernel, kKernel, false>(
        geometry, front, top, as_offsets, [&](const InputRow& row) {
          Element<T> elements[kKernel][kChannels];
#pragma unroll
          for (int i = 0; i < kKernel; ++i) {
            const T* address = plane + (row.position + columns[i]) * geometry.inner;
            unpack(load<kChannels>(address), elements[i]);
          }
#pragma unroll
          for (int c = 0; c < kChannels; ++c) {
            Candidate<T> of_row{elements[0][c], columns[0]};
#pragma unroll
            for (int i = 1; i < kKernel; ++i) {
              of_row.update(elements[i][c], columns[i]);
            }
            const bool is_first = row.is_first && row.number == 0;
            candidates[c].update(of_row.value, row.index + of_row.index, is_first);
          }
        });
    if (as_offsets) { // columns were counted from 0 on, and not from the window's first
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        candidates[c].index -= left;
      }
    }
    result.store_candidates(tiling.pooled(outer, cell, channel), candidates);
  });
}

// Dilation, which the geometry does not say: steps between the elements of a window. Offset is as
// in Decoder.
template <class Offset>
struct Dilation {
  struct Range {
    Offset first;
    Offset end;
  };

  Divider<Offset> axis[3];

  __device__ Offset step(int a) const { return axis[a].divisor(); }

  // Which elements of a cell's window lie in the input, in dimension `a`: numbers [first, end). Of
  // a window of 3 elements, 2 apart, that begins at -1 in an input of 4, elements 1 and 2 do, at
  // coordinates 1 and 3.
  __device__ Range elements_inside(const Geometry<Offset>& geometry, int a, Offset cell) const {
    const auto& [in, out, kernel, stride, padding] = geometry.axis[a];
    // Both count from the begin of the padding on, so that no coordinate is below 0.
    const Offset start = cell * stride;
    const Offset last_of_input = out + padding - 1; // no window begins after it
    const Offset end = axis[a].divide(last_of_input - start) + 1;
    const Offset first = start < padding ? axis[a].divide(padding - start - 1) + 1 : 0;
    return {first, end < kernel ? end : kernel};
  }
};

// From an element's number in its window, by dimension, to its place. The results wrap around for
// elements before the input, which nobody reads; sums with them are right again.
template <class Offset>
struct DilatedWindow {
  const Geometry<Offset>& geometry;
  const Dilation<Offset>& dilation;
  Offset first; // position of the window's first element, inside the input or not
  bool as_offsets;

  // Position of the first element of a row of the window.
  __device__ Offset row_position(Offset z, Offset y) const {
    const auto& [depth, height, width] = geometry.axis;
    return first + (z * dilation.step(0) * height.out + y * dilation.step(1)) * width.out;
  }
  // Index of that element.
  __device__ Offset row_index(Offset z, Offset y) const {
    const auto& [depth, height, width] = geometry.axis;
    return as_offsets ? (z * height.kernel + y) * width.kernel : row_position(z, y);
  }
  // From an element's index to that of the next one in its row.
  __device__ Offset index_step() const { return as_offsets ? 1 : dilation.step(2); }
};

// Blocks of a processor: 64-bit offsets leave each of 512 threads 128 registers, 32-bit ones 64.
template <class Offset>
constexpr int kWindowBlocks = (sizeof(Offset) == sizeof(uint32_t) ? 1024 : 512) / kThreads;

// Elements that a thread reads at a time; four with 64-bit offsets would spill.
template <class Offset>
constexpr int kElementsAtOnce = sizeof(Offset) == sizeof(uint32_t) ? 4 : 2;

// `lowest` is no larger than any number of type T. It is the value of a window without elements.
template <class T, class Offset>
__global__ void __launch_bounds__(kThreads, kWindowBlocks<Offset>) pool_windows(
    Tiling<Offset> tiling,
    const T* __restrict__ input,
    PoolResult<T> result,
    Dilation<Offset> dilation,
    T lowest) {
  for_each_item(tiling.items, [&](Offset item) {
    const Geometry<Offset>& geometry = tiling.geometry;
    const auto [outer, cell, channel] = tiling.item(item);
    const auto [front, top, left] = tiling.window_start(cell).at;
    const DilatedWindow<Offset> window{
        .geometry = geometry,
        .dilation = dilation,
        .first = (front * geometry.axis[1].out + top) * geometry.axis[2].out + left,
        .as_offsets = result.takes_offsets()};
    const auto in_depth = dilation.elements_inside(geometry, 0, cell[0]);
    const auto in_height = dilation.elements_inside(geometry, 1, cell[1]);
    const auto in_width = dilation.elements_inside(geometry, 2, cell[2]);
    const T* plane = input + (outer * tiling.out_plane * geometry.inner + channel);
    // A window without elements in the input gets the index of its first element that is not in the
    // padding before it, as in PyTorch; that may lie beyond the plane.
    const Offset no_index =
        window.row_index(in_depth.first, in_height.first) + in_width.first * window.index_step();
    Candidate<T, Offset> candidate[1] = {{Element<T>::of(lowest), no_index}};
    for (Offset z = in_depth.first; z < in_depth.end; ++z) {
      for (Offset y = in_height.first; y < in_height.end; ++y) {
        const Offset position = window.row_position(z, y) + in_width.first * dilation.step(2);
        Offset element = position * geometry.inner;
        Offset index = window.row_index(z, y) + in_width.first * window.index_step();
#pragma unroll(kElementsAtOnce<Offset>)
        for (Offset x = in_width.first; x < in_width.end; ++x) {
          candidate[0].update(Element<T>::of(plane[element]), index);
          element += dilation.step(2) * geometry.inner;
          index += window.index_step();
        }
      }
    }
    result.store_candidates(tiling.pooled(outer, cell, channel), candidate);
  });
}

} // namespace maxunpool_cuda
