// Unpooling of contiguous planes (inner == 1) whose rows divide into no vectors, or whose windows
// no other kernel is compiled for: one pass over the output, which is put together in shared
// memory.
//
//   strip 0   ======        A strip is the rows of outputs at one row of cells: S of them from
//   where strip 1   ====== |      those windows begin. Strips are counted through all planes, and
//   through strip 2   ====== | band the depths of a plane. A block owns the outputs of a band:
//   consecutive strip 3   ======        strips, which are consecutive in memory, or a part of one
//   strip that is
//                           too long.
//
// A block clears its slots, has every cell whose window reaches the band write to the slot of its
// output, and copies the slots to the output in vectors, wherever rows begin. Where windows overlap
// slots hold the last of the cells, found by atomics, else values.
//
// It vouches for the indices of its cells: stray ones are noted (see Report), and have the second
// kernel write the plane again.
#pragma once

#include "atomics.cuh"
#include "cells.cuh"
#include "divider.cuh"
#include "report.cuh"
#include "shared.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

constexpr int kBandThreads = 256; // of a block, at most

enum class Band : int8_t {
  disjoint,    // windows that share nothing, of planes of one depth
  deep,        // the same, of any depth
  overlapping, // of planes of one depth
};

// Cells of a thread that are read before any is looked at: as many as the registers hold.
constexpr int cells_ahead(Band band) {
  return band == Band::deep ? 2 : 4;
}

struct BandPlan {
  Geometry<uint32_t> geometry;
  Band kind;
  uint32_t in_plane;
  uint32_t bands, strips;
  uint32_t band_strips;        // of a band; one if it is a part
  uint32_t above, before;      // cells whose windows reach a strip, or a tile, beside the one there
  uint32_t part_columns;       // tiles of a part of a strip
  uint32_t pitch;              // slots of a row
  uint32_t bytes;              // of slots, and of one vector more
  Divider<uint32_t> parts;     // of a strip
  Divider<uint32_t> heights;   // strips in a depth
  Divider<uint32_t> depths;    // of a plane
  Divider<uint32_t> row_cells; // that reach a band in a row
  Divider<uint32_t> out_width, out_height, kernel_width, kernel_height, depth_stride;
};

