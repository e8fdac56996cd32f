// Plans of the kernels of max unpooling.
#pragma once

#include "../dtypes.h"
#include "../geometry.h"
#include "../reduction.h"
#include "backward.cuh"
#include "band_plan.cuh"
#include "call.cuh"
#include "stray_plan.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

namespace maxunpool_cuda {

// Number of tiles that cover both the pooled cells and the output.
inline int64_t tiles_of(const Axis<int64_t>& axis, int64_t tile) {
  return std::max(axis.in, divide_up(axis.out, tile));
}

// Tiling of forward_windows: tiles are at most as large as the stride.
template <class Offset>
Tiling<Offset> tile_outputs(const Geometry<int64_t>& geometry) {
  int64_t tile[3], tiles[3];
  for (int a = 0; a < 3; ++a) {
    const Axis<int64_t>& axis = geometry.axis[a];
    tile[a] = a == 2 && geometry.inner == 1 ? 1 : std::min<int64_t>(axis.stride, kMostTile);
    tiles[a] = tiles_of(axis, tile[a]);
  }
  auto tiling = make_tiling<Offset>(geometry, tiles, geometry.inner);
  std::copy_n(tile, 3, tiling.tile);
  return tiling;
}

// Largest distance of a cell whose window overlaps a given cell's; 0 for "sum", where none matters.
template <class Offset>
Position<Offset> overlap_of(const Geometry<int64_t>& geometry, Reduce reduce) {
  Position<Offset> away{};
  for (int a = 0; a < 3 && reduce == Reduce::last; ++a) {
    const Axis<int64_t>& axis = geometry.axis[a];
    away[a] = static_cast<Offset>(std::min((axis.kernel - 1) / axis.stride, axis.in));
  }
  return away;
}

// Tiling and plan of backward(), whose threads own a cell in so many planes.
inline std::pair<Tiling<uint32_t>, GatherPlan> make_gather_plan(
    const Geometry<int64_t>& g, Reduce reduce, int64_t planes) {
  const bool of_channels = g.inner % planes == 0;
  const int64_t slabs = of_channels ? 1 : planes;
  const int64_t channels = of_channels ? g.inner / planes : g.inner;
  const Axis<int64_t>& depth = g.axis[0];
  return {
      tile_cells<uint32_t>(g, channels, slabs),
      {static_cast<uint32_t>(slabs), static_cast<uint32_t>(of_channels ? channels : g.in_slab()),
       static_cast<uint32_t>(of_channels ? channels : g.out_slab()), reduce == Reduce::sum,
       std::max({depth.in, depth.out, depth.kernel}) != 1, overlap_of<uint32_t>(g, reduce)}};
}

// Whether windows are these, in width and in height.
inline bool has_windows(
    const Geometry<int64_t>& geometry, int64_t kernel, int64_t stride, int64_t padding) {
  const auto same = [&](const Axis<int64_t>& axis) {
    return axis.kernel == kernel && axis.stride == stride && axis.padding == padding;
  };
  return same(geometry.axis[2]) && same(geometry.axis[1]);
}

// Tilings of forward_rows and forward_channels. Empty: they are not compiled for these windows.
// Offsets are 32-bit, and pointers aligned where vectors are read.
//
// Rows have kStride outputs to a cell in width; in height the last cell may have fewer, but has
// one. No window is clipped on the right.
template <class Shape>
std::optional<Tiling<uint32_t>> tile_rows(const Geometry<int64_t>& geometry) {
  const auto& [depth, height, width] = geometry.axis;
  const bool depth_fits =
      Shape::kDeep ? is_simple_in_depth(depth) && depth.padding == 0 : is_trivial(depth);
  if (geometry.inner != 1 || !depth_fits ||
      !has_windows(geometry, Shape::kKernel, Shape::kStride, Shape::kPadding) ||
      width.in % Shape::V != 0 || width.out != width.in * Shape::kStride ||
      height.in != divide_up(height.out, Shape::kStride)) {
    return {};
  }
  return make_tiling<uint32_t>(geometry, {depth.out, height.in, width.in / Shape::V}, 1);
}

template <class Shape>
std::optional<Tiling<uint32_t>> tile_channels(const Geometry<int64_t>& geometry, int64_t channels) {
  const auto& [depth, height, width] = geometry.axis;
  if (geometry.inner == 1 || geometry.inner % channels != 0 || !is_trivial(depth) ||
      !has_windows(geometry, Shape::kKernel, Shape::kStride, Shape::kPadding)) {
    return {};
  }
  return make_tiling<uint32_t>(
      geometry, {1, tiles_of(height, Shape::kStride), tiles_of(width, Shape::kStride)},
      geometry.inner / channels);
}

// Plan of a call, and the bytes of its workspace, which may start out as anything.
struct Plan {
  bool is_64bit;                     // of offsets
  std::optional<BandPlan> bands;     // of calls that bands can do
  std::optional<StrayPlan> stray;    // of calls that may need a second kernel
  size_t flags_bytes = 0, bytes = 0; // of stray flags, which slots follow; of both

  explicit Plan(const Arguments& arguments) {
    const Geometry<int64_t>& g = arguments.geometry;
    is_64bit = !fits_32bit(g, align_channels(g.inner), arguments.limits.max_32bit_offset);
    if (!is_64bit) {
      bands = make_bands(arguments);
    }
    stray = is_of_planes() ? std::nullopt : make_stray_plan(arguments, is_64bit);
    if (stray) {
      const int64_t flags = most_items(g) / arguments.threads + 1;
      flags_bytes =
          align(std::max<int64_t>(flags, bands ? bands->bands.count : 0) * sizeof(uint32_t));
      bytes = flags_bytes + (stray->shared ? 0 : stray->shape.blocks * stray->slot_bytes);
    }
  }

  bool is_of_planes() const { return bands && bands->bands.planes != 0; }

 private:
  // Most items of any kernel.
  static int64_t most_items(const Geometry<int64_t>& g) {
    int64_t items = g.outer * g.inner;
    for (const Axis<int64_t>& axis : g.axis) {
      items *= std::max(axis.in, axis.out);
    }
    return items;
  }
};

} // namespace maxunpool_cuda
