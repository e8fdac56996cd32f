// Windows as sets of output positions: which cells share a position, told from how far apart they
// are, so that nobody has to remember which positions were visited.
#pragma once

#include "../geometry.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>

namespace maxunpool_cuda {

// The window of a cell is the set of positions begin(cell) + row + x of the flat plane, for each of
// its rows and 0 <= x < width. It is not clipped: where it leaves the plane on one side it enters
// on another, so what is said here of windows holds for the clipped ones, which are subsets.
class Windows {
 public:
  static constexpr int kFused = 4; // entries of a list that a loop takes at once

  explicit Windows(const Geometry<int64_t>& geometry) : geometry_(geometry) {
    listed_ = is_small() && list_rows() && list_later(kLast, 0, 0, 1);
    std::sort(later_, later_ + later_count_);
    later_count_ = static_cast<int>(std::unique(later_, later_ + later_count_) - later_);
    listed_ = listed_ && later_count_ <= kMostLater;
    fill_up(rows_, row_count_);
    fill_up(later_, later_count_);
  }

  // False: there is more to list, or it is larger, than pays or than 32-bit numbers tell apart.
  // Nothing else here is defined then.
  bool listed() const { return listed_; }
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
  // If two cells share a position, the later one is one of these numbers of cells behind:
  // ascending.
  int later_count() const { return later_count_; }
  const int64_t* later() const { return later_; }
  bool disjoint() const { return later_count_ == 0; }
  int64_t reach() const { return disjoint() ? 0 : later_[later_count_ - 1]; }

 private:
  static constexpr int kLast = Geometry<int64_t>::kAxes - 1;
  static constexpr int kMostRows = 16, kMostLater = 8, kMostFound = 16;
  // An index and the extents of three axes, each below it, add up to less than 2^31.
  static constexpr int64_t kLimit = int64_t{1} << 28;

  bool is_small() {
    int64_t step = 1;
    for (int a = kLast; a >= 0; --a) {
      const Axis<int64_t>& axis = geometry_.axis[a];
      step_[a] = step;
      if (std::max({axis.in, axis.out, axis.kernel, axis.stride, axis.padding}) >= kLimit ||
          axis.in * axis.stride + axis.kernel + axis.padding > (kLimit - 1) / step) {
        return false;
      }
      // One cell after the other shares positions then: spares the search for them.
      if (std::min(axis.in - 1, (axis.kernel - 1) / axis.stride) > kMostLater) {
        return false;
      }
      step *= axis.out;
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

  // Two cells share a position if the numbers of cells that they are apart along the axes solve,
  // digit by digit from the last axis on,
  //   apart * stride + carry = difference of two coordinates in a window + next carry * out.
  bool list_later(int a, int64_t carry, int64_t cells, int64_t cell_step) {
    if (a < 0) {
      if (carry != 0 || cells <= 0) {
        return true;
      }
      if (later_count_ == kMostFound) { // the same ones more than once
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
      const int64_t first = std::max(-most, divided_up(middle - within, axis.stride));
      const int64_t last = std::min(most, -divided_up(-middle - within, axis.stride));
      for (int64_t apart = first; apart <= last; ++apart) {
        if (!list_later(a - 1, next, cells + apart * cell_step, cell_step * axis.in)) {
          return false;
        }
      }
    }
    return true;
  }

  static int64_t divided_up(int64_t a, int64_t b) { return a / b + (a % b > 0 ? 1 : 0); }

  template <class T>
  static void fill_up(T* list, int count) {
    for (int i = count; i % kFused != 0; ++i) {
      list[i] = list[count - 1];
    }
  }

  const Geometry<int64_t>& geometry_;
  int64_t step_[kLast + 1] = {};
  int row_count_ = 0, later_count_ = 0;
  bool listed_;
  uint32_t rows_[kMostRows];
  int64_t later_[kMostFound];
};

} // namespace maxunpool_cuda
