// Unpooling for windows, layouts and types that no other kernel is compiled for, in one pass over
// the output, every element of which is written once, by its owner.
//
//   cells     c c c      A thread owns the outputs o of a tile, of one channel: one after the other
//   it
//             c c c      looks at all cells whose windows cover an output, in row-major order, and
//   outputs    ooo       writes it. Tiles are at most as large as the stride, and one wide where
//              ooo       neighbouring threads then write neighbouring outputs.
//
// It vouches for the index of the cell with its tile's coordinates, and writes nothing if that is
// stray (see Report).
#pragma once

#include "report.cuh"
#include "take.cuh"
#include "tiling.cuh"

#include <cstdint>

namespace maxunpool_cuda {

template <class Take, class Offset>
__global__ void __launch_bounds__(kThreads, sizeof(Offset) == 4 ? 1024 / kThreads : 1)
    forward_windows(
        Tiling<Offset> tiling,
        Report report,
        AnyIndices indices,
        const typename Take::Element* __restrict__ input,
        typename Take::Element* __restrict__ output) {
  using Held = typename Take::Held;
  const Geometry<Offset>& g = tiling.geometry;
  for_each_chunk<int64_t>(tiling.items, report, [&](Offset i) {
    const auto item = tiling.item(i);
    const Position<Offset>& p = item.tile;
    const Offset channel = item.channels;
    const auto target_of_cell = [&](Offset source, Offset d, Offset h, Offset w) {
      const int64_t index = indices[source];
      return indices.bytes > 1 ? target_of<Offset>(index)
                               : target_of_offset(tiling, {{d, h, w}}, static_cast<Offset>(index));
    };
    if (tiling.is_cell(p)) {
      const Offset row = tiling.pooled_row(item.outer, p.at[0], p.at[1]);
      const Offset source = (row + p.at[2]) * g.inner + channel;
      const Offset target = target_of_cell(source, p.at[0], p.at[1], p.at[2]);
      if (target >= tiling.out_plane) {
        report_bad(
            report.error,
            g,
            item.outer,
            tiling.cell(p),
            channel,
            indices.bytes == 1,
            indices[source]);
      } else if (indices.bytes > 1 && !tiling.holds(tiling.window(p), target)) {
        return true;
      }
    }

    const auto depth = tiling.outputs(0, p.at[0]), height = tiling.outputs(1, p.at[1]),
               width = tiling.outputs(2, p.at[2]);
    for (Offset d = depth.first; d < depth.end; ++d) {
      const auto depths = windows_over(g.axis[0], tiling.stride[0], d);
      for (Offset h = height.first; h < height.end; ++h) {
        const auto heights = windows_over(g.axis[1], tiling.stride[1], h);
        for (Offset w = width.first; w < width.end; ++w) {
          const auto widths = windows_over(g.axis[2], tiling.stride[2], w);
          const Offset position = (d * g.axis[1].out + h) * g.axis[2].out + w;
          Take kept;
          for (Offset from_d = depths.first; from_d < depths.end; ++from_d) {
            for (Offset from_h = heights.first; from_h < heights.end; ++from_h) {
              const Offset row = tiling.pooled_row(item.outer, from_d, from_h);
              for (Offset from_w = widths.first; from_w < widths.end; ++from_w) {
                const Offset source = (row + from_w) * g.inner + channel;
                if (target_of_cell(source, from_d, from_h, from_w) == position) {
                  kept.add(static_cast<Held>(input[source]));
                }
              }
            }
          }
          output[(item.outer * tiling.out_plane + position) * g.inner + channel] = kept.result();
        }
      }
    }
    return false;
  });
}

} // namespace maxunpool_cuda
