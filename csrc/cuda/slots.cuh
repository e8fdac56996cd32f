// SPDX-License-Identifier: BSD-3-Clause
// Kernels for all calls that the others are not compiled for, and for the sum of indices that are
// out of window. A block owns a part of a plane, or several small planes, with a slot in shared
// memory for each output. The cells that name an output fill its slot, and then the block writes
// the outputs. Example, of a part with six outputs and four cells. Two cells name output 4. With
// "last" its slot keeps the later one; with "sum" both add up in its slot, in this order.
//
//     number of a cell                  0  1  2  3
//     output that its index names       1  4  0  4
//
//     output, and number of its slot    0  1  2  3  4  5
//     slot, for "last"                  3  1  0  0  4  0     1 + number of the last cell, or 0
//
// parts.cuh says which outputs a part has, and which cells it looks at. forward_any_sum_slots is
// also a fix-up kernel: then it reads the out-of-window flags that the fast one wrote, and rewrites
// flagged images. No block waits for another.
#pragma once

#include "../reduction.h"
#include "combine.cuh"
#include "device.cuh"
#include "indices.cuh"
#include "parts.cuh"
#include "report.cuh"
#include "tiling.cuh"

#include <algorithm>
#include <cstdint>

namespace maxunpool_cuda {

constexpr int kSlotThreads = 2 * kThreads; // of a block, at most
// With 1024 threads on a processor each may have 64 registers.
constexpr int kSlotBlocksOfProcessor = 1024 / kSlotThreads;

// Calls visit(i) for this thread's share of the numbers below `count`: threadIdx.x, and every
// blockDim.x-th number after it. for_each_loaded() gives a thread the same share.
template <class Offset, class Visit>
__device__ inline void for_each_in_block(Offset count, const Visit& visit) {
  for (Offset i = threadIdx.x; i < count; i += blockDim.x) {
    visit(i);
  }
}

// Calls visit(i, load(i)) for this thread's share of the numbers below `count`. All that it loads
// at once is on its way before the first visit, so that loads do not wait for each other.
template <class Offset, class Load, class Visit>
__device__ inline void for_each_loaded(Offset count, const Load& load, const Visit& visit) {
  constexpr int kAtOnce =
      sizeof(Offset) == sizeof(uint32_t) ? 2 : 1; // more take code and registers
  for (Offset first = threadIdx.x; first < count; first += kAtOnce * blockDim.x) {
    decltype(load(first)) loaded[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const Offset i = first + n * blockDim.x;
      loaded[n] = load(i < count ? i : first);
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const Offset i = first + n * blockDim.x;
      if (i < count) {
        visit(i, loaded[n]);
      }
    }
  }
}

// Calls visit(part) for this block's parts; as the fix-up kernel, for those of groups that have a
// flagged image. visit() returns whether an index is out of window. All threads of a block call it.
//
// A team of blocks, as many as a group has parts, does one group at a time. Example: 10 blocks, and
// groups of 3 parts. Blocks 0 to 2, 3 to 5 and 6 to 8 are the teams 0, 1 and 2, and block 9 does
// nothing. Team 1 does the groups 1, 4, 7 and so on, and its block 5 part 2 of each. If a group has
// more parts than there are blocks, all blocks are one team, and a block does several parts.
template <class Offset, class Visit>
__device__ inline void for_each_part(
    const Parts<Offset>& parts, const Report& report, const Visit& visit) {
  // All threads of the block go by what one of them has read, as the word may change meanwhile.
  if (parts.is_fixup &&
      !__syncthreads_or(threadIdx.x == 0 && parts.out_of_window_flags.launches.may_have())) {
    return;
  }
  const bool many_blocks = parts.parts_of_group < gridDim.x;
  const uint32_t team_blocks =
      many_blocks ? static_cast<uint32_t>(parts.parts_of_group) : gridDim.x;
  const uint32_t teams = gridDim.x / team_blocks;
  const uint32_t team = blockIdx.x / team_blocks;
  if (team == teams) { // these blocks are too few to be a team
    return;
  }
  for (Offset group = team; group < parts.groups; group += teams) {
    if (parts.is_fixup && !__syncthreads_or(parts.has_flag(group))) {
      continue;
    }
    for (Offset number = blockIdx.x % team_blocks; number < parts.parts_of_group;
         number += team_blocks) {
      // Waits until the slots have been read, too.
      const int out_of_window = __syncthreads_or(visit(Part<Offset>(parts, group, number)));
      if (report.out_of_window_flags != nullptr && threadIdx.x == 0) {
        report.write_flag(group * parts.parts_of_group + number, out_of_window != 0);
      }
    }
  }
}

// If this thread has noted an index that is out of bounds, looks for such indices again in its
// share of the part's cells, which is what for_each_loaded() has given it before. Reports each one
// unless the fast kernel has, and calls visit(cell).
template <class Offset, class Visit>
__device__ inline void report_out_of_bounds(
    const Parts<Offset>& parts,
    const Part<Offset>& part,
    const AnyIndices& indices,
    const Errors& errors,
    const Noted& noted,
    const Visit& visit) {
  if (!noted.out_of_bounds) {
    return;
  }
  for_each_in_block(part.cell_count(), [&](Offset i) {
    const LoadedCell<Offset> loaded = part.load_cell(indices, i);
    if (part.is_in_plane(part.target(indices, loaded))) {
      return;
    }
    if (!parts.is_fixup) {
      const Offset element = part.pooled(loaded.cell);
      const int64_t index = indices[element];
      errors.report(parts.decoder.geometry, element, indices.are_offsets(), index);
    }
    visit(loaded.cell);
  });
}
struct NoVisit { // where there is nothing else to do for such a cell
  template <class Cell>
  __device__ void operator()(const Cell&) const {}
};

// Makes each slot 1 + the number of the last cell that names its output, counted from the part's
// first cell; 0: there is none. Returns what was noted of the indices.
template <class Offset>
__device__ inline Noted fill_with_last(
    uint32_t* slots, const Part<Offset>& part, const AnyIndices& indices) {
  for_each_in_block(part.slot_count(), [&](Offset slot) { slots[slot] = 0; });
  __syncthreads();
  Noted noted;
  const auto load = [&](Offset i) { return part.load_cell(indices, i); };
  for_each_loaded(part.cell_count(), load, [&](Offset, const LoadedCell<Offset>& loaded) {
    const Offset target = part.noted_target(indices, loaded, noted);
    if (part.holds(target)) {
      const auto number = static_cast<uint32_t>(loaded.cell.position - part.first_cell);
      atomicMax(slots + part.slot({target, loaded.cell.plane}), number + 1);
    }
  });
  __syncthreads();
  return noted;
}

template <class Offset, class T>
__global__ void __launch_bounds__(kSlotThreads, kSlotBlocksOfProcessor) forward_last_slots(
    Parts<Offset> parts,
    Report report,
    const T* __restrict__ input,
    AnyIndices indices,
    T* __restrict__ output) {
  auto* const slots = shared_memory<uint32_t>();
  for_each_part(parts, report, [&](const Part<Offset>& part) {
    const Noted noted = fill_with_last(slots, part, indices);
    report_out_of_bounds(parts, part, indices, report.errors, noted, NoVisit{});
    const auto load = [&](Offset slot) {
      const Offset plane = part.output(slot).plane;
      const uint32_t last = slots[slot];
      return last == 0 ? T{} : input[part.pooled({part.first_cell + (last - 1), plane})];
    };
    for_each_loaded(part.slot_count(), load, [&](Offset slot, const T& value) {
      output[part.unpooled(part.output(slot))] = value;
    });
    return noted.out_of_window;
  });
}

// Gradient of "last": of the cells that name one output, the last one gets its gradient. A part
// writes the cells that name its outputs, and those with an out-of-bounds index whose windows begin
// in it.
template <class Offset, class T>
__global__ void __launch_bounds__(kSlotThreads, kSlotBlocksOfProcessor) backward_last_slots(
    Parts<Offset> parts,
    Report report,
    const T* __restrict__ grad_output,
    AnyIndices indices,
    T* __restrict__ grad_input) {
  auto* const slots = shared_memory<uint32_t>();
  for_each_part(parts, report, [&](const Part<Offset>& part) {
    const Noted noted = fill_with_last(slots, part, indices);
    report_out_of_bounds(
        parts, part, indices, report.errors, noted, [&](const Place<Offset>& cell) {
          if (part.holds_start(part.window_start(cell))) {
            grad_input[part.pooled(cell)] = T{};
          }
        });
    const auto load = [&](Offset i) { return part.load_cell(indices, i); };
    for_each_loaded(part.cell_count(), load, [&](Offset, const LoadedCell<Offset>& loaded) {
      const Place<Offset> output{part.target(indices, loaded), loaded.cell.plane};
      if (!part.holds(output.position)) {
        return;
      }
      T* const to = grad_input + part.pooled(loaded.cell);
      const Offset number = loaded.cell.position - part.first_cell;
      // Two stores take fewer registers than one store of a chosen value.
      if (slots[part.slot(output)] == number + 1) {
        *to = grad_output[part.unpooled(output)];
      } else {
        *to = T{};
      }
    });
    return noted.out_of_window;
  });
}

// Gradient of "sum": every cell gets the gradient of the output that it names, wherever that is. So
// parts are ranges of cells, and need no slots.
template <class T>
__global__ void __launch_bounds__(kSlotThreads, kSlotBlocksOfProcessor) backward_sum_slots(
    Parts<uint64_t> parts,
    Report report,
    const T* __restrict__ grad_output,
    AnyIndices indices,
    T* __restrict__ grad_input) {
  for_each_part(parts, report, [&](const Part<uint64_t>& part) {
    Noted noted;
    const auto load = [&](uint64_t i) { return part.load_cell(indices, i); };
    for_each_loaded(part.cell_count(), load, [&](uint64_t, const LoadedCell<uint64_t>& loaded) {
      const uint64_t target = part.noted_target(indices, loaded, noted);
      grad_input[part.pooled(loaded.cell)] =
          part.is_in_plane(target) ? grad_output[part.unpooled({target, loaded.cell.plane})] : T{};
    });
    report_out_of_bounds(parts, part, indices, report.errors, noted, NoVisit{});
    return false; // an index out of window is as good as any other here
  });
}

// The windows that cover one output, by numbers: the window of the last cell in row-major order has
// number 0. Example: windows of 3x3 with stride 1 and padding 1, planes of 10 columns. The output
// at row 4, column 5 is covered by the windows of 9 cells, of which (5, 6) is the last:
//
//   cell        (5, 6) (5, 5) (5, 4) (4, 6) (4, 5) .. (3, 4)
//   number           0      1      2      3      4 ..      8
//   distance()       0      1      2     10     11 ..     22    elements before (5, 6)
//
// At an edge of the plane some of the 9 cells do not exist. Their numbers stay unused.
struct CoveringWindows {
  Divider<uint32_t> count[3]; // in each dimension, at most
  uint32_t all;               // their product: 9 in the example
  uint32_t words;             // of 32 bits, with a bit for each window: 1 in the example

