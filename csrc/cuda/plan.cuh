// How calls of max unpooling are cut up: what a call is, and the plans of its kernels, as values.
#pragma once

#include "../dtypes.h"
#include "../geometry.h"
#include "../reduction.h"
#include "divider.cuh"
#include "forward_bands.cuh"
#include "forward_channels.cuh"
#include "forward_rows.cuh"
#include "limits.h"
#include "planes.cuh"
#include "report.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <type_traits>

namespace maxunpool_cuda {

struct Arguments {
  Geometry<int64_t> geometry;
  Reduce reduce;
  bool forward;
  bool deterministic;   // also in the last bits of sums
  c10::ScalarType type; // of the values
  c10::ScalarType index_type;
  size_t element_size;
  const void* values; // input, or grad_output
  const void* indices;
  void* result; // output, or grad_input
  ErrorRecord* error;
  Limits limits{};
  int64_t threads = kThreads; // of a block
  int64_t blocks = 256;       // of a kernel with slots in global memory, at most
};

// What a kernel with slots has to do.
struct SharedShape {
  int64_t pieces; // at most so many blocks have work, or slots
  int64_t slots;  // of a piece
  int64_t bytes;  // of shared memory, for each block
  bool likely;    // that the pieces need anything done
};

inline int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// How many tiles cover both the pooled cells and the output.
inline int64_t tiles_of(const Axis<int64_t>& axis, int64_t tile) {
  return std::max(axis.in, divide_up(axis.out, tile));
}

inline Divider<uint32_t> divider(int64_t by) {
  return Divider<uint32_t>(static_cast<uint32_t>(by));
}

// How a call is cut up, and its workspace, which may start out as anything.
struct Plan {
  bool wide;                                     // 64-bit offsets
  int64_t planes = 0;                            // of a block that does small planes whole; or 0
  int64_t stage, planes_bytes, planes_threads;   // its shared memory; see Planes
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
    planes = wide ? 0 : small_planes(arguments);
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
    if (planes == 0 && slot != 0) {
      global_slots = bytes =
          align(most_items(g) / arguments.threads * sizeof(uint32_t) + sizeof(uint32_t));
      if (!shared) {
        const auto room = limits.slot_bytes / static_cast<int64_t>(slot_bytes);
        blocks = std::clamp<int64_t>(room, 1, std::min(pieces, arguments.blocks));
        bytes += blocks * slot_bytes;
      }
    }
  }

  static size_t align(size_t size) {
    return (size + kVectorBytes - 1) / kVectorBytes * kVectorBytes;
  }

 private:
  static constexpr int64_t kMostChannels = 32, kMostParts = 64,
                           kGrain = 16; // outputs, so that parts begin where vectors do

  // Whether planes.cuh does this call, and so many planes to a block.
  int64_t small_planes(const Arguments& arguments) {
    const Geometry<int64_t>& g = arguments.geometry;
    const auto size = static_cast<int64_t>(arguments.element_size);
    const auto index_size = static_cast<int64_t>(c10::elementSize(arguments.index_type));
    const bool any_windows = arguments.reduce == Reduce::last &&
                             (arguments.forward || arguments.index_type != c10::ScalarType::Byte);
    const bool one_window = arguments.reduce != Reduce::last && arguments.forward &&
                            windows_are_apart(g) && c10::isFloatingType(arguments.type);
    if (g.inner != 1 || size > kMostSmall || !(any_windows || one_window)) {
      return 0;
    }
    // Of so many planes, with the vectors at their ends.
    const bool claims = arguments.index_type != c10::ScalarType::Byte || !windows_are_apart(g);
    const bool staged = arguments.forward && claims && is_staged(size);
    const int64_t vector = kVectorBytes, slot = claims ? sizeof(uint32_t) : size;
    const auto bytes = [&](int64_t count) {
      stage = static_cast<int64_t>(align(count * g.out_plane() * slot + 2 * vector * slot));
      return stage + (staged ? count * g.in_plane() * size + 8 * vector : 0);
    };
    const auto fits = [&](int64_t count) {
      return bytes(count) <= arguments.limits.small_bytes && count * g.in_plane() <= kMostClaims;
    };
    if (!fits(1)) {
      return 0;
    }
    int64_t count = 1;
    const int64_t group = cells_of_group(size, index_size);
    while (count < g.outer && count * g.in_plane() < arguments.limits.small_plane * group &&
           fits(2 * count)) {
      count *= 2;
    }
    planes_bytes = bytes(count);
    const int64_t groups = count * g.in_plane() / group + 1;
    const int64_t vectors = arguments.forward ? count * g.out_plane() * size / vector : 0;
    planes_threads =
        std::min<int64_t>(std::max(groups, vectors / kVectorsPerThread), kPlanesThreads);
    return count;
  }
  static constexpr int64_t kMostSmall = 8, kMostClaims = 4096, kVectorsPerThread = 4;

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
          reach,
          (in + 1) * static_cast<double>(axis.stride) + out + static_cast<double>(axis.padding) +
              static_cast<double>(axis.kernel));
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

