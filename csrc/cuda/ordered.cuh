// SPDX-License-Identifier: BSD-3-Clause
// The fix-up kernel of "last" and of its gradient: for indices that lead anywhere in their plane. A
// block goes through the elements of a plane in row-major order, a chunk at a time, so its time
// grows with the plane. It reads the out-of-window flags that the fast kernel wrote, and rewrites
// the flagged images. No block waits for another.
//
// Example: blocks of 4 threads, and a plane of 8 cells, so two chunks.
//
//     cell                        0  1  2  3 | 4  5  6  7
//     output that its index names b  e  b  a | e  j  j  j
//
//     unpool, first to last     0 to 3: cells 1, 2 and 3 store to e, b and a; cell 0 does not, as
//                                       cell 2 is later
//                               4 to 7: cells 4 and 7 store to e and j, so e is overwritten
//     gradient, last to first   4 to 7: cells 4 and 7 get the gradients of e and j, and take these;
//                                       cells 5 and 6 get 0
//                               0 to 3: cells 2 and 3 get a gradient; cell 0 gets 0, as cell 2 is
//                                       later, and cell 1, as e is taken
//
// In a chunk, rounds find the last of the threads that name one output (see Turns). From chunk to
// chunk, an unpool only overwrites, and a gradient has a bit for each output: whether it is taken.
//
// In channels_last, a block does a *group* of up to 32 neighbouring channels at once, so that
// threads that are neighbours access neighbours. Example: 70 channels are groups of 32, 32 and 6.
// With 1024 threads a chunk is 32 cells of a group, one channel a thread; in the last group, 26 of
// each 32 threads have no channel. Planes of a contiguous tensor are groups of one.
//
// Indices that are out of bounds name no output. The fast kernel has reported them.
#pragma once

#include "../geometry.h"
#include "device.cuh"
#include "divider.cuh"
#include "indices.cuh"
#include "report.cuh"

#include <algorithm>
#include <bit>
#include <cstdint>

namespace maxunpool_cuda {

// The groups of a call, and how blocks go through them. Numbers have 64 bits, so that one kernel
// serves calls of all sizes.
struct OrderedPlan {
  uint64_t cells;     // of a plane
  uint64_t outputs;   // of a plane
  uint64_t index_end; // an index below this number names an output
  uint64_t inner;     // of the geometry
  uint64_t channels;  // of a group; the last one of an image may have fewer
  uint64_t groups;
  Divider<uint64_t> groups_of_image;
  uint64_t chunk_cells; // cells of a chunk
  uint64_t chunks;      // of a group
  uint64_t taken_words; // of 32 bits, for the outputs of a group
  uint32_t* taken;      // so many words for each block, if the call is a gradient
  OutOfWindowFlags flags;

  int64_t threads; // of a block
  int64_t blocks;  // whose threads fit the processors, but no more than there are groups

  OrderedPlan() = default;
  OrderedPlan(const Geometry<int64_t>& geometry, int64_t index_bytes, int64_t processors) {
    // As raw() does not extend int32 by its sign, -1 becomes 2^32 - 1.
    constexpr int64_t kInt32Indices = int64_t{1} << 31;
    const int64_t all_channels = geometry.inner;
    const int64_t some_channels = std::min<int64_t>(all_channels, kOrderedChannels);
    const int64_t in_plane = geometry.in_plane();
    const int64_t out_plane = geometry.out_plane();
    const int64_t groups_together = divide_up(all_channels, some_channels);
    const int64_t all_groups = geometry.outer * groups_together;
    threads = threads_of(in_plane * some_channels, all_groups <= processors);
    const auto size = [](int64_t n) { return static_cast<uint64_t>(n); };
    cells = size(in_plane);
    outputs = size(out_plane);
    index_end =
        size(index_bytes == sizeof(int32_t) ? std::min(out_plane, kInt32Indices) : out_plane);
    inner = size(all_channels);
    channels = size(some_channels);
    groups = size(all_groups);
    groups_of_image = Divider<uint64_t>(groups_together);
    chunk_cells = size(threads / some_channels);
    chunks = size(divide_up(in_plane, threads / some_channels));
    taken_words = size(divide_up(out_plane * some_channels, 32));
    blocks = std::min(all_groups, processors * (kThreadsOfProcessor / threads));
  }
  // Words of `taken` for all blocks: at most two bits for each output of the call, but whole words.
  int64_t all_taken_words() const { return blocks * static_cast<int64_t>(taken_words); }

