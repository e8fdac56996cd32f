// Window offsets: from uint8 indices to positions in the output plane.
#pragma once

#include "../geometry.h"
#include "processor.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>

namespace maxunpool_cuda {
namespace { // Internal linkage: GCC inlines these more readily.

// Cells [first, end) of a slab, or of an axis.
struct CellRange {
  int64_t first, end;

  bool empty() const { return first >= end; }
  bool holds(int64_t cell) const { return cell >= first && cell < end; }
  CellRange within(const CellRange& other) const {
    return {std::max(first, other.first), std::min(end, other.end)};
  }
};

// Calls work(cell, channel, element), each counted from the beginning of any slab, in memory order
// or in reverse. `inner`: channels; a constant makes a simple loop. All is inlined: else captures
// would be read from memory again for each element.
template <bool kReverse, class Inner, class Work>
MAXUNPOOL_INLINE inline void for_each_element(
    const CellRange& cells, Inner inner, const Work& work) {
  for (int64_t i = 0; i < cells.end - cells.first; ++i) {
    const int64_t cell = kReverse ? cells.end - 1 - i : cells.first + i;
    for (int64_t j = 0; j < inner; ++j) {
      const int64_t channel = kReverse ? inner - 1 - j : j;
      work(cell, channel, cell * inner + channel);
    }
  }
}

class WindowOffsets {
 public:
  explicit WindowOffsets(const Geometry<int64_t>& geometry) : geometry_(geometry) {
    std::fill(std::begin(offset_), std::end(offset_), kNowhere);
    const Axis<int64_t>* axis = geometry.axis;
    for (int64_t z = 0; z < axis[0].kernel; ++z) {
      for (int64_t y = 0; y < axis[1].kernel; ++y) {
        for (int64_t x = 0; x < axis[2].kernel; ++x) {
          offset_[volume_++] = (z * axis[1].out + y) * axis[2].out + x;
        }
      }
    }
    for (int a = 0; a < 3; ++a) {
      const int64_t last = axis[a].out + axis[a].padding - axis[a].kernel;
      whole_[a] = {
          divide_up(axis[a].padding, axis[a].stride),
          last < 0 ? 0 : std::min(axis[a].in, last / axis[a].stride + 1)};
    }
  }

  // Row of cells of a slab.
  class Row {
   public:
    // Row y of slice z; `first` counts its first cell through the slabs.
    Row(const WindowOffsets& all, int64_t z, int64_t y, int64_t first)
        : all_(all), first_(first), z_(z), y_(y) {
      const auto& [depth, height, width] = all.geometry_.axis;
      // Unsigned: a start far outside of the plane may wrap around, and is not used then.
      const auto unsigned_start = [&](int a, int64_t cell) {
        return static_cast<uint64_t>(all.start(a, cell));
      };
      const uint64_t rows = unsigned_start(0, z) * height.out + unsigned_start(1, y);
      start_ = static_cast<int64_t>(rows * width.out - width.padding);
      stride_ = width.stride;
      const bool whole = all.whole_[0].holds(z) && all.whole_[1].holds(y);
      whole_ =
          whole ? CellRange{first + all.whole_[2].first, first + all.whole_[2].end} : CellRange{};
    }

    // Visits the elements of cells of the row, in order or in reverse. Calls known(position,
    // channel, element) where the position is sure to lie in [begin, end), else open(position,
    // channel, element), where a bad index has a negative position. `in_windows`: the result of
    // that function for these indices, or for more.
    template <bool kReverse, class Inner, class Known, class Open>
    MAXUNPOOL_INLINE void for_each(
        const CellRange& cells, Inner inner, const uint8_t* indices, bool in_windows, int64_t begin,
        int64_t end, const Known& known, const Open& open) const {
      const CellRange inside = cells.within(whole_);
      const int64_t last = all_.offset_[all_.volume_ - 1];
      if (!in_windows || inside.empty() || start(inside.first) < begin ||
          start(inside.end - 1) + last >= end) {
        look<kReverse>(cells, inner, indices, open);
        return;
      }
      const CellRange left{cells.first, inside.first}, right{inside.end, cells.end};
      look<kReverse>(kReverse ? right : left, inner, indices, open);
      for_each_element<kReverse>(
          inside, inner, [&](int64_t cell, int64_t channel, int64_t i) MAXUNPOOL_INLINE {
            known(start(cell) + all_.offset_[indices[i]], channel, i);
          });
      look<kReverse>(kReverse ? left : right, inner, indices, open);
    }