  explicit CoveringWindows(const Geometry<int64_t>& geometry)
      : all(static_cast<uint32_t>(most(geometry))),
        words(static_cast<uint32_t>(divide_up(most(geometry), 32))) {
    for (int a = 0; a < 3; ++a) {
      count[a] = Divider<uint32_t>(divide_up(geometry.axis[a].kernel, geometry.axis[a].stride));
    }
  }
  // How many windows cover an output, at most; a number beyond kMost, if these are more than kMost.
  static constexpr int64_t kMost = 256;
  static int64_t most(const Geometry<int64_t>& geometry) {
    int64_t windows = 1;
    for (const Axis<int64_t>& axis : geometry.axis) {
      windows *= std::min(divide_up(axis.kernel, axis.stride), kMost + 1);
    }
    return windows;
  }

  // The number of a cell's window, which begins at `start`, among those that cover an output. In
  // each dimension, the cell lies as many cells before the last one as there are whole strides from
  // the begin of its window to the output.
  __device__ uint32_t number(
      const Parts<uint32_t>& parts,
      const Position<uint32_t>& start,
      const Position<uint32_t>& output) const {
    uint32_t number = 0;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      if (a == 0 && !parts.decoder.deep) {
        continue;
      }
      number = number * count[a].divisor() + parts.strides[a].divide(output[a] - start[a]);
    }
    return number;
  }
  // By how many pooled elements the cell with that number lies before the last cell.
  __device__ uint32_t distance(const Parts<uint32_t>& parts, uint32_t number) const {
    const auto& [depth, height, width] = parts.decoder.geometry.axis;
    uint32_t columns = number;
    uint32_t rows = split(columns, count[2]);
    if (parts.decoder.deep) {
      const uint32_t slices = split(rows, count[1]);
      rows += slices * height.in;
    }
    return (rows * width.in + columns) * parts.decoder.geometry.inner;
  }
};

