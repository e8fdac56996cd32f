// How calls of max unpooling are cut up: the plans of their kernels, as values.
#pragma once

#include "../dtypes.h"
#include "../geometry.h"
#include "../reduction.h"
#include "band_plan.cuh"
#include "call.cuh"
#include "divider.cuh"
#include "forward_channels.cuh"
#include "forward_rows.cuh"
#include "limits.h"
#include "tiling.cuh"
#include "vector.cuh"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>

namespace maxunpool_cuda {

// How many tiles cover both the pooled cells and the output.
inline int64_t tiles_of(const Axis<int64_t>& axis, int64_t tile) {
  return std::max(axis.in, divide_up(axis.out, tile));
}

// `tiles`: how many in each dimension; `groups`: of channels; `planes`: that a thread does.
template <class Offset>
Tiling<Offset> make_tiling(
    const Geometry<int64_t>& geometry,
    const int64_t (&tile)[3],
    const int64_t (&tiles)[3],
    int64_t groups,
    int64_t planes = 1) {
  Tiling<Offset> tiling;
  static_cast<Windows<Offset>&>(tiling) = windows_of<Offset>(geometry);
  tiling.items = static_cast<Offset>(
      divide_up(geometry.outer, planes) * tiles[0] * tiles[1] * tiles[2] * groups);
  for (int a = 0; a < 3; ++a) {
    tiling.tile[a] = static_cast<Offset>(tile[a]);
    tiling.tiles[a] = divider<Offset>(tiles[a]);
    tiling.stride[a] = divider<Offset>(geometry.axis[a].stride);
  }
  tiling.channels = divider<Offset>(groups);
  return tiling;
}

// Are these the windows, in width and in height?
inline bool has_windows(
    const Geometry<int64_t>& geometry, int64_t kernel, int64_t stride, int64_t padding) {
  const auto same = [&](const Axis<int64_t>& axis) {
    return axis.kernel == kernel && axis.stride == stride && axis.padding == padding;
  };
  return same(geometry.axis[2]) && same(geometry.axis[1]);
}

// Each is empty where there is no such plan for these windows. Offsets are 32-bit, and pointers
// aligned where vectors are read.
template <class Shape>
std::optional<RowPlan> make_row_plan(const Geometry<int64_t>& geometry) {
  const auto& [depth, height, width] = geometry.axis;
  const bool depth_fits =
      Shape::kDeep ? is_simple_in_depth(depth) && depth.padding == 0 : is_trivial(depth);
  if (geometry.inner != 1 || !depth_fits ||
      !has_windows(geometry, Shape::kKernel, Shape::kStride, Shape::kPadding) ||
      width.in % Shape::V != 0 || width.out != width.in * Shape::kStride ||
      height.in != divide_up(height.out, Shape::kStride)) {
    return {};
  }
  const int64_t groups = width.in / Shape::V;
  return RowPlan{
      windows_of<uint32_t>(geometry),
      static_cast<uint32_t>(geometry.outer * depth.out * height.in * groups),
      divider(groups),
      divider(height.in),
      divider(depth.out),
      divider(depth.stride)};
}

template <class Shape>
std::optional<ChannelPlan> make_channel_plan(const Geometry<int64_t>& geometry, int64_t channels) {
  const auto& [depth, height, width] = geometry.axis;
  if (geometry.inner == 1 || geometry.inner % channels != 0 || !is_trivial(depth) ||
      !has_windows(geometry, Shape::kKernel, Shape::kStride, Shape::kPadding)) {
    return {};
  }
  const int64_t groups = geometry.inner / channels, rows = tiles_of(height, Shape::kStride),
                columns = tiles_of(width, Shape::kStride);
  return ChannelPlan{
      windows_of<uint32_t>(geometry),
      static_cast<uint32_t>(geometry.outer * rows * columns * groups),
      static_cast<uint32_t>(geometry.in_plane()),
      divider(groups),
      divider(columns),
      divider(rows)};
}

// How a call is cut up, and its workspace, which may start out as anything.
struct Plan {
  bool wide;                                     // 64-bit offsets
  std::optional<BandPlan> bands;                 // of a call that bands can do
  bool shared = false;                           // the second kernel's slots are in shared memory
  int64_t channels, groups, part, parts, pieces; // of the second kernel; see Pieces
  int64_t slots;                                 // of a piece
  int64_t blocks;                                // of the second kernel, at most
  size_t global_slots, slot_bytes, bytes;        // offset of the slots, each block's, and the whole

