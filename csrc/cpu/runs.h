// Pooled tensors in short runs of elements, and where the indices of a run point to if each of them
// lies in its own window, as max pooling makes them.
#pragma once

#include "../geometry.h"
#include "windows.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <numeric>

// What loops over the elements of a run is compiled twice on x86-64: the vectors that every such
// processor has are too short for it to pay.
#if defined(__x86_64__) && defined(__GNUC__)
#define MAXUNPOOL_AVX2 __attribute__((target("avx2")))
#define MAXUNPOOL_INLINE __attribute__((always_inline))
#else
#define MAXUNPOOL_INLINE
#endif

namespace maxunpool_cuda {

// Elements that follow one another in memory: several whole slabs, or a piece of one.
struct Run {
  static constexpr int64_t kMost = 1 << 10;

  int64_t outer; // the first slab, and the first element in it
  int64_t first;
  int64_t count;
  int64_t rest;  // elements of the same slabs from the first one on
  int64_t reach; // in a piece: how far behind an element its window is shared, at most
  int64_t known; // more than count if reach is short: how far the lists below are filled in
  int64_t ahead; // how far behind this run the next one begins, in elements of the pooled tensor
  uint32_t begin[2 * kMost];  // position where an element's window begins, modulo 2^32
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
    const int64_t slab = geometry_.in_slab();
    pieces_ = (slab - 1) / Run::kMost + 1;
    slabs_ = std::clamp<int64_t>(
        std::min(Run::kMost / slab, kOffsets / geometry_.out_slab()), 1, geometry_.outer);
    groups_ = (geometry_.outer - 1) / slabs_ + 1;
  }

  // Calls work(run) for runs that together are the tensor, those at the same place of every slab
  // one after the other: one begin and one origin serve them all. `elements`: worth a task.
  template <class Work>
  void for_each(int64_t elements, const Work& work) const {
    const int64_t count = pieces_ * groups_;
    const int64_t size = std::max<int64_t>(1, geometry_.in_slab() * geometry_.outer / count);
    at::parallel_for(0, count, (elements - 1) / size + 1, [&](int64_t begin, int64_t end) {
      Run run;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t piece = i / groups_, next = (i + 1) / groups_;
        run.outer = i % groups_ * slabs_;
        run.first = start(piece);
        if (i == begin || i % groups_ == 0) {
          locate(piece, run);
        }
        const int64_t slabs = std::min(slabs_, geometry_.outer - run.outer);
        if (pieces_ == 1) {
          run.count = run.rest = run.known = slabs * geometry_.in_slab();
        }
        run.ahead = ((i + 1) % groups_ * slabs_ - run.outer) * geometry_.in_slab() + start(next) -
                    run.first;
        work(run);
      }
    });
  }

 private:
  static constexpr int64_t kOffsets = int64_t{1} << 32;

  int64_t start(int64_t piece) const { return piece * geometry_.in_slab() / pieces_; }

  void locate(int64_t piece, Run& run) const {
    const Axis<int64_t>* axis = geometry_.axis;
    const int64_t inner = geometry_.inner, first = start(piece);
    run.count = start(piece + 1) - first;
    run.rest = geometry_.in_slab() - first;
    run.reach = pieces_ == 1 ? 0 : windows_.reach() * inner;
    run.known =
        run.count + (run.reach > Run::kMost ? 0 : std::min(run.reach, run.rest - run.count));
    const int64_t cell = first / inner, row = cell / axis[2].in;
    int64_t z = row / axis[1].in, y = row % axis[1].in, x = cell % axis[2].in;
    int64_t channel = first % inner, count = 0;
    while (count < run.known) {
      const int64_t begin = windows_.begin({z, y, 0});
      if (inner == 1) {
        const int64_t cells = std::min(axis[2].in - x, run.known - count);
        for (int64_t i = 0; i < cells; ++i) {
          run.begin[count + i] = static_cast<uint32_t>(begin + (x + i) * axis[2].stride);
        }
        std::fill_n(run.origin + count, cells, 0);
        count += cells;
      } else {
        for (; x < axis[2].in && count < run.known; ++x) {
          const int64_t channels = std::min(inner - channel, run.known - count);
          std::fill_n(
              run.begin + count, channels, static_cast<uint32_t>(begin + x * axis[2].stride));
          std::iota(
              run.origin + count, run.origin + count + channels, static_cast<uint32_t>(channel));
          count += channels;
          channel = 0;
        }
      }
      x = 0;
      z += (y + 1) / axis[1].in;
      y = (y + 1) % axis[1].in;
    }
    for (int64_t i = count; i < count * slabs_; ++i) {
      run.begin[i] = run.begin[i - count];
      run.origin[i] = run.origin[i - count] + static_cast<uint32_t>(geometry_.out_slab());
    }
  }

  const Windows& windows_;
  const Geometry<int64_t>& geometry_;
  int64_t pieces_, slabs_, groups_;
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
    const uint32_t position = static_cast<uint32_t>(indices[i]) - run.begin[i];
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
    offset[i] = index * inner + run.origin[i];
  }
  for (int64_t i = run.count; i < run.known; ++i) {
    bits |= static_cast<uint64_t>(int64_t{indices[i]});
    offset[i] = static_cast<uint32_t>(indices[i]) * inner + run.origin[i];
  }
  return bits >> 32 == 0 && outside == 0;
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
  const auto mark = [&](const auto* values, int64_t available) MAXUNPOOL_INLINE {
    if (windows.later_count() == 1) {
      mark_repeated<1>(windows, run, values, available, targets.again);
    } else {
      mark_repeated<Windows::kFused>(windows, run, values, available, targets.again);
    }
  };
  if (run.known >= std::min(run.count + run.reach, run.rest)) {
    mark(targets.offset, run.known); // which are short, and differ between planes
  } else {
    mark(indices, run.rest);
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
#endif

} // namespace runs_detail

// Fills in the targets of a run's elements; `again` only where windows are not disjoint. False: an
// index lies outside of its window, and the targets are undefined.
template <class Index>
bool find_targets(const Windows& windows, const Run& run, const Index* indices, Targets& targets) {
#if defined(MAXUNPOOL_AVX2)
  static const bool avx2 = __builtin_cpu_supports("avx2");
  if (avx2) {
    return runs_detail::find_targets_avx2(windows, run, indices, targets);
  }
#endif
  return runs_detail::find_targets(windows, run, indices, targets);
}

} // namespace maxunpool_cuda
