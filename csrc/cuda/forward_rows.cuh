// Unpooling of planes whose rows divide into vectors, of contiguous tensors (inner == 1): one pass
// over the output, every element of which is written once, by its owner, zero or not.
//
//   cells      | c  c | (c)       A thread owns V cells of a row and the S rows of outputs at them:
//   below      |(c)(c)| (c)       S x (V * S) outputs, written in vectors. Cells in brackets are
//   outputs    | oo oo|           others', but their windows cover these outputs too, unless
//   (S = 2)    | oo oo|           windows are disjoint.
//
// A thread compares its outputs with the indices of all cells whose windows cover them, in
// row-major order: the last match is kept, or all matches are added. It checks the indices of its
// own cells. If one is stray, the thread flags it (see Report) and writes nothing, for the second
// kernel rewrites the plane.
#pragma once

#include "combine.cuh"
#include "indices.cuh"
#include "report.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <algorithm>
#include <cstdint>

namespace maxunpool_cuda {

// Windows of kKernel, kStride apart, in width and height, with kPadding. An output is covered by
// windows of the cell at its place and of later ones alone. kDeep: planes have slices, of windows
// that do not overlap in depth and have no padding there; else planes have one slice.
template <class Element, int kKernelSize, int kStrideSize, int kPaddingSize, bool kIsDeep = false>
struct RowShape {
  static constexpr bool kDeep = kIsDeep;
  static_assert(!kDeep || (kKernelSize & (kKernelSize - 1)) == 0); // see RowIndices::move_to_depth
  static constexpr int kKernel = kKernelSize, kStride = kStrideSize, kPadding = kPaddingSize;
  static_assert(kKernel - kPadding <= kStride && kPadding <= kStride);
  static constexpr bool kDisjoint = kKernel <= kStride && kPadding == 0;
  // Elements stored at a time: 16 bytes, or less where more would not fit the registers.
  static constexpr int kGrain = std::min<int>(kVectorBytes / sizeof(Element), 8);
  static constexpr int V = std::max(1, kGrain / kStride);
  static constexpr int N = V * kStride; // outputs of a thread in a row
  static_assert(N % kGrain == 0);
  static constexpr int kRight = (N - 1 + kPadding) / kStride + 1 - V;        // cells beyond its own
  static constexpr int kBelow = (kStride - 1 + kPadding) / kStride;          // rows of them
  static constexpr int kBlocks = (V >= 4 || kDeep ? 1280 : 1536) / kThreads; // resident
};

// Kernel for 32-bit offsets and aligned pointers. Tiles are V cells of a row, for each slice of the
// outputs (see tile_rows).
template <class Combine, class Index, class Shape>
__global__ void __launch_bounds__(kThreads, Shape::kBlocks) forward_rows(
    Tiling<uint32_t> tiling, Report report,
    typename Combine::Element negative_zero, // see add_to_zero
    const typename Combine::Element* __restrict__ input, const Index* __restrict__ indices,
    typename Combine::Element* __restrict__ output) {
  using Element = typename Combine::Element;
  using Held = typename Combine::Held;
  constexpr int V = Shape::V, N = Shape::N, kGrain = Shape::kGrain, kRight = Shape::kRight;
  constexpr int kKernel = Shape::kKernel, kStride = Shape::kStride, kPadding = Shape::kPadding;
  const auto& [depths, heights, widths] = tiling.geometry.axis;
  for_each_chunk<Index>(tiling.items, report, [&](uint32_t i) {
    const auto item = tiling.item(i, false, Shape::kDeep);
    const auto [depth, height, column] = item.tile.at;
    const uint32_t plane = item.outer;
    uint32_t source = i * V, cell_depth = 0, in_depth = 0; // slice of cells, and of their windows
    if constexpr (Shape::kDeep) {
      cell_depth = tiling.stride[0].divide(depth);
      in_depth = depth - cell_depth * tiling.stride[0].divisor();
      source = ((plane * depths.in + cell_depth) * heights.in + height) * widths.in + column * V;
    }
    const bool is_covered = !Shape::kDeep || (cell_depth < depths.in && in_depth < depths.kernel);
    const uint32_t top = height * kStride; // of the outputs
    const uint32_t slice = heights.out * widths.out;
    const uint32_t first_output = depth * slice + top * widths.out + column * N;
    const bool right_exist = kRight > 0 && column + 1 < tiling.tiles[2].divisor();

    // All cells are read before any is looked at.
    RowIndices<Index, V, kRight, kKernel, kStride> row_indices[1 + Shape::kBelow];
    Held value[1 + Shape::kBelow][V + kRight];
    const Element* values = input + source;
    const Index* at = indices + source;
#pragma unroll
    for (int below = 0; below <= Shape::kBelow; ++below) {
      const bool exist = below == 0 ? is_covered : height + below < heights.in;
      row_indices[below].read(at, exist, exist && right_exist);
      if (exist) {
        load_held<V>(values, value[below]);
      }
      if (exist && right_exist) {
#pragma unroll
        for (int v = V; v < V + kRight; ++v) {
          value[below][v] = static_cast<Held>(values[v]);
        }
      }
      at += widths.in;
      values += widths.in;
    }

    const uint32_t first = first_output - kPadding * (widths.out + 1);
    bool in_windows = in_depth > 0 || !is_covered; // another thread checks these indices
    if (!in_windows && (kPadding == 0 || height > 0) && top + kKernel - kPadding <= heights.out) {
      in_windows = (!Shape::kDeep || depth + depths.kernel <= depths.out) &&
                   row_indices[0].template all_inside<kPadding>(
                       column == 0, first, widths.out, Shape::kDeep ? depths.kernel : 1, slice);
    }
    if (!in_windows) {
      bool stray = false;
#pragma unroll 1
      for (int v = 0; v < V; ++v) {
        const Position<uint32_t> cell{{cell_depth, height, column * V + v}};
        stray |= is_stray(tiling, report.error, indices, source + v, cell);
      }
      if (stray) {
        return true;
      }
    }

    if constexpr (Shape::kDisjoint) {
      add_to_zero(value[0], negative_zero);
    }
    if (Shape::kDeep && is_covered) {
      row_indices[0].move_to_depth(in_depth);
    }
    Combine kept[kStride][N];
#pragma unroll
    for (int below = 0; below <= Shape::kBelow; ++below) {
#pragma unroll
      for (int r = 0; r < kStride; ++r) {
#pragma unroll
        for (int e = 0; e < N; ++e) {
#pragma unroll
          for (int v = 0; v < V + kRight; ++v) {
            const int y = r - below * kStride + kPadding, x = e - v * kStride + kPadding;
            if (y >= 0 && y < kKernel && x >= 0 && x < kKernel) {
              kept[r][e].add_if(
                  row_indices[below].is(v, y, x, first + below * kStride * widths.out, widths.out),
                  value[below][v]);
            }
          }
        }
      }
    }
    Element* to = output + (plane * tiling.out_plane + first_output);
#pragma unroll
    for (int r = 0; r < kStride; ++r, to += widths.out) {
      if (r == 0 || top + r < heights.out) {
#pragma unroll
        for (int e = 0; e < N; e += kGrain) {
          store_results<kGrain>(to + e, kept[r] + e);
        }
      }
    }
    return false;
  });
}

} // namespace maxunpool_cuda
