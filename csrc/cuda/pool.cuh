// SPDX-License-Identifier: BSD-3-Clause
// Kernels of max pooling. pool_elements.cuh has the comparison of two elements and the store,
// tiling.cuh the items of a thread, vector.cuh the loads of several neighbours at once, divider.cuh
// the division by a dilation. max_pool.cu chooses the kernel; large windows have pool_lanes.cuh.
// As in all of csrc, `out` is the unpooled side, which is the input here, and `in` the pooled one.
//
// pool_rows, for contiguous tensors: windows of 2x2 to 5x5 without dilation. A thread owns kRows x
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
// pool_windows, for all else: windows of any size and dilation. A thread owns one window in up to 4
// channels, or 4 windows of a column in one channel. It looks at one element after the other.
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
    const auto [outer, tile, channel] = tiling.item(item, false, tiling.deep);
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

// The way of pool_windows from element to element, and from window to window of a thread.
template <class Offset>
struct WindowSteps {
  Divider<Offset> dilation[3]; // from an element of the window to the next
  Divider<Offset> apart;       // from a window of the thread to the next
  Offset rows_apart;           // the same, in rows of elements
};

// The elements of the input that lie in the windows of a thread: a box, which begins where the
// first window does, and has so many slices, rows and columns.
template <class Offset>
struct WindowBox {
  struct Dimension {
    Offset first = 0; // numbers of the elements that lie in the input: [first, end)
    Offset end = 1;
    Offset step; // positions of the input from an element to the next
    Offset next; // the same of indices
  };
  Dimension of[3];
  Offset position; // of the first element that lies in the input
  Offset index;    // of that element

  __device__ WindowBox(
      const Tiling<Offset>& tiling,
      const WindowSteps<Offset>& steps,
      const Position<Offset>& cell,
      Offset rows,
      bool as_offsets) {
    const auto& [depth, height, width] = tiling.geometry.axis;
    auto& [slice, row, column] = of;
    column.step = steps.dilation[2].divisor();
    row.step = steps.dilation[1].divisor() * width.out;
    slice.step = steps.dilation[0].divisor() * height.out * width.out;
    column.next = as_offsets ? 1 : column.step;
    row.next = as_offsets ? width.kernel : row.step;
    slice.next = as_offsets ? height.kernel * width.kernel : slice.step;
    if (tiling.deep) {
      clip(slice, depth, steps.dilation[0], cell[0], depth.kernel);
    }
    clip(row, height, steps.dilation[1], cell[1], rows);
    clip(column, width, steps.dilation[2], cell[2], width.kernel);
    // Before the input a number wraps around; the sum is right again.
    const auto [front, top, left] = tiling.window_start(cell).at;
    position = (front * height.out + top) * width.out + left + slice.first * slice.step +
               row.first * row.step + column.first * column.step;
    index = as_offsets ? slice.first * slice.next + row.first * row.next + column.first : position;
  }

 private:
  // Sets which of `elements` elements of a dimension lie in the input. Of a window of 3 elements, 2
  // apart, that begins at -1 in an input of 4, elements 1 and 2 do, at coordinates 1 and 3.
  __device__ static void clip(
      Dimension& dimension,
      const Axis<Offset>& axis,
      const Divider<Offset>& dilation,
      Offset cell,
      Offset elements) {
    // Both count from the begin of the padding on, so that no coordinate is below 0.
    const Offset start = cell * axis.stride;
    const Offset last_of_input = axis.out + axis.padding - 1; // no window begins after it
    dimension.end = elements;
    if (start < axis.padding) {
      dimension.first = dilation.divide(axis.padding - start - 1) + 1;
    }
    if (start + (elements - 1) * dilation.divisor() > last_of_input) {
      dimension.end = start > last_of_input ? 0 : dilation.divide(last_of_input - start) + 1;
    }
  }
};

// Compares the elements of a row with the candidates of V channels. The row begins at `address`,
// with `index`.
template <class T, class Offset, int V>
__device__ __forceinline__ void update_by_row(
    Candidate<T, Offset> (&candidates)[V],
    const typename WindowBox<Offset>::Dimension& columns,
    Offset inner,
    const T* address,
    Offset index) {
#pragma unroll 1
  for (Offset x = columns.first; x < columns.end; ++x) {
    Element<T> elements[V];
    unpack(load<V>(address), elements);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      candidates[v].update(elements[v], index);
    }
    address += columns.step * inner;
    index += columns.next;
  }
}

// The candidates of a thread's windows.
template <class T, class Offset, int R, int V>
struct WindowCandidates {
  Candidate<T, Offset> of[R][V];

