// Pooled tensors in short runs of elements, and where the indices of a run point to if each of them
// lies in its own window, as max pooling makes them.
#pragma once

#include "../geometry.h"
#include "processor.h"
#include "windows.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>

namespace maxunpool_cuda {

// Elements that follow one another in memory: several slabs, slices, rows or cells, or some
// channels of a cell. All runs of a tensor are alike but for where they begin, so they share the
// lists.
struct Run {
  static constexpr int64_t kMost = 1 << 10;

  int64_t outer; // the first slab, and the first element in it
  int64_t first;
  int64_t count;
  int64_t rest;  // elements of the same slabs from the first one on
  int64_t reach; // unless slabs are whole: how far behind an element its window may be shared
  // More than count if reach is short: how far targets are to be found. Never so if the run is some
  // channels of a cell: its reach, if there is any, is a whole cell at least, longer than kMost.
  int64_t known;
  uint32_t shift;   // to add to the window's begin, modulo 2^32
  uint32_t channel; // to add to the origin

  uint32_t begin[kMost];      // position where an element's window begins, modulo 2^32
  uint32_t origin[2 * kMost]; // where index 0 of an element points to, as in Targets
};

struct Targets {
  uint32_t offset[2 * Run::kMost]; // in elements of the unpooled tensor, from the first slab on
  uint8_t again[Run::kMost];       // 1: a later element of the plane has the same index
};

// How a pooled tensor is cut into runs.
class Runs {
 public:
  explicit Runs(const Windows& windows) : windows_(windows), geometry_(windows.geometry()) {
    const Axis<int64_t>* axis = geometry_.axis;
    const int64_t slabs = std::min(geometry_.outer, kOffsets / geometry_.out_slab());
    // Runs are made of the largest parts of the tensor that are no longer than one.
    item_ = geometry_.in_slab();
    items_ = geometry_.outer;
    int64_t most = slabs;
    for (const int64_t length : {axis[0].in, axis[1].in, axis[2].in, geometry_.inner}) {
      if (item_ <= Run::kMost) {
        break;
      }
      item_ /= length;
      items_ = most = length;
    }
    most = std::clamp<int64_t>(most, 1, Run::kMost / item_);
    block_ = (items_ - 1) / ((items_ - 1) / most + 1) + 1;
    blocks_ = (items_ - 1) / block_ + 1;
    whole_ = item_ == geometry_.in_slab();
    reach_ = whole_ ? 0 : windows.reach() * geometry_.inner;
  }

  // Does a run know all elements that its windows share positions with?
  bool know_all() const { return reach_ <= Run::kMost; }

  // Not some channels of a cell?
  bool whole_cells() const { return geometry_.inner <= Run::kMost; }

  // Calls work(run) for runs that together are the tensor. `elements`: how many are worth a task.
  template <class Work>
  void for_each(int64_t elements, const Work& work) const {
    const int64_t slab = geometry_.in_slab(), total = slab * geometry_.outer;
    const int64_t count = total / (items_ * item_) * blocks_;
    const int64_t grain = (elements - 1) / (block_ * item_) + 1;
    at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
      Run run;
      list(run);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t element = start(i);
        run.outer = element / slab;
        run.first = element % slab;
        run.count = start(i + 1) - element;
        run.rest = whole_ ? run.count : slab - run.first;
        run.reach = reach_;
        run.known = run.count + (know_all() ? std::min(reach_, run.rest - run.count) : 0);
        const int64_t cell = run.first / geometry_.inner, row = cell / geometry_.axis[2].in;
        const int64_t height = geometry_.axis[1].in;
        run.shift = static_cast<uint32_t>(
            windows_.begin({row / height, row % height, cell % geometry_.axis[2].in}) -
            windows_.begin({0, 0, 0}));
        run.channel = static_cast<uint32_t>(run.first % geometry_.inner);
        work(run);
      }
    });
  }

 private:
  static constexpr int64_t kOffsets = int64_t{1} << 32;

  // The first element of a run.
  int64_t start(int64_t run) const {
    return (run / blocks_ * items_ + run % blocks_ * block_) * item_;
  }

  // Fills in the lists, for a run at the beginning of a slab.
  void list(Run& run) const {
    const int64_t slab = geometry_.in_slab(), inner = geometry_.inner, count = block_ * item_;
    const int64_t listed = std::min(count, slab), width = geometry_.axis[2].in;
    int64_t i = 0;
    for (int64_t row = 0; i < listed; ++row) {
      int64_t begin = windows_.begin({row / geometry_.axis[1].in, row % geometry_.axis[1].in, 0});
      for (int64_t x = 0; x < width && i < listed; ++x, begin += geometry_.axis[2].stride) {
        for (const int64_t end = std::min(i + inner, listed); i < end; ++i) {
          run.begin[i] = static_cast<uint32_t>(begin);
        }
      }
    }
    for (; i < count; ++i) { // further slabs
      run.begin[i] = run.begin[i - slab];
    }
    const int64_t known = count + (know_all() ? reach_ : 0);
    for (i = 0; i < known; ++i) {
      run.origin[i] = i < inner ? static_cast<uint32_t>(i) : run.origin[i - inner];
    }
    const auto out_slab = static_cast<uint32_t>(geometry_.out_slab());
    for (i = slab; whole_ && i < count; ++i) {
      run.origin[i] = run.origin[i - slab] + out_slab;
    }
  }

  const Windows& windows_;
  const Geometry<int64_t>& geometry_;
  int64_t item_;   // what runs are made of: its size,
  int64_t items_;  // how many there are in a larger one, of which no run crosses the end,
  int64_t block_;  // how many a run has, if it is not the last,
  int64_t blocks_; // how many runs that makes,
  bool whole_;     // and whether they are slabs
  int64_t reach_;
};

