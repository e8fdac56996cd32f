// SPDX-License-Identifier: BSD-3-Clause
// The kernel for windows and layouts that no other fast kernel is compiled for. A block owns a part
// of a plane, or several small planes, and has slots in shared memory for its outputs. The cells
// whose windows reach into the part put their numbers into the slots of the outputs that they name.
// Then the block writes what the slots say. Example of a part with six outputs and four cells:
//
//     number of a cell               0  1  2  3
//     output that its index names    1  4  0  4
//
//     output, and its slot           0  1  2  3  4      5
//     last, gradient                 3  1  0  0  4      0   1 + number of the last cell, or 0
//     sum                            2  0  -  -  1 3    -   a bit for each of these cells (see
//                                                           SlotsPlan::window_number)
//
// "last" stores the last cell's value. The gradient goes to the last cell, and the others get 0.
// "sum" adds the values of a slot's cells in row-major order, whatever the order in which threads
// set the bits: so no thread waits for its turn.
//
// Where an index is out of window, the block flags that (see Report), and the fix-up kernel
// rewrites the image.
#pragma once

#include "../geometry.h"
#include "combine.cuh"
#include "device.cuh"
#include "divider.cuh"
#include "indices.cuh"
#include "report.cuh"

#include <algorithm>
#include <cstdint>
#include <numeric>

namespace maxunpool_cuda {

constexpr int64_t kMostCovering = 256; // windows of an output, for "sum": bits of a slot
static_assert(kMostCovering / 8 <= kSharedBytes);

// Windows that cover one output, at most; a number beyond kMostCovering, if more than that.
inline int64_t most_covering(const Geometry<int64_t>& geometry) {
  int64_t windows = 1;
  for (const Axis<int64_t>& axis : geometry.axis) {
    windows *= std::min(divide_up(axis.kernel, axis.stride), kMostCovering + 1);
  }
  return windows;
}

// How the planes of a call are cut. Planes that lie beside each other in memory form a group: small
// planes of a contiguous tensor, so that a block has enough to do; or channels of a channels_last
// tensor, so that neighbouring threads access neighbours. A part has the same positions in all
// planes of its group. Examples, with room for 8192 slots, and cells a quarter of the outputs:
//
//   output plane, layout     planes  outputs
//   112x112, contiguous           1     6272  2 equal parts
//   14x14, contiguous            10      196  2048 / 196 planes
//   112x112, 64 channels          8      965  13 parts of about equal size
//   4x4, 64 channels             64       16  8 channels, doubled 3 times
struct Cut {
  int64_t planes;  // of a group
  int64_t groups;  // of the call
  int64_t parts;   // of a group
  int64_t outputs; // positions of a part, in its planes; the last part of a group may have fewer

  // `room`: slots of a part, at most.
  Cut(const Geometry<int64_t>& geometry, int64_t room) {
    constexpr int64_t kChannels = 8;  // whose elements, of float, fill a sector of memory
    constexpr int64_t kEnough = 2048; // cells or outputs of small planes, for 256 threads
    const int64_t out_plane = geometry.out_plane();
    const int64_t positions = std::max(geometry.in_plane(), out_plane);
    if (geometry.inner > 1) {
      planes = std::gcd(geometry.inner, std::min(kChannels, room));
      const int64_t most = std::min(room, kEnough / positions);
      while (geometry.inner % (2 * planes) == 0 && 2 * planes <= most) {
        planes *= 2;
      }
      groups = geometry.outer * geometry.inner / planes;
    } else {
      const int64_t fitting = std::min(room / out_plane, kEnough / positions);
      planes = std::clamp<int64_t>(fitting, 1, geometry.outer);
      groups = divide_up(geometry.outer, planes);
    }
    outputs = divide_up(out_plane, divide_up(out_plane, room / planes)); // about equal parts
    parts = divide_up(out_plane, outputs);
  }
};

// What the host computes for the kernel, of a call whose numbers fit 32 bits.
struct SlotsPlan {
  Decoder<uint32_t> decoder;
  Divider<uint32_t> strides[3];  // of windows
  Divider<uint32_t> covering[3]; // windows that cover one output, in each dimension, at most
  Divider<uint32_t> in_height;   // of the pooled plane
  Divider<uint32_t> in_width;
  uint32_t words;   // of 32 bits, of a slot
  uint32_t planes;  // of a group; see Cut
  uint32_t outputs; // of a part
  uint32_t parts;   // of the call
  Divider<uint32_t> parts_of_group;
  Divider<uint32_t> groups_of_image; // 1 in a contiguous tensor
  uint32_t next_slot;                // from the slot of an output to that of the next position
  uint32_t next_pooled;              // from an element to that of the next plane of the group
  uint32_t next_output;              // the same of the unpooled tensor, and of slots
  Divider<uint32_t> cell_columns;    // see Part::place
  Divider<uint32_t> output_columns;
  bool all_cells; // a part looks at all cells of its planes; else see Part::edge

