// SPDX-License-Identifier: BSD-3-Clause
// From the indices of a chunk, of any dtype and layout, to the outputs that they name.
//
// It takes chunks from plan.h. The target of an element is the output that its index names, counted
// from the begin of the chunk's reach, in 32 bits.
//
// Each index is read once, and what was read is checked where no other thread writes. So a thread
// that changes indices during a call changes what the call gives, but not which memory it touches.
//
// Example: the chunk of plan.h whose reach begins with output 5376 (row 24 of 224 columns). Its
// cell in row 12, column 5 has a window that begins at row 24, column 10, at position 24 * 224
// + 10.
//   FlatTargets    the flat index 5387 (row 24, column 11) has the target 5387 - 5376 = 11
//   OffsetTargets  the window offset 1 (row 0, column 1 of the window) names the same output: 11
//   OwnWindows     the targets 10, 11, 234 and 235 lie in the window of that cell
// In channels_last with 64 channels the target of channel 7 is 11 * 64 + 7, from 5376 * 64 on.
#pragma once

#include "../calls.h"
#include "../dtypes.h"
#include "../geometry.h"
#include "machine.h"
#include "plan.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <type_traits>

namespace maxunpool_cuda {
namespace { // Internal linkage: GCC inlines these more readily.

struct Coordinates {
  int64_t z;
  int64_t y;
  int64_t x;
};

class Windows {
 public:
  explicit Windows(const Geometry<int64_t>& geometry) : geometry_(geometry) {}

  // How far the window of an image's element lies from the first window of its plane.
  Coordinates step_to(int64_t element) const {
    const auto& [depth, height, width] = geometry_.axis;
    const int64_t cell = element / geometry_.inner;
    const int64_t row = cell / width.in;
    return {
        .z = row / height.in * depth.stride,
        .y = row % height.in * height.stride,
        .x = cell % width.in * width.stride};
  }

  // Where the window of an image's element begins, before it is clipped.
  Coordinates begin_of(int64_t element) const {
    const auto& [depth, height, width] = geometry_.axis;
    const auto [z, y, x] = step_to(element);
    return {.z = z - depth.padding, .y = y - height.padding, .x = x - width.padding};
  }

  // Position in the output plane. Unsigned, because coordinates far outside of the plane may wrap
  // around; such positions are not used.
  int64_t position(uint64_t z, uint64_t y, uint64_t x) const {
    return static_cast<int64_t>((z * geometry_.axis[1].out + y) * geometry_.axis[2].out + x);
  }
  int64_t position(const Coordinates& at) const { return position(at.z, at.y, at.x); }

  // Whether a window may lie outside of the plane in part.
  bool may_be_clipped() const {
    return std::any_of(geometry_.axis, geometry_.axis + 3, [](const Axis<int64_t>& axis) {
      return axis.padding > 0 || (axis.in - 1) * axis.stride + axis.kernel > axis.out;
    });
  }

 private:
  const Geometry<int64_t>& geometry_;
};

// Where the window of each element of a group's first chunk begins, before it is clipped. Other
// chunks need no table: a chunk is whole rows or a piece of one, so from chunk to chunk all its
// windows move as far as the first one does.
struct WindowTable {
  // A position in the plane, in 32 bits that may wrap around, and coordinates. Aligned, so that no
  // vector of 32 bytes lies in two cache lines.
  alignas(64) uint32_t position[Chunk::kMost];
  alignas(64) int32_t x[Chunk::kMost];
  alignas(64) int32_t y[Chunk::kMost];

  void fill(const Plan& plan) {
    const Geometry<int64_t>& geometry = plan.geometry;
    const Windows windows(geometry);
    const int64_t image = std::min(plan.longest_chunk, geometry.in_image());
    for (int64_t row = 0; row < image; row += geometry.axis[2].in * geometry.inner) {
      fill_row(geometry, windows.begin_of(row), row, image);
    }
    for (int64_t i = image; i < plan.longest_chunk; ++i) { // other images of the group
      position[i] = position[i - image];
      x[i] = x[i - image];
      y[i] = y[i - image];
    }
  }