template <class Element, class Index, Band kBand>
__global__ void __launch_bounds__(kBandThreads, kBand == Band::deep ? 4 : 5) forward_bands(
    BandPlan plan,
    Report report,
    Element negative_zero, // see added_to_zero
    const Element* __restrict__ input,
    const Index* __restrict__ indices,
    Element* __restrict__ output) {
  constexpr bool kOverlap = kBand == Band::overlapping, kDeep = kBand == Band::deep;
  constexpr int kAhead = cells_ahead(kBand);
  using Slot = std::conditional_t<kOverlap, uint32_t, Element>;
  constexpr uint32_t kGrain = kVectorBytes / sizeof(Element);
  Slot* const slots = shared_memory<Slot>();
  const auto& [depths, heights, widths] = plan.geometry.axis;
  for (uint32_t band = blockIdx.x; band < plan.bands; band += gridDim.x) {
    const uint32_t first_part = plan.parts.divide(band);
    const uint32_t first_strip = first_part * plan.band_strips;
    const uint32_t first_tile = (band - first_part * plan.parts.divisor()) * plan.part_columns;
    // Rows of outputs are counted through all depths and planes.
    const auto row_of = [&](uint32_t strip) {
      const uint32_t volume = plan.heights.divide(strip);
      const uint32_t y = (strip - volume * plan.heights.divisor()) * heights.stride;
      const uint32_t row = y < heights.padding ? 0 : y - heights.padding;
      return volume * heights.out + (row < heights.out ? row : heights.out);
    };
    const uint32_t last_strip = first_strip + plan.band_strips;
    const uint32_t first_row = row_of(first_strip);
    const uint32_t rows = row_of(last_strip < plan.strips ? last_strip : plan.strips) - first_row;
    const auto column_of = [&](uint32_t tile) {
      const uint32_t x = tile * widths.stride;
      const uint32_t column = x < widths.padding ? 0 : x - widths.padding;
      return column < widths.out ? column : widths.out;
    };
    const bool whole = plan.parts.divisor() == 1;
    const uint32_t first_column = whole ? 0 : column_of(first_tile);
    const uint32_t columns =
        (whole ? widths.out : column_of(first_tile + plan.part_columns)) - first_column;
    // Slots lie in their vectors as outputs do.
    Element* const to = output + (first_row * widths.out + first_column);
    const uint32_t shift = reinterpret_cast<uintptr_t>(to) / sizeof(Element) % kGrain;

    for (uint32_t i = threadIdx.x; i * kVectorBytes < plan.bytes; i += blockDim.x) {
      reinterpret_cast<Vector<uint32_t, 4>*>(slots)[i] = {};
    }
    __syncthreads();

    // Where the plane begins in which the band does: slots count cells from there.
    const uint32_t first_volume = plan.heights.divide(first_strip);
    const uint32_t base = first_volume * plan.in_plane; // of no use in depth
    bool stray = false;
    // Neighbouring threads read neighbouring cells of a strip, groups of them several strips.
    const uint32_t row_cells = plan.row_cells.divisor();
    const bool many = row_cells < blockDim.x;
    const uint32_t groups = many ? plan.row_cells.divide(blockDim.x) : 1;
    const uint32_t group = many ? plan.row_cells.divide(threadIdx.x) : 0;
    const uint32_t lane = threadIdx.x - group * row_cells;
    const uint32_t band_strips = group < groups ? plan.band_strips + plan.above : 0;
    for (uint32_t k = group; k < band_strips; k += kAhead * groups) {
      for (uint32_t c = lane; c < row_cells; c += blockDim.x) {
        const uint32_t column = first_tile + c - (whole ? 0 : plan.before);
        const uint32_t left = column * widths.stride - widths.padding;
        struct Cell {
          uint32_t volume, height, outer, depth, cell_depth, source; // kNowhere: it does not exist
        };
        const auto cell_of = [&](uint32_t n) { // of the n-th strip
          const uint32_t number = k + n * groups, strip = first_strip + number - plan.above;
          Cell at;
          at.volume = plan.heights.divide(strip);
          at.height = strip - at.volume * plan.heights.divisor();
          at.outer = at.volume;
          at.depth = at.cell_depth = 0;
          if constexpr (kDeep) {
            at.outer = plan.depths.divide(at.volume);
            at.depth = at.volume - at.outer * plan.depths.divisor();
            at.cell_depth = plan.depth_stride.divide(at.depth + depths.padding);
          }
          // What lies left of or above the plane wraps around.
          const bool exists = number < band_strips && strip < plan.strips && column < widths.in &&
                              at.height < heights.in && at.cell_depth < depths.in &&
                              (number >= plan.above || at.volume == first_volume);
          at.source = exists ? at.outer * plan.in_plane +
                                   (at.cell_depth * heights.in + at.height) * widths.in + column
                             : kNowhere;
          return at;
        };
        Cell cell[kAhead];
        Index index[kAhead];
        Element value[kAhead];
#pragma unroll
        for (int n = 0; n < kAhead; ++n) { // all are read before any is looked at
          cell[n] = cell_of(n);
          if (cell[n].source != kNowhere) {
            index[n] = indices[cell[n].source];
            if constexpr (!kOverlap) {
              value[n] = input[cell[n].source];
            }
          }
        }
        bool all_inside = true;
#pragma unroll
        for (int n = 0; n < kAhead; ++n) {
          const Cell& at = cell[n];
          if (at.source == kNowhere) {
            continue;
          }
          const uint32_t top = at.height * heights.stride - heights.padding;
          const uint32_t front = at.cell_depth * depths.stride - depths.padding;
          uint32_t z = front, y, x; // of the output
          if constexpr (kIsWindowOffset<Index>) {
            y = plan.kernel_width.divide(index[n]);
            x = left + index[n] - y * widths.kernel;
            if constexpr (kDeep) {
              const uint32_t in_depth = plan.kernel_height.divide(y);
              z += in_depth;
              y -= in_depth * heights.kernel;
            }
            y += top;
          } else {
            const uint32_t target = narrow_indices(Vector<Index, 1>{{index[n]}}).at[0];
            y = plan.out_width.divide(target);
            x = target - y * widths.out;
            if constexpr (kDeep) {
              z = plan.out_height.divide(y);
              y -= z * heights.out;
            }
          }
          bool inside = (y - top < heights.kernel) & (x - left < widths.kernel) &
                        (y < heights.out) & (x < widths.out);
          if constexpr (kDeep) {
            inside &= (z - front < depths.kernel) & (z < depths.out);
          }
          all_inside &= inside;
          const uint32_t slot_row = at.volume * heights.out + y - first_row,
                         slot_column = x - first_column;
          const uint32_t slot = shift + slot_row * plan.pitch + slot_column;
          if (!inside || (kDeep && z != at.depth)) {
            continue;
          }
          if constexpr (!kOverlap) {
            slots[slot] = added_to_zero(value[n], negative_zero);
          } else if (slot_row < rows && slot_column < columns) {
            atomic_max(&slots[slot], at.source - base + 1);
          }
        }
        if (!all_inside) {
#pragma unroll 1
          for (uint32_t n = 0; n < kAhead; ++n) {
            const Cell at = cell_of(n);
            stray |= at.source != kNowhere && is_stray(
                                                  Windows<uint32_t>{
                                                      plan.geometry,
                                                      plan.geometry.out_plane(),
                                                      plan.out_height,
                                                      plan.out_width,
                                                      plan.kernel_height,
                                                      plan.kernel_width},
                                                  report.error,
                                                  indices,
                                                  at.source,
                                                  {{at.cell_depth, at.height, column}});
          }
        }
      }
    }
    const int any_stray = __syncthreads_or(stray);
    if (threadIdx.x == 0 && !kIsWindowOffset<Index>) {
      report.stray[band] = static_cast<uint32_t>(any_stray);
    }

    const auto result = [&](Slot slot) {
      if constexpr (kOverlap) {
        return slot == 0 ? Element{} : input[base + slot - 1];
      } else {
        return slot;
      }
    };
    if (whole) {
      // Vectors, the first and the last of which may be cut off.
      constexpr int N = kGrain;
      const uint32_t end = shift + rows * widths.out;
      // Before the output if that begins between vectors. As pointers, nvcc would cut vectors up.
      const uint32_t begin = first_row * widths.out - shift;
      for (uint32_t i = threadIdx.x * N; i < end; i += blockDim.x * N) {
        if (i >= shift && i + N <= end) {
          const auto taken = load<N>(slots + i);
          Vector<Element, N> stored;
#pragma unroll
          for (int n = 0; n < N; ++n) {
            stored.at[n] = result(taken.at[n]);
          }
          store(output + static_cast<int32_t>(begin + i), stored);
        } else {
#pragma unroll 1
          for (uint32_t n = i < shift ? shift : i; n < i + N && n < end; ++n) {
            output[static_cast<int32_t>(begin + n)] = result(slots[n]);
          }
        }
      }
    } else {
      for (uint32_t row = 0; row < rows; ++row) {
        for (uint32_t x = threadIdx.x; x < columns; x += blockDim.x) {
          to[row * widths.out + x] = result(slots[shift + row * plan.pitch + x]);
        }
      }
    }
    __syncthreads(); // all slots have been read
  }
}

} // namespace maxunpool_cuda
