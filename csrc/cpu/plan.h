// How an unpooling is cut up: its pooled elements into chunks, its outputs into parts.
#pragma once

#include "../calls.h"
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
  bool operator==(const Range&) const = default;
  Range within(const Range& other) const {
    return {std::max(begin, other.begin), std::min(end, other.end)};
  }
};

// Elements that are read at a time, and follow each other in memory. A stack is a slab, or several
// small ones that follow each other; elements and outputs are counted from its begin.
struct Chunk {
  static constexpr int64_t kMost = 1 << 10; // elements

  int64_t stack;
  Range elements;
  Range reach; // outputs that their indices may name
  Range owned; // those in reach that the thread owns

  int64_t lead() const { return owned.begin - reach.begin; }
};

struct Plan {
  // `any_index`: any index may name any output of its plane. Else the reach of a chunk holds the
  // windows of its rows, along the first axis that is longer than 1.
  Plan(const UnpoolCall& call, bool any_index) : geometry(call.geometry), any_index(any_index) {
    constexpr int64_t kGrain = 1 << 15; // outputs that are worth a thread
    const Axis<int64_t>* axis = geometry.axis;
    // Unit: the largest of slab, slice, row, cell and element that a chunk has room for.
    unit_ = geometry.in_slab();
    slabs = std::min(Chunk::kMost / unit_, kGrain / geometry.out_slab());
    slabs = std::clamp<int64_t>(slabs, 1, geometry.outer);
    for (const int64_t length : {axis[0].in, axis[1].in, axis[2].in, geometry.inner}) {
      if (unit_ > Chunk::kMost) {
        unit_ /= length;
        units_ = length;
      }
    }
    chunk_units_ = divide_up(units_, divide_up(units_, Chunk::kMost / unit_));
    row_chunks_ = divide_up(units_, chunk_units_);
    chunks = geometry.in_slab() / (unit_ * units_) * row_chunks_;
    longest_chunk = slabs * chunk_units_ * unit_;
    while (first_ < 2 && axis[first_].in == 1 && axis[first_].out == 1) {
      ++first_;
    }
    const int64_t outputs = slabs * geometry.out_slab(), threads = at::get_num_threads();
    const int64_t stacks = divide_up(geometry.outer, slabs);
    if (slabs == 1) { // as many for each thread; and 32 bits tell the outputs of a part apart
      parts = stacks < 8 * threads ? threads / std::gcd(threads, stacks) : 1;
      parts = std::max(std::min(parts, outputs / kGrain + 1), (outputs >> 31) + 1);
    }
    const auto size = static_cast<int64_t>(call.element_size);
    const auto index_size = static_cast<int64_t>(c10::elementSize(call.index_type));
    const int64_t slab = geometry.in_slab() * (size + index_size) + geometry.out_slab() * size;
    large = geometry.outer > (4 << 20) / slab;
    grain = std::max<int64_t>(1, kGrain * parts / outputs);
    total = stacks * parts;
  }

  // Chunk i of a stack, for the owner of `outputs`. The reaches of all chunks cover the stack.
  Chunk chunk(int64_t stack, int64_t i, const Range& outputs) const {
    const int64_t end = slabs > 1 ? slabs_of(stack) * geometry.in_slab() : begin_of(i + 1);
    const Range reach = any_index || chunks == 1 ? outputs_of(stack) : reach_of(i);
    return {stack, {begin_of(i), end}, reach, reach.within(outputs)};
  }

  // Outputs of part i of a stack.
  Range part(int64_t stack, int64_t i) const {
    const int64_t some = geometry.out_plane() / parts, rest = geometry.out_plane() % parts;
    const auto begin = [&](int64_t k) { return (k * some + std::min(k, rest)) * geometry.inner; };
    return parts == 1 ? outputs_of(stack) : Range{begin(i), begin(i + 1)};
  }

  // Where a stack begins in the pooled and in the unpooled tensor.
  int64_t pooled(int64_t stack) const { return stack * slabs * geometry.in_slab(); }
  int64_t unpooled(int64_t stack) const { return stack * slabs * geometry.out_slab(); }

  const Geometry<int64_t>& geometry;
  const bool any_index;
  bool large;                       // the call reads and writes more than caches hold
  int64_t slabs, chunks, parts = 1; // of a stack; the last stack may have fewer slabs
  int64_t grain, total;             // parts that are worth a thread; parts of the call
  int64_t longest_chunk;

 private:
  int64_t slabs_of(int64_t stack) const { return std::min(slabs, geometry.outer - stack * slabs); }
  Range outputs_of(int64_t stack) const { return {0, slabs_of(stack) * geometry.out_slab()}; }
  int64_t begin_of(int64_t chunk) const {
    const int64_t i = chunk % row_chunks_, row = chunk / row_chunks_;
    return (row * units_ + i * chunk_units_) * unit_;
  }
  Range reach_of(int64_t chunk) const {
    const Axis<int64_t>& axis = geometry.axis[first_];
    const int64_t row = geometry.in_slab() / axis.in, out_row = geometry.out_slab() / axis.out;
    const auto begin = [&](int64_t k) { // the reach before ends here at the earliest
      const int64_t window = begin_of(k) / row * axis.stride - axis.padding;
      return k == 0        ? 0
             : k == chunks ? geometry.out_slab()
                           : std::clamp<int64_t>(window, 0, axis.out - 1) * out_row;
    };
    const int64_t last = (begin_of(chunk + 1) - 1) / row * axis.stride - axis.padding + axis.kernel;
    const int64_t end = std::max(begin(chunk + 1), std::min(last, axis.out) * out_row);
    return {begin(chunk), std::max(begin(chunk) + 1, end)};
  }

  int64_t unit_, units_ = 1;         // elements of a unit; units of the next larger one, a row
  int64_t chunk_units_, row_chunks_; // units of a chunk that is not its row's last; chunks of a row
  int first_ = 0;                    // the first axis that is longer than 1
};

} // namespace maxunpool_cuda
