// SPDX-License-Identifier: BSD-3-Clause
// The kernel for indices that lead anywhere in their plane. A block goes through the elements of a
// plane in row-major order, a chunk at a time, so its time grows with the plane, whatever the
// windows. No block waits for another.
//
// It is the fix-up kernel of the others: then it reads the out-of-window flags that the fast kernel
// wrote, and rewrites the flagged images. And it does all of the few calls that no fast kernel is
// for (see dispatch.cuh), in which indices may be window offsets, too.
//
// Example: blocks of 4 threads, and a plane of 8 cells, so two chunks.
//
//     cell                        0  1  2  3 | 4  5  6  7
//     output that its index names b  e  b  a | e  j  j  j
//
//     last, first to last       0 to 3: cells 1, 2 and 3 store to e, b and a; cell 0 does not, as
//                                       cell 2 is later
//                               4 to 7: cells 4 and 7 store to e and j, so e is overwritten
//     sum, first to last        0 to 3: cells 0, 1 and 3 add to b, e and a; then cell 2 adds to b
//                               4 to 7: cells 4 and 5 add to e and j; then 6, and then 7 adds to j
//     gradient, last to first   4 to 7: cells 4 and 7 get the gradients of e and j, and take these;
//                                       cells 5 and 6 get 0
//                               0 to 3: cells 2 and 3 get a gradient; cell 0 gets 0, as cell 2 is
//                                       later, and cell 1, as e is taken
//
// In a chunk, rounds find the threads whose turn it is (see Turns). From chunk to chunk, "last"
// only overwrites, "sum" reads what it has written, and a gradient has a bit for each output:
// whether it is taken.
//
// In channels_last, a block does a *group* of up to 32 neighbouring channels at once, so that
// threads that are neighbours access neighbours. Example: 70 channels are groups of 32, 32 and 6.
// With 1024 threads a chunk is 32 cells of a group, one channel a thread; in the last group, 26 of
// each 32 threads have no channel. Planes of a contiguous tensor are groups of one.
//
// If groups are few, several blocks share one: each has a *range* of its outputs. All of them read
// all indices, and pass over those that name no output of their range.
#pragma once

#include "../geometry.h"
#include "../reduction.h"
#include "../torch.h"
#include "combine.cuh"
#include "device.cuh"
#include "divider.cuh"
#include "indices.cuh"
#include "report.cuh"
#include "tiling.cuh"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

// What a sum of T is kept in while it grows: the output itself, unless that would round each sum.
template <class T>
using Partial = std::conditional_t<std::is_floating_point_v<Accumulator<T>>, Accumulator<T>, T>;

// Bits that a block remembers of each output of a range.
template <class T, Order kOrder>
constexpr int remembered_bits() {
  if (kOrder == Order::gradient) {
    return 1; // whether it is taken
  }
  return kOrder == Order::sum && !std::is_same_v<Partial<T>, T> ? 8 * sizeof(Partial<T>) : 0;
}

// Lets the threads of a block act on outputs, those that name one output one after the other.
// Outputs share slots of shared memory, by their numbers. In a round, each thread that waits writes
// its turn to its slot, if that is larger. The thread whose turn stays there acts. For "sum" the
// others wait for the next round, whose turns are larger; earlier threads have larger turns. For
// "last" and the gradient later threads have larger turns, and only the last one acts: then the
// others that name its output are done, and those that name another one wait. Example of "last", of
// a block of four threads and slots for the outputs a, a, b, c, where a and b share a slot:
//
//     round 0: turns 1 2 3 4    a and b's slot is 3, c's 4: threads 2 and 3 act, 0 and 1 wait
//     round 1: turns 5 6 - -    a and b's slot is 6:        thread 1 acts, and 0 is done
class Turns {
 public:
  // Slots of a block of so many threads: 2 to this power, at least 16 a thread, but at most 4096.
  static int slot_bits(int64_t threads) {
    return std::min(12, 4 + static_cast<int>(std::bit_width(static_cast<uint64_t>(threads - 1))));
  }
  static int64_t shared_bytes(int64_t threads) {
    const int64_t slots = int64_t{1} << slot_bits(threads);
    return threads * int64_t{sizeof(uint64_t)} + slots * int64_t{sizeof(uint32_t)};
  }

