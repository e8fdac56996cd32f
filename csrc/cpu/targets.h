// From the indices of a chunk, of any dtype and layout, to the outputs that they name.
#pragma once

#include "../calls.h"
#include "../dtypes.h"
#include "../geometry.h"
#include "machine.h"
#include "plan.h"

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {
namespace { // Internal linkage: GCC inlines these more readily.

// The target of an element is the output that its index names, counted from the first output that
// the thread owns. Targets that are not owned are at least the number of those that are.
class Targets {
 public:
  // `own_window`: flat indices have to lie in the windows of their elements, see
  // can_tell_windows().
  Targets(const UnpoolCall& call, const Plan& plan, bool own_window)
      : call_(call), plan_(plan), own_window_(own_window) {
    const bool offsets = call.index_type == c10::ScalarType::Byte;
    for (const Axis<int64_t>& axis : geometry_.axis) {
      fits_ = fits_ && (axis.in * axis.stride + axis.kernel + axis.padding) >> 30 == 0;
    }
    for (int64_t i = 0; own_window && i < kRows; ++i) { // the last row is repeated
      const int64_t row = std::min(i, depth_.kernel * height_.kernel - 1);
      row_[i] = static_cast<uint32_t>(position(row / height_.kernel, row % height_.kernel, 0));
    }
    list(offsets, own_window);
  }

  // Whether no two windows share an output, none is clipped, and rows are few enough to look
  // whether an index lies in the window of its element.
  static bool can_tell_windows(const Geometry<int64_t>& geometry) {
    bool can = disjoint(geometry) && geometry.out_plane() >> 31 == 0;
    for (const Axis<int64_t>& axis : geometry.axis) {
      can = can && whole(axis, {0, axis.in - 1});
    }
    return can && geometry.axis[0].kernel * geometry.axis[1].kernel <= kRows;
  }

  // Finds the targets of a chunk whose reach is `reach`, for the owner of `owned`. False, and they
  // are undefined, if an index leads out of the reach or, where it has to lie there, its window.
  bool find(
      int64_t stack, const Range& chunk, const Range& reach, const Range& owned,
      uint32_t* targets) const {
    bool found = false;
    with_index_type(call_.index_type, [&]<class Index>(std::type_identity<Index>) {
      const Index* indices = indices_of<Index>(stack) + chunk.begin;
      if (reach.size() >> 31 == 0 && (!kIsWindowOffset<Index> || fits_)) {
        found = find_all(indices, chunk, reach, owned, targets);
      } else if (!own_window_) {
        found = find_each(stack, chunk, reach, owned, targets);
      }
    });
    return found;
  }

  // Output of the stack that an element's index names; kNone if the index is bad.
  int64_t output_of(int64_t stack, int64_t element) const {
    const int64_t slab = geometry_.in_slab(), slab_outputs = geometry_.out_slab();
    const Coordinates window = window_of(element % slab);
    int64_t index = kNone;
    with_index_type(call_.index_type, [&]<class Index>(std::type_identity<Index>) {
      index = indices_of<Index>(stack)[element];
      if constexpr (kIsWindowOffset<Index>) {
        const int64_t row = index / width_.kernel, x = window.x + index % width_.kernel;
        const int64_t y = window.y + row % height_.kernel, z = window.z + row / height_.kernel;
        const bool exists = row < depth_.kernel * height_.kernel && Range{0, depth_.out}.holds(z) &&
                            Range{0, height_.out}.holds(y) && Range{0, width_.out}.holds(x);
        index = exists ? position(z, y, x) : kNone;
      }
    });
    return Range{0, geometry_.out_plane()}.holds(index)
               ? element / slab * slab_outputs + index * geometry_.inner + element % geometry_.inner
               : kNone;
  }

  static constexpr int64_t kNone = -1;

 private:
  static constexpr int64_t kRows = 4; // most rows of a window that indices are looked for in

  struct Coordinates {
    int64_t z, y, x;
  };
  // How far the window of a slab's element lies from the first window.
  Coordinates step_to(int64_t element) const {
    const int64_t cell = element / geometry_.inner, row = cell / width_.in;
    return {
        row / height_.in * depth_.stride, row % height_.in * height_.stride,
        cell % width_.in * width_.stride};
  }
  // Where that window begins, before it is clipped.
  Coordinates window_of(int64_t element) const {
    const auto [z, y, x] = step_to(element);
    return {z - depth_.padding, y - height_.padding, x - width_.padding};
  }

  // Unsigned: coordinates far outside of the plane may wrap around, and are not used then.
  int64_t position(uint64_t z, uint64_t y, uint64_t x) const {
    return static_cast<int64_t>((z * height_.out + y) * width_.out + x);
  }

  // Whether the windows of these cells along an axis lie in the plane.
  static bool whole(const Axis<int64_t>& axis, const Range& first_and_last) {
    return first_and_last.begin * axis.stride >= axis.padding &&
           first_and_last.end * axis.stride - axis.padding + axis.kernel <= axis.out;
  }

  // Whether the windows of a chunk lie in the plane.
  bool whole(const Range& chunk) const {
    if (all_whole_ || chunk.end > geometry_.in_slab()) {
      return all_whole_;
    }
    const int64_t first = chunk.begin / geometry_.inner, last = (chunk.end - 1) / geometry_.inner;
    const auto along = [&](const Axis<int64_t>& axis, int64_t step) {
      const bool together = first / (step * axis.in) == last / (step * axis.in);
      return whole(
          axis,
          together ? Range{first / step % axis.in, last / step % axis.in} : Range{0, axis.in - 1});
    };
    return along(depth_, height_.in * width_.in) && along(height_, width_.in) && along(width_, 1);
  }

  template <class Index>
  const Index* indices_of(int64_t stack) const {
    return static_cast<const Index*>(call_.indices) + plan_.pooled(stack);
  }

  // Fills in the lists.
  void list(bool offsets, bool own_window) {
    const bool windows = offsets || own_window;
    const int64_t count = plan_.longest_chunk(), inner = geometry_.inner;
    const int64_t slab = std::min(count, geometry_.in_slab());
    for (int64_t i = 0; windows && i < slab;) {
      const auto [z, y, begin] = window_of(i);
      for (int64_t x = begin, end = std::min(slab, i + width_.in * inner); i < end;
           x += width_.stride) {
        const auto window = static_cast<uint32_t>(position(z, y, x));
        for (const int64_t next = std::min(end, i + inner); i < next; ++i) {
          window_[i] = window;
          x_[i] = static_cast<int32_t>(x);
          y_[i] = static_cast<int32_t>(y);
          z_[i] = static_cast<int32_t>(z);
        }
      }
    }
    for (int64_t i = slab; windows && i < count; ++i) { // further slabs
      window_[i] = window_[i - slab];
      x_[i] = x_[i - slab];
      y_[i] = y_[i - slab];
      z_[i] = z_[i - slab];
    }
    for (int64_t i = 0; (offsets || !flat_) && i < count; ++i) {
      first_[i] = static_cast<uint32_t>(i % inner + i / slab * geometry_.out_slab());
    }
  }

  // Finds targets one by one, however large the numbers.
  bool find_each(
      int64_t stack, const Range& chunk, const Range& reach, const Range& owned,
      uint32_t* targets) const {
    for (int64_t i = 0; i < chunk.size(); ++i) {
      const int64_t output = output_of(stack, chunk.begin + i);
      if (!reach.holds(output)) {
        return false;
      }
      const bool owns = owned.holds(output);
      targets[i] = owns ? static_cast<uint32_t>(output - owned.begin) : ~uint32_t{0};
    }
    return true;
  }

  // Flat indices.
  template <class Index>
  bool find_all(
      const Index* indices, const Range& chunk, const Range& reach, const Range& owned,
      uint32_t* targets) const {
    const int64_t rows = depth_.kernel * height_.kernel;
    const auto in_rows = [&]<int kCount>(std::integral_constant<int, kCount>) {
      return flat_ ? find_all<kCount, true>(indices, chunk, reach, owned, targets)
                   : find_all<kCount, false>(indices, chunk, reach, owned, targets);
    };
    return !own_window_ ? in_rows(std::integral_constant<int, 0>{})
           : rows == 1  ? in_rows(std::integral_constant<int, 1>{})
           : rows == 2  ? in_rows(std::integral_constant<int, 2>{})
                        : in_rows(std::integral_constant<int, kRows>{});
  }

  // kCount: rows of a window, if indices have to lie in it. kFlat: a stack is one plane.
  template <int kCount, bool kFlat, class Index>
  bool find_all(
      const Index* indices, const Range& chunk, const Range& reach, const Range& owned,
      uint32_t* targets) const {
    const int64_t count = chunk.size();
    const auto first = static_cast<uint64_t>(reach.begin / geometry_.inner);
    const uint64_t last = std::min(reach.end / geometry_.inner, geometry_.out_plane()) - 1;
    const auto inner = static_cast<uint32_t>(geometry_.inner);
    const auto shift = static_cast<uint32_t>(chunk.begin % geometry_.inner - owned.begin);
    const Coordinates step = step_to(chunk.begin);
    const auto window = static_cast<uint32_t>(position(step.z, step.y, step.x));
    return in_vectors([=, this]() MAXUNPOOL_INLINE {
      uint32_t* __restrict to = targets;
      uint64_t outside = 0; // its first bit
      uint32_t stray = 0;
      for (int64_t i = 0; i < count; ++i) {
        const auto index = static_cast<uint64_t>(int64_t{indices[i]});
        outside |= (index - first) | (last - index);
        const auto position = static_cast<uint32_t>(index);
        if constexpr (kCount > 0) {
          const uint32_t distance = position - (window_[i] + window);
          uint32_t least = distance; // from a row of the window that begins before
          for (int row = 1; row < kCount; ++row) {
            least = std::min(least, distance - row_[row]);
          }
          stray |= least >= static_cast<uint32_t>(width_.kernel);
        }
        to[i] = kFlat ? position + shift : position * inner + (first_[i] + shift);
      }
      return outside >> 63 == 0 && stray == 0;
    });
  }

  // Window offsets, which name no output outside of the reach.
  bool find_all(
      const uint8_t* offsets, const Range& chunk, const Range&, const Range& owned,
      uint32_t* targets) const {
    const auto in_axes = [&]<int kAxes>(std::integral_constant<int, kAxes>) {
      return whole(chunk) ? find_all<kAxes, false>(offsets, chunk, owned, targets)
                          : find_all<kAxes, true>(offsets, chunk, owned, targets);
    };
    const auto is_thin = [](const Axis<int64_t>& axis) {
      return axis.in == 1 && axis.out == 1 && axis.kernel == 1 && axis.padding == 0;
    };
    return !is_thin(depth_)    ? in_axes(std::integral_constant<int, 3>{})
           : !is_thin(height_) ? in_axes(std::integral_constant<int, 2>{})
                               : in_axes(std::integral_constant<int, 1>{});
  }

  // kAxes: how many of the last axes are longer than 1. kClipped: an offset below the window's
  // volume may still lie outside of the plane.
  template <int kAxes, bool kClipped>
  bool find_all(
      const uint8_t* offsets, const Range& chunk, const Range& owned, uint32_t* targets) const {
    const auto narrow = [](int64_t n) { return static_cast<int32_t>(n); };
    // Reciprocals: a product's upper half is the quotient, for all quotients of uint8.
    const int32_t by_width = narrow((1 << 16) / width_.kernel + 1);
    const int32_t by_height = narrow((1 << 16) / height_.kernel + 1);
    const int32_t rows = narrow(height_.kernel), columns = narrow(width_.kernel);
    const int32_t depth = narrow(depth_.out), height = narrow(height_.out);
    const int32_t width = narrow(width_.out), volume = narrow(depth_.kernel) * rows * columns;
    // Positions to skip after each row of a window, and after each slice.
    const auto skip = static_cast<uint32_t>(width - columns);
    const auto skip_slice = static_cast<uint32_t>((height_.out - height_.kernel) * width_.out);
    const auto inner = static_cast<uint32_t>(geometry_.inner);
    const auto shift = static_cast<uint32_t>(chunk.begin % geometry_.inner - owned.begin);
    const Coordinates step = step_to(chunk.begin);
    const int32_t dz = narrow(step.z), dy = narrow(step.y), dx = narrow(step.x);
    const auto window = static_cast<uint32_t>(position(step.z, step.y, step.x));
    const int64_t count = chunk.size();
    return in_vectors([=, this]() MAXUNPOOL_INLINE {
      uint32_t* __restrict to = targets;
      uint8_t most = 0;
      int32_t outside = 0; // its first bit
      for (int64_t i = 0; i < count; ++i) {
        const int32_t offset = offsets[i], row = kAxes > 1 ? offset * by_width >> 16 : 0;
        const int32_t slice = kAxes > 2 ? row * by_height >> 16 : 0;
        if constexpr (kClipped) {
          const int32_t x = x_[i] + dx + offset - row * columns;
          outside |= x | (width - 1 - x);
          if constexpr (kAxes > 1) {
            const int32_t y = y_[i] + dy + row - slice * rows;
            outside |= y | (height - 1 - y);
          }
          if constexpr (kAxes > 2) {
            const int32_t z = z_[i] + dz + slice;
            outside |= z | (depth - 1 - z);
          }
        }
        most = std::max(most, offsets[i]);
        const uint32_t position = window_[i] + window + offset + row * skip + slice * skip_slice;
        to[i] = position * inner + (first_[i] + shift);
      }
      return outside >= 0 && most < volume;
    });
  }

  const UnpoolCall& call_;
  const Plan& plan_;
  const Geometry<int64_t>& geometry_ = call_.geometry;
  const Axis<int64_t>&depth_ = geometry_.axis[0], &height_ = geometry_.axis[1],
        &width_ = geometry_.axis[2];
  const bool own_window_;
  const bool all_whole_ = whole(depth_, {0, depth_.in - 1}) &&
                          whole(height_, {0, height_.in - 1}) && whole(width_, {0, width_.in - 1});
  const bool flat_ = geometry_.inner == 1 && plan_.slabs() == 1;
  bool fits_ = true;    // coordinates fit 32 bits
  uint32_t row_[kRows]; // where the rows of a window begin, in positions from its begin on
  // Of each element of the first chunk: the position and the coordinates where its window begins,
  // and the output that position 0 is. All chunks share them, but for what their first element
  // adds.
  uint32_t window_[Plan::kChunk], first_[Plan::kChunk];
  int32_t x_[Plan::kChunk], y_[Plan::kChunk], z_[Plan::kChunk];
};

} // namespace
} // namespace maxunpool_cuda
