// How an unpooling is cut up: its pooled elements into chunks, its outputs into parts.
#pragma once

#include "../geometry.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <numeric>

namespace maxunpool_cuda {

// Integers [begin, end).
struct Range {
  int64_t begin, end;

  int64_t size() const { return end - begin; }
  bool empty() const { return begin >= end; }
  bool holds(int64_t i) const {
    return static_cast<uint64_t>(i - begin) < static_cast<uint64_t>(size());
  }
  bool holds(const Range& other) const { return begin <= other.begin && other.end <= end; }
  bool operator==(const Range&) const = default;
  Range within(const Range& other) const {
    return {std::max(begin, other.begin), std::min(end, other.end)};
  }
};

// A stack is a slab, or several small ones that follow each other. Elements and outputs are counted
// from the begin of their stack, and all stacks are cut alike.
//   chunk  elements that are read at a time, and follow each other in memory
//   reach  outputs that the indices of a chunk may name: those of the windows of its rows, along
//   the
//          first axis that is longer than 1. The reaches of a stack together cover its outputs
//   part   outputs that one thread owns
class Plan {
 public:
  static constexpr int64_t kChunk = 1 << 10; // most elements of a chunk

  // `any_index`: any index may name any output of its plane, so that every reach is the stack.
  Plan(const Geometry<int64_t>& geometry, bool any_index)
      : geometry_(geometry), any_index_(any_index) {
    constexpr int64_t kGrain = 1 << 15; // outputs that are worth a thread
    const Axis<int64_t>* axis = geometry.axis;
    // Unit: the largest of slab, slice, row, cell and element that a chunk has room for.
    unit_ = geometry.in_slab();
    slabs_ = std::min(kChunk / unit_, kGrain / geometry.out_slab());
    slabs_ = std::clamp<int64_t>(slabs_, 1, geometry.outer);
    for (const int64_t length : {axis[0].in, axis[1].in, axis[2].in, geometry.inner}) {
      if (unit_ > kChunk) {
        unit_ /= length;
        units_ = length;
      }
    }
    row_chunks_ = divide_up(units_, kChunk / unit_);
    chunk_units_ = divide_up(units_, row_chunks_);
    row_chunks_ = divide_up(units_, chunk_units_);
    chunks_ = geometry.in_slab() / (unit_ * units_) * row_chunks_;
    while (first_ < 2 && axis[first_].in == 1 && axis[first_].out == 1) {
      ++first_;
    }
    const int64_t outputs = slabs_ * geometry.out_slab(), threads = at::get_num_threads();
    const int64_t stacks = divide_up(geometry.outer, slabs_);
    if (slabs_ == 1) { // parts of equal size for each thread, and outputs that 32 bits tell apart
      parts_ = stacks < 8 * threads ? threads / std::gcd(threads, stacks) : 1;
      parts_ = std::max(std::min(parts_, outputs / kGrain + 1), (outputs >> 31) + 1);
    }
    grain_ = std::max<int64_t>(1, kGrain * parts_ / outputs);
    total_ = stacks * parts_;
  }

  int64_t chunks() const { return chunks_; } // of a stack
  int64_t parts() const { return parts_; }   // of a stack
  int64_t total() const { return total_; }   // parts of the call
  int64_t grain() const { return grain_; }   // parts that are worth a thread
  int64_t slabs() const { return slabs_; }   // of a stack; the last one may have fewer
  bool any_index() const { return any_index_; }
  const Geometry<int64_t>& geometry() const { return geometry_; }

  // Where a stack begins in the pooled and in the unpooled tensor.
  int64_t pooled(int64_t stack) const { return stack * slabs_ * geometry_.in_slab(); }
  int64_t unpooled(int64_t stack) const { return stack * slabs_ * geometry_.out_slab(); }

  int64_t longest_chunk() const { return slabs_ * chunk_units_ * unit_; }
  Range chunk(int64_t stack, int64_t i) const {
    return {begin_of(i), slabs_ > 1 ? slabs_of(stack) * geometry_.in_slab() : begin_of(i + 1)};
  }

  Range reach(int64_t stack, int64_t i) const {
    if (any_index_ || chunks_ == 1) {
      return {0, slabs_of(stack) * geometry_.out_slab()};
    }
    const Axis<int64_t>& axis = geometry_.axis[first_];
    const int64_t row = geometry_.in_slab() / axis.in, out_row = geometry_.out_slab() / axis.out;
    const auto start = [&](int64_t k) { // the reach before ends here at the earliest
      const int64_t window = begin_of(k) / row * axis.stride - axis.padding;
      return k == 0         ? 0
             : k == chunks_ ? geometry_.out_slab()
                            : std::clamp<int64_t>(window, 0, axis.out - 1) * out_row;
    };
    const int64_t last = (begin_of(i + 1) - 1) / row * axis.stride - axis.padding + axis.kernel;
    return {start(i), std::max({start(i) + 1, start(i + 1), std::min(last, axis.out) * out_row})};
  }

  Range part(int64_t stack, int64_t i) const {
    const auto start = [&](int64_t k) {
      const int64_t whole = geometry_.out_plane() / parts_, rest = geometry_.out_plane() % parts_;
      return (k * whole + std::min(k, rest)) * geometry_.inner;
    };
    return parts_ == 1 ? Range{0, slabs_of(stack) * geometry_.out_slab()}
                       : Range{start(i), start(i + 1)};
  }

 private:
  int64_t slabs_of(int64_t stack) const {
    return std::min(slabs_, geometry_.outer - stack * slabs_);
  }
  int64_t begin_of(int64_t chunk) const {
    const int64_t i = chunk % row_chunks_, row = chunk / row_chunks_;
    return (row * units_ + i * chunk_units_) * unit_;
  }

  const Geometry<int64_t>& geometry_;
  const bool any_index_;
  int64_t slabs_, chunks_, grain_, total_, parts_ = 1;
  int64_t unit_, units_ = 1;         // elements of a unit; units of the next larger one, a row
  int64_t chunk_units_, row_chunks_; // units of a chunk that is not its row's last; chunks of a row
  int first_ = 0;                    // the first axis that is longer than 1
};

} // namespace maxunpool_cuda