  // A window without elements in the input has the value `lowest`, and the index of its first
  // element that is not in the padding before it, as in PyTorch; that may lie beyond the plane.
  __device__ WindowCandidates(
      const WindowBox<Offset>& box, const WindowSteps<Offset>& steps, T lowest) {
    const auto& row = box.of[1];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const Offset begin = r * steps.rows_apart;
      const Offset rows = begin > row.first ? begin - row.first : 0;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        of[r][v] = {Element<T>::of(lowest), box.index + rows * row.next};
      }
    }
  }

  // Goes through the box, which begins at `slice`.
  __device__ __forceinline__ void update(
      const WindowBox<Offset>& box,
      const WindowSteps<Offset>& steps,
      const Geometry<Offset>& geometry,
      const T* slice,
      T lowest) {
    const auto& [slices, rows, columns] = box.of;
    const Offset inner = geometry.inner;
    Offset index_of_slice = box.index;
#pragma unroll 1
    for (Offset z = slices.first; z < slices.end; ++z) {
      const T* row = slice;
      Offset index = index_of_slice;
#pragma unroll 1
      for (Offset y = rows.first; y < rows.end; ++y) {
        if constexpr (R == 1) {
          update_by_row(of[0], columns, inner, row, index);
        } else {
          Candidate<T, Offset> of_row[V];
#pragma unroll
          for (int v = 0; v < V; ++v) {
            of_row[v] = {Element<T>::of(lowest), index};
          }
          update_by_row(of_row, columns, inner, row, index);
          merge_row(of_row, y, steps.rows_apart, geometry.axis[1].kernel);
        }
        row += rows.step * inner;
        index += rows.next;
      }
      slice += slices.step * inner;
      index_of_slice += slices.next;
    }
  }

 private:
  // Compares the best of row y of the box with the windows that have it.
  __device__ void merge_row(
      const Candidate<T, Offset> (&of_row)[V], Offset y, Offset rows_apart, Offset kernel) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (y - r * rows_apart < kernel) { // before the window, the difference wraps around
#pragma unroll
        for (int v = 0; v < V; ++v) {
          of[r][v].update(of_row[v].value, of_row[v].index);
        }
      }
    }
  }
};

// Blocks of a processor: 1024 threads of 64 registers with 32-bit offsets, else 512 of 128.
template <class Offset>
constexpr int kWindowBlocks = (sizeof(Offset) == sizeof(uint32_t) ? 1024 : 512) / kThreads;

// Any windows. A thread owns R windows of a column, in V channels. Where windows have rows of
// elements in common, the maximum of a row is found once. Example: windows of 4x4, 1 apart. A
// thread owns four of them, one below the other, and reads 7 rows of 4 elements, in place of 16.
// With dilation, windows have rows in common if they begin whole dilations apart: those of a thread
// are `apart` windows from each other. With dilation 3 and stride 1, the first threads of a column
// own windows 0, 3, 6 and 9; 1, 4, 7 and 10; 2, 5, 8 and 11; and then 12, 15, 18 and 21.
//
// `lowest` is no larger than any number of type T.
template <class T, class Offset, int R, int V>
__global__ void __launch_bounds__(kThreads, kWindowBlocks<Offset>) pool_windows(
    Tiling<Offset> tiling,
    const T* __restrict__ input,
    PoolResult<T> result,
    WindowSteps<Offset> steps,
    T lowest) {
  for_each_item(tiling.items, [&](Offset item) {
    const Geometry<Offset>& geometry = tiling.geometry;
    const auto& [depth, height, width] = geometry.axis;
    const bool as_offsets = result.takes_offsets();
    const auto [outer, tile, vector] = tiling.item(item, geometry.inner != 1, tiling.deep);
    const Offset channel = V * vector;
    Position<Offset> cell = tile; // of the first window
    if (R > 1) {
      const Offset group = split(cell[1], steps.apart);
      cell[1] += group * (R * steps.apart.divisor());
    }
    const Offset rows = height.kernel + (R - 1) * steps.rows_apart;
    const WindowBox<Offset> box(tiling, steps, cell, rows, as_offsets);
    const T* plane = input + (outer * tiling.out_plane * geometry.inner + channel);
    WindowCandidates<T, Offset, R, V> best(box, steps, lowest);
    best.update(box, steps, geometry, plane + box.position * geometry.inner, lowest);
    const Offset element = tiling.pooled(outer, cell, channel);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const Offset below = r * steps.apart.divisor(); // the first window
      if (R == 1 || cell[1] + below < height.in) {
        if (R > 1 && as_offsets) {
#pragma unroll
          for (int v = 0; v < V; ++v) {
            best.of[r][v].index -= r * steps.rows_apart * width.kernel;
          }
        }
        result.store_candidates(element + below * width.in * geometry.inner, best.of[r]);
      }
    }
  });
}

} // namespace maxunpool_cuda
