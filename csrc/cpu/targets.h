// SPDX-License-Identifier: BSD-3-Clause
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

// The target of an element is the output that its index names, counted from the first in reach.
class Targets {
 public:
  static constexpr int64_t kNone = -1;

  // `own_window`: flat indices have to lie in the windows of their elements, see
  // can_tell_windows().
  Targets(const UnpoolCall& call, const Plan& plan, bool own_window)
      : call_(call), plan_(plan), own_window_(own_window) {
    const bool offsets = call.index_type == c10::ScalarType::Byte;
    double farthest = 0; // position in a window, before it is clipped
    for (const Axis<int64_t>& axis : geometry_.axis) {
      const double end = axis.in * static_cast<double>(axis.stride) + axis.kernel + axis.padding;
      farthest = farthest * static_cast<double>(axis.out) + end;
    }
    fits_ = farthest < 1 << 30;
    const int64_t rows = depth_.kernel * height_.kernel;
    for (int64_t i = 0; own_window && i < kRows; ++i) { // the last row is repeated
      const int64_t row = std::min(i, rows - 1);
      row_[i] = static_cast<uint32_t>(position(row / height_.kernel, row % height_.kernel, 0));
    }
    const int axes = !is_one(depth_) ? 3 : !is_one(height_) ? 2 : 1;
    count_ = offsets ? axes : !own_window ? 0 : rows == 3 ? kRows : rows;
    if (offsets || own_window || !plain_) {
      list(offsets || own_window);
    }
  }

  // Whether no two windows share an output, none is clipped, and rows are few enough to look
  // whether an index lies in the window of its element.
  static bool can_tell_windows(const Geometry<int64_t>& geometry) {
    return disjoint(geometry) && geometry.out_plane() >> 31 == 0 && !clips(geometry) &&
           geometry.axis[0].kernel * geometry.axis[1].kernel <= kRows;
  }

  // Finds the targets of a chunk. False, and they are undefined, if an index leads out of the reach
  // or, where it has to lie there, its window.
  bool find(const Chunk& chunk, uint32_t* targets) const {
    bool found = false;
    with_index_type(call_.index_type, [&]<class Index>(std::type_identity<Index>) {
      if (chunk.reach.size() >> 31 != 0 || (kIsWindowOffset<Index> && !fits_)) {
        found = !own_window_ && find_each(chunk, targets);
        return;
      }
      with_one_of<0, 1, 2, 3, kRows>(count_, [&](auto count) {
        with_one_of<0, 1>(plain_, [&](auto plain) {
          with_one_of<0, 1>(clips_ && kIsWindowOffset<Index>, [&](auto clips) {
            found = find_all<count, plain, clips, Index>(chunk, targets);
          });
        });
      });
    });
    return found;
  }

  // Output of the stack that an element's index names; kNone if the index is out of bounds.
  int64_t output_of(int64_t stack, int64_t element) const {
    const int64_t image = element / geometry_.in_image(), inner = geometry_.inner;
    const Coordinates window = window_of(element % geometry_.in_image());
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
    const bool good = Range{0, geometry_.out_plane()}.holds(index);
    return good ? image * geometry_.out_image() + index * inner + element % inner : kNone;
  }

 private:
  static constexpr int64_t kRows = 4; // most rows of a window that indices are looked for in