  // All threads of a block call each function.
  explicit __device__ Turns(int slot_bits)
      : outputs_(shared_memory<uint64_t>()),
        slots_(reinterpret_cast<uint32_t*>(outputs_ + blockDim.x)),
        slot_bits_(slot_bits) {
    begin_anew();
  }
  // Calls act() when it is this thread's turn. A thread that does not name the output only waits.
  // What threads did before this call, all see when they act; and no thread returns before all
  // have acted.
  template <bool kAllAct, class Act>
  __device__ void act_in_turn(uint64_t output, bool names, const Act& act) {
    if (given_ >= kMostTurns) {
      begin_anew();
    }
    uint32_t* const slot = slots_ + slot_of(output);
    const uint32_t turn = 1 + (kAllAct ? blockDim.x - 1 - threadIdx.x : threadIdx.x);
    outputs_[threadIdx.x] = output;
    bool waits = names;
    do {
      if (waits) {
        atomicMax(slot, given_ + turn);
      }
      __syncthreads();
      if (waits) {
        const uint32_t winner = *slot - given_;
        if (winner == turn) {
          act();
        }
        waits = kAllAct ? winner != turn : outputs_[winner - 1] != output;
      }
      given_ += blockDim.x;
    } while (__syncthreads_or(waits)); // then all have read what the next round or call overwrites
  }

 private:
  __device__ void begin_anew() {
    for (uint32_t slot = threadIdx.x; slot < 1u << slot_bits_; slot += blockDim.x) {
      slots_[slot] = 0;
    }
    given_ = 0;
    __syncthreads();
  }

  // Knuth's multiplicative hash: outputs that lie evenly spaced, as those of a row or a column, get
  // slots that are spread evenly, too.
  __device__ uint32_t slot_of(uint64_t output) const {
    constexpr uint32_t kGoldenRatio = 2654435769u; // 2^32 / 1.618..
    return static_cast<uint32_t>(output) * kGoldenRatio >> (32 - slot_bits_);
  }

  uint64_t* outputs_; // of each thread
  uint32_t* slots_;
  int slot_bits_;
  uint32_t given_; // turns of earlier rounds
};

// The work of a call, and how blocks go through it. Numbers have 64 bits, so that one kernel serves
// calls of all sizes.
struct OrderedPlan {
  Tiling<uint64_t> tiling; // an item is a cell of a plane
  uint64_t index_end;      // a flat index below this number names an output
  uint64_t channels;       // of a group; the last one of an image may have fewer
  Divider<uint64_t> groups_of_image;
  Divider<uint64_t> ranges_of_group;
  uint64_t ranges;        // of the call
  uint64_t range_outputs; // positions of a range; the last one of a group may have fewer
  uint64_t chunk_cells;   // cells of a chunk
  uint64_t chunks;        // of a group
  int slot_bits;          // see Turns
  uint32_t* memory;       // what blocks remember of their outputs
  uint64_t block_words;   // of 32 bits: how much of it each block has
  bool drops_losers;      // gradient: of the cells that name one output, all but the last get 0
  bool is_fixup;          // does only images that are flagged, and reports no index
  OutOfWindowFlags flags; // of the fast kernel

  int64_t threads; // of a block
  int64_t blocks;  // no more than there are ranges, or than fit the processors by their threads

