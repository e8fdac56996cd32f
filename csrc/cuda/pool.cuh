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

  struct Range {
    Offset first;
    Offset end;
  };
  // Which elements of a window lie in the input, in dimension `a`: numbers [first, end). `elements`
  // is how many it has. Of a window of 3 elements, 2 apart, that begins at -1 in an input of 4,
  // elements 1 and 2 do, at coordinates 1 and 3.
  __device__ Range
  elements_inside(const Axis<Offset>& axis, int a, Offset cell, Offset elements) const {
    // Both count from the begin of the padding on, so that no coordinate is below 0.
    const Offset start = cell * axis.stride;
    const Offset last_of_input = axis.out + axis.padding - 1; // no window begins after it
    Range range{0, elements};
    if (start < axis.padding) {
      range.first = dilation[a].divide(axis.padding - start - 1) + 1;
    }
    if (start + (elements - 1) * dilation[a].divisor() > last_of_input) {
      range.end = start > last_of_input ? 0 : dilation[a].divide(last_of_input - start) + 1;
    }
    return range;
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
// `lowest` is no larger than any number of type T. It is the value of a window without elements.
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
    Position<Offset> cell = tile; // of the first window
    if (R > 1) {
      const Offset group = split(cell[1], steps.apart);
      cell[1] += group * (R * steps.apart.divisor());
    }
    const Offset channel = V * vector;
    const auto [front, top, left] = tiling.window_start(cell).at;
    const Offset all_rows = height.kernel + (R - 1) * steps.rows_apart;
    auto in_depth = typename WindowSteps<Offset>::Range{0, 1};
    if (tiling.deep) {
      in_depth = steps.elements_inside(depth, 0, cell[0], depth.kernel);
    }
    const auto in_height = steps.elements_inside(height, 1, cell[1], all_rows);
    const auto in_width = steps.elements_inside(width, 2, cell[2], width.kernel);
    // Elements of the input from one slice, row and column of the window to the next, and indices.
    const Offset column_step = steps.dilation[2].divisor();
    const Offset row_step = steps.dilation[1].divisor() * width.out;
    const Offset slice_step = steps.dilation[0].divisor() * height.out * width.out;
    const Offset next_column = as_offsets ? 1 : column_step;
    const Offset next_row = as_offsets ? width.kernel : row_step;
    const Offset next_slice = as_offsets ? height.kernel * width.kernel : slice_step;
    // The place of the first window's first element that is inside, and its index. Before the input
    // a number wraps around; the sum is right again.
    const Offset start = (front * height.out + top) * width.out + left;
    const Offset first = start + in_depth.first * slice_step + in_height.first * row_step +
                         in_width.first * column_step;
    Offset index_of_slice =
        as_offsets ? in_depth.first * next_slice + in_height.first * next_row + in_width.first
                   : first;
    const T* slice =
        input + (outer * tiling.out_plane * geometry.inner + channel) + first * geometry.inner;
    // A window without elements in the input gets the index of its first element that is not in the
    // padding before it, as in PyTorch; that may lie beyond the plane.
    Candidate<T, Offset> best[R][V];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const Offset begin = r * steps.rows_apart;
      const Offset rows = begin > in_height.first ? begin - in_height.first : 0;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        best[r][v] = {Element<T>::of(lowest), index_of_slice + rows * next_row};
      }
    }
#pragma unroll 1
    for (Offset z = in_depth.first; z < in_depth.end; ++z) {
      const T* row = slice;
      Offset index_of_row = index_of_slice;
#pragma unroll 1
      for (Offset y = in_height.first; y < in_height.end; ++y) {
        const T* address = row;
        Offset index = index_of_row;
        Candidate<T, Offset> of_row[V];
#pragma unroll
        for (int v = 0; v < V; ++v) {
          of_row[v] = R == 1 ? best[0][v] : Candidate<T, Offset>{Element<T>::of(lowest), index};
        }
#pragma unroll 1
        for (Offset x = in_width.first; x < in_width.end; ++x) {
          Element<T> elements[V];
          unpack(load<V>(address), elements);
#pragma unroll
          for (int v = 0; v < V; ++v) {
            of_row[v].update(elements[v], index);
          }
          address += column_step * geometry.inner;
          index += next_column;
        }
#pragma unroll
        for (int r = 0; r < R; ++r) {
#pragma unroll
          for (int v = 0; v < V; ++v) {
            if (R == 1) {
              best[0][v] = of_row[v];
            } else if (y - r * steps.rows_apart < height.kernel) {
              best[r][v].update(of_row[v].value, of_row[v].index);
            }
          }
        }
        row += row_step * geometry.inner;
        index_of_row += next_row;
      }
      slice += slice_step * geometry.inner;
      index_of_slice += next_slice;
    }
    const Offset element = tiling.pooled(outer, cell, channel);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const Offset below = r * steps.apart.divisor(); // the first window
      if (R == 1 || cell[1] + below < height.in) {
        if (R > 1 && as_offsets) {
#pragma unroll
          for (int v = 0; v < V; ++v) {
            best[r][v].index -= r * steps.rows_apart * width.kernel;
          }
        }
        result.store_candidates(element + below * width.in * geometry.inner, best[r]);
      }
    }
  });
}

} // namespace maxunpool_cuda
