// Chunks of pooled tensors: short enough for caches, long enough for vectors.
#pragma once

#include "../geometry.h"
#include "windows.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>

namespace maxunpool_cuda {
namespace { // Internal linkage: GCC inlines these more readily.

// Consecutive elements in memory: several slabs, slices, rows or cells, or some channels of a cell.
// All chunks of a tensor share the lists; `shift` and `channel` say where a chunk begins.
struct Chunk {
  static constexpr int64_t kMost = 1 << 10;

  int64_t outer; // the first slab
  int64_t first; // the first element, counted in that slab
  int64_t count;
  int64_t rest;     // elements from the first to the end of the slabs
  int64_t extent;   // later elements whose windows may share positions; 0: whole slabs
  int64_t known;    // elements that get targets: count, and a short extent
  uint32_t shift;   // to add to the window's begin, modulo 2^32
  uint32_t channel; // to add to the origin

  uint32_t begin[kMost];      // position where an element's window begins, modulo 2^32
  uint32_t origin[2 * kMost]; // target of index 0, as in Targets
};

// Cutting of a pooled tensor into chunks.
class Chunks {
 public:
  explicit Chunks(const Windows& windows) : windows_(windows), geometry_(windows.geometry()) {
    const Axis<int64_t>* axis = geometry_.axis;
    const int64_t slabs = std::min(geometry_.outer, kOffsets / geometry_.out_slab());
    // Unit: the largest of slab, slice, row, cell and element that a chunk has room for.
    unit_ = geometry_.in_slab();
    units_ = geometry_.outer;
    int64_t most = slabs;
    for (const int64_t length : {axis[0].in, axis[1].in, axis[2].in, geometry_.inner}) {
      if (unit_ <= Chunk::kMost) {
        break;
      }
      unit_ /= length;
      units_ = most = length;
    }
    most = std::clamp<int64_t>(most, 1, Chunk::kMost / unit_);
    length_ = divide_up(units_, divide_up(units_, most));
    chunks_ = divide_up(units_, length_);
    whole_ = unit_ == geometry_.in_slab();
    extent_ = whole_ ? 0 : windows.latest() * geometry_.inner;
  }

  // Whether a chunk has targets for all elements that its windows share positions with.
  bool know_all() const { return extent_ <= Chunk::kMost; }

  // Whether chunks hold whole cells.
  bool whole_cells() const { return geometry_.inner <= Chunk::kMost; }

  // Calls work(chunk) for all chunks. `elements`: how many a task has at least.
  template <class Work>
  void for_each(int64_t elements, const Work& work) const {
    const int64_t slab = geometry_.in_slab(), total = slab * geometry_.outer;
    const int64_t count = total / (units_ * unit_) * chunks_;
    const int64_t grain = divide_up(elements, length_ * unit_);
    at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
      Chunk chunk;
      list(chunk);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t element = start(i);
        chunk.outer = element / slab;
        chunk.first = element % slab;
        chunk.count = start(i + 1) - element;
        chunk.rest = whole_ ? chunk.count : slab - chunk.first;
        chunk.extent = extent_;
        chunk.known = chunk.count + (know_all() ? std::min(extent_, chunk.rest - chunk.count) : 0);
        const int64_t cell = chunk.first / geometry_.inner, row = cell / geometry_.axis[2].in;
        const int64_t height = geometry_.axis[1].in;
        chunk.shift = static_cast<uint32_t>(
            windows_.begin({row / height, row % height, cell % geometry_.axis[2].in}) -
            windows_.begin({0, 0, 0}));
        chunk.channel = static_cast<uint32_t>(chunk.first % geometry_.inner);
        work(chunk);
      }
    });
  }

 private:
  static constexpr int64_t kOffsets = int64_t{1} << 32;

  // First element of a chunk.
  int64_t start(int64_t chunk) const {
    return (chunk / chunks_ * units_ + chunk % chunks_ * length_) * unit_;
  }

  // Fills in the lists, for a chunk that begins where a slab does.
  void list(Chunk& chunk) const {
    const int64_t slab = geometry_.in_slab(), inner = geometry_.inner, count = length_ * unit_;
    const int64_t listed = std::min(count, slab), width = geometry_.axis[2].in;
    int64_t i = 0;
    for (int64_t row = 0; i < listed; ++row) {
      int64_t begin = windows_.begin({row / geometry_.axis[1].in, row % geometry_.axis[1].in, 0});
      for (int64_t x = 0; x < width && i < listed; ++x, begin += geometry_.axis[2].stride) {
        for (const int64_t end = std::min(i + inner, listed); i < end; ++i) {
          chunk.begin[i] = static_cast<uint32_t>(begin);
        }
      }
    }
    for (; i < count; ++i) { // further slabs
      chunk.begin[i] = chunk.begin[i - slab];
    }
    const int64_t known = count + (know_all() ? extent_ : 0);
    for (i = 0; i < known; ++i) {
      chunk.origin[i] = i < inner ? static_cast<uint32_t>(i) : chunk.origin[i - inner];
    }
    const auto out_slab = static_cast<uint32_t>(geometry_.out_slab());
    for (i = slab; whole_ && i < count; ++i) {
      chunk.origin[i] = chunk.origin[i - slab] + out_slab;
    }
  }

  const Windows& windows_;
  const Geometry<int64_t>& geometry_;
  int64_t unit_;   // elements of a unit
  int64_t units_;  // units of the next larger unit, whose end no chunk crosses
  int64_t length_; // units of a chunk that is not the last
  int64_t chunks_; // of the next larger unit
  bool whole_;     // units are slabs
  int64_t extent_; // as in Chunk
};

} // namespace
} // namespace maxunpool_cuda