 private:
  // Fills in a row of cells from element i on, unless the table ends before.
  void fill_row(const Geometry<int64_t>& geometry, Coordinates begin, int64_t i, int64_t end) {
    const Axis<int64_t>& width = geometry.axis[2];
    const Windows windows(geometry);
    for (int64_t cell = 0; cell < width.in && i < end; ++cell, begin.x += width.stride) {
      const auto cell_position = static_cast<uint32_t>(windows.position(begin));
      for (int64_t channel = 0; channel < geometry.inner && i < end; ++channel, ++i) {
        position[i] = cell_position;
        x[i] = static_cast<int32_t>(begin.x);
        y[i] = static_cast<int32_t>(begin.y);
      }
    }
  }
};

// What to add to a position, times the channels, to get an output: an element's channel, and the
// begin of its image in the group. The table is of a group's first chunk. A chunk that begins
// inside a cell adds the channel of its first element.
struct FirstOutputs {
  alignas(64) uint32_t output[Chunk::kMost]; // no vector of it lies in two cache lines

  void fill(const Plan& plan) {
    const int64_t inner = plan.geometry.inner;
    const int64_t image = std::min(plan.longest_chunk, plan.geometry.in_image());
    for (int64_t i = 0; i < image; ++i) {
      output[i] = i < inner ? static_cast<uint32_t>(i) : output[i - inner]; // the channel
    }
    for (int64_t i = image; i < plan.longest_chunk; ++i) { // other images of the group
      output[i] = output[i - image] + static_cast<uint32_t>(plan.geometry.out_image());
    }
  }
};

// Whether the targets of a call are positions less a constant: its groups are planes.
inline bool groups_are_planes(const Plan& plan) {
  return plan.geometry.inner == 1 && plan.images == 1;
}

// Tells whether the targets of a chunk lie in their own windows. If windows do not overlap, no two
// such targets are equal.
class OwnWindows {
 public:
  // Whether no two windows overlap, none is clipped, and images and windows are small enough.
  static bool can_tell(const Geometry<int64_t>& geometry) {
    return disjoint(geometry) && geometry.out_image() >> 31 == 0 &&
           !Windows(geometry).may_be_clipped() &&
           geometry.axis[0].kernel * geometry.axis[1].kernel <= kMostRows;
  }

  OwnWindows(const Plan& plan, const FirstOutputs& first_outputs)
      : plan_(plan), windows_(plan.geometry) {
    const auto inner = static_cast<uint32_t>(plan.geometry.inner);
    WindowTable table;
    table.fill(plan);
    for (int64_t i = 0; i < plan.longest_chunk; ++i) {
      begin_[i] = table.position[i] * inner + first_outputs.output[i];
    }
    const auto& [depth, height, width] = plan.geometry.axis;
    for (int64_t row = 0; row < depth.kernel * height.kernel; ++row) {
      const int64_t position = windows_.position(row / height.kernel, row % height.kernel, 0);
      row_begin_[row] = static_cast<uint32_t>(position) * inner;
    }
    row_size_ = static_cast<uint32_t>(width.kernel) * inner;
  }

  // Whether all targets of a chunk lie in their own windows.
  bool hold(const Chunk& chunk, const uint32_t* targets) const {
    const int64_t count = chunk.elements.size();
    const int64_t inner = plan_.geometry.inner;
    // From the group's first window to that of the chunk's first element.
    const int64_t step = windows_.position(windows_.step_to(chunk.elements.begin)) * inner;
    const int64_t channel = chunk.elements.begin % inner;
    const auto moved = static_cast<uint32_t>(step + channel - chunk.reach.begin);
    return in_vectors([=, this]() MAXUNPOOL_INLINE {
      uint32_t farthest = 0; // from the begin of a row of the own window
#pragma GCC unroll 4
      for (int64_t i = 0; i < count; ++i) {
        const uint32_t in_window = targets[i] - (begin_[i] + moved);
        // The distance from the last row that begins at or before the target is the smallest:
        // earlier rows are farther, and later ones wrap around.
        uint32_t in_row = in_window;
        for (int row = 1; row < kMostRows; ++row) {
          in_row = std::min(in_row, in_window - row_begin_[row]);
        }
        farthest = std::max(farthest, in_row);
      }
      return farthest < row_size_;
    });
  }