  static constexpr int kMostThreads = 2 * kThreads;
  int64_t threads; // of a block
  int64_t shared_bytes;
  int64_t images; // of a group

  SlotsPlan(const Geometry<int64_t>& geometry, int64_t words_of_slot)
      : decoder(geometry),
        in_height(geometry.axis[1].in),
        in_width(geometry.axis[2].in),
        words(static_cast<uint32_t>(words_of_slot)) {
    const int64_t slot_bytes = words_of_slot * int64_t{sizeof(uint32_t)};
    const Cut cut(geometry, kSharedBytes / slot_bytes);
    const bool is_contiguous = geometry.inner == 1;
    const auto size = [](int64_t n) { return static_cast<uint32_t>(n); };
    planes = size(cut.planes);
    outputs = size(cut.outputs);
    parts = size(cut.groups * cut.parts);
    parts_of_group = Divider<uint32_t>(cut.parts);
    groups_of_image = Divider<uint32_t>(is_contiguous ? 1 : geometry.inner / cut.planes);
    next_slot = is_contiguous ? 1 : planes;
    next_pooled = is_contiguous ? decoder.in_plane : 1;
    next_output = is_contiguous ? decoder.out_plane : 1;
    cell_columns = Divider<uint32_t>(is_contiguous ? geometry.in_plane() : cut.planes);
    output_columns = Divider<uint32_t>(is_contiguous ? geometry.out_plane() : cut.planes);
    all_cells = cut.parts == 1;
    for (int a = 0; a < 3; ++a) {
      const Axis<int64_t>& axis = geometry.axis[a];
      strides[a] = Divider<uint32_t>(axis.stride);
      covering[a] = Divider<uint32_t>(divide_up(axis.kernel, axis.stride));
      // The index of a window that covers no output is checked all the same.
      all_cells |=
          axis.padding >= axis.kernel || (axis.in - 1) * axis.stride - axis.padding >= axis.out;
    }
    // Whole warps, with a thread for each cell of a group or for each 8 outputs of a part.
    const int64_t work = std::max(geometry.in_plane(), divide_up(cut.outputs, 8)) * cut.planes;
    threads = std::min<int64_t>(divide_up(work, 32) * 32, kMostThreads);
    shared_bytes = int64_t{sizeof(uint32_t)} *
                   (most_words() + 32 * words); // the slots and, for "sum", distances
    images = is_contiguous ? cut.planes : 1;
  }

  // Words of a part's slots, at most.
  MAXUNPOOL_HOST_DEVICE uint32_t most_words() const { return outputs * planes * words; }

  // The number of a window among those that cover an output: that of the last cell in row-major
  // order is 0. `start` is where the window begins. Example: windows of 3x3 with stride 1 and
  // padding 1. The output at row 4, column 5 is covered by the windows of 9 cells, of which (5, 6)
  // is the last:
  //
  //   cell        (5, 6) (5, 5) (5, 4) (4, 6) (4, 5) .. (3, 4)
  //   number           0      1      2      3      4 ..      8
  //
  // In each dimension, the cell lies as many cells before the last one as there are whole strides
  // from the begin of its window to the output. At an edge of the plane some of the 9 cells do not
  // exist, and their numbers stay unused.
  __device__ uint32_t
  window_number(const Position<uint32_t>& start, const Position<uint32_t>& output) const {
    uint32_t number = 0;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      if (a > 0 || decoder.deep) {
        number = number * covering[a].divisor() + strides[a].divide(output[a] - start[a]);
      }
    }
    return number;
  }
  // By how many pooled elements the cell with that number lies before the last one: in contiguous
  // planes of 10 columns, 0, 1, 2, 10, 11 .. 22 in the example.
  __device__ uint32_t distance(uint32_t number) const {
    uint32_t columns = number;
    uint32_t rows = split(columns, covering[2]);
    const uint32_t slices = split(rows, covering[1]);
    rows += slices * in_height.divisor();
    return (rows * in_width.divisor() + columns) * decoder.geometry.inner;
  }
};