  struct Coordinates {
    int64_t z, y, x;
  };
  // How far the window of an image's element lies from the first window.
  Coordinates step_to(int64_t element) const {
    const int64_t cell = element / geometry_.inner, row = cell / width_.in;
    return {
        row / height_.in * depth_.stride,
        row % height_.in * height_.stride,
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

  // Whether a window may lie outside of the plane in part.
  static bool clips(const Geometry<int64_t>& geometry) {
    return std::any_of(geometry.axis, geometry.axis + 3, [](const Axis<int64_t>& axis) {
      return axis.padding > 0 || (axis.in - 1) * axis.stride + axis.kernel > axis.out;
    });
  }

  static bool is_one(const Axis<int64_t>& axis) {
    return axis.in == 1 && axis.out == 1 && axis.kernel == 1 && axis.padding == 0;
  }

  template <class Index>
  const Index* indices_of(int64_t stack) const {
    return static_cast<const Index*>(call_.indices) + plan_.pooled(stack);
  }

  // Fills in the lists.
  void list(bool windows) {
    const int64_t count = plan_.longest_chunk, inner = geometry_.inner;
    const int64_t image = std::min(count, geometry_.in_image());
    for (int64_t i = 0; windows && i < image;) { // rows of cells
      const auto [z, y, begin] = window_of(i);
      const int64_t end = std::min(image, i + width_.in * inner);
      for (int64_t x = begin; i < end; x += width_.stride) {
        for (const int64_t next = std::min(end, i + inner); i < next; ++i) {
          window_[i] = static_cast<uint32_t>(position(z, y, x));
          x_[i] = static_cast<int32_t>(x);
          y_[i] = static_cast<int32_t>(y);
        }
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      first_[i] = static_cast<uint32_t>(i);
      if (i >= image) { // the next image
        window_[i] = window_[i - image];
        x_[i] = x_[i - image];
        y_[i] = y_[i - image];
        first_[i] = first_[i - image] + static_cast<uint32_t>(geometry_.out_image());
      } else if (i >= inner) {
        first_[i] = first_[i - inner];
      }
    }
  }

  // Finds targets one by one, however large the numbers. 32 bits may not tell all of a reach apart,
  // so those that are not owned lie just before those that are.
  bool find_each(const Chunk& chunk, uint32_t* targets) const {
    for (int64_t i = 0; i < chunk.elements.size(); ++i) {
      const int64_t output = output_of(chunk.stack, chunk.elements.begin + i);
      if (!chunk.reach.holds(output)) {
        return false;
      }
      const int64_t target =
          chunk.owned.holds(output) ? output - chunk.reach.begin : chunk.lead() - 1;
      targets[i] = static_cast<uint32_t>(target);
    }
    return true;
  }

  // Finds all targets in vectors. kCount, kPlain: see count_, plain_.
  template <int kCount, bool kPlain, bool kClips, class Index>
  bool find_all(const Chunk& chunk, uint32_t* targets) const {
    const Index* indices = indices_of<Index>(chunk.stack) + chunk.elements.begin;
    const int64_t count = chunk.elements.size(), inner = geometry_.inner;
    const int64_t first = chunk.reach.begin / inner; // position
    const int64_t last = std::min(chunk.reach.end / inner, geometry_.out_plane()) - 1 - first;
    const Coordinates step = step_to(chunk.elements.begin);
    const auto begin = static_cast<uint32_t>(position(step.z, step.y, step.x) - first);
    const auto channel = static_cast<uint32_t>(chunk.elements.begin % inner);
    const auto channels = static_cast<uint32_t>(inner);
    const auto narrow = [](int64_t n) { return static_cast<int32_t>(n); };
    // Reciprocals: a product's upper half is the quotient, for all quotients of uint8.
    const int32_t by_width = narrow((1 << 16) / width_.kernel + 1);
    const int32_t by_height = narrow((1 << 16) / height_.kernel + 1);
    const int32_t rows = narrow(height_.kernel), columns = narrow(width_.kernel);
    const int32_t height = narrow(height_.out), width = narrow(width_.out);
    const int32_t dy = narrow(step.y), dx = narrow(step.x);
    // Positions to skip after each row of a window, and after each slice.
    const auto skip = static_cast<uint32_t>(width - columns);
    const auto skip_slice = static_cast<uint32_t>((height_.out - height_.kernel) * width_.out);
    const uint32_t volume = narrow(depth_.kernel) * rows * columns;
    return in_vectors([=, this]() MAXUNPOOL_INLINE {
      uint32_t* __restrict to = targets;
      uint64_t high = 0; // bits of distances from `first`
      uint32_t most = 0, out_of_window = 0;
      int32_t outside = 0; // its first bit
      uint8_t most_offset = 0;
      for (int64_t i = 0; i < count; ++i) {
        uint32_t distance; // from `first`, in positions
        if constexpr (kIsWindowOffset<Index>) {
          const int32_t offset = indices[i], row = kCount > 1 ? offset * by_width >> 16 : 0;
          const int32_t slice = kCount > 2 ? row * by_height >> 16 : 0;
          const int32_t x = x_[i] + dx + offset - row * columns,
                        y = y_[i] + dy + row - slice * rows;
          outside |= kClips && kCount > 1 ? x | (width - 1 - x) : 0;
          outside |= kClips && kCount > 2 ? y | (height - 1 - y) : 0;
          most_offset = std::max(most_offset, indices[i]);
          distance = window_[i] + begin + offset + row * skip + slice * skip_slice;
        } else {
          const uint64_t wide = static_cast<uint64_t>(int64_t{indices[i]}) - first;
          high |= wide;
          distance = static_cast<uint32_t>(wide);
          const uint32_t inside = kCount > 0 ? distance - (window_[i] + begin) : 0;
          uint32_t least = inside; // from a row of the window that begins before
          for (int row = 1; row < kCount; ++row) {
            least = std::min(least, inside - row_[row]);
          }
          out_of_window |= kCount > 0 && least >= static_cast<uint32_t>(columns) ? 1 : 0;
        }
        most = std::max(most, distance);
        to[i] = kPlain ? distance : distance * channels + (first_[i] + channel);
      }
      return high >> 31 == 0 && most <= last && out_of_window == 0 && outside >= 0 &&
             most_offset < volume;
    });
  }

  const UnpoolCall& call_;
  const Plan& plan_;
  const Geometry<int64_t>& geometry_ = call_.geometry;
  const Axis<int64_t>&depth_ = geometry_.axis[0], &height_ = geometry_.axis[1],
        &width_ = geometry_.axis[2];
  const bool own_window_;
  const bool clips_ = clips(geometry_);
  const bool plain_ = geometry_.inner == 1 && plan_.images == 1; // the stack is one plane
  bool fits_; // positions of windows, clipped or not, fit 32 bits
  // Of window offsets, how many last axes matter: those before them have size 1. Else the rows of
  // the window that an index has to lie in, or 0.
  int64_t count_;
  uint32_t row_[kRows]; // where the rows of a window begin, in positions from its begin on
  // Of each element of the first chunk: where its window begins, as a position and as coordinates,
  // and the output that position 0 is. All chunks share them, but for what their first element
  // adds.
  uint32_t window_[Chunk::kMost], first_[Chunk::kMost];
  int32_t x_[Chunk::kMost], y_[Chunk::kMost];
};

} // namespace
} // namespace maxunpool_cuda
