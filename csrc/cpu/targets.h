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
  static constexpr int64_t kNone = -1;

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
    if (offsets || own_window || !flat_) {
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
      const Index* indices = indices_of<Index>(chunk.stack) + chunk.elements.begin;
      if (chunk.reach.size() >> 31 != 0 || (kIsWindowOffset<Index> && !fits_)) {
        found = !own_window_ && find_each(chunk, targets);
      } else if constexpr (kIsWindowOffset<Index>) {
        const int axes = !is_one(depth_) ? 3 : !is_one(height_) ? 2 : 1;
        with_count<1, 2, 3>(axes, [&](auto count) {
          found = clips_ ? find_offsets<count, true>(indices, chunk, targets)
                         : find_offsets<count, false>(indices, chunk, targets);
        });
      } else {
        const int64_t rows = own_window_ ? depth_.kernel * height_.kernel : 0;
        with_count<0, 1, 2, kRows>(rows == 3 ? kRows : rows, [&](auto count) {
          found = flat_ ? find_flat<count, true>(indices, chunk, targets)
                        : find_flat<count, false>(indices, chunk, targets);
        });
      }
    });
    return found;
  }

  // Output of the stack that an element's index names; kNone if the index is bad.
  int64_t output_of(int64_t stack, int64_t element) const {
    const int64_t slab = element / geometry_.in_slab(), inner = geometry_.inner;
    const Coordinates window = window_of(element % geometry_.in_slab());
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
    return good ? slab * geometry_.out_slab() + index * inner + element % inner : kNone;
  }

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

  // Whether a window may lie outside of the plane in part.
  static bool clips(const Geometry<int64_t>& geometry) {
    return std::any_of(geometry.axis, geometry.axis + 3, [](const Axis<int64_t>& axis) {
      return axis.padding > 0 || (axis.in - 1) * axis.stride + axis.kernel > axis.out;
    });
  }

  static bool is_one(const Axis<int64_t>& axis) {
    return axis.in == 1 && axis.out == 1 && axis.kernel == 1 && axis.padding == 0;
  }

  // Calls f with the one of kCounts that `count` is.
  template <int... kCounts, class F>
  static void with_count(int64_t count, const F& f) {
    (void)((count == kCounts && (f(std::integral_constant<int, kCounts>{}), true)) || ...);
  }

  template <class Index>
  const Index* indices_of(int64_t stack) const {
    return static_cast<const Index*>(call_.indices) + plan_.pooled(stack);
  }

  // Fills in the lists.
  void list(bool windows) {
    const int64_t count = plan_.longest_chunk, inner = geometry_.inner;
    const int64_t slab = std::min(count, geometry_.in_slab());
    for (int64_t i = 0; windows && i < slab;) { // rows of cells
      const auto [z, y, begin] = window_of(i);
      const int64_t end = std::min(slab, i + width_.in * inner);
      for (int64_t x = begin; i < end; x += width_.stride) {
        for (const int64_t next = std::min(end, i + inner); i < next; ++i) {
          window_[i] = static_cast<uint32_t>(position(z, y, x));
          at_[0][i] = static_cast<int32_t>(z);
          at_[1][i] = static_cast<int32_t>(y);
          at_[2][i] = static_cast<int32_t>(x);
        }
      }
    }
    for (int64_t i = slab; windows && i < count; ++i) { // further slabs
      window_[i] = window_[i - slab];
      for (auto& list : at_) {
        list[i] = list[i - slab];
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      first_[i] = i >= slab    ? first_[i - slab] + static_cast<uint32_t>(geometry_.out_slab())
                  : i >= inner ? first_[i - inner]
                               : static_cast<uint32_t>(i);
    }
  }

  // Finds targets one by one, however large the numbers.
  bool find_each(const Chunk& chunk, uint32_t* targets) const {
    for (int64_t i = 0; i < chunk.elements.size(); ++i) {
      const int64_t output = output_of(chunk.stack, chunk.elements.begin + i);
      if (!chunk.reach.holds(output)) {
        return false;
      }
      const bool owns = chunk.owned.holds(output);
      targets[i] = owns ? static_cast<uint32_t>(output - chunk.owned.begin) : ~uint32_t{0};
    }
    return true;
  }

  // What a chunk adds to the listed begins of windows, and to the listed outputs.
  uint32_t window_shift(const Chunk& chunk) const {
    const Coordinates step = step_to(chunk.elements.begin);
    return static_cast<uint32_t>(position(step.z, step.y, step.x));
  }
  uint32_t output_shift(const Chunk& chunk) const {
    return static_cast<uint32_t>(chunk.elements.begin % geometry_.inner - chunk.owned.begin);
  }

  // Flat indices. kCount: rows of a window, if indices have to lie in it. kFlat: a stack is one
  // plane.
  template <int kCount, bool kFlat, class Index>
  bool find_flat(const Index* indices, const Chunk& chunk, uint32_t* targets) const {
    const int64_t count = chunk.elements.size(), last_reach = chunk.reach.end / geometry_.inner;
    const auto first = static_cast<uint64_t>(chunk.reach.begin / geometry_.inner);
    const uint64_t last = std::min(last_reach, geometry_.out_plane()) - 1;
    const auto inner = static_cast<uint32_t>(geometry_.inner);
    const auto width = static_cast<uint32_t>(width_.kernel);
    const uint32_t shift = output_shift(chunk), window = window_shift(chunk);
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
          stray |= least >= width;
        }
        to[i] = kFlat ? position + shift : position * inner + (first_[i] + shift);
      }
      return outside >> 63 == 0 && stray == 0;
    });
  }

  // Window offsets, which name no output outside of the reach. kAxes: the last axes, before which
  // all are of size 1. kClips: an offset below the window's volume may lie outside of the plane.
  template <int kAxes, bool kClips>
  bool find_offsets(const uint8_t* offsets, const Chunk& chunk, uint32_t* targets) const {
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
    const Coordinates step = step_to(chunk.elements.begin);
    const int32_t dz = narrow(step.z), dy = narrow(step.y), dx = narrow(step.x);
    const auto inner = static_cast<uint32_t>(geometry_.inner);
    const uint32_t shift = output_shift(chunk), window = window_shift(chunk);
    const int64_t count = chunk.elements.size();
    return in_vectors([=, this]() MAXUNPOOL_INLINE {
      uint32_t* __restrict to = targets;
      uint8_t most = 0;
      int32_t outside = 0; // its first bit
      for (int64_t i = 0; i < count; ++i) {
        const int32_t offset = offsets[i], row = kAxes > 1 ? offset * by_width >> 16 : 0;
        const int32_t slice = kAxes > 2 ? row * by_height >> 16 : 0;
        if constexpr (kClips) {
          const int32_t x = at_[2][i] + dx + offset - row * columns;
          const int32_t y = at_[1][i] + dy + row - slice * rows, z = at_[0][i] + dz + slice;
          outside |= x | (width - 1 - x);
          outside |= kAxes > 1 ? y | (height - 1 - y) : 0;
          outside |= kAxes > 2 ? z | (depth - 1 - z) : 0;
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
  const bool own_window_, clips_ = clips(geometry_);
  const bool flat_ = geometry_.inner == 1 && plan_.slabs == 1;
  bool fits_ = true;    // coordinates fit 32 bits
  uint32_t row_[kRows]; // where the rows of a window begin, in positions from its begin on
  // Of each element of the first chunk: where its window begins, as a position and as coordinates,
  // and the output that position 0 is. All chunks share them, but for what their first element
  // adds.
  uint32_t window_[Chunk::kMost], first_[Chunk::kMost];
  int32_t at_[3][Chunk::kMost];
};

} // namespace
} // namespace maxunpool_cuda