  explicit Plan(const Arguments& arguments) {
    const Geometry<int64_t>& g = arguments.geometry;
    const Limits& limits = arguments.limits;
    const bool last = arguments.reduce == Reduce::last;
    channels = std::min(g.inner, kMostChannels);
    wide = !fits(g, ((g.inner - 1) / channels + 1) * channels, limits.narrow);
    // Window offsets have no second kernel, and so no slots.
    const bool offsets = arguments.index_type == c10::ScalarType::Byte;
    int64_t slot = offsets ? 0 : slot_size(arguments);
    if (!wide) {
      bands = make_bands(arguments);
    }
    part = g.out_plane();
    if (last && !offsets && !wide && arguments.element_size <= sizeof(uint64_t)) {
      const auto small = static_cast<int64_t>(sizeof(uint32_t));
      const int64_t room = limits.shared_bytes / (small * channels) / kGrain * kGrain;
      part = divide_up(part, kGrain) * kGrain;
      if (room > 0 && part <= kMostParts * room) {
        shared = true;
        slot = small;
        part = divide_up(divide_up(part, divide_up(part, room)), kGrain) * kGrain;
      }
    }
    part = std::min(part, g.out_plane());
    parts = divide_up(g.out_plane(), part);
    groups = divide_up(g.inner, channels);
    pieces = g.outer * groups * parts;
    slots = part * channels;
    blocks = pieces;
    slot_bytes = align(slots * slot);
    global_slots = bytes = 0;
    if (slot != 0 && !is_of_planes()) {
      const int64_t notes = most_items(g) / arguments.threads + 1;
      global_slots = bytes =
          align(std::max<int64_t>(notes, bands ? bands->bands.count : 0) * sizeof(uint32_t));
      if (!shared) {
        const auto room = limits.slot_bytes / static_cast<int64_t>(slot_bytes);
        blocks = std::clamp<int64_t>(room, 1, std::min(pieces, arguments.blocks));
        bytes += blocks * slot_bytes;
      }
    }
  }

  bool is_of_planes() const { return bands && bands->bands.planes != 0; } // has no second kernel

 private:
  static constexpr int64_t kMostChannels = 32, kMostParts = 64,
                           kGrain = 16; // outputs, so that parts begin where vectors do

  // No kernel has more items than this.
  static int64_t most_items(const Geometry<int64_t>& g) {
    int64_t items = g.outer * g.inner;
    for (const Axis<int64_t>& axis : g.axis) {
      items *= std::max(axis.in, axis.out);
    }
    return items;
  }

  // Do all intermediate values of all kernels stay below the limit?
  static bool fits(const Geometry<int64_t>& g, int64_t inner, int64_t limit) {
    double tiles = 1, reach = 0;
    for (const Axis<int64_t>& axis : g.axis) {
      const auto in = static_cast<double>(axis.in), out = static_cast<double>(axis.out);
      tiles *= std::max(in, out);
      reach = std::max(
          reach, (in + 1) * static_cast<double>(axis.stride) + out +
                     static_cast<double>(axis.padding) + static_cast<double>(axis.kernel));
    }
    const double slabs = static_cast<double>(g.outer) * static_cast<double>(inner);
    return std::max(slabs * tiles, reach) < static_cast<double>(limit);
  }

  int64_t slot_size(const Arguments& arguments) const {
    if (arguments.reduce == Reduce::last) {
      return sizeof(uint64_t);
    }
    if (!arguments.forward) {
      return arguments.reduce == Reduce::mean ? sizeof(uint64_t) : 0;
    }
    int64_t size = 0;
    with_arithmetic_type(
        arguments.type, [&]<class T>(std::type_identity<T>) { size = sizeof(Sum<T>); });
    return size;
  }
};

} // namespace maxunpool_cuda