namespace runs_detail {

// Two elements of one channel are later * inner apart. kFused: how many distances a loop takes.
template <int kFused, class Value>
MAXUNPOOL_INLINE inline void mark_repeated(
    const Windows& windows,
    const Run& run,
    const Value* values,
    int64_t available,
    uint8_t* __restrict again) {
  const int64_t inner = windows.geometry().inner;
  std::fill_n(again, run.count, uint8_t{0});
  for (int first = 0; first < windows.later_count(); first += kFused) {
    int64_t distances[kFused] = {};
    for (int i = 0; i < kFused; ++i) {
      distances[i] = windows.later()[first + i] * inner;
    }
    const int64_t all = std::clamp<int64_t>(available - distances[kFused - 1], 0, run.count);
    for (int64_t i = 0; i < all; ++i) {
      bool equal = false;
      for (const int64_t distance : distances) {
        equal |= values[i] == values[i + distance];
      }
      again[i] |= static_cast<uint8_t>(equal);
    }
    for (const int64_t distance : distances) {
      const int64_t some = std::min(run.count, available - distance);
      for (int64_t i = all; i < some; ++i) {
        again[i] |= static_cast<uint8_t>(values[i] == values[i + distance]);
      }
    }
  }
}

// kRows: how many rows of a window a loop takes.
template <int kRows, class Index>
MAXUNPOOL_INLINE inline bool find_offsets(
    const Windows& windows, const Run& run, const Index* indices, uint32_t* offset) {
  // From the nearest row that begins at or before the index: else it wraps to a large number.
  const auto distance = [&](int64_t i, const uint32_t* rows) MAXUNPOOL_INLINE {
    const uint32_t position = static_cast<uint32_t>(indices[i]) - (run.begin[i] + run.shift);
    uint32_t least = position - rows[0];
    for (int row = 1; row < kRows; ++row) {
      least = std::min(least, position - rows[row]);
    }
    return least;
  };
  const bool more = windows.row_count() > kRows;
  if (more) {
    std::fill_n(offset, run.count, ~uint32_t{0});
    for (int first = kRows; first < windows.row_count(); first += kRows) {
      for (int64_t i = 0; i < run.count; ++i) {
        offset[i] = std::min(offset[i], distance(i, windows.rows() + first));
      }
    }
  }
  const auto positions = static_cast<uint32_t>(windows.geometry().out_plane());
  const auto inner = static_cast<uint32_t>(windows.geometry().inner);
  uint64_t bits = 0; // of all indices, which have 32
  uint32_t outside = 0;
  for (int64_t i = 0; i < run.count; ++i) {
    const auto index = static_cast<uint32_t>(indices[i]);
    uint32_t least = distance(i, windows.rows());
    least = more ? std::min(least, offset[i]) : least;
    bits |= static_cast<uint64_t>(int64_t{indices[i]});
    outside |= static_cast<uint32_t>(least >= windows.width()) | (index >= positions);
    offset[i] = index * inner + (run.origin[i] + run.channel);
  }
  for (int64_t i = run.count; i < run.known; ++i) {
    bits |= static_cast<uint64_t>(int64_t{indices[i]});
    offset[i] = static_cast<uint32_t>(indices[i]) * inner + (run.origin[i] + run.channel);
  }
  return bits >> 32 == 0 && outside == 0;
}

// Offsets in the windows, none of them too large: windows are not clipped here.
MAXUNPOOL_INLINE inline bool find_targets(
    const Windows& windows, const Run& run, const uint8_t* indices, Targets& targets) {
  const Geometry<int64_t>& geometry = windows.geometry();
  // A quotient is a product's upper half: right for all that a byte can be divided by.
  const auto reciprocal = [](int64_t n) { return static_cast<uint32_t>((1 << 16) / n + 1); };
  const auto& [depth, height, width] = geometry.axis;
  const uint32_t by_width = reciprocal(width.kernel), by_height = reciprocal(height.kernel);
  // What the next row, or the next slice, is further away than the next position in the window.
  const auto row = static_cast<uint32_t>(width.out - width.kernel);
  const auto slice = static_cast<uint32_t>((height.out - height.kernel) * width.out);
  const auto inner = static_cast<uint32_t>(geometry.inner);
  for (int64_t i = 0; i < run.count; ++i) {
    const uint32_t offset = indices[i], y = offset * by_width >> 16, z = y * by_height >> 16;
    const uint32_t position = run.begin[i] + run.shift + offset + y * row + z * slice;
    targets.offset[i] = position * inner + (run.origin[i] + run.channel);
  }
  return true;
}

// `values`: as far as `available`, what differs between targets.
template <class Value>
MAXUNPOOL_INLINE inline void mark(
    const Windows& windows,
    const Run& run,
    const Value* values,
    int64_t available,
    Targets& targets) {
  if (windows.later_count() == 1) {
    mark_repeated<1>(windows, run, values, available, targets.again);
  } else {
    mark_repeated<Windows::kFused>(windows, run, values, available, targets.again);
  }
}

template <class Index>
MAXUNPOOL_INLINE inline bool find_targets(
    const Windows& windows, const Run& run, const Index* indices, Targets& targets) {
  const bool found = windows.row_count() == 1
                         ? find_offsets<1>(windows, run, indices, targets.offset)
                     : windows.row_count() == 2
                         ? find_offsets<2>(windows, run, indices, targets.offset)
                         : find_offsets<Windows::kFused>(windows, run, indices, targets.offset);
  if (!found || windows.disjoint()) {
    return found;
  }
  if (run.known >= std::min(run.count + run.reach, run.rest)) {
    mark(windows, run, targets.offset, run.known, targets); // which are short, of several planes
  } else {
    mark(windows, run, indices, run.rest, targets);
  }
  return true;
}

#if defined(MAXUNPOOL_AVX2)
// Templates would ignore the target.
MAXUNPOOL_AVX2 inline bool find_targets_avx2(
    const Windows& windows, const Run& run, const int64_t* indices, Targets& targets) {
  return find_targets(windows, run, indices, targets);
}

MAXUNPOOL_AVX2 inline bool find_targets_avx2(
    const Windows& windows, const Run& run, const int32_t* indices, Targets& targets) {
  return find_targets(windows, run, indices, targets);
}

MAXUNPOOL_AVX2 inline bool find_targets_avx2(
    const Windows& windows, const Run& run, const uint8_t* indices, Targets& targets) {
  return find_targets(windows, run, indices, targets);
}

MAXUNPOOL_AVX2 inline void mark_avx2(const Windows& windows, const Run& run, Targets& targets) {
  mark(windows, run, targets.offset, run.known, targets);
}
#endif

} // namespace runs_detail

// Fills in `again`, given the offsets as far as they are known, which is far enough.
inline void mark_repeated(const Windows& windows, const Run& run, Targets& targets) {
#if defined(MAXUNPOOL_AVX2)
  if (has_avx2()) {
    return runs_detail::mark_avx2(windows, run, targets);
  }
#endif
  runs_detail::mark(windows, run, targets.offset, run.known, targets);
}

// Fills in the targets of a run's elements; `again` only where windows are not disjoint. False: an
// index lies outside of its window, and the targets are undefined.
template <class Index>
bool find_targets(const Windows& windows, const Run& run, const Index* indices, Targets& targets) {
#if defined(MAXUNPOOL_AVX2)
  if (has_avx2()) {
    return runs_detail::find_targets_avx2(windows, run, indices, targets);
  }
#endif
  return runs_detail::find_targets(windows, run, indices, targets);
}

} // namespace maxunpool_cuda
