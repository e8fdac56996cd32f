// How calls of max unpooling are cut up: what a call is, and the plans of its kernels, as values.
#pragma once

#include "../dtypes.h"
#include "../geometry.h"
#include "../reduction.h"
#include "bands.cuh"
#include "divider.cuh"
#include "forward_channels.cuh"
#include "forward_rows.cuh"
#include "limits.h"
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

// A call as bands: their kernels' plan, and threads and shared memory of a block.
struct BandPlan {
  Bands bands;
  int64_t threads, bytes;

  bool of_planes() const { return bands.planes != 0; }
};

// Of any contiguous tensor whose elements fit slots, but sums of windows that overlap, and
// gradients of parts; empty also where strips are too long.
inline std::optional<BandPlan> make_bands(const Arguments& arguments) {
  const Geometry<int64_t>& g = arguments.geometry;
  const Limits& limits = arguments.limits;
  const auto& [depth, height, width] = g.axis;
  const auto size = static_cast<int64_t>(arguments.element_size);
  const auto index_size = static_cast<int64_t>(c10::elementSize(arguments.index_type));
  const bool apart = windows_are_apart(g), last = arguments.reduce == Reduce::last;
  const bool offsets = arguments.index_type == c10::ScalarType::Byte;
  const bool forward = arguments.forward;
  const bool adds_nothing = forward && apart && !c10::isComplexType(arguments.type);
  if (offsets && depth.kernel * height.kernel * width.kernel >= kMostOffsets) {
    return {}; // kernels need an offset that no window has
  }
  if (g.inner != 1 || size > 8 || !(last ? forward || !offsets : adds_nothing)) {
    return {};
  }
  const auto slices = [&](const auto& size_of) { return size_of(height) * size_of(width); };
  const auto in = [](const Axis<int64_t>& axis) { return axis.in; };
  const auto out = [](const Axis<int64_t>& axis) { return axis.out; };
  const auto clips = [](const Axis<int64_t>& axis) {
    return axis.padding != 0 || (axis.in - 1) * axis.stride + axis.kernel > axis.out;
  };
  const bool deep = !is_trivial(depth);

  // Slots, with the vectors at their ends, and what is staged.
  const bool claims = !offsets || !apart;
  const int64_t vector = kVectorBytes, slot = claims ? sizeof(uint32_t) : size;
  const bool staged = forward && claims && is_staged(size);
  const auto staged_of = [&](int64_t cells) {
    return staged ? divide_up(cells * size, vector) * vector + 8 * vector : 0;
  };
  const auto slots_of = [&](int64_t outputs) {
    return divide_up(outputs, vector) * vector + 2 * vector;
  };
  const auto bytes_of = [&](int64_t cells, int64_t outputs) {
    return staged_of(cells) + slots_of(outputs) * slot + static_cast<int64_t>(sizeof(Band<1, 1>));
  };
  const auto fits = [&](int64_t cells, int64_t outputs, int64_t bytes) {
    return bytes_of(cells, outputs) <= bytes && cells <= kMostClaims;
  };
  const int64_t group = cells_of_group(size, index_size);

  Bands all{};
  all.windows = windows_of(narrow<uint32_t>(g));
  int64_t cells, outputs, count; // cells and outputs of a band
  int64_t planes = 0;
  if (fits(g.in_plane(), g.out_plane(), limits.small_bytes) &&
      (last || c10::isFloatingType(arguments.type))) {
    planes = 1;
    while (planes < g.outer && planes * g.in_plane() < limits.small_plane * group &&
           fits(2 * planes * g.in_plane(), 2 * planes * g.out_plane(), limits.small_bytes)) {
      planes *= 2;
    }
    cells = planes * g.in_plane();
    outputs = planes * g.out_plane();
    count = divide_up(g.outer, planes);
  } else if (forward) {
    constexpr int64_t kUsual = 16 << 10, kMost = 48 << 10; // bytes of a block
    constexpr int64_t kUsualCells = 16;
    const bool thin = !deep && height.in == 1 && height.out == 1;
    // The first axis, unless its slices are too large, and windows share none of them.
    int cut = thin ? 2 : deep ? 0 : 1;
    if (cut == 0 && is_simple_in_depth(depth) &&
        !fits(2 * slices(in), depth.stride * slices(out), kUsual)) {
      cut = 1;
    }
    const Axis<int64_t>& axis = g.axis[cut];
    const int64_t row_cells = cut == 0 ? slices(in) : cut == 1 ? width.in : 1;
    const int64_t row_outputs = cut == 0 ? slices(out) : cut == 1 ? width.out : 1;
    const int64_t above = (axis.kernel - 1) / axis.stride;
    const auto cells_in = [&](int64_t strips) { return (strips + above) * row_cells; };
    const auto outputs_in = [&](int64_t strips) { return strips * axis.stride * row_outputs; };
    const int64_t all_strips = std::max(axis.in, divide_up(axis.out + axis.padding, axis.stride));
    int64_t strips = 1;
    while (strips < all_strips && cells_in(strips + 1) <= kUsualCells * limits.small_plane &&
           fits(cells_in(strips + 1), outputs_in(strips + 1), kUsual)) {
      ++strips;
    }
    strips = divide_up(all_strips, divide_up(all_strips, strips)); // as long as each other
    cells = cells_in(strips);
    outputs = outputs_in(strips);
    if (!fits(cells, outputs, kMost)) {
      return {};
    }
    const int64_t volumes = cut == 1 ? depth.out : 1, parts = divide_up(all_strips, strips);
    count = g.outer * volumes * parts;
    all.cut = cut;
    all.axis = all.windows.geometry.axis[cut];
    all.strips = static_cast<uint32_t>(strips);
    all.above = static_cast<uint32_t>(above);
    all.row_cells = static_cast<uint32_t>(row_cells);
    all.row_outputs = static_cast<uint32_t>(row_outputs);
    all.volume_cells = static_cast<uint32_t>(slices(in));
    all.volume_outputs = static_cast<uint32_t>(cut == 1 ? slices(out) : g.out_plane());
    all.parts = divider(parts);
    all.depths = divider(volumes);
    all.depth_stride = divider(depth.stride);
    all.depth_padding = static_cast<uint32_t>(cut == 1 ? depth.padding : 0);
  } else {
    return {};
  }
  all.count = static_cast<uint32_t>(count);
  all.planes = static_cast<uint32_t>(planes);
  all.in_plane = static_cast<uint32_t>(g.in_plane());
  all.cells = static_cast<uint32_t>(g.outer * g.in_plane());
  all.staged = static_cast<uint32_t>(staged_of(cells));
  all.bfloat16 = arguments.type == c10::ScalarType::BFloat16;
  all.reduce = arguments.reduce;
  all.cells_of_plane = ShortDivider(g.in_plane());
  all.deep = deep;
  all.plain = !deep && std::none_of(std::begin(g.axis), std::end(g.axis), clips);
  all.kernel_volume = static_cast<uint32_t>(depth.kernel * height.kernel * width.kernel);
  all.cells_of_row = ShortDivider(width.in);
  all.cells_of_height = ShortDivider(slices(in));
  all.kernel_height = ShortDivider(height.kernel);
  all.kernel_width = ShortDivider(width.kernel);
  const int64_t next_row = height.stride * width.out - width.in * width.stride;
  const int64_t next_plane = g.out_plane() - height.in * height.stride * width.out;
  all.next_row = static_cast<uint32_t>(next_row);
  all.next_plane = static_cast<uint32_t>(next_plane);
  // Of groups, each some 32 bytes or less, or of four vectors.
  const int64_t per_thread = group * (size + index_size) < 32 ? 2 : 1;
  const int64_t vectors = forward ? outputs * size / vector : 0;
  const int64_t threads =
      std::min<int64_t>(std::max(cells / group, vectors / 4) / per_thread + 1, kBandThreads);
  return BandPlan{all, threads, bytes_of(cells, outputs)};
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
    if (slot != 0 && !(bands && bands->of_planes())) {
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

  static size_t align(size_t size) {
    return (size + kVectorBytes - 1) / kVectorBytes * kVectorBytes;
  }

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

} // namespace maxunpool_cuda