 private:
  static constexpr int kMostRows = 4; // of a window; each is a comparison of every target

  const Plan& plan_;
  const Windows windows_;
  // Where the window of each element of a group's first chunk begins, among the outputs of the
  // group. No vector of it lies in two cache lines.
  alignas(64) uint32_t begin_[Chunk::kMost];
  // Outputs from the begin of a window to the begin of each row; 0 for rows that it does not have.
  uint32_t row_begin_[kMostRows] = {};
  uint32_t row_size_; // outputs from the begin of a row to its end
};

// What FlatTargets and OffsetTargets know of a chunk.
struct ChunkPositions {
  uint32_t channels;
  uint32_t channel; // of the first element
  int64_t first;    // position in the plane where the reach begins
  int64_t farthest; // distance of the reach's last position from `first`

  ChunkPositions(const Geometry<int64_t>& geometry, const Chunk& chunk)
      : channels(static_cast<uint32_t>(geometry.inner)),
        channel(static_cast<uint32_t>(chunk.elements.begin % geometry.inner)),
        first(chunk.reach.begin / geometry.inner) {
    const int64_t end = std::min(chunk.reach.end / geometry.inner, geometry.out_plane());
    farthest = end - 1 - first;
  }
};

// Targets of flat indices.
class FlatTargets {
 public:
  // `in_own_windows`: each index has to lie in its own window.
  FlatTargets(const Plan& plan, bool in_own_windows) : plan_(plan) {
    first_outputs_.fill(plan);
    if (in_own_windows) {
      own_windows_.emplace(plan, first_outputs_);
    }
  }

  // Finds the targets of a chunk, whose reach has less than 2^31 outputs. False, and they are
  // undefined, if an index leads out of the reach or its own window. `indices`: of the chunk.
  template <class Index>
  bool find(const Index* indices, const Chunk& chunk, uint32_t* targets) const {
    const bool narrow = groups_are_planes(plan_) ? read<true>(indices, chunk, targets)
                                                 : read<false>(indices, chunk, targets);
    forget_source(targets); // what is checked now is what a kernel will use
    return narrow && (own_windows_ ? own_windows_->hold(chunk, targets) : in_reach(chunk, targets));
  }

 private:
  // Reads the indices, once. False if one is so far from the reach that 32 bits cannot show it.
  template <bool kPlanes, class Index>
  bool read(const Index* indices, const Chunk& chunk, uint32_t* targets) const {
    const int64_t count = chunk.elements.size();
    const ChunkPositions positions(plan_.geometry, chunk);
    if (positions.first > std::numeric_limits<Index>::max()) {
      return false; // no index leads so far
    }
    // By reference: a copy that was just written would be read in wider words, which stalls.
    return in_vectors([=, this, &positions]() MAXUNPOOL_INLINE {
      using Bits = std::make_unsigned_t<Index>; // int32 in 32 bits: more of them fill a vector
      const auto first = static_cast<Bits>(positions.first);
      uint32_t* __restrict to = targets;
      // All bits: of int64 those of the distances from the reach's first position, whose high ones
      // show a far index; of int32 those of the indices, whose highest shows a negative one.
      Bits all = 0;
      uint32_t farthest = 0;
#pragma GCC unroll 4
      for (int64_t i = 0; i < count; ++i) {
        const auto index = static_cast<Bits>(indices[i]);
        const Bits wide = index - first;
        const auto distance = static_cast<uint32_t>(wide);
        all |= sizeof(Bits) == 4 ? index : wide;
        if constexpr (kPlanes) {
          to[i] = distance;
        } else {
          farthest = std::max(farthest, distance);
          const uint32_t first_output = first_outputs_.output[i] + positions.channel;
          to[i] = distance * positions.channels + first_output;
        }
      }
      return all >> 31 == 0 && farthest <= positions.farthest;
    });
  }

