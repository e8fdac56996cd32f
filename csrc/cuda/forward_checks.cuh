// SPDX-License-Identifier: BSD-3-Clause
// Whether the indices of a thread's own pooled elements lie in their windows. The kernel `forward`
// looks at no other place for the outputs that they name, so each index is checked by one thread,
// in two steps:
//
// 1. own_indices_inside() takes some instructions, and may doubt a good index, but never passes a
//    wrong one. It has four variants: for overlapping (3x3) or disjoint windows, and for window
//    offsets or positions.
// 2. report_own_indices() decodes the indices one by one, if the first step doubts any. It reports
//    those that are out of bounds, and returns whether one is out of window. The fix-up kernel then
//    recomputes the image.
//
// Example: an output plane of 8 x 8, 3x3 windows, stride 2, padding 1. The window of cell (1, 0)
// begins at row 1 and column -1, so its outputs are these (offset: position):
//
//   0: -    1: 8    2: 9      Column -1 does not exist: offsets 0, 3 and 6 are clipped from the
//   3: -    4: 16   5: 17     window. So offset 4 passes, as does position 16. Offsets 3 and 9, and
//   6: -    7: 24   8: 25     position 64, are out of bounds. Position 10 is out of window.
//
// From report.cuh comes the decoder of one index, which also reports (decoded_or_reported).
#pragma once

#include "forward_tile.cuh"
#include "indices.cuh"
#include "report.cuh"
#include "tiling.cuh"

#include <algorithm>
#include <cstdint>

namespace maxunpool_cuda {

// The offsets of a 3x3 window that are not clipped, a bit each: bit 3y + x for row y and column x.
// The window begins at `top` and `left`; a number before the first wraps around, and so is not
// below `out`. Column x may be clipped only if bit x of `edges` is set; for the others there is no
// code. Octal constants have a digit for each row of the window: 0007 is its first row, 0111 its
// first column. In the example at the top of this file, all rows (0777) and the columns 1 and 2
// (0222 | 0444) exist, so it returns 0666: bits 1, 2, 4, 5, 7 and 8.
__device__ __forceinline__ uint32_t
unclipped_offsets(const Geometry<uint32_t>& geometry, uint32_t top, uint32_t left, int edges) {
  uint32_t rows = 0;
  uint32_t columns = 0;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const bool may_be_clipped = (edges >> i & 1) != 0;
    rows |= top + i < geometry.axis[1].out ? 0007u << 3 * i : 0;
    columns |= !may_be_clipped || left + i < geometry.axis[2].out ? 0111u << i : 0;
  }
  return rows & columns;
}

// Which columns of the window of a tile's cell n may be clipped, as unclipped_offsets() takes them.
// With Elements::cells, the output has S columns for each cell. So without padding, a window of
// three columns goes beyond the output at the last cell of a row alone, and with padding 1, it
// begins before the output at the first cell alone.
template <class Traits>
constexpr int clippable_columns(int n) {
  if (!Traits::kOfCells) {
    return 0b111;
  }
  if (Traits::P == 1) {
    return n == 0 ? 0b001 : 0;
  }
  return n == Traits::kCount - 1 ? 0b100 : 0;
}

// Bit 0 tells whether the offset is in the window of the tile's cell n; the other bits mean
// nothing. Doubts all offsets of the second depth of a window and beyond, and no other good one.
template <class Traits>
__device__ __forceinline__ uint32_t offset_inside_3x3(
    const Geometry<uint32_t>& geometry, const ThreadTile<Traits>& tile, int n, uint32_t offset) {
  const uint32_t top = Traits::S * tile.row - Traits::P;
  const uint32_t right = Traits::kOfCells ? Traits::S * n : 0; // from the tile's first window
  const uint32_t left = Traits::S * tile.column - Traits::P + right;
  constexpr uint32_t kBeyond = 9; // a bit that is never set
  return unclipped_offsets(geometry, top, left, clippable_columns<Traits>(n)) >>
         (offset < kBeyond ? offset : kBeyond);
}

// Whether the position is in the window of the tile's cell n. Doubts no good one.
template <class Traits>
__device__ __forceinline__ bool position_inside_3x3(
    const Tiling<uint32_t>& tiling,
    const Planes& planes,
    const ThreadTile<Traits>& tile,
    int n,
    uint32_t position) {
  const uint32_t top = Traits::S * tile.row - Traits::P;
  const uint32_t right = Traits::kOfCells ? Traits::S * n : 0;
  const uint32_t left = Traits::S * tile.column - Traits::P + right;
  const Position<uint32_t> start{{tile.output_depth, top, left}};
  return decoded<false>(tiling, position, start, planes.deep).in_window;
}