   private:
    template <bool kReverse, class Inner, class Open>
    void look(const CellRange& cells, Inner inner, const uint8_t* indices, const Open& open) const {
      for_each_element<kReverse>(cells, inner, [&](int64_t cell, int64_t channel, int64_t i) {
        const int64_t x = cell - first_;
        const bool exists = whole_.holds(cell) || all_.in_plane(z_, y_, x, indices[i]);
        open(exists ? start(cell) + all_.offset_[indices[i]] : kNowhere, channel, i);
      });
    }

    // The position where the window of a cell begins, before it is clipped.
    int64_t start(int64_t cell) const { return start_ + (cell - first_) * stride_; }

    const WindowOffsets& all_;
    int64_t first_, z_, y_, start_, stride_;
    CellRange whole_; // whose windows are not clipped
  };

  // Calls visit(row, cells) for the rows, or parts of them, that at least one cell makes up, in
  // order or in reverse.
  template <bool kReverse, class Visit>
  MAXUNPOOL_INLINE void for_each_row(const CellRange& cells, const Visit& visit) const {
    const auto& [depth, height, width] = geometry_.axis;
    const CellRange rows{cells.first / width.in, (cells.end - 1) / width.in + 1};
    int64_t row = kReverse ? rows.end - 1 : rows.first;
    int64_t z = row / height.in % depth.in, y = row % height.in;
    for (int64_t i = rows.first; i < rows.end; ++i) {
      const int64_t first = row * width.in;
      visit(Row(*this, z, y, first), cells.within({first, first + width.in}));
      if constexpr (kReverse) {
        --row;
        if (--y < 0) {
          y = height.in - 1;
          z = (z == 0 ? depth.in : z) - 1;
        }
      } else {
        ++row;
        if (++y == height.in) {
          y = 0;
          z = z + 1 == depth.in ? 0 : z + 1;
        }
      }
    }
  }

  // Whether every offset is below the window's volume.
  bool in_windows(const uint8_t* indices, int64_t count) const {
    uint8_t most = 0;
    for (int64_t i = 0; i < count; ++i) {
      most = std::max(most, indices[i]);
    }
    return most < volume_;
  }

 private:
  // Negative, and so is its sum with any position.
  static constexpr int64_t kNowhere = std::numeric_limits<int64_t>::min() / 2;

  int64_t start(int a, int64_t cell) const {
    return cell * geometry_.axis[a].stride - geometry_.axis[a].padding;
  }

  bool in_plane(int64_t z, int64_t y, int64_t x, int64_t offset) const {
    const Axis<int64_t>* axis = geometry_.axis;
    const auto within = [&](int a, int64_t cell, int64_t coordinate) {
      const auto at = static_cast<uint64_t>(start(a, cell) + coordinate);
      return at < static_cast<uint64_t>(axis[a].out);
    };
    const int64_t row = offset / axis[2].kernel;
    return row < axis[0].kernel * axis[1].kernel && within(0, z, row / axis[1].kernel) &&
           within(1, y, row % axis[1].kernel) && within(2, x, offset % axis[2].kernel);
  }

  const Geometry<int64_t>& geometry_;
  int64_t volume_ = 0;
  int64_t offset_[kMostOffsets];
  CellRange whole_[3]; // along each axis
};

} // namespace
} // namespace maxunpool_cuda
