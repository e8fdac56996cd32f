// Unpooling for windows, layouts and types that no other kernel is compiled for, in one pass over
// the output, every element of which is written once, by its owner.
//
//   cells     c c c      A thread owns the outputs o of a tile, of one channel. For one output
//             c c c      after the other it looks at all cells whose windows cover that output, in
//   outputs    ooo       row-major order, and writes the output. Tiles are at most as large as the
//              ooo       stride, and one wide where neighbouring threads then write neighbours.
//
// The thread also checks the index of the cell with its tile's coordinates, and writes nothing if
// that is stray (see Report).
#pragma once

#include "combine.cuh"
#include "report.cuh"
#include "tiling.cuh"

#include <cstdint>

namespace maxunpool_cuda {

template <class Combine, class Offset>
__global__ void __launch_bounds__(kThreads, sizeof(Offset) == 4 ? 1024 / kThreads : 1)
    forward_windows(
        Tiling<Offset> tiling, Report report, AnyIndices indices,
        const typename Combine::Element* __restrict__ input,
        typename Combine::Element* __restrict__ output) {
  const Geometry<Offset>& g = tiling.geometry;
  const Offset step = are_offsets(indices) ? g.axis[2].stride : 0; // of offsets, from cell to cell
  for_each_chunk<int64_t>(tiling.items, report, [&](Offset i) {
    const auto item = tiling.item(i);
    const Position<Offset>& p = item.tile;
    const Offset outer = item.outer, channel = item.group;
    if (tiling.is_cell(p) &&
        is_stray(tiling, report.error, indices, tiling.pooled(outer, p, channel), p)) {
      return true;
    }

    const auto depth = tiling.outputs(0, p[0]), height = tiling.outputs(1, p[1]),
               width = tiling.outputs(2, p[2]);
    for (Offset d = depth.first; d < depth.end; ++d) {
      const auto depths = tiling.windows_over(0, d);
      for (Offset h = height.first; h < height.end; ++h) {
        const auto heights = tiling.windows_over(1, h);
        for (Offset w = width.first; w < width.end; ++w) {
          const auto widths = tiling.windows_over(2, w);
          const Offset position = (d * g.axis[1].out + h) * g.axis[2].out + w;
          Combine kept;
          for (Offset z = depths.first; z < depths.end; ++z) {
            for (Offset y = heights.first; y < heights.end; ++y) {
              const Position<Offset> cell{{z, y, widths.first}}, start = window_start(tiling, cell);
              Offset source = tiling.pooled(outer, cell, channel), name = position;
              if (are_offsets(indices)) {
                const Offset row = (d - start[0]) * g.axis[1].kernel + h - start[1];
                name = row * g.axis[2].kernel + w - start[2];
              }
              for (Offset x = widths.first; x < widths.end; ++x) {
                if (indices[source] == static_cast<int64_t>(name)) {
                  kept.add(static_cast<typename Combine::Held>(input[source]));
                }
                source += g.inner;
                name -= step;
              }
            }
          }
          output[(outer * tiling.out_plane + position) * g.inner + channel] = kept.result();
        }
      }
    }
    return false;
  });
}

} // namespace maxunpool_cuda
