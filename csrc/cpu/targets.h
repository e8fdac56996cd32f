// Targets: what the indices of a chunk name, if none is stray or bad, as max pooling makes them.
#pragma once

#include "../geometry.h"
#include "chunks.h"
#include "processor.h"
#include "window_offsets.h"
#include "windows.h"

#include <algorithm>
#include <cstdint>
#include <optional>

namespace maxunpool_cuda {
namespace { // Internal linkage: GCC inlines these more readily.

struct Targets {
  uint32_t offset[2 * Chunk::kMost]; // in elements of the unpooled tensor, from the first slab on
  uint8_t has_later_duplicate[Chunk::kMost]; // 1: a later element of the plane has the same index
};

namespace targets_detail {

// Marks values that recur at a later cell of their channel. kFused: how many distances a loop
// takes.
template <int kFused, class Value>
MAXUNPOOL_INLINE inline void mark_repeated(
    const Windows& windows, const Chunk& chunk, const Value* values, int64_t available,
    uint8_t* __restrict has_later_duplicate) {
  const int64_t inner = windows.geometry().inner;
  std::fill_n(has_later_duplicate, chunk.count, uint8_t{0});
  for (int first = 0; first < windows.later_count(); first += kFused) {
    int64_t distances[kFused] = {};
    for (int i = 0; i < kFused; ++i) {
      distances[i] = windows.later()[first + i] * inner;
    }
    const int64_t all = std::clamp<int64_t>(available - distances[kFused - 1], 0, chunk.count);
    for (int64_t i = 0; i < all; ++i) {
      bool equal = false;
      for (const int64_t distance : distances) {
        equal |= values[i] == values[i + distance];
      }
      has_later_duplicate[i] |= static_cast<uint8_t>(equal);
    }
    for (const int64_t distance : distances) { // elements whose later cells may not be available
      const int64_t end = std::min(chunk.count, available - distance);
      for (int64_t i = all; i < end; ++i) {
        has_later_duplicate[i] |= static_cast<uint8_t>(values[i] == values[i + distance]);
      }
    }
  }
}

// Finds the targets of positions. False if one is stray or bad. kRows: rows that a loop takes.
template <int kRows, class Index>
MAXUNPOOL_INLINE inline bool find_offsets(
    const Windows& windows, const Chunk& chunk, const Index* indices, uint32_t* offset) {
  // Distance of the index from the nearest row of its window that begins before it; a row that
  // begins after it is a large number away, for the difference wraps around.
  const auto distance = [&](int64_t i, const uint32_t* rows) MAXUNPOOL_INLINE {
    const uint32_t position = static_cast<uint32_t>(indices[i]) - (chunk.begin[i] + chunk.shift);
    uint32_t least = position - rows[0];
    for (int row = 1; row < kRows; ++row) {
      least = std::min(least, position - rows[row]);
    }
    return least;
  };
  const bool more = windows.row_count() > kRows;
  if (more) {
    std::fill_n(offset, chunk.count, ~uint32_t{0});
    for (int first = kRows; first < windows.row_count(); first += kRows) {
      for (int64_t i = 0; i < chunk.count; ++i) {
        offset[i] = std::min(offset[i], distance(i, windows.rows() + first));
      }
    }
  }
  const auto positions = static_cast<uint32_t>(windows.geometry().out_plane());
  const auto inner = static_cast<uint32_t>(windows.geometry().inner);
  uint64_t bits = 0; // of all indices, which must fit 32
  uint32_t stray = 0;
  for (int64_t i = 0; i < chunk.count; ++i) {
    const auto index = static_cast<uint32_t>(indices[i]);
    uint32_t least = distance(i, windows.rows());
    least = more ? std::min(least, offset[i]) : least;
    bits |= static_cast<uint64_t>(int64_t{indices[i]});
    stray |= static_cast<uint32_t>(least >= windows.width()) | (index >= positions);
    offset[i] = index * inner + (chunk.origin[i] + chunk.channel);
  }
  for (int64_t i = chunk.count; i < chunk.known; ++i) {
    bits |= static_cast<uint64_t>(int64_t{indices[i]});
    offset[i] = static_cast<uint32_t>(indices[i]) * inner + (chunk.origin[i] + chunk.channel);
  }
  return bits >> 32 == 0 && stray == 0;
}

// Finds the targets of window offsets below the window's volume. Windows are not clipped here.
MAXUNPOOL_INLINE inline bool find_targets(
    const Windows& windows, const Chunk& chunk, const uint8_t* indices, Targets& targets) {
  const Geometry<int64_t>& geometry = windows.geometry();
  // Reciprocals: a product's upper half is the quotient, for all quotients of uint8.
  const auto reciprocal = [](int64_t n) { return static_cast<uint32_t>((1 << 16) / n + 1); };
  const auto& [depth, height, width] = geometry.axis;
  const uint32_t by_width = reciprocal(width.kernel), by_height = reciprocal(height.kernel);
  // Positions to skip after each row of a window, and after each slice.
  const auto row = static_cast<uint32_t>(width.out - width.kernel);
  const auto slice = static_cast<uint32_t>((height.out - height.kernel) * width.out);
  const auto inner = static_cast<uint32_t>(geometry.inner);
  for (int64_t i = 0; i < chunk.count; ++i) {
    const uint32_t offset = indices[i], y = offset * by_width >> 16, z = y * by_height >> 16;
    const uint32_t position = chunk.begin[i] + chunk.shift + offset + y * row + z * slice;
    targets.offset[i] = position * inner + (chunk.origin[i] + chunk.channel);
  }
  return true;
}

// Fills in has_later_duplicate. `values` are the targets or the indices, of which `available` can
// be read.
template <class Value>
MAXUNPOOL_INLINE inline void mark(
    const Windows& windows, const Chunk& chunk, const Value* values, int64_t available,
    Targets& targets) {
  if (windows.later_count() == 1) {
    mark_repeated<1>(windows, chunk, values, available, targets.has_later_duplicate);
  } else {
    mark_repeated<Windows::kFused>(windows, chunk, values, available, targets.has_later_duplicate);
  }
}

template <class Index>
MAXUNPOOL_INLINE inline bool find_targets(
    const Windows& windows, const Chunk& chunk, const Index* indices, Targets& targets) {
  bool found = false;
  if (windows.row_count() == 1) {
    found = find_offsets<1>(windows, chunk, indices, targets.offset);
  } else if (windows.row_count() == 2) {
    found = find_offsets<2>(windows, chunk, indices, targets.offset);
  } else {
    found = find_offsets<Windows::kFused>(windows, chunk, indices, targets.offset);
  }
  if (!found || !windows.shared()) {
    return found;
  }
  if (chunk.known >= std::min(chunk.count + chunk.extent, chunk.rest)) {
    mark(windows, chunk, targets.offset, chunk.known, targets); // 32-bit, and tell planes apart
  } else {
    mark(windows, chunk, indices, chunk.rest, targets);
  }
  return true;
}

} // namespace targets_detail

// Finder of the targets of chunks. Fills in has_later_duplicate only if windows share positions.
template <class Index>
class FindTargets {
 public:
  explicit FindTargets(const Windows& windows) : windows_(windows) {
    if (kIsWindowOffset<Index>) {
      offsets_.emplace(windows.geometry());
    }
  }

