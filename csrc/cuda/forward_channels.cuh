// Unpooling of channels_last planes: one pass over the output, every element of which is written
// once, by its owner, zero or not.
//
//   cells      | c | (c)      Each letter is a vector of V channels. A thread owns those of a cell
//   below      |(c)| (c)      and of the S x S outputs at it. Cells in brackets are others', but
//   outputs    | oo |         their windows cover these outputs too, unless windows are disjoint.
//   (S = 2)    | oo |
//
// As in forward_rows.cuh, a thread compares its outputs with indices in row-major order, checks the
// indices of its own cell, and writes nothing if one is stray.
#pragma once

#include "combine.cuh"
#include "indices.cuh"
#include "report.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <cstdint>

namespace maxunpool_cuda {

// Windows of kKernel, kStride apart, in width and height, with kPadding.
template <int kKernelSize, int kStrideSize, int kPaddingSize>
struct ChannelShape {
  static constexpr int kKernel = kKernelSize, kStride = kStrideSize, kPadding = kPaddingSize;
  static constexpr bool kDisjoint = kKernel <= kStride && kPadding == 0;
  // Cells, counted from a thread's own, whose windows cover its outputs.
  static constexpr int kFirst = -((kKernel - kPadding - 1) / kStride);
  static constexpr int kLast = (kStride - 1 + kPadding) / kStride;
};

// Kernel for planes of one slice, 32-bit offsets, aligned pointers, and channels that are a
// multiple of V. Tiles cover all outputs and cells (see tile_channels).
template <class Combine, class Index, int V, class Shape>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads) forward_channels(
    Tiling<uint32_t> tiling, Report report,
    typename Combine::Element negative_zero, // see add_to_zero
    const typename Combine::Element* __restrict__ input, const Index* __restrict__ indices,
    typename Combine::Element* __restrict__ output) {
  using Element = typename Combine::Element;
  using Held = typename Combine::Held;
  constexpr int kKernel = Shape::kKernel, kStride = Shape::kStride, kPadding = Shape::kPadding;
  const auto& [depths, heights, widths] = tiling.geometry.axis;
  for_each_chunk<Index>(tiling.items, report, [&](uint32_t i) {
    const auto item = tiling.item(i, true, false);
    const uint32_t outer = item.outer, channel = item.group * V;
    const uint32_t height = item.tile[1], column = item.tile[2];
    const uint32_t top = height * kStride, left = column * kStride; // of the outputs
    const uint32_t corner = top * widths.out + left, inner = tiling.geometry.inner;
    const uint32_t cell = height * widths.in + column;
    const uint32_t source = (outer * tiling.in_plane + cell) * inner + channel;
    Combine kept[kStride][kStride][V];
#pragma unroll
    for (int y = Shape::kFirst; y <= Shape::kLast; ++y) {
#pragma unroll
      for (int x = Shape::kFirst; x <= Shape::kLast; ++x) {
        if (height + y >= heights.in || column + x >= widths.in) {
          continue; // also where a coordinate below 0 wraps around
        }
        const uint32_t from = source + (y * widths.in + x) * inner;
        ChannelIndices<Index, V, kKernel> cell_indices;
        cell_indices.read(indices + from);
        Held value[V];
        load_held<V>(input + from, value);
        if (x == 0 && y == 0) {
          const uint32_t first = corner - kPadding * (widths.out + 1);
          const bool is_clipped = top < kPadding || left < kPadding ||
                                  top - kPadding + kKernel > heights.out ||
                                  left - kPadding + kKernel > widths.out;
          if (is_clipped || !cell_indices.all_inside(first, widths.out)) {
            bool stray = false;
#pragma unroll 1
            for (int v = 0; v < V; ++v) {
              const Position<uint32_t> own{{0, height, column}};
              stray |= is_stray(tiling, report.error, indices, source + v, own);
            }
            if (stray) {
              return true;
            }
          }
          if constexpr (Shape::kDisjoint) {
            add_to_zero(value, negative_zero);
          }
        }
#pragma unroll
        for (int r = 0; r < kStride; ++r) {
#pragma unroll
          for (int e = 0; e < kStride; ++e) {
            const int in_y = r - y * kStride + kPadding, in_x = e - x * kStride + kPadding;
            if (in_y >= 0 && in_y < kKernel && in_x >= 0 && in_x < kKernel) {
#pragma unroll
              for (int v = 0; v < V; ++v) {
                kept[r][e][v].add_if(
                    cell_indices.is(v, in_y, in_x, corner + r * widths.out + e), value[v]);
              }
            }
          }
        }
      }
    }
    Element* to = output + (outer * tiling.out_plane + corner) * inner + channel;
#pragma unroll
    for (int r = 0; r < kStride; ++r, to += widths.out * inner) {
#pragma unroll
      for (int e = 0; e < kStride; ++e) {
        if (top + r < heights.out && left + e < widths.out) {
          store_results<V>(to + e * inner, kept[r][e]);
        }
      }
    }
    return false;
  });
}

} // namespace maxunpool_cuda