// A cell or an output of a part.
struct Place {
  uint32_t position; // in its plane
  uint32_t plane;    // of the group's
};

// A part, as the threads of its block see it. Its cells and its outputs have numbers, as their
// elements lie in memory: plane by plane in a contiguous tensor, position by position in
// channels_last.
class Part {
 public:
  uint32_t cells; // that it looks at
  uint32_t slots; // one for each output

  __device__ Part(const SlotsPlan& plan, uint32_t number) : plan_(plan) {
    const Geometry<uint32_t>& geometry = plan.decoder.geometry;
    uint32_t part = number;
    uint32_t group = split(part, plan.parts_of_group);
    const uint32_t image = split(group, plan.groups_of_image);
    const bool is_contiguous = geometry.inner == 1;
    const uint32_t first_image = is_contiguous ? image * plan.planes : image;
    const uint32_t first_channel = is_contiguous ? 0 : group * plan.planes;
    first_pooled_ = first_image * plan.decoder.in_plane * geometry.inner + first_channel;
    first_unpooled_ = first_image * plan.decoder.out_plane * geometry.inner + first_channel;
    planes_ = is_contiguous ? smaller(plan.planes, geometry.outer - first_image) : plan.planes;
    first_output_ = part * plan.outputs;
    outputs_ = smaller(plan.outputs, plan.decoder.out_plane - first_output_);
    first_cell_ = 0;
    uint32_t end = plan.decoder.in_plane;
    if (!plan.all_cells) {
      const uint32_t last_output = first_output_ + outputs_ - 1;
      first_cell_ = edge(first_output_, last_output, false);
      end = edge(last_output, first_output_, true);
    }
    cells = first_cell_ < end ? (end - first_cell_) * planes_ : 0;
    slots = outputs_ * planes_;
  }

  __device__ Place cell(uint32_t number) const {
    return place(number, first_cell_, plan_.cell_columns);
  }
  __device__ Place output(uint32_t slot) const {
    return place(slot, first_output_, plan_.output_columns);
  }
  // Whether the part has the output at a position; and its slot.
  __device__ bool holds(uint32_t position) const { return position - first_output_ < outputs_; }
  __device__ uint32_t slot(const Place& output) const {
    return (output.position - first_output_) * plan_.next_slot + output.plane * plan_.next_output;
  }
  // Numbers of elements, in their tensors.
  __device__ uint32_t pooled(const Place& cell) const {
    return first_pooled_ + cell.position * plan_.decoder.geometry.inner +
           cell.plane * plan_.next_pooled;
  }
  __device__ uint32_t unpooled(const Place& output) const {
    return first_unpooled_ + output.position * plan_.decoder.geometry.inner +
           output.plane * plan_.next_output;
  }

