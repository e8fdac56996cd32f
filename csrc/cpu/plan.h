// SPDX-License-Identifier: BSD-3-Clause
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

// Elements that are read at a time, and follow each other in memory: so few that processors read
// ahead in the indices, the values and the result at once. A stack is an image, or several small
// ones that follow each other; elements and outputs are counted from its begin.
struct Chunk {
  static constexpr int64_t kMost = 1 << 9; // elements

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
    // A chunk is some units of a row of them. Unit: the largest of image, slice, row, cell and
    // element that it has room for.
    int64_t unit = geometry.in_image();
    images = std::min(Chunk::kMost / unit, kGrain / geometry.out_image());
    images = std::clamp<int64_t>(images, 1, geometry.outer);
    int64_t units = images;
    for (const int64_t length : {axis[0].in, axis[1].in, axis[2].in, geometry.inner}) {
      if (unit > Chunk::kMost) {
        unit /= length;
        units = length;
      }
    }
    row_ = units * unit;
    longest_chunk = divide_up(units, divide_up(units, Chunk::kMost / unit)) * unit;
    row_chunks_ = divide_up(row_, longest_chunk);
    chunks = divide_up(geometry.in_image(), row_) * row_chunks_;
    while (axis_ < axis + 2 && axis_->in == 1 && axis_->out == 1) {
      ++axis_;
    }
    step_ = geometry.in_image() / axis_->in;
    out_step_ = geometry.out_image() / axis_->out;
    const int64_t outputs = images * geometry.out_image(), threads = at::get_num_threads();
    const int64_t stacks = divide_up(geometry.outer, images);
    if (images == 1) { // as many for each thread; and 32 bits tell the outputs of a part apart
      parts = stacks < 8 * threads ? threads / std::gcd(threads, stacks) : 1;
      parts = std::max(std::min(parts, outputs / kGrain + 1), (outputs >> 31) + 1);
    }
    grain = std::max<int64_t>(1, kGrain * parts / outputs);
    total = stacks * parts;
  }

  // Chunk i of a stack, for the owner of `outputs`. The reaches of all chunks cover the stack.
  Chunk chunk(int64_t stack, int64_t i, const Range& outputs) const {
    const int64_t row = i / row_chunks_, begin = row * row_ + i % row_chunks_ * longest_chunk;
    const int64_t most = images_of(stack) * geometry.in_image();
    const Range elements{begin, std::min({begin + longest_chunk, (row + 1) * row_, most})};
    const Range reach = any_index || chunks == 1 ? outputs_of(stack) : reach_of(elements);
    return {stack, elements, reach, reach.within(outputs)};
  }

  // Outputs of part i of a stack.
  Range part(int64_t stack, int64_t i) const {
    const int64_t some = geometry.out_plane() / parts, rest = geometry.out_plane() % parts;
    const auto begin = [&](int64_t k) { return (k * some + std::min(k, rest)) * geometry.inner; };
    return parts == 1 ? outputs_of(stack) : Range{begin(i), begin(i + 1)};
  }

  // Where a stack begins in the pooled and in the unpooled tensor.
  int64_t pooled(int64_t stack) const { return stack * images * geometry.in_image(); }
  int64_t unpooled(int64_t stack) const { return stack * images * geometry.out_image(); }

  // How many elements ahead of a chunk its walk prefetches: so many that their reach is another.
  int64_t ahead() const { return std::max(step_, longest_chunk); }

  const Geometry<int64_t>& geometry;
  const bool any_index;
  int64_t images, chunks, parts = 1; // of a stack; the last stack may have fewer images
  int64_t grain, total;              // parts that are worth a thread; parts of the call
  int64_t longest_chunk;

 private:
  int64_t images_of(int64_t stack) const {
    return std::min(images, geometry.outer - stack * images);
  }
  Range outputs_of(int64_t stack) const { return {0, images_of(stack) * geometry.out_image()}; }

  Range reach_of(const Range& elements) const {
    const auto window = [&](int64_t element) { // where it begins, along the axis
      return element / step_ * axis_->stride - axis_->padding;
    };
    const auto begin = [&](int64_t element) { // the reach before ends here at the earliest
      return element == 0 ? 0
             : element == geometry.in_image()
                 ? geometry.out_image()
                 : std::clamp<int64_t>(window(element), 0, axis_->out - 1) * out_step_;
    };
    const int64_t first = begin(elements.begin), next = begin(elements.end);
    const int64_t last = std::min(window(elements.end - 1) + axis_->kernel, axis_->out) * out_step_;
    return {first, std::max({first + 1, next, last})};
  }

  int64_t row_, row_chunks_;                  // elements of a row of units, and chunks
  const Axis<int64_t>* axis_ = geometry.axis; // the first that is longer than 1
  int64_t step_, out_step_;                   // elements and outputs of one step along it
};

} // namespace maxunpool_cuda