  // False: an index is stray or bad, and the targets are undefined.
  bool operator()(const Chunk& chunk, const Index* indices, Targets& targets) const {
    using namespace targets_detail;
    if constexpr (kIsWindowOffset<Index>) {
      if (!offsets_->in_windows(indices, chunk.known)) {
        return false;
      }
    }
    const bool found = in_vectors(
        [&]() MAXUNPOOL_INLINE { return find_targets(windows_, chunk, indices, targets); });
    if constexpr (kIsWindowOffset<Index>) {
      return find_rest(chunk, indices, targets);
    }
    return found;
  }

 private:
  // Finds the targets of elements behind the chunk, and of those whose windows are clipped.
  bool find_rest(const Chunk& chunk, const uint8_t* indices, Targets& targets) const {
    const Geometry<int64_t>& geometry = windows_.geometry();
    const int64_t inner = geometry.inner;
    bool in_plane = true;
    offsets_->template for_each_row<false>(
        {chunk.first / inner, (chunk.first + chunk.known) / inner},
        [&](const WindowOffsets::Row& row, const CellRange& cells) {
          const int64_t end = (chunk.first + chunk.count) / inner; // of the chunk
          const auto set = [&](int64_t position, int64_t, int64_t element) {
            const int64_t i = element - chunk.first;
            targets.offset[i] = static_cast<uint32_t>(position * inner) + chunk.origin[i];
            in_plane &= position >= 0;
          };
          const auto visit = [&](const CellRange& range, const auto& known) {
            row.for_each<false>(
                range, inner, indices - chunk.first, true, 0, geometry.out_plane(), known, set);
          };
          visit(cells.within({cells.first, end}), [](int64_t, int64_t, int64_t) {});
          visit(cells.within({end, cells.end}), set);
        });
    if (in_plane && windows_.shared()) {
      in_vectors([&]() MAXUNPOOL_INLINE {
        targets_detail::mark(windows_, chunk, targets.offset, chunk.known, targets);
      });
    }
    return in_plane;
  }

  const Windows& windows_;
  std::optional<WindowOffsets> offsets_; // of uint8 indices
};

} // namespace
} // namespace maxunpool_cuda