  __device__ Position<uint32_t> window_start(const Place& cell) const {
    return plan_.decoder.window_start(coordinates(cell.position, plan_.in_height, plan_.in_width));
  }
  // What an index of a cell names. `index` is what AnyIndices::raw() returned.
  __device__ Decoded<uint32_t> decode(
      const AnyIndices& indices, uint64_t index, const Position<uint32_t>& start) const {
    return decoded(plan_.decoder, indices.are_offsets(), index_as<uint32_t>(index), start);
  }
  // Coordinates of an output.
  __device__ Position<uint32_t> coordinates(uint32_t position) const {
    return coordinates(position, plan_.decoder.out_height, plan_.decoder.out_width);
  }
  // The last cell, in row-major order, whose window covers an output. It may lie beyond the plane.
  __device__ Place last_covering(const Place& output) const {
    const Position<uint32_t> at = coordinates(output.position);
    uint32_t cell = 0;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      if (a > 0 || plan_.decoder.deep) {
        const Axis<uint32_t>& axis = plan_.decoder.geometry.axis[a];
        cell = cell * axis.in + plan_.strides[a].divide(at[a] + axis.padding);
      }
    }
    return {cell, output.plane};
  }

 private:
  __device__ static uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

  // Coordinates of a position in a plane of that height and width.
  __device__ Position<uint32_t> coordinates(
      uint32_t position, const Divider<uint32_t>& height, const Divider<uint32_t>& width) const {
    Position<uint32_t> at{{0, 0, position}};
    at[1] = split(at[2], width);
    if (plan_.decoder.deep) {
      at[0] = split(at[1], height);
    }
    return at;
  }

  // The place of a cell or an output, from its number in the part. In a contiguous tensor `columns`
  // divides by the size of a plane: number = plane * size + position. In channels_last it divides
  // by the planes of a group: number = position * planes + plane.
  __device__ Place place(uint32_t number, uint32_t first, const Divider<uint32_t>& columns) const {
    if (planes_ == 1) { // saves most of the work
      return {first + number, 0};
    }
    uint32_t last = number;
    const uint32_t before = split(last, columns);
    return plan_.decoder.geometry.inner == 1 ? Place{last, before} : Place{first + before, last};
  }

  // Begin or end, as cell positions, of the cells whose windows may reach into the part. For the
  // begin, `own_end` is the part's first position, and `other_end` its last one; for the end, it is
  // the other way round. Examples, of 3x3 windows with stride 1 and no padding, so that cell (y, x)
  // covers rows y to y + 2:
  //   part (3, 2) to (3, 5): begins with cell (1, 0), whose window ends at (3, 2);
  //                          ends after cell (3, 5), whose window begins there;
  //   part (3, 2) to (4, 1): cells (1, 0) to (4, last), as rows differ, and so columns may be any.
  __device__ uint32_t edge(uint32_t own_end, uint32_t other_end, bool is_end) const {
    const auto nearest = coordinates(own_end);
    const auto opposite = coordinates(other_end);
    bool equal = true; // the part lies at one coordinate in each dimension before `a`
    uint32_t cell = 0;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      const Axis<uint32_t>& axis = plan_.decoder.geometry.axis[a];
      const uint32_t padded = nearest[a] + axis.padding;
      const uint32_t last = axis.in - 1;
      uint32_t coordinate = is_end ? last : 0; // if not `equal`, any may be needed
      if (equal && is_end) { // the last window that begins at nearest[a] or before
        coordinate = smaller(plan_.strides[a].divide(padded), last);
      } else if (equal && padded >= axis.kernel) {
        // The first window that ends behind nearest[a]; axis.in or more, if no window does.
        coordinate = plan_.strides[a].divide(padded - axis.kernel) + 1;
      }
      cell = cell * axis.in + coordinate;
      equal = equal && nearest[a] == opposite[a];
    }
    return cell + (is_end ? 1 : 0);
  }

  const SlotsPlan& plan_;
  uint32_t planes_;
  uint32_t first_output_; // position of the first output
  uint32_t outputs_;      // positions, from that on
  uint32_t first_cell_;   // position of the first cell
  uint32_t first_pooled_; // number of the first plane's first element in the pooled tensor
  uint32_t first_unpooled_;
};

// Calls visit(i, load(i)) for this thread's share of the numbers below `count`. It loads two at
// once, so that one load does not wait for the other.
template <class Load, class Visit>
__device__ inline void for_each_loaded(uint32_t count, const Load& load, const Visit& visit) {
  for (uint32_t first = threadIdx.x; first < count; first += 2 * blockDim.x) {
    const uint32_t second = first + blockDim.x;
    const auto of_first = load(first);
    const auto of_second = load(second < count ? second : first);
    visit(first, of_first);
    if (second < count) {
      visit(second, of_second);
    }
  }
}

// Sets the slots of a part. Calls visit_invalid(cell) for this thread's cells whose indices are out
// of window or out of bounds, and returns whether there are any.
template <Order kOrder, class Visit>
__device__ inline bool fill(
    uint32_t* slots,
    const SlotsPlan& plan,
    const Part& part,
    const AnyIndices& indices,
    const Visit& visit_invalid) {
  for (uint32_t word = threadIdx.x; word < part.slots * plan.words; word += blockDim.x) {
    slots[word] = 0;
  }
  __syncthreads();
  bool any_invalid = false;
  const auto load = [&](uint32_t number) { return indices.raw(part.pooled(part.cell(number))); };
  for_each_loaded(part.cells, load, [&](uint32_t number, uint64_t index) {
    const Place cell = part.cell(number);
    const auto start = part.window_start(cell);
    const auto named = part.decode(indices, index, start);
    if (!named.in_window) {
      any_invalid = true;
      visit_invalid(cell);
    } else if (part.holds(named.target)) {
      const uint32_t slot = part.slot({named.target, cell.plane});
      if constexpr (kOrder == Order::sum) {
        const uint32_t window = plan.window_number(start, part.coordinates(named.target));
        atomicOr(slots + (window / 32 * part.slots + slot), 1u << window % 32);
      } else {
        atomicMax(slots + slot, number + 1);
      }
    }
  });
  __syncthreads();
  return any_invalid;
}