 private:
  static constexpr int64_t kThreadsOfProcessor = 1536; // each may have 40 registers

  // The threads of a block: whole warps, as few as give the same number of chunks. If each
  // group has a processor for itself, its block is large. Else several blocks share a processor,
  // and while one waits the others work.
  static int64_t threads_of(int64_t elements, bool has_processor) {
    constexpr int64_t kWarp = 32;
    const int64_t most = has_processor ? kOrderedThreads : kOrderedThreads / 2;
    const int64_t of_chunk = divide_up(elements, divide_up(elements, most));
    return std::min(divide_up(of_chunk, kWarp) * kWarp, most);
  }
};

// What a thread does of a group: one channel, in one cell of each chunk. Numbers of elements are
// counted in their tensors.
struct OrderedThread {
  uint32_t channel;  // of the group
  uint32_t cell;     // of the chunk
  uint64_t pooled;   // the channel's first element
  uint64_t unpooled; // its first output
  bool exists;       // false: the thread does nothing but wait for the others

  __device__ OrderedThread(const OrderedPlan& plan, uint64_t group) {
    const auto channels = static_cast<uint32_t>(plan.channels);
    channel = threadIdx.x % channels;
    cell = threadIdx.x / channels;
    uint64_t group_of_image = group;
    const uint64_t image = split(group_of_image, plan.groups_of_image);
    const uint64_t of_image = group_of_image * plan.channels + channel;
    pooled = image * plan.cells * plan.inner + of_image;
    unpooled = image * plan.outputs * plan.inner + of_image;
    exists = of_image < plan.inner && cell < plan.chunk_cells;
  }
};

// Finds the last thread of those that name one output. Outputs share slots of shared memory, by
// their numbers. In a round, each thread that waits writes its turn to its slot, if that is larger.
// The thread whose turn stays there wins. The others that name its output are done, too; those that
// name another one wait for the next round, whose turns are larger. So there are as many rounds as
// a slot has outputs. Example, of a block of four threads and slots for the outputs a, a, b, c,
// where a and b share a slot:
//
//     round 0: turns 1 2 3 4    a and b's slot is 3, c's 4: threads 2 and 3 win, 0 and 1 wait
//     round 1: turns 5 6 - -    a and b's slot is 6:        thread 1 wins, and 0 is done
class Turns {
 public:
  static constexpr uint32_t kSlots = 4 * kOrderedThreads; // a power of two

  static int64_t shared_bytes(int64_t threads) {
    return threads * int64_t{sizeof(uint64_t)} + kSlots * int64_t{sizeof(uint32_t)};
  }

  // All threads of a block call each function.
  __device__ Turns()
      : outputs_(shared_memory<uint64_t>()),
        slots_(reinterpret_cast<uint32_t*>(outputs_ + blockDim.x)) {
    begin_anew();
  }
  // Whether this thread is the last one that names the output. False, if it names none. No thread
  // returns before all have called.
  __device__ bool is_last(uint64_t output, bool names) {
    if (given_ >= kMostTurns) {
      begin_anew();
    }
    uint32_t* const slot = slots_ + slot_of(output);
    outputs_[threadIdx.x] = output;
    bool wins = false;
    bool waits = names;
    do {
      if (waits) {
        atomicMax(slot, given_ + threadIdx.x + 1);
      }
      __syncthreads();
      if (waits) {
        const uint32_t winner = *slot - given_ - 1;
        wins = winner == threadIdx.x;
        waits = outputs_[winner] != output;
      }
      given_ += blockDim.x;
    } while (__syncthreads_or(waits)); // then all have read what the next round or call overwrites
    return wins;
  }

 private:
  __device__ void begin_anew() {
    for (uint32_t slot = threadIdx.x; slot < kSlots; slot += blockDim.x) {
      slots_[slot] = 0;
    }
    given_ = 0;
    __syncthreads();
  }