// Whether the offset is in a disjoint window of K x K that has its first row and all its columns,
// as own_indices_inside() has found out. Three cases: if all depths and rows of the window exist,
// no offset is clipped. If its last row does not, only offsets of the first row pass. If its last
// depth does not, none pass.
template <class Traits>
__device__ __forceinline__ bool offset_inside_disjoint(
    const Geometry<uint32_t>& geometry, const ThreadTile<Traits>& tile, uint32_t offset) {
  constexpr int K = Traits::K;
  const Axis<uint32_t>& depth = geometry.axis[0];
  const uint32_t end = tile.row_exists[K - 1] ? K * K * depth.kernel : K;
  return offset < (tile.output_depth + depth.kernel <= depth.out ? end : 0);
}

// Whether the position is in such a window, that of the tile's cell n: then it is 0 to K - 1 beyond
// the first output of one of the window's rows. Doubts all of a window's third depth and beyond.
// Example: 2x2 windows in rows of 8, and tile.position is 16. Position 25 has the distance 9, less
// a row 1: inside. Position 18 has the distance 2, and 2 - 8 has wrapped around: 2, not inside.
template <class Traits>
__device__ __forceinline__ bool position_inside_disjoint(
    const Geometry<uint32_t>& geometry,
    const Planes& planes,
    const ThreadTile<Traits>& tile,
    int n,
    uint32_t position) {
  constexpr int K = Traits::K;
  const auto& [depth, height, width] = geometry.axis;
  const bool has_second_depth =
      planes.deep && depth.kernel > 1 && tile.output_depth + 1 < depth.out;
  const uint32_t to_second_depth = has_second_depth ? height.out * width.out : 0;
  // Each minimum takes off a depth or a row, if the position lies that far. If it does not, the
  // difference wraps around, and is not the minimum.
  uint32_t distance = position - tile.position - (Traits::kOfCells ? K * n : 0);
  distance = std::min(distance, distance - to_second_depth);
#pragma unroll
  for (int i = 1; i < K; ++i) {
    distance = std::min(distance, distance - (tile.row_exists[i] ? width.out : 0));
  }
  return distance < K;
}

// Step 1. `own` holds the indices of the tile's elements. May return false for good indices, and
// never true for wrong ones. `forward` uses the result only if the tile's outputs lie in the first
// depth of the window, so the functions above take tile.output_depth for where the window begins.
template <class Traits>
__device__ __forceinline__ bool own_indices_inside(
    const Tiling<uint32_t>& tiling,
    const Planes& planes,
    const ThreadTile<Traits>& tile,
    const uint32_t (&own)[Traits::kCount]) {
  const Geometry<uint32_t>& geometry = tiling.geometry;
  constexpr bool kOverlap = Traits::K > Traits::S;
  // A disjoint window that lacks its first row or a column is left to step 2.
  uint32_t all_inside = // 0 or 1, so `&=` drops all bits but the lowest
      kOverlap || (tile.row_exists[0] && tile.column_exists[Traits::S - 1]);
#pragma unroll
  for (int n = 0; n < Traits::kCount; ++n) {
    if constexpr (kOverlap && Traits::kOffsets) {
      all_inside &= offset_inside_3x3(geometry, tile, n, own[n]);
    } else if constexpr (kOverlap) {
      all_inside &= position_inside_3x3(tiling, planes, tile, n, own[n]);
    } else if constexpr (Traits::kOffsets) {
      all_inside &= offset_inside_disjoint(geometry, tile, own[n]);
    } else {
      all_inside &= position_inside_disjoint(geometry, planes, tile, n, own[n]);
    }
  }
  return all_inside != 0;
}

// Step 2. Reports the out-of-bounds indices of the tile's own elements, and returns whether one is
// out of window.
template <class Traits>
__device__ __forceinline__ bool report_own_indices(
    const Tiling<uint32_t>& tiling,
    const Planes& planes,
    const ThreadTile<Traits>& tile,
    const AnyIndices& indices,
    const Errors& errors) {
  bool out_of_window = false;
#pragma unroll 1 // rare, so short code counts
  for (int n = 0; n < (tile.left < Traits::kCount ? tile.left : Traits::kCount); ++n) {
    const uint32_t element = tile.first_element + n * (Traits::kOfPlanes ? planes.next_pooled : 1);
    const uint32_t column = tile.column + (Traits::kOfCells ? n : 0);
    const auto start = tiling.window_start({{tile.depth, tile.row, column}});
    const auto found = decoded_or_reported(tiling, errors, indices, element, start);
    out_of_window |= found.in_plane && !found.in_window;
  }
  return out_of_window;
}

} // namespace maxunpool_cuda