  static bool in_reach(const Chunk& chunk, const uint32_t* targets) {
    const int64_t count = chunk.elements.size();
    return in_vectors([=, size = chunk.reach.size()]() MAXUNPOOL_INLINE {
      uint32_t farthest = 0;
#pragma GCC unroll 4
      for (int64_t i = 0; i < count; ++i) {
        farthest = std::max(farthest, targets[i]);
      }
      return farthest < size;
    });
  }

  const Plan& plan_;
  FirstOutputs first_outputs_;
  std::optional<OwnWindows> own_windows_;
};

// Targets of window offsets.
class OffsetTargets {
 public:
  explicit OffsetTargets(const Plan& plan)
      : plan_(plan), may_be_clipped_(Windows(plan.geometry).may_be_clipped()) {
    const auto& [depth, height, width] = plan.geometry.axis;
    double farthest = 0; // more than any two positions in windows, unclipped, are apart
    for (const Axis<int64_t>& axis : plan.geometry.axis) {
      const double end = axis.in * static_cast<double>(axis.stride) + axis.kernel + axis.padding;
      farthest = farthest * static_cast<double>(axis.out) + end;
    }
    fits_ = farthest < kMostPosition;
    axes_ = height.is_trivial() ? 1 : 2;
    axes_ = depth.is_trivial() ? axes_ : 3;
    windows_.fill(plan);
    first_outputs_.fill(plan);
  }

  // Whether 32 bits hold the positions of all windows, clipped or not. Else find() is not allowed.
  bool fits() const { return fits_; }

  // Finds the targets of a chunk, whose reach has less than 2^31 outputs. False, and they are
  // undefined, if an index leads out of its window or out of the plane. `offsets`: of the chunk.
  //
  // Twelve instantiations, each of which does what its case needs. One for all takes longer, for 2d
  // windows that are not clipped: 1.5 times if it always looks at three axes, 3 times if it always
  // checks coordinates; and a table with the position of each of 256 offsets 4.5 times, since
  // vectors read a table one element at a time (measured on an Intel Xeon with AVX2, GCC 12).
  bool find(const uint8_t* offsets, const Chunk& chunk, uint32_t* targets) const {
    bool all = false;
    with_one_of<1, 2, 3>(axes_, [&](auto axes) {
      with_one_of<0, 1>(groups_are_planes(plan_), [&](auto planes) {
        with_one_of<0, 1>(may_be_clipped_, [&](auto clipped) {
          all = find_all<axes, planes, clipped>(offsets, chunk, targets);
        });
      });
    });
    return all;
  }

 private:
  // Positions. So a difference fits int32_t, with a factor of 2 to spare.
  static constexpr int64_t kMostPosition = 1 << 30;

  // Numbers of the geometry, and of a chunk, in the 32 bits that vectors compute with.
  struct Shape {
    int32_t rows;    // of a window
    int32_t columns; // of a window
    int32_t height;  // of the plane
    int32_t width;   // of the plane
    uint32_t volume; // offsets of a window
    // offset / columns is offset * by_columns >> 16, where by_columns = 65536 / columns + 1. Before
    // the shift drops its fraction, that is too large by less than 256 / 65536, so by less than
    // 1 / columns: too little to reach the next integer. The same for rows.
    int32_t by_rows;
    int32_t by_columns;
    uint32_t to_next_row;   // positions from the end of a window's row to its next row
    uint32_t to_next_slice; // positions more, from a window's depth slice to its next one
    // From the first window of the group to that of the chunk's first element.
    int32_t down;
    int32_t right;
    uint32_t positions; // less where the reach begins
  };