// Makes each slot the set of the covering windows whose cells name its output: bit `number % 32` of
// words[number / 32][slot] is 1 for each such window. Returns what was noted of the indices; those
// that are out of window are in no set.
__device__ inline Noted fill_with_sets(
    uint32_t* words,
    const Parts<uint32_t>& parts,
    const CoveringWindows& covering,
    const Part<uint32_t>& part,
    const AnyIndices& indices) {
  const uint32_t slots = part.slot_count();
  for_each_in_block(slots * covering.words, [&](uint32_t i) { words[i] = 0; });
  __syncthreads();
  Noted noted;
  const auto load = [&](uint32_t i) { return part.load_cell(indices, i); };
  for_each_loaded(part.cell_count(), load, [&](uint32_t, const LoadedCell<uint32_t>& loaded) {
    const Position<uint32_t> start = part.window_start(loaded.cell);
    const Decoded<uint32_t> found = part.noted_decode(indices, loaded, start, noted);
    if (found.in_window && part.holds(found.target)) {
      const uint32_t number = covering.number(parts, start, part.coordinates(found.target));
      const uint32_t slot = part.slot({found.target, loaded.cell.plane});
      atomicOr(words + (number / 32 * slots + slot), 1u << number % 32);
    }
  });
  __syncthreads();
  return noted;
}