template <class Offset>
Geometry<Offset> narrow(const Geometry<int64_t>& from) {
  Geometry<Offset> to;
  to.outer = static_cast<Offset>(from.outer);
  to.inner = static_cast<Offset>(from.inner);
  to.rank = from.rank;
  for (int a = 0; a < 3; ++a) {
    const Axis<int64_t>& axis = from.axis[a];
    to.axis[a] = {
        static_cast<Offset>(axis.in),
        static_cast<Offset>(axis.out),
        static_cast<Offset>(axis.kernel),
        static_cast<Offset>(axis.stride),
        static_cast<Offset>(axis.padding)};
  }
  return to;
}

// Windows that share no output and begin at multiples of the stride.
inline bool windows_are_disjoint(const Geometry<int64_t>& geometry) {
  const auto padded = [](const Axis<int64_t>& axis) { return axis.padding != 0; };
  return windows_are_apart(geometry) &&
         std::none_of(std::begin(geometry.axis), std::end(geometry.axis), padded);
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
  static_cast<Windows<Offset>&>(tiling) = windows_of(narrow<Offset>(geometry));
  tiling.items = static_cast<Offset>(
      divide_up(geometry.outer, planes) * tiles[0] * tiles[1] * tiles[2] * groups);
  for (int a = 0; a < 3; ++a) {
    tiling.tile[a] = static_cast<Offset>(tile[a]);
    tiling.tiles[a] = Divider<Offset>(static_cast<Offset>(tiles[a]));
    tiling.stride[a] = Divider<Offset>(tiling.geometry.axis[a].stride);
  }
  tiling.channels = Divider<Offset>(static_cast<Offset>(groups));
  return tiling;
}

inline Planes make_planes(const Arguments& arguments, const Plan& plan, bool aligned) {
  const Geometry<int64_t>& g = arguments.geometry;
  const auto& [depth, height, width] = g.axis;
  const auto clips = [](const Axis<int64_t>& axis) {
    return axis.padding != 0 || (axis.in - 1) * axis.stride + axis.kernel > axis.out;
  };
  const bool deep = depth.in != 1 || depth.kernel != 1;
  const int64_t next_row = height.stride * width.out - width.in * width.stride;
  int64_t next_height = g.out_plane() - height.in * height.stride * width.out;
  const int64_t next_depth = g.out_plane() - depth.in * depth.stride * height.out * width.out;
  if (deep) {
    next_height = (depth.stride * height.out - height.in * height.stride) * width.out;
  }
  return {
      narrow<uint32_t>(g),
      arguments.error,
      static_cast<uint32_t>(plan.planes),
      static_cast<uint32_t>(g.in_plane()),
      static_cast<uint32_t>(g.out_plane()),
      static_cast<uint32_t>(plan.stage),
      aligned,
      arguments.type == c10::ScalarType::BFloat16,
      arguments.reduce,
      ShortDivider(g.in_plane()),
      !deep && std::none_of(std::begin(g.axis), std::end(g.axis), clips),
      static_cast<uint32_t>(depth.kernel * height.kernel * width.kernel),
      ShortDivider(width.in),
      ShortDivider(width.in * height.in),
      ShortDivider(height.kernel),
      ShortDivider(width.kernel),
      static_cast<uint32_t>(next_row),
      static_cast<uint32_t>(next_height),
      static_cast<uint32_t>(deep ? next_depth : 0)};
}

// Are these the windows, in width and in height?
inline bool has_windows(
    const Geometry<int64_t>& geometry, int64_t kernel, int64_t stride, int64_t padding) {
  const auto same = [&](const Axis<int64_t>& axis) {
    return axis.kernel == kernel && axis.stride == stride && axis.padding == padding;
  };
  return same(geometry.axis[2]) && same(geometry.axis[1]);
}

