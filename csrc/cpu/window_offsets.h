// One-byte indices: from offsets in the window of a cell to positions in the output plane.
#pragma once

#include "../geometry.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>

namespace maxunpool_cuda {

// Position: int32_t where fits(), or int64_t.
template <class Position>
class WindowOffsets {
 public:
  static bool fits(const Geometry<int64_t>& geometry) {
    return geometry.out_plane() < -int64_t{kNowhere};
  }

  explicit WindowOffsets(const Geometry<int64_t>& geometry) : geometry_(geometry) {
    std::fill(std::begin(offset_), std::end(offset_), kNowhere);
    const Axis<int64_t>* axis = geometry.axis;
    int i = 0;
    for (int64_t z = 0; z < axis[0].kernel; ++z) {
      for (int64_t y = 0; y < axis[1].kernel; ++y) {
        for (int64_t x = 0; x < axis[2].kernel; ++x) {
          offset_[i++] = static_cast<Position>((z * axis[1].out + y) * axis[2].out + x);
        }
      }
    }
    for (int a = 0; a < 3; ++a) {
      const int64_t last = axis[a].out + axis[a].padding - axis[a].kernel;
      whole_[a] = {
          (axis[a].padding - 1) / axis[a].stride + (axis[a].padding > 0 ? 1 : 0),
          last < 0 ? 0 : std::min(axis[a].in, last / axis[a].stride + 1)};
    }
  }

  // positions[i] becomes that of element first + i, counted through the slabs from `indices` on.
  // It is negative for an offset that leads out of the window or of the plane.
  void decode(const uint8_t* indices, int64_t first, int64_t count, Position* positions) const {
    const Axis<int64_t>* axis = geometry_.axis;
    const int64_t inner = geometry_.inner, cell = first / inner, row = cell / axis[2].in;
    int64_t z = row / axis[1].in % axis[0].in, y = row % axis[1].in, x = cell % axis[2].in;
    int64_t channel = first % inner;
    const uint8_t* index = indices + first;
    const uint8_t* const end = index + count;
    while (index < end) {
      const bool whole = whole_[0].holds(z) && whole_[1].holds(y);
      const int64_t row_begin =
          (begin(0, z) * axis[1].out + begin(1, y)) * axis[2].out - axis[2].padding;
      while (x < axis[2].in && index < end) {
        if (inner == 1 && whole && whole_[2].holds(x)) {
          const int64_t cells = std::min<int64_t>(whole_[2].end - x, end - index);
          for (int64_t i = 0; i < cells; ++i) {
            positions[i] =
                static_cast<Position>(row_begin + (x + i) * axis[2].stride) + offset_[index[i]];
          }
          index += cells;
          positions += cells;
          x += cells;
          continue;
        }
        const int64_t channels = std::min<int64_t>(inner - channel, end - index);
        const auto cell_begin = static_cast<Position>(row_begin + x * axis[2].stride);
        if (whole && whole_[2].holds(x)) {
          for (int64_t i = 0; i < channels; ++i) {
            positions[i] = cell_begin + offset_[index[i]];
          }
        } else {
          for (int64_t i = 0; i < channels; ++i) {
            positions[i] = in_plane(z, y, x, index[i]) ? cell_begin + offset_[index[i]] : kNowhere;
          }
        }
        index += channels;
        positions += channels;
        channel = 0;
        ++x;
      }
      x = 0;
      if (++y == axis[1].in) {
        y = 0;
        z = z + 1 == axis[0].in ? 0 : z + 1;
      }
    }
  }

 private:
  // Negative, and so is its sum with any position.
  static constexpr Position kNowhere = std::numeric_limits<Position>::min() / 2;

  // Cells of an axis whose windows the output holds entirely.
  struct Whole {
    int64_t first, end;

    bool holds(int64_t cell) const { return cell >= first && cell < end; }
  };

  int64_t begin(int a, int64_t cell) const {
    return cell * geometry_.axis[a].stride - geometry_.axis[a].padding;
  }

  bool in_plane(int64_t z, int64_t y, int64_t x, int64_t offset) const {
    const Axis<int64_t>* axis = geometry_.axis;
    const auto within = [&](int a, int64_t cell, int64_t coordinate) {
      return static_cast<uint64_t>(begin(a, cell) + coordinate) <
             static_cast<uint64_t>(axis[a].out);
    };
    const int64_t row = offset / axis[2].kernel;
    return row < axis[0].kernel * axis[1].kernel && within(0, z, row / axis[1].kernel) &&
           within(1, y, row % axis[1].kernel) && within(2, x, offset % axis[2].kernel);
  }

  const Geometry<int64_t>& geometry_;
  Position offset_[256];
  Whole whole_[3];
};

} // namespace maxunpool_cuda