// Sums, if each index is in its own window. Slots are sets of covering windows: those whose cells
// name the output. The bits of a set have one order, whatever the order in which threads set them.
// So one thread adds the elements of an output up, and none waits for its turn.
template <class T>
__global__ void __launch_bounds__(kSlotThreads, kSlotBlocksOfProcessor) forward_own_sum_slots(
    Parts<uint32_t> parts,
    CoveringWindows covering,
    Report report,
    const T* __restrict__ input,
    AnyIndices indices,
    T* __restrict__ output) {
  auto* const distances = shared_memory<uint32_t>(); // [covering.all]
  auto* const words = distances + covering.all;      // [covering.words][slots of the part]
  for_each_in_block(
      covering.all, [&](uint32_t number) { distances[number] = covering.distance(parts, number); });
  for_each_part(parts, report, [&](const Part<uint32_t>& part) {
    const uint32_t slots = part.slot_count();
    const Noted noted = fill_with_sets(words, parts, covering, part, indices);
    report_out_of_bounds(parts, part, indices, report.errors, noted, NoVisit{});
    for_each_in_block(slots, [&](uint32_t slot) {
      const Place<uint32_t> place = part.output(slot);
      const uint32_t last = part.pooled({part.last_covering(place), place.plane});
      CombineSum<T> sum;
      // The largest number is that of the first cell in row-major order, so it is added first.
      for (uint32_t word = covering.words; word > 0; --word) {
        uint32_t set = words[(word - 1) * slots + slot];
        while (set != 0) {
          const uint32_t bit = 31 - __clz(set);
          set ^= 1u << bit;
          sum.add(input[last - distances[32 * (word - 1) + bit]]);
        }
      }
      output[part.unpooled(place)] = sum.result();
    });
    return noted.out_of_window;
  });
}

// Sums of any indices. Shared memory holds the sums, [slots of a part] of CombineSum, and then as
// many turns. The threads of a block hold a cell each, in row-major order. A thread whose cell
// names an output of the part waits until it may add. In each round, every thread that waits writes
// its turn to its slot if that is larger, and the thread whose turn stays there adds. Turns fall
// from thread to thread, and rise by blockDim.x from round to round, so the first thread that waits
// for a slot always wins, and turns of earlier rounds never do. Example, of a block of four
// threads, whose cells name the outputs a, b, a, a:
//
//     round 0: turns 4 3 2 1    a's turn is 4, b's 3: threads 0 and 1 add
//     round 1: turns - - 6 5    a's turn is 6:        thread 2 adds
//     round 2: turns - - - 9    a's turn is 9:        thread 3 adds
//     after the rounds:         a's turn and b's turn are 0 again
template <class T>
__global__ void __launch_bounds__(kSlotThreads, kSlotBlocksOfProcessor) forward_any_sum_slots(
    Parts<uint64_t> parts,
    Report report,
    const T* __restrict__ input,
    AnyIndices indices,
    T* __restrict__ output) {
  auto* const sums = shared_memory<CombineSum<T>>();
  auto* const turns = reinterpret_cast<uint32_t*>(sums + parts.most_slots());
  for_each_part(parts, report, [&](const Part<uint64_t>& part) {
    const uint64_t slots = part.slot_count();
    const uint64_t cells = part.cell_count();
    for_each_in_block(slots, [&](uint64_t slot) {
      sums[slot] = CombineSum<T>{};
      turns[slot] = 0;
    });
    Noted noted;
    for (uint64_t chunk = 0; chunk < cells; chunk += blockDim.x) {
      uint64_t slot = slots; // none
      T value{};
      if (chunk + threadIdx.x < cells) {
        const LoadedCell<uint64_t> loaded = part.load_cell(indices, chunk + threadIdx.x);
        const uint64_t target = part.noted_target(indices, loaded, noted);
        if (part.holds(target)) {
          slot = part.slot({target, loaded.cell.plane});
          value = input[part.pooled(loaded.cell)];
        }
      }
      bool waits = slot < slots;
      for (uint32_t turn = blockDim.x - threadIdx.x; __syncthreads_or(waits); turn += blockDim.x) {
        if (waits) {
          atomicMax(turns + slot, turn);
        }
        __syncthreads();
        if (waits && turns[slot] == turn) {
          sums[slot].add(value);
          waits = false;
        }
      }
      if (slot < slots) { // the next chunk's turns begin anew; its first barrier comes before them
        atomicExch(turns + slot, 0u);
      }
    }
    __syncthreads();
    report_out_of_bounds(parts, part, indices, report.errors, noted, NoVisit{});
    for_each_in_block(slots, [&](uint64_t slot) {
      output[part.unpooled(part.output(slot))] = sums[slot].result();
    });
    return noted.out_of_window;
  });
}

} // namespace maxunpool_cuda