// There is no such dimension, or none to speak of.
inline bool is_trivial(const Axis<int64_t>& axis) {
  return axis.in == 1 && axis.out == 1 && axis.kernel == 1 && axis.padding == 0;
}

// Do windows share nothing in depth, and does that of every cell hold the output at its number
// times the stride?
inline bool is_simple_in_depth(const Axis<int64_t>& depth) {
  return depth.kernel <= depth.stride && depth.padding < depth.kernel &&
         (depth.in - 1) * depth.stride < depth.out;
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
      windows_of(narrow<uint32_t>(geometry)),
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
      windows_of(narrow<uint32_t>(geometry)),
      static_cast<uint32_t>(geometry.outer * rows * columns * groups),
      static_cast<uint32_t>(geometry.in_plane()),
      divider(groups),
      divider(columns),
      divider(rows)};
}

// `notes`: of strays, that there is room for.
inline std::optional<BandPlan> make_band_plan(
    const Geometry<int64_t>& geometry, size_t element_size, int64_t notes) {
  const auto& [depth, height, width] = geometry.axis;
  const bool overlap = height.kernel > height.stride || width.kernel > width.stride;
  const bool deep = !is_trivial(depth);
  const Band kind = overlap ? Band::overlapping : deep ? Band::deep : Band::disjoint;
  if (geometry.inner != 1 || (deep && overlap) || !is_simple_in_depth(depth)) {
    return {};
  }
  constexpr int64_t kFew = 1 << 13, kMost = 1 << 14; // bytes of a block
  const auto size = static_cast<int64_t>(overlap ? sizeof(uint32_t) : element_size);
  // Tiles begin where windows do, and cover all outputs and cells.
  const auto tiles = [](const Axis<int64_t>& axis) {
    return std::max(axis.in, divide_up(axis.out + axis.padding, axis.stride));
  };
  const auto beside = [](const Axis<int64_t>& axis) { return (axis.kernel - 1) / axis.stride; };
  const int64_t heights = tiles(height), columns = tiles(width), before = beside(width);
  const int64_t strips = geometry.outer * depth.out * heights;
  const int64_t strip_bytes = height.stride * width.out * size;
  const bool whole = strip_bytes <= kMost;
  // A thread then has as many cells as it reads ahead.
  const int64_t turns = cells_ahead(kind) * std::max<int64_t>(1, kBandThreads / width.in);
  const int64_t band_strips =
      whole ? std::clamp<int64_t>(std::min(turns, kMost / strip_bytes), 1, strips) : 1;
  const int64_t part_columns =
      whole ? columns : std::max<int64_t>(1, kFew / (height.stride * width.stride * size));
  const int64_t pitch = whole ? width.out : std::min(part_columns * width.stride, width.out);
  const int64_t parts = divide_up(columns, part_columns);
  const int64_t bands = divide_up(strips, band_strips) * parts;
  // A vector of outputs may begin before the band's.
  const auto vector = static_cast<int64_t>(kVectorBytes);
  const int64_t spare = vector / static_cast<int64_t>(element_size) * size;
  const int64_t bytes =
      divide_up(band_strips * height.stride * pitch * size + spare, vector) * vector;
  if (bytes > 2 * kMost || bands > notes) {
    return {}; // for huge strides
  }
  return BandPlan{
      narrow<uint32_t>(geometry),
      overlap ? Band::overlapping
      : deep  ? Band::deep
              : Band::disjoint,
      static_cast<uint32_t>(geometry.in_plane()),
      static_cast<uint32_t>(bands),
      static_cast<uint32_t>(strips),
      static_cast<uint32_t>(band_strips),
      static_cast<uint32_t>(beside(height)),
      static_cast<uint32_t>(before),
      static_cast<uint32_t>(part_columns),
      static_cast<uint32_t>(pitch),
      static_cast<uint32_t>(bytes),
      divider(parts),
      divider(heights),
      divider(depth.out),
      divider(whole ? width.in : part_columns + before),
      divider(width.out),
      divider(height.out),
      divider(width.kernel),
      divider(height.kernel),
      divider(depth.stride)};
}

} // namespace maxunpool_cuda