  // Knuth's multiplicative hash: outputs that lie evenly spaced, as those of a row or a column, get
  // slots that are spread evenly, too.
  __device__ static uint32_t slot_of(uint64_t output) {
    constexpr uint32_t kGoldenRatio = 2654435769u; // 2^32 / 1.618..
    return static_cast<uint32_t>(output) * kGoldenRatio >> (32 - std::countr_zero(kSlots));
  }

  uint64_t* outputs_; // of each thread
  uint32_t* slots_;
  uint32_t given_; // turns of earlier rounds
};

// Whether no thread has taken the output before. `taken` has a bit for each.
__device__ inline bool take(uint32_t* taken, uint64_t output) {
  const uint32_t bit = 1u << output % 32;
  return (atomicOr(taken + output / 32, bit) & bit) == 0;
}

// Does one group. `taken`: words of the block, if it is a gradient's.
template <class T, bool kForward>
__device__ inline void do_in_order(
    const OrderedPlan& plan,
    const OrderedThread& thread,
    Turns& turns,
    uint32_t* taken,
    const T* __restrict__ values,
    const AnyIndices& indices,
    T* __restrict__ result) {
  constexpr uint64_t kNone = ~uint64_t{0}; // names no output
  const auto element = [&](uint64_t cell) { return thread.pooled + cell * plan.inner; };
  const auto output = [&](uint64_t index) { return thread.unpooled + index * plan.inner; };
  const auto load_index = [&](uint64_t cell) {
    return thread.exists && cell < plan.cells ? indices.raw(element(cell)) : kNone;
  };
  const auto load_value = [&](uint64_t cell, uint64_t index) {
    return index < plan.index_end ? values[kForward ? element(cell) : output(index)] : T{};
  };
  // Waiting for memory is most of the time. So an index is loaded two chunks before it is used,
  // and the value one chunk before. A cell before the first one has wrapped around, and is not
  // loaded.
  const uint64_t step = kForward ? plan.chunk_cells : -plan.chunk_cells;
  uint64_t cell = thread.cell + (kForward ? 0 : (plan.chunks - 1) * plan.chunk_cells);
  uint64_t index = load_index(cell);
  uint64_t next_index = load_index(cell + step);
  T value = load_value(cell, index);
  for (uint64_t chunk = 0; chunk < plan.chunks; ++chunk) {
    const uint64_t later_index = load_index(cell + 2 * step);
    const T next_value = load_value(cell + step, next_index);
    const uint64_t of_group = index * plan.channels + thread.channel;
    const bool is_last = turns.is_last(of_group, index < plan.index_end);
    if constexpr (kForward) {
      if (is_last) {
        result[output(index)] = value;
      }
    } else if (thread.exists && cell < plan.cells) {
      result[element(cell)] = is_last && take(taken, of_group) ? value : T{};
    }
    cell += step;
    index = next_index;
    next_index = later_index;
    value = next_value;
  }
}

// kForward: unpools `values`, else `values` is the gradient of the output.
template <class T, bool kForward>
__global__ void __launch_bounds__(kOrderedThreads, 1) ordered(
    OrderedPlan plan, const T* __restrict__ values, AnyIndices indices, T* __restrict__ result) {
  // All threads of the block go by what one of them has read, as the word may change meanwhile.
  if (!__syncthreads_or(threadIdx.x == 0 && plan.flags.launches.may_have())) {
    return;
  }
  Turns turns;
  for (uint64_t group = blockIdx.x; group < plan.groups; group += gridDim.x) {
    if (!__syncthreads_or(plan.flags.any(plan.groups_of_image.divide(group)))) {
      continue;
    }
    const OrderedThread thread(plan, group);
    uint32_t* taken = nullptr;
    // The first barrier of is_last() lies between this and what the chunks write there.
    if constexpr (kForward) {
      const uint64_t end = thread.exists ? plan.outputs : 0;
      for (uint64_t position = thread.cell; position < end; position += plan.chunk_cells) {
        result[thread.unpooled + position * plan.inner] = T{};
      }
    } else {
      taken = plan.taken + blockIdx.x * plan.taken_words;
      for (uint64_t word = threadIdx.x; word < plan.taken_words; word += blockDim.x) {
        taken[word] = 0;
      }
    }
    do_in_order<T, kForward>(plan, thread, turns, taken, values, indices, result);
  }
}

} // namespace maxunpool_cuda