// The sum of the elements of a slot's cells. `distances` has plan.distance() of every window. The
// largest window number is that of the first cell in
// row-major order, so it is added first.
template <class T>
__device__ inline T sum_of_slot(
    const uint32_t* slots,
    const uint32_t* distances,
    const SlotsPlan& plan,
    const Part& part,
    uint32_t slot,
    const T* __restrict__ values) {
  const uint32_t last = part.pooled(part.last_covering(part.output(slot)));
  CombineSum<T> sum;
  for (uint32_t word = plan.words; word-- > 0;) {
    uint32_t set = slots[word * part.slots + slot];
    while (set != 0) {
      const uint32_t bit = 31 - __clz(set);
      set ^= 1u << bit;
      sum.add(values[last - distances[32 * word + bit]]);
    }
  }
  return sum.result();
}

// Blocks of a processor, at least: four of 256 threads leave each thread 64 registers. A sum may
// have 80, as nvcc 13.2 takes more than 64 (sm_100, sm_120).
template <Order kOrder>
constexpr int kSlotBlocks = kOrder == Order::sum ? 3 : 4;

// Unpools `values`; or, if it is a gradient, `values` is the gradient of the output.
template <class T, Order kOrder>
__global__ void __launch_bounds__(SlotsPlan::kMostThreads, kSlotBlocks<kOrder>) slots(
    SlotsPlan plan,
    Report report,
    const T* __restrict__ values,
    AnyIndices indices,
    T* __restrict__ result) {
  auto* const slots = shared_memory<uint32_t>();
  auto* const distances = slots + plan.most_words(); // of "sum"
  if constexpr (kOrder == Order::sum) {
    for (uint32_t window = threadIdx.x; window < 32 * plan.words; window += blockDim.x) {
      distances[window] = plan.distance(window);
    }
  }
  for (uint32_t number = blockIdx.x; number < plan.parts; number += gridDim.x) {
    const Part part(plan, number);
    const auto visit_invalid = [&](const Place& cell) {
      const uint32_t element = part.pooled(cell);
      decoded_or_reported(plan.decoder, report.errors, indices, element, part.window_start(cell));
      if constexpr (kOrder == Order::gradient) {
        result[element] = T{};
      }
    };
    const bool any_invalid = fill<kOrder>(slots, plan, part, indices, visit_invalid);
    if constexpr (kOrder == Order::last) {
      const auto load = [&](uint32_t slot) {
        const uint32_t last = slots[slot];
        return last == 0 ? T{} : values[part.pooled(part.cell(last - 1))];
      };
      for_each_loaded(part.slots, load, [&](uint32_t slot, const T& value) {
        result[part.unpooled(part.output(slot))] = value;
      });
    } else if constexpr (kOrder == Order::sum) {
      for (uint32_t slot = threadIdx.x; slot < part.slots; slot += blockDim.x) {
        result[part.unpooled(part.output(slot))] =
            sum_of_slot(slots, distances, plan, part, slot, values);
      }
    } else {
      const auto load = [&](uint32_t n) { return indices.raw(part.pooled(part.cell(n))); };
      for_each_loaded(part.cells, load, [&](uint32_t n, uint64_t index) {
        const Place cell = part.cell(n);
        const auto named = part.decode(indices, index, part.window_start(cell));
        const Place output{named.target, cell.plane};
        if (part.holds(named.target)) {
          const bool wins = slots[part.slot(output)] == n + 1;
          result[part.pooled(cell)] = wins ? values[part.unpooled(output)] : T{};
        }
      });
    }
    const int is_flagged = __syncthreads_or(any_invalid); // then the slots have been read, too
    if (report.out_of_window_flags != nullptr && threadIdx.x == 0) {
      report.write_flag(number, is_flagged != 0);
    }
  }
}

} // namespace maxunpool_cuda