  Shape shape_of(const Chunk& chunk, int64_t first) const {
    const auto& [depth, height, width] = plan_.geometry.axis;
    const Windows windows(plan_.geometry);
    const Coordinates step = windows.step_to(chunk.elements.begin);
    const int64_t skipped_rows = height.out - height.kernel;
    return {
        .rows = static_cast<int32_t>(height.kernel),
        .columns = static_cast<int32_t>(width.kernel),
        .height = static_cast<int32_t>(height.out),
        .width = static_cast<int32_t>(width.out),
        .volume = static_cast<uint32_t>(depth.kernel * height.kernel * width.kernel),
        .by_rows = static_cast<int32_t>((1 << 16) / height.kernel + 1),
        .by_columns = static_cast<int32_t>((1 << 16) / width.kernel + 1),
        .to_next_row = static_cast<uint32_t>(width.out - width.kernel),
        .to_next_slice = static_cast<uint32_t>(skipped_rows * width.out),
        .down = static_cast<int32_t>(step.y),
        .right = static_cast<int32_t>(step.x),
        .positions = static_cast<uint32_t>(windows.position(step) - first)};
  }

  // kAxes: of the last axes, how many are looked at; those before have size 1. kClipped: windows
  // may be clipped. An offset that leaves the plane along the first axis leaves the reach, too;
  // only the axes after it are compared on their own.
  template <int kAxes, bool kPlanes, bool kClipped>
  bool find_all(const uint8_t* offsets, const Chunk& chunk, uint32_t* targets) const {
    const int64_t count = chunk.elements.size();
    const ChunkPositions positions(plan_.geometry, chunk);
    const Shape shape = shape_of(chunk, positions.first);
    alignas(64) uint8_t own[Chunk::kMost]; // what is checked is what targets are made of
    std::copy_n(offsets, count, own);
    forget_source(own);
    return in_vectors([=, this, &positions, &shape, &own]() MAXUNPOOL_INLINE { // as in FlatTargets
      uint32_t* __restrict to = targets;
      uint32_t farthest = 0;
      uint8_t largest_offset = 0;
      int32_t outside = 0; // negative: some coordinate was outside
      for (int64_t i = 0; i < count; ++i) {
        const int32_t offset = own[i];
        const int32_t row = kAxes > 1 ? offset * shape.by_columns >> 16 : 0; // of all slices
        const int32_t slice = kAxes > 2 ? row * shape.by_rows >> 16 : 0;
        if constexpr (kClipped && kAxes > 1) {
          const int32_t x = windows_.x[i] + shape.right + offset - row * shape.columns;
          outside |= x | (shape.width - 1 - x);
        }
        if constexpr (kClipped && kAxes > 2) {
          const int32_t y = windows_.y[i] + shape.down + row - slice * shape.rows;
          outside |= y | (shape.height - 1 - y);
        }
        const uint32_t window = windows_.position[i] + shape.positions;
        const uint32_t distance =
            window + offset + row * shape.to_next_row + slice * shape.to_next_slice;
        largest_offset = std::max(largest_offset, own[i]);
        farthest = std::max(farthest, distance);
        const uint32_t first_output = kPlanes ? 0 : first_outputs_.output[i] + positions.channel;
        to[i] = kPlanes ? distance : distance * positions.channels + first_output;
      }
      return outside >= 0 && largest_offset < shape.volume && farthest <= positions.farthest;
    });
  }

  const Plan& plan_;
  const bool may_be_clipped_;
  bool fits_;
  int axes_;
  WindowTable windows_;
  FirstOutputs first_outputs_;
};

// Targets of a call, whatever its indices.
class Targets {
 public:
  static constexpr int64_t kNone = -1;

