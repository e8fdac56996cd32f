// Plan of a call in bands (see bands.cuh).
#pragma once

#include "../dtypes.h"
#include "../geometry.h"
#include "../reduction.h"
#include "bands.cuh"
#include "call.cuh"
#include "decoder.cuh"
#include "divider.cuh"
#include "limits.h"
#include "vector.cuh"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <optional>

namespace maxunpool_cuda {

struct BandPlan {
  Bands bands;
  BlockShape shape;
};

// Shared memory of a block: staged elements, a Band, and slots.
struct BandMemory {
  int64_t size, slot; // bytes of an element, of a slot
  bool staged;        // elements are staged, and slots say where

  int64_t staged_bytes(int64_t cells) const {
    constexpr int64_t kSpare = 128; // bytes of groups at the ends
    return staged ? align(cells * size) + kSpare : 0;
  }
  int64_t bytes(int64_t cells, int64_t outputs) const {
    constexpr int64_t kSpare = 32; // slots of vectors at the ends
    return staged_bytes(cells) + int64_t{sizeof(Band<1, 1>)} + align((outputs + kSpare) * slot);
  }
  bool fits(int64_t cells, int64_t outputs, int64_t most) const {
    return bytes(cells, outputs) <= most && cells <= kMostClaims;
  }
};

// Size of a band, at most.
struct BandSize {
  int64_t cells, outputs;
};

inline int64_t in_slice(const Geometry<int64_t>& g) {
  return g.axis[1].in * g.axis[2].in;
}
inline int64_t out_slice(const Geometry<int64_t>& g) {
  return g.axis[1].out * g.axis[2].out;
}

// Bands of some whole planes. Empty: not one plane fits.
inline std::optional<BandSize> cut_into_planes(
    const Arguments& arguments, const BandMemory& memory, int64_t group, Bands& all) {
  const Geometry<int64_t>& g = arguments.geometry;
  const auto fits = [&](int64_t planes) {
    return memory.fits(planes * g.in_plane(), planes * g.out_plane(), arguments.limits.small_bytes);
  };
  if (!fits(1)) {
    return {};
  }
  int64_t planes = 1;
  while (planes < g.outer && planes * g.in_plane() < arguments.limits.small_plane * group &&
         fits(2 * planes)) {
    planes *= 2;
  }
  all.planes = static_cast<uint32_t>(planes);
  all.count = static_cast<uint32_t>(divide_up(g.outer, planes));
  return BandSize{planes * g.in_plane(), planes * g.out_plane()};
}

// Bands that are parts of planes. Empty: a strip is too long.
inline std::optional<BandSize> cut_into_parts(
    const Arguments& arguments, const BandMemory& memory, Bands& all) {
  constexpr int64_t kUsualBytes = 16 << 10, kMostBytes = 48 << 10; // of a block
  constexpr int64_t kUsualCells = 16; // of a part, times Limits::small_plane
  const Geometry<int64_t>& g = arguments.geometry;
  const auto& [depth, height, width] = g.axis;
  // Planes are cut along the first axis, unless its slices are large and windows share none.
  int cut = 1;
  if (is_trivial(depth) && height.in == 1 && height.out == 1) {
    cut = 2;
  } else if (!is_trivial(depth)) {
    const bool large = !memory.fits(2 * in_slice(g), depth.stride * out_slice(g), kUsualBytes);
    cut = large && is_simple_in_depth(depth) ? 1 : 0;
  }
  const Axis<int64_t>& axis = g.axis[cut];
  const int64_t row_cells = cut == 0 ? in_slice(g) : cut == 1 ? width.in : 1;
  const int64_t row_outputs = cut == 0 ? out_slice(g) : cut == 1 ? width.out : 1;
  const int64_t above = (axis.kernel - 1) / axis.stride;
  const auto size_of = [&](int64_t strips) {
    return BandSize{(strips + above) * row_cells, strips * axis.stride * row_outputs};
  };
  const int64_t all_strips = std::max(axis.in, divide_up(axis.out + axis.padding, axis.stride));
  int64_t strips = 1;
  for (; strips < all_strips; ++strips) {
    const BandSize more = size_of(strips + 1);
    if (more.cells > kUsualCells * arguments.limits.small_plane ||
        !memory.fits(more.cells, more.outputs, kUsualBytes)) {
      break;
    }
  }
  const int64_t parts = divide_up(all_strips, strips);
  strips = divide_up(all_strips, parts); // of equal length
  const BandSize size = size_of(strips);
  if (!memory.fits(size.cells, size.outputs, kMostBytes)) {
    return {};
  }
  const int64_t slices = cut == 1 ? depth.out : 1;
  all.count = static_cast<uint32_t>(g.outer * slices * parts);
  all.cut = cut;
  all.axis = all.decoder.geometry.axis[cut];
  all.strips = static_cast<uint32_t>(strips);
  all.above = static_cast<uint32_t>(above);
  all.row_cells = static_cast<uint32_t>(row_cells);
  all.row_outputs = static_cast<uint32_t>(row_outputs);
  all.slice_cells = static_cast<uint32_t>(in_slice(g));
  all.slice_outputs = static_cast<uint32_t>(cut == 1 ? out_slice(g) : g.out_plane());
  all.parts = divider(parts);
  all.slices = divider(slices);
  all.slice_stride = divider(depth.stride);
  all.slice_padding = static_cast<uint32_t>(cut == 1 ? depth.padding : 0);
  return size;
}

// Bands of a call. Empty: the tensor is not contiguous, its elements do not fit slots, or the call
// is a sum of windows that overlap, or a gradient of large planes or from window offsets.
inline std::optional<BandPlan> make_bands(const Arguments& arguments) {
  const Geometry<int64_t>& g = arguments.geometry;
  const auto& [depth, height, width] = g.axis;
  const auto size = static_cast<int64_t>(arguments.element_size);
  const auto index_size = static_cast<int64_t>(c10::elementSize(arguments.index_type));
  const int64_t kernel_volume = depth.kernel * height.kernel * width.kernel;
  const bool apart = disjoint(g), last = arguments.reduce == Reduce::last;
  const bool offsets = index_size == 1, forward = arguments.forward;
  const bool adds_nothing = forward && apart && !c10::isComplexType(arguments.type);
  if (g.inner != 1 || size > 8 || !(last ? forward || !offsets : adds_nothing) ||
      (offsets && kernel_volume >= kMostOffsets)) { // 255 must be in no window: see drop_others
    return {};
  }
  const bool claims = !offsets || !apart;
  const BandMemory memory{
      size, claims ? int64_t{sizeof(uint32_t)} : size, forward && claims && is_staged(size)};
  const int64_t group = cells_of_group(size, index_size);
  Bands all{};
  all.decoder = decoder_of<uint32_t>(g);
  std::optional<BandSize> band;
  if (last || c10::isFloatingType(arguments.type)) {
    band = cut_into_planes(arguments, memory, group, all);
  }
  if (!band && forward) {
    band = cut_into_parts(arguments, memory, all);
  }
  if (!band) {
    return {};
  }
  const auto clips = [](const Axis<int64_t>& axis) {
    return axis.padding != 0 || (axis.in - 1) * axis.stride + axis.kernel > axis.out;
  };
  all.aligned = has_vectors(arguments);
  all.readable = all.aligned ? static_cast<uint32_t>(g.outer * g.in_plane()) : 0;
  all.staged = static_cast<uint32_t>(memory.staged_bytes(band->cells));
  all.bfloat16 = arguments.type == c10::ScalarType::BFloat16;
  all.sums = !last;
  all.deep = !is_trivial(depth);
  all.plain = !all.deep && std::none_of(std::begin(g.axis), std::end(g.axis), clips);
  all.kernel_volume = static_cast<uint32_t>(kernel_volume);
  all.cells_of_plane = ShortDivider(g.in_plane());
  all.cells_of_height = ShortDivider(in_slice(g));
  all.cells_of_row = ShortDivider(width.in);
  all.kernel_height = ShortDivider(height.kernel);
  all.kernel_width = ShortDivider(width.kernel);
  all.next_row = static_cast<uint32_t>(height.stride * width.out - width.in * width.stride);
  all.next_plane = static_cast<uint32_t>(g.out_plane() - height.in * height.stride * width.out);
  // Threads have one group each, or two of less than 32 bytes, or four vectors.
  const int64_t per_thread = group * (size + index_size) < 32 ? 2 : 1;
  const int64_t vectors = forward ? band->outputs * size / static_cast<int64_t>(kVectorBytes) : 0;
  const int64_t threads =
      std::min<int64_t>(std::max(band->cells / group, vectors / 4) / per_thread + 1, kBandThreads);
  return BandPlan{all, {all.count, threads, memory.bytes(band->cells, band->outputs), true}};
}

} // namespace maxunpool_cuda
