// SPDX-License-Identifier: BSD-3-Clause
// How an unpooling on the CPU is divided: its outputs into parts, each of which one thread writes,
// and its pooled elements into chunks, which a thread visits one after the other.
//
// Besides the call (../calls.h) it needs to know only the number of threads. An image group is one
// image, or several small ones that follow each other in memory. Elements and outputs are counted
// from the begin of their image group.
//
// Example: two threads unpool 64 contiguous planes of 112x112 cells to 224x224, with 2x2 windows.
//   image group  one plane: 12544 elements, 50176 outputs
//   part         the whole plane, because 64 planes divide evenly among two threads
//   chunk        4 rows of cells, because 5 rows exceed 512 elements: chunk 0 has the elements
//                [0, 448), and a plane has 28 chunks
//   reach        chunk 3 has the rows of cells 12 to 15, whose windows are the rows of outputs
//                24 to 31: its indices may name the outputs [5376, 7168)
// One plane of 1024x1024 cells alone has two parts, the outputs [0, 2097152) and [2097152,
// 4194304).
#pragma once

#include "../calls.h"
#include "../geometry.h"
#include "../torch.h"

#include <algorithm>
#include <cstdint>
#include <numeric>

namespace maxunpool_cuda {

// Integers [begin, end).
struct Range {
  int64_t begin;
  int64_t end;

  int64_t size() const { return end - begin; }
  bool empty() const { return begin >= end; }
  bool holds(int64_t i) const {
    return static_cast<uint64_t>(i - begin) < static_cast<uint64_t>(size());
  }
  bool operator==(const Range&) const = default;
  // What both have. Nothing: begin >= end. (size() and holds() are for other ranges alone.)
  Range within(const Range& other) const {
    return {std::max(begin, other.begin), std::min(end, other.end)};
  }
};

// A run of consecutive pooled elements of an image group.
struct Chunk {
  // Elements. Their int64 indices fill 4 KiB, a page, and the tables of targets.h
  // 8 KiB: all that stays in a first cache of 32 KiB beside the values.
  static constexpr int64_t kMost = 512;

  int64_t group;  // the image group
  Range elements; // of the group
  Range reach;    // outputs of the group that the elements' indices may name
  Range owned;    // outputs of the reach that belong to the part of the caller

  // Outputs of the reach before those that are owned.
  int64_t lead() const { return owned.begin - reach.begin; }
};

class Plan {
 public:
  // Outputs that are worth a thread. With 2x2 windows of float32 they take about 8 us, some times
  // as long as it takes to wake a thread.
  static constexpr int64_t kGrain = 1 << 15;

  // `any_index`: the reach of every chunk is its whole image group, so any index that is in bounds
  // lies in it. Else the reach is what the chunk's windows cover, rounded up to whole rows, or
  // whole depth slices in 3d.
  Plan(const UnpoolCall& call, bool any_index) : geometry(call.geometry), any_index(any_index) {
    choose_images();
    choose_chunks();
    choose_axis();
    choose_parts();
  }

  // Chunk i of an image group, for the owner of `outputs`. Together, the reaches of all chunks hold
  // every output of the group. None begins or ends before that of the chunk before: slots rely on
  // it.
  Chunk chunk(int64_t group, int64_t i, const Range& outputs) const {
    const Range elements = elements_of(group, i);
    const Range reach = any_index || chunks == 1 ? outputs_of(group) : reach_of(elements);
    return {.group = group, .elements = elements, .reach = reach, .owned = reach.within(outputs)};
  }

  // The elements of that chunk.
  Range elements_of(int64_t group, int64_t i) const {
    const int64_t section = i / section_chunks_;
    const int64_t begin = section * section_ + i % section_chunks_ * longest_chunk;
    const int64_t section_end = (section + 1) * section_;
    const int64_t group_end = images_of(group) * geometry.in_image();
    return {begin, std::min({begin + longest_chunk, section_end, group_end})};
  }

  // Outputs of part i of an image group. The sizes of parts differ by one output at most.
  Range part(int64_t group, int64_t i) const {
    return parts == 1 ? outputs_of(group) : Range{part_begin(i), part_begin(i + 1)};
  }

  Range outputs_of(int64_t group) const { return {0, images_of(group) * geometry.out_image()}; }

  // Where an image group begins in the pooled and in the unpooled tensor.
  int64_t pooled(int64_t group) const { return group * images * geometry.in_image(); }
  int64_t unpooled(int64_t group) const { return group * images * geometry.out_image(); }