  // `bits`: remembered_bits().
  OrderedPlan(
      const Geometry<int64_t>& geometry,
      int64_t index_bytes,
      int64_t bits,
      int64_t processors,
      bool for_fixup)
      : tiling(geometry, {geometry.axis[0].in, geometry.axis[1].in, geometry.axis[2].in}, 1),
        is_fixup(for_fixup) {
    const int64_t some_channels = std::min<int64_t>(geometry.inner, kOrderedChannels);
    const int64_t in_plane = geometry.in_plane();
    const int64_t out_plane = geometry.out_plane();
    const int64_t groups_together = divide_up(geometry.inner, some_channels);
    const int64_t groups = geometry.outer * groups_together;
    // Small blocks wait less for each other; large ones are done with a plane sooner. So many
    // share a processor, if there are groups enough.
    const auto groups_of_processor = static_cast<uint64_t>(groups / processors);
    const auto blocks_together = static_cast<int64_t>(
        std::bit_floor(std::clamp<uint64_t>(groups_of_processor, 1, kMostTogether)));
    threads = threads_of(in_plane * some_channels, kOrderedThreads / blocks_together);
    slot_bits = Turns::slot_bits(threads);
    const int64_t cells_of_chunk = threads / some_channels;
    const int64_t chunks_of_group = divide_up(in_plane, cells_of_chunk);
    const int64_t wanted_ranges = std::clamp<int64_t>(
        std::min(processors / groups, chunks_of_group / kFewestChunks), 1, kMostRanges);
    const int64_t outputs_of_range = divide_up(out_plane, wanted_ranges);
    const int64_t ranges_together = divide_up(out_plane, outputs_of_range);
    const int64_t words = divide_up(outputs_of_range * some_channels * bits, 32);
    blocks = std::min(groups * ranges_together, processors * (kOrderedThreads / threads));
    if (bits > 1) {
      // Sums of 16-bit types: an eighth of the output's bytes, or half of these for a whole call.
      // But enough for one range.
      const int64_t most_words = geometry.outer * geometry.out_image() / (is_fixup ? 16 : 4);
      blocks = std::clamp<int64_t>(most_words / words, 1, blocks);
    }
    const auto size = [](int64_t n) { return static_cast<uint64_t>(n); };
    const bool is_int32 = index_bytes == sizeof(int32_t); // -1 becomes 2^32 - 1
    index_end = size(is_int32 ? std::min(out_plane, int64_t{1} << 31) : out_plane);
    channels = size(some_channels);
    groups_of_image = Divider<uint64_t>(groups_together);
    ranges_of_group = Divider<uint64_t>(ranges_together);
    ranges = size(groups * ranges_together);
    range_outputs = size(outputs_of_range);
    chunk_cells = size(cells_of_chunk);
    chunks = size(chunks_of_group);
    block_words = size(words);
  }
  // Words of `memory`.
  int64_t words() const { return blocks * static_cast<int64_t>(block_words); }

 private:
  static constexpr int64_t kFewestChunks = 4;  // a plane of fewer is not worth two blocks
  static constexpr int64_t kMostRanges = 16;   // as all of them read all indices
  static constexpr uint64_t kMostTogether = 4; // blocks of a processor

  // The threads of a block: whole warps, as few as give the same number of chunks.
  static int64_t threads_of(int64_t elements, int64_t most) {
    constexpr int64_t kWarp = 32;
    const int64_t of_chunk = divide_up(elements, divide_up(elements, most));
    return std::min(divide_up(of_chunk, kWarp) * kWarp, most);
  }
};

// What a thread does of a range: one channel, in one cell of each chunk. Numbers of elements are
// counted in their tensors.
struct OrderedThread {
  uint32_t channel;  // of the group
  uint32_t cell;     // of the chunk
  uint64_t first;    // output of the range, a position in the plane
  uint64_t outputs;  // positions of the range
  uint64_t pooled;   // the channel's first element
  uint64_t unpooled; // its first output
  bool exists;       // false: the thread does nothing but wait for the others
  bool is_of_first;  // of the ranges that share the group

  __device__ OrderedThread(const OrderedPlan& plan, uint64_t group, uint64_t range) {
    const Tiling<uint64_t>& tiling = plan.tiling;
    const uint64_t inner = tiling.geometry.inner;
    const auto channels = static_cast<uint32_t>(plan.channels);
    channel = threadIdx.x % channels;
    cell = threadIdx.x / channels;
    uint64_t group_of_image = group;
    const uint64_t image = split(group_of_image, plan.groups_of_image);
    const uint64_t of_image = group_of_image * plan.channels + channel;
    pooled = image * tiling.in_plane * inner + of_image;
    unpooled = image * tiling.out_plane * inner + of_image;
    exists = of_image < inner && cell < plan.chunk_cells;
    is_of_first = range == 0;
    first = range * plan.range_outputs;
    const uint64_t left = tiling.out_plane - first;
    outputs = left < plan.range_outputs ? left : plan.range_outputs;
  }
};