  // `in_own_windows`: flat indices have to lie in their own windows.
  Targets(const UnpoolCall& call, const Plan& plan, bool in_own_windows)
      : call_(call), plan_(plan), windows_(plan.geometry) {
    if (call.index_type == ScalarType::Byte) {
      offset_targets_.emplace(plan);
    } else {
      flat_targets_.emplace(plan, in_own_windows);
    }
  }

  // Finds the targets of a chunk. False, and they are undefined, if an index leads out of the
  // reach, or is not in its own window but has to be.
  bool find(const Chunk& chunk, uint32_t* targets) const {
    if (chunk.reach.size() >> 31 != 0 || (offset_targets_ && !offset_targets_->fits())) {
      return find_each(chunk, targets);
    }
    bool all = false;
    with_index_type(call_.index_type, [&]<class Index>(std::type_identity<Index>) {
      const int64_t begin = plan_.pooled(chunk.group) + chunk.elements.begin;
      const Index* indices = static_cast<const Index*>(call_.indices) + begin;
      if constexpr (kIsWindowOffset<Index>) {
        all = offset_targets_->find(indices, chunk, targets);
      } else {
        all = flat_targets_->find(indices, chunk, targets);
      }
    });
    return all;
  }

  // Output that an element's index names, both counted in the whole tensor; kNone if the index is
  // out of bounds.
  int64_t output_of(int64_t element) const {
    const Geometry<int64_t>& geometry = plan_.geometry;
    const int64_t image = element / geometry.in_image();
    int64_t position = kNone;
    with_index_type(call_.index_type, [&]<class Index>(std::type_identity<Index>) {
      const volatile Index& shared = static_cast<const Index*>(call_.indices)[element];
      const int64_t index = shared; // is read once
      if constexpr (kIsWindowOffset<Index>) {
        position = position_of(index, windows_.begin_of(element % geometry.in_image()));
      } else {
        position = Range{0, geometry.out_plane()}.holds(index) ? index : kNone;
      }
    });
    if (position == kNone) {
      return kNone;
    }
    return image * geometry.out_image() + position * geometry.inner + element % geometry.inner;
  }

 private:
  // Position of an offset in the window that begins there; kNone if it is outside of the window or
  // of the plane.
  int64_t position_of(int64_t offset, const Coordinates& window) const {
    const auto& [depth, height, width] = plan_.geometry.axis;
    const int64_t row = offset / width.kernel;
    const int64_t z = window.z + row / height.kernel;
    const int64_t y = window.y + row % height.kernel;
    const int64_t x = window.x + offset % width.kernel;
    const bool exists = row < depth.kernel * height.kernel && Range{0, depth.out}.holds(z) &&
                        Range{0, height.out}.holds(y) && Range{0, width.out}.holds(x);
    return exists ? windows_.position(z, y, x) : kNone;
  }

  // Finds targets one by one, however large the numbers. A reach may have 2^32 outputs or more, so
  // all that the caller does not own get the target `lead() - 1`, which is just before the owned.
  bool find_each(const Chunk& chunk, uint32_t* targets) const {
    const int64_t begin = plan_.pooled(chunk.group) + chunk.elements.begin;
    for (int64_t i = 0; i < chunk.elements.size(); ++i) {
      const int64_t output = output_of(begin + i) - plan_.unpooled(chunk.group);
      if (!chunk.reach.holds(output)) {
        return false;
      }
      const bool is_owned = chunk.owned.holds(output);
      const int64_t target = is_owned ? output - chunk.reach.begin : chunk.lead() - 1;
      targets[i] = static_cast<uint32_t>(target);
    }
    return true;
  }

  const UnpoolCall& call_;
  const Plan& plan_;
  const Windows windows_;
  std::optional<FlatTargets> flat_targets_;
  std::optional<OffsetTargets> offset_targets_;
};

} // namespace
} // namespace maxunpool_cuda
