// Windows as sets of output positions. Which cells share a position follows from their distance, so
// that no memory of visited outputs is needed.
#pragma once

#include "../geometry.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <optional>

namespace maxunpool_cuda {

// The window of a cell is the set of positions begin(cell) + row + x of the flat plane, for each of
// its rows and 0 <= x < width. Here it is not clipped: where it leaves the plane on one side it
// enters on another. Clipped windows are subsets, so those that share no position here share none.
class Windows {
 public:
  static constexpr int kFused = 4; // entries of a list that a loop takes at once

  // Windows of a geometry; nothing where lists would be longer, or numbers larger, than pays.
  static std::optional<Windows> list(const Geometry<int64_t>& geometry) {
    Windows all(geometry);
    if (!all.is_small() || !all.list_rows() || !all.list_later(kLast, 0, 0, 1)) {
      return {};
    }
    std::sort(all.later_, all.later_ + all.later_count_);
    all.later_count_ =
        static_cast<int>(std::unique(all.later_, all.later_ + all.later_count_) - all.later_);
    fill_up(all.rows_, all.row_count_);
    fill_up(all.later_, all.later_count_);
    return all.later_count_ <= kMostLater ? std::optional(all) : std::nullopt;
  }

  const Geometry<int64_t>& geometry() const { return geometry_; }

  int64_t offset(int64_t z, int64_t y, int64_t x) const { return z * step_[0] + y * step_[1] + x; }
  int64_t begin(const int64_t (&cell)[3]) const {
    const auto first = [&](int a) {
      return cell[a] * geometry_.axis[a].stride - geometry_.axis[a].padding;
    };
    return offset(first(0), first(1), first(2));
  }
  uint32_t width() const { return static_cast<uint32_t>(geometry_.axis[kLast].kernel); }

  // The lists repeat their last entry up to a multiple of kFused.
  int row_count() const { return row_count_; }
  const uint32_t* rows() const { return rows_; }
  // Distances in cells, ascending, from a cell to later ones that may share a position.
  int later_count() const { return later_count_; }
  const int64_t* later() const { return later_; }
  bool shared() const { return later_count_ != 0; }
  int64_t latest() const { return shared() ? later_[later_count_ - 1] : 0; }

 private:
  static constexpr int kLast = Geometry<int64_t>::kAxes - 1;
  static constexpr int kMostRows = 16, kMostLater = 8, kMostFound = 16;
  // An index and the extents of three axes, each below it, add up to less than 2^31.
  static constexpr int64_t kLimit = int64_t{1} << 28;

  explicit Windows(const Geometry<int64_t>& geometry)
      : geometry_(geometry),
        step_{geometry.axis[1].out * geometry.axis[2].out, geometry.axis[2].out, 1} {}

  // Whether 32-bit numbers tell all positions apart, and the search for shared ones ends soon.
  bool is_small() const {
    for (int a = kLast; a >= 0; --a) {
      const Axis<int64_t>& axis = geometry_.axis[a];
      if (std::max({axis.in, axis.out, axis.kernel, axis.stride, axis.padding}) >= kLimit ||
          axis.in * axis.stride + axis.kernel + axis.padding > (kLimit - 1) / step_[a]) {
        return false;
      }
      // Cells of one row alone that share a position: too many make the lists too long.
      if (std::min(axis.in - 1, (axis.kernel - 1) / axis.stride) > kMostLater) {
        return false;
      }
    }
    return std::max(geometry_.in_slab(), geometry_.out_slab()) < kLimit;
  }

  bool list_rows() {
    const int64_t depth = geometry_.axis[0].kernel, height = geometry_.axis[1].kernel;
    if (depth * height > kMostRows) {
      return false;
    }
    for (int64_t z = 0; z < depth; ++z) {
      for (int64_t y = 0; y < height; ++y) {
        rows_[row_count_++] = static_cast<uint32_t>(offset(z, y, 0));
      }
    }
    return true;
  }

  // Two cells share a position if their distances along the axes solve, digit by digit from the
  // last axis on,
  //   distance * stride + carry = difference of two coordinates in a window + next carry * out.
  bool list_later(int a, int64_t carry, int64_t cells, int64_t cell_step) {
    if (a < 0) {
      if (carry != 0 || cells <= 0) {
        return true;
      }
      if (later_count_ == kMostFound) { // duplicates included
        return false;
      }
      later_[later_count_++] = cells;
      return true;
    }
    const Axis<int64_t>& axis = geometry_.axis[a];
    const int64_t within = axis.kernel - 1, most = axis.in - 1;
    const int64_t carries = a == 0 ? 0 : (most * axis.stride + std::abs(carry) + within) / axis.out;
    if (carries > 2) {
      return false;
    }
    for (int64_t next = -carries; next <= carries; ++next) {
      const int64_t middle = next * axis.out - carry;
      const int64_t first = std::max(-most, divide_up(middle - within, axis.stride));
      const int64_t last = std::min(most, divide_down(middle + within, axis.stride));
      for (int64_t distance = first; distance <= last; ++distance) {
        if (!list_later(a - 1, next, cells + distance * cell_step, cell_step * axis.in)) {
          return false;
        }
      }
    }
    return true;
  }

  template <class T>
  static void fill_up(T* list, int count) {
    for (int i = count; i % kFused != 0; ++i) {
      list[i] = list[count - 1];
    }
  }

  const Geometry<int64_t>& geometry_;
  const int64_t step_[kLast + 1]; // positions from one output coordinate to the next
  int row_count_ = 0, later_count_ = 0;
  uint32_t rows_[kMostRows] = {};
  int64_t later_[kMostFound] = {};
};

} // namespace maxunpool_cuda