// Whether no thread has taken the output before. `taken` has a bit for each.
__device__ inline bool take(uint32_t* taken, uint64_t output) {
  const uint32_t bit = 1u << output % 32;
  return (atomicOr(taken + output / 32, bit) & bit) == 0;
}

// One range of a call, as a thread of its block does it.
template <class T, Order kOrder>
class OrderedRange {
 public:
  __device__ OrderedRange(
      const OrderedPlan& plan,
      const OrderedThread& thread,
      const T* __restrict__ values,
      const AnyIndices& indices,
      T* __restrict__ result)
      : plan_(plan),
        thread_(thread),
        values_(values),
        indices_(indices),
        result_(result),
        memory_(plan.memory + blockIdx.x * plan.block_words) {}

  // All threads of the block call it.
  __device__ void run(Turns& turns, const Errors& errors) const {
    begin();
    if (do_in_order(turns)) {
      report(errors);
    }
    if constexpr (kKeepsSums) {
      __syncthreads();
      for_each_output([&](uint64_t of_range, uint64_t output) {
        result_[output] = static_cast<T>(sums()[of_range]);
      });
    }
  }

 private:
  static constexpr bool kForward = kOrder != Order::gradient;
  static constexpr bool kKeepsSums = kForward && remembered_bits<T, kOrder>() != 0;
  static constexpr uint64_t kNone = ~uint64_t{0}; // no output's position

  // Sets what the first chunk begins with.
  __device__ void begin() const {
    if constexpr (kKeepsSums || !kForward) {
      for (uint64_t word = threadIdx.x; word < plan_.block_words; word += blockDim.x) {
        memory_[word] = 0;
      }
    } else {
      for_each_output([&](uint64_t, uint64_t output) { result_[output] = T{}; });
    }
  }

  // Goes through all cells. Returns whether an index of this thread is out of bounds.
  __device__ bool do_in_order(Turns& turns) const {
    // Waiting for memory is most of the time. So an index is loaded two chunks before it is used,
    // and the value one chunk before. A cell before the first one has wrapped around, and is not
    // loaded.
    const uint64_t step = kForward ? plan_.chunk_cells : -plan_.chunk_cells;
    uint64_t cell = thread_.cell + (kForward ? 0 : (plan_.chunks - 1) * plan_.chunk_cells);
    uint64_t position = named_by(cell, load_index(cell));
    uint64_t next_index = load_index(cell + step);
    T value = load_value(cell, position);
    bool all_in_bounds = true;
    for (uint64_t chunk = 0; chunk < plan_.chunks; ++chunk) {
      const uint64_t later_index = load_index(cell + 2 * step);
      const uint64_t next_position = named_by(cell + step, next_index);
      const T next_value = load_value(cell + step, next_position);
      if (position == kNone && is_cell(cell)) {
        all_in_bounds = false;
        if (!kForward && thread_.is_of_first) {
          result_[element(cell)] = T{};
        }
      }
      // Of several ranges, most chunks name outputs of others.
      if (plan_.ranges_of_group.divisor() == 1 || __syncthreads_or(is_in_range(position))) {
        act(turns, cell, position, value);
      }
      cell += step;
      next_index = later_index;
      position = next_position;
      value = next_value;
    }
    return !all_in_bounds;
  }

  // What the thread does in a chunk.
  __device__ void act(Turns& turns, uint64_t cell, uint64_t position, T value) const {
    const uint64_t of_range = number_of_range(position);
    const bool names = is_in_range(position);
    if constexpr (kOrder == Order::last) {
      turns.act_in_turn<false>(of_range, names, [&] { result_[output(position)] = value; });
    } else if constexpr (kOrder == Order::sum) {
      turns.act_in_turn<true>(of_range, names, [&] {
        if constexpr (kKeepsSums) {
          sums()[of_range] = plus<T>(sums()[of_range], value);
        } else {
          T& sum = result_[output(position)];
          sum = static_cast<T>(plus<T>(sum, value));
        }
      });
    } else {
      bool wins = !plan_.drops_losers;
      if (plan_.drops_losers) {
        turns.act_in_turn<false>(of_range, names, [&] { wins = take(memory_, of_range); });
      }
      if (names) {
        result_[element(cell)] = wins ? value : T{};
      }
    }
  }