  // Elements from a chunk to the first one with another reach: a chunk, or a row of cells (in 3d a
  // depth slice) if that is longer.
  int64_t to_another_reach() const { return std::max(step_, longest_chunk); }

  const Geometry<int64_t>& geometry;
  const bool any_index;
  int64_t groups;        // image groups of the call
  int64_t images;        // of a group: several only if they are one chunk; the last may have fewer
  int64_t chunks;        // of a group
  int64_t longest_chunk; // elements; the last chunk of a section may have fewer
  int64_t parts;         // of a group
  int64_t grain;         // parts that are worth a thread

 private:
  // Small images are grouped until they fill a chunk, or are worth a thread.
  void choose_images() {
    const int64_t most =
        std::min(Chunk::kMost / geometry.in_image(), kGrain / geometry.out_image());
    images = std::clamp<int64_t>(most, 1, geometry.outer);
    groups = divide_up(geometry.outer, images);
  }

  // A chunk is a whole number of units. A unit is the largest of image, depth slice, row, cell and
  // element that is not larger than a chunk may be. A section is what such units are counted in:
  // of rows it is a depth slice, of images the group. A chunk lies in one section.
  void choose_chunks() {
    int64_t unit = geometry.in_image();
    int64_t units = images;
    const auto& [depth, height, width] = geometry.axis;
    for (const int64_t length : {depth.in, height.in, width.in, geometry.inner}) {
      if (unit > Chunk::kMost) {
        unit /= length;
        units = length;
      }
    }
    section_ = units * unit;
    section_chunks_ = divide_up(units, Chunk::kMost / unit);
    longest_chunk = divide_up(units, section_chunks_) * unit;
    chunks = divide_up(geometry.in_image(), section_) * section_chunks_;
  }

  // Reaches are ranges along the first axis that is longer than 1.
  void choose_axis() {
    axis_ = geometry.axis;
    while (axis_ < geometry.axis + 2 && axis_->in == 1 && axis_->out == 1) {
      ++axis_;
    }
    step_ = geometry.in_image() / axis_->in;
    out_step_ = geometry.out_image() / axis_->out;
  }

  // Large images are divided if there are few, so that all threads get equally many parts. A part
  // has at most 2^31 outputs, which 32 bits can count.
  void choose_parts() {
    const int64_t outputs = images * geometry.out_image();
    const int64_t threads = get_num_threads();
    parts = 1;
    if (images == 1) {
      // With 8 groups for each thread, an uneven division costs an eighth at most.
      const bool few = groups < 8 * threads;
      const int64_t even = few ? threads / std::gcd(threads, groups) : 1;
      parts = std::max(std::min(even, outputs / kGrain + 1), (outputs >> 31) + 1);
    }
    grain = std::max<int64_t>(1, kGrain * parts / outputs);
  }

  int64_t images_of(int64_t group) const {
    return std::min(images, geometry.outer - group * images);
  }

  // First output of a part, in a group of one image.
  int64_t part_begin(int64_t i) const {
    const int64_t outputs = geometry.out_image() / parts;
    const int64_t remainder = geometry.out_image() % parts;
    return i * outputs + std::min(i, remainder);
  }

  // Coordinate along the axis where an element's window begins, before it is clipped.
  int64_t window_begin(int64_t element) const {
    return element / step_ * axis_->stride - axis_->padding;
  }

  // Where the reach of a chunk begins; `element` is the chunk's first. The reach before it ends
  // here or later, so no output lies between them. The end of the image stands for a chunk after
  // the last.
  int64_t reach_begin(int64_t element) const {
    if (element == 0) {
      return 0;
    }
    if (element == geometry.in_image()) {
      return geometry.out_image();
    }
    return std::clamp<int64_t>(window_begin(element), 0, axis_->out - 1) * out_step_;
  }

  Range reach_of(const Range& elements) const {
    const int64_t begin = reach_begin(elements.begin);
    const int64_t next_begin = reach_begin(elements.end);
    const int64_t last_window_end = window_begin(elements.end - 1) + axis_->kernel;
    const int64_t windows_end = std::clamp<int64_t>(last_window_end, 0, axis_->out) * out_step_;
    // Never empty, so that some thread visits the chunk and checks its indices.
    return {begin, std::max({begin + 1, next_begin, windows_end})};
  }

  int64_t section_;        // elements; see choose_chunks()
  int64_t section_chunks_; // chunks of a section
  const Axis<int64_t>* axis_;
  int64_t step_;     // elements of one step along the axis
  int64_t out_step_; // outputs of one step along the axis
};

} // namespace maxunpool_cuda