  // Reports the indices of this thread's cells that are out of bounds, unless that has been done.
  __device__ void report(const Errors& errors) const {
    if (plan_.is_fixup || !thread_.is_of_first) {
      return;
    }
    for (uint64_t cell = thread_.cell; is_cell(cell); cell += plan_.chunk_cells) {
      if (named_by(cell, load_index(cell)) == kNone) {
        const uint64_t number = element(cell);
        errors.report(plan_.tiling.geometry, number, indices_.are_offsets(), indices_[number]);
      }
    }
  }

  // Calls visit(number in the range, number in the unpooled tensor) for outputs of the thread's
  // channel. Together, the threads visit all outputs of the range.
  template <class Visit>
  __device__ void for_each_output(const Visit& visit) const {
    const uint64_t end = thread_.exists ? thread_.first + thread_.outputs : 0;
    for (uint64_t position = thread_.first + thread_.cell; position < end;
         position += plan_.chunk_cells) {
      visit(number_of_range(position), output(position));
    }
  }

  __device__ bool is_cell(uint64_t cell) const {
    return thread_.exists && cell < plan_.tiling.in_plane;
  }
  __device__ bool is_in_range(uint64_t position) const {
    return position - thread_.first < thread_.outputs;
  }
  // Numbers of a cell's element and of an output, in their tensors, and of an output in the range.
  __device__ uint64_t element(uint64_t cell) const {
    return thread_.pooled + cell * plan_.tiling.geometry.inner;
  }
  __device__ uint64_t output(uint64_t position) const {
    return thread_.unpooled + position * plan_.tiling.geometry.inner;
  }
  __device__ uint64_t number_of_range(uint64_t position) const {
    return (position - thread_.first) * plan_.channels + thread_.channel;
  }
  __device__ Partial<T>* sums() const { return reinterpret_cast<Partial<T>*>(memory_); }

  __device__ uint64_t load_index(uint64_t cell) const {
    return is_cell(cell) ? indices_.raw(element(cell)) : 0;
  }
  // The position of the output that a cell's index names, or kNone.
  __device__ uint64_t named_by(uint64_t cell, uint64_t index) const {
    if (!is_cell(cell)) {
      return kNone;
    }
    if (!indices_.are_offsets()) {
      return index < plan_.index_end ? index : kNone;
    }
    const Tiling<uint64_t>& tiling = plan_.tiling;
    const auto start = tiling.window_start(tiling.item(cell, false, tiling.deep).tile);
    return decoded_offset(tiling, index, start).target;
  }
  __device__ T load_value(uint64_t cell, uint64_t position) const {
    return is_in_range(position) ? values_[kForward ? element(cell) : output(position)] : T{};
  }

  const OrderedPlan& plan_;
  const OrderedThread& thread_;
  const T* __restrict__ values_;
  const AnyIndices& indices_;
  T* __restrict__ result_;
  uint32_t* memory_;
};

// Unpools `values`; or, if it is a gradient, `values` is the gradient of the output.
template <class T, Order kOrder>
__global__ void __launch_bounds__(kOrderedThreads) ordered(
    OrderedPlan plan,
    Errors errors,
    const T* __restrict__ values,
    AnyIndices indices,
    T* __restrict__ result) {
  // All threads of the block go by what one of them has read, as the word may change meanwhile.
  if (plan.is_fixup && !__syncthreads_or(threadIdx.x == 0 && plan.flags.launches.may_have())) {
    return;
  }
  Turns turns(plan.slot_bits);
  for (uint64_t range = blockIdx.x; range < plan.ranges; range += gridDim.x) {
    uint64_t range_of_group = range;
    const uint64_t group = split(range_of_group, plan.ranges_of_group);
    const bool is_to_do = !plan.is_fixup || plan.flags.any(plan.groups_of_image.divide(group));
    if (__syncthreads_or(is_to_do)) { // and what the last range left in memory has been read
      const OrderedThread thread(plan, group, range_of_group);
      OrderedRange<T, kOrder>(plan, thread, values, indices, result).run(turns, errors);
    }
  }
}

} // namespace maxunpool_cuda
