// Kernels for any flat indices: pooled elements meet in slots, one per output element, by atomics.
// "last" is deterministic, a maximum of positions, and so are counts; the floating-point sums of
// "sum" and "mean" depend on the order the atomics take, unless `in_order` has one thread add up a
// plane.
//
// They are the second kernel of a call, and do only what the first has found astray (see Report);
// or the only one, where planes are small.
//
// The work is cut into pieces, some channels of a slab each: a plane of a contiguous tensor. A team
// does a piece in three steps: clear the slots, fill them, read them.
// - BlockTeam: a block does a piece after the other, with the slots in its shared memory;
// - GridTeam: for planes that do not fit there. The whole grid does some pieces at once, with the
//   slots in global memory, and must be launched cooperatively.
#pragma once

#include "../reduction.h"
#include "atomics.cuh"
#include "divider.cuh"
#include "report.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <cooperative_groups.h>

#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

constexpr int kBlockTeam = 1024; // threads at most
constexpr int kGridTeam = 512;   // threads in a block, of which a processor holds at least one

// A slot: {} while empty, then add(position, value) for each pooled element that names its output,
// with value() to read the element; kAlone: one thread adds them all. The owner of the output reads
// output(); the owner of a pooled element, in the backward, reads grad_input().
template <class T, class Offset>
struct LastSlot {
  using Element = T;
  static constexpr bool kAnyOrder = true; // add() commutes

  Offset end; // 1 + the position, in the plane, of the last pooled element

  template <bool kAlone, class Value>
  __device__ void add(Offset position, const Value&) {
    atomic_max(&end, position + 1);
  }
  // pooled(position) reads an element of the slot's plane.
  template <class Pooled>
  __device__ T output(Reduce, const Pooled& pooled) const {
    return end == 0 ? T{} : pooled(end - 1);
  }
  __device__ T grad_input(Offset position, T grad) const {
    return end == position + 1 ? grad : T{};
  }
};

template <class T, class Offset>
struct SumSlot {
  using Element = T;
  static constexpr bool kAnyOrder = std::is_integral_v<T>;

  Sum<T> sum;

  template <bool kAlone, class Value>
  __device__ void add(Offset, const Value& value) {
    if constexpr (kAlone) {
      sum.add(value());
    } else {
      atomic_add(&sum.sum, static_cast<Accumulator<T>>(value()));
      atomic_add(&sum.count, uint64_t{1});
    }
  }
  template <class Pooled>
  __device__ T output(Reduce reduce, const Pooled&) const {
    return sum.result(reduce);
  }
};

template <class T, class Offset>
struct CountSlot {
  using Element = T;
  static constexpr bool kAnyOrder = true;

  uint64_t count;

  template <bool kAlone, class Value>
  __device__ void add(Offset, const Value&) {
    atomic_add(&count, uint64_t{1});
  }
  __device__ T grad_input(Offset, T grad) const {
    return mean_of<T>(grad, static_cast<int64_t>(count));
  }
};

template <class Offset>
struct Pieces {
  Geometry<Offset> geometry;
  Astray<Offset> astray;
  ErrorRecord* error; // null: the first kernel has reported the bad indices
  bool in_order;
  Offset count;             // of all pieces
  Offset capacity;          // pieces whose slots a team has
  Divider<Offset> channels; // of a piece; the last one of a slab may have fewer
  Divider<Offset> groups;   // pieces of a slab
  Divider<Offset> in_plane, out_plane;
  void* slots;           // for GridTeam: [capacity][out_plane][channels]
  uint32_t* astray_slab; // for GridTeam: [outer]

  struct Place {
    Offset piece;    // among the team's
    Offset position; // in the plane
    Offset lane;     // channel in the piece
    Offset outer;
    Offset channel;
  };
  // Element i of the pieces from `first` on, which have plane.divisor() positions each.
  __device__ Place place(Offset i, Offset first, const Divider<Offset>& plane) const {
    Place place;
    place.lane = i;
    place.position = split(place.lane, channels);
    place.piece = split(place.position, plane);
    place.channel = first + place.piece;
    place.outer = split(place.channel, groups);
    place.channel = place.channel * channels.divisor() + place.lane;
    return place;
  }
  __device__ Offset slot(const Place& place, Offset target) const {
    return (place.piece * out_plane.divisor() + target) * channels.divisor() + place.lane;
  }
  __device__ Offset pooled(const Place& place, Offset position) const {
    return (place.outer * in_plane.divisor() + position) * geometry.inner + place.channel;
  }
  __device__ Offset unpooled(const Place& place, Offset position) const {
    return (place.outer * out_plane.divisor() + position) * geometry.inner + place.channel;
  }
};

// Threads that share slots.
template <class Slot>
struct BlockTeam {
  static constexpr bool kGrid = false;
  static constexpr int kThreads = kBlockTeam;

  __device__ unsigned rank() const { return threadIdx.x; }
  __device__ unsigned size() const { return blockDim.x; }
  __device__ void sync() const { __syncthreads(); }
  __device__ static Slot* slots(void*) {
#ifdef __CUDACC__
    extern __shared__ uint4 shared_slots[];
    return reinterpret_cast<Slot*>(shared_slots);
#else
    return static_cast<Slot*>(shim::shared_memory());
#endif
  }
};

template <class Slot>
struct GridTeam {
  static constexpr bool kGrid = true;
  static constexpr int kThreads = kGridTeam;

  __device__ unsigned rank() const { return blockIdx.x * blockDim.x + threadIdx.x; }
  __device__ unsigned size() const { return gridDim.x * blockDim.x; }
  __device__ void sync() const { cooperative_groups::this_grid().sync(); }
  __device__ static Slot* slots(void* global) { return static_cast<Slot*>(global); }
};

template <class Team, class Offset, class Visit>
__device__ inline void for_each_of(const Team& team, Offset items, const Visit& visit) {
  for (Offset i = team.rank(); i < items; i += team.size()) {
    visit(i);
  }
}

// Do all of this for the pieces [first, end) that are astray: clear the slots, add() the pooled
// elements, and call read(place, slots) for each position of `read_plane`.
template <class Team, class Slot, class Index, class Offset, class Read>
__device__ inline void fill_and_read(
    const Team& team,
    const Pieces<Offset>& pieces,
    Slot* slots,
    const Index* indices,
    const typename Slot::Element* values,
    Offset first,
    Offset end,
    const Divider<Offset>& read_plane,
    const Read& read) {
  const Offset channels = pieces.channels.divisor(), count = end - first;
  const auto exists = [&](const auto& place) {
    return place.channel < pieces.geometry.inner &&
           (!Team::kGrid || pieces.astray_slab[place.outer] != 0);
  };
  // There is room up to a whole vector.
  using Clear = Vector<uint32_t, 4>;
  const uint64_t bytes = uint64_t{count} * pieces.out_plane.divisor() * channels * sizeof(Slot);
  for_each_of(team, (bytes - 1) / sizeof(Clear) + 1, [&](uint64_t i) {
    reinterpret_cast<Clear*>(slots)[i] = Clear{};
  });
  team.sync();
  const auto add = [&]<bool kAlone>(Offset i, std::bool_constant<kAlone>) {
    const auto from = pieces.place(i, first, pieces.in_plane);
    if (!exists(from)) {
      return;
    }
    const Offset source = pieces.pooled(from, from.position);
    const Index index = indices[source];
    const Offset target = target_of<Offset>(index);
    const auto value = [&] { return values[source]; };
    if (target < pieces.out_plane.divisor()) {
      slots[pieces.slot(from, target)].template add<kAlone>(from.position, value);
    } else if (pieces.error != nullptr) {
      report_bad(
          pieces.error, pieces.geometry, from.outer, from.position, from.channel, false, index);
    }
  };
  const Offset cells = pieces.in_plane.divisor();
  if (Slot::kAnyOrder || !pieces.in_order) {
    for_each_of(team, count * cells * channels, [&](Offset i) { add(i, std::false_type{}); });
  } else if constexpr (!Slot::kAnyOrder) {
    for_each_of(team, count * channels, [&](Offset lane) {
      const Offset piece = split(lane, pieces.channels);
      for (Offset position = 0; position < cells; ++position) {
        add((piece * cells + position) * channels + lane, std::true_type{});
      }
    });
  }
  team.sync();
  for_each_of(team, count * read_plane.divisor() * channels, [&](Offset i) {
    const auto place = pieces.place(i, first, read_plane);
    if (exists(place)) {
      read(place, i);
    }
  });
}

// Finds this team's pieces that are astray and has them done.
template <class Team, class Offset, class Do>
__device__ inline void for_each_astray(
    const Team& team, const Pieces<Offset>& pieces, const Do& run) {
  if constexpr (Team::kGrid) {
    const Offset slabs = pieces.geometry.outer;
    for (Offset slab = blockIdx.x; slab < slabs; slab += gridDim.x) {
      const int astray =
          __syncthreads_or(pieces.astray.any(slab, slab + 1, threadIdx.x, blockDim.x));
      if (threadIdx.x == 0) {
        pieces.astray_slab[slab] = static_cast<uint32_t>(astray);
      }
    }
    team.sync();
    bool in_use = false; // the slots
    for (Offset first = 0; first < pieces.count; first += pieces.capacity) {
      const Offset rest = pieces.count - first;
      const Offset end = first + (rest < pieces.capacity ? rest : pieces.capacity);
      bool astray = false;
      for (Offset slab = pieces.groups.divide(first) + threadIdx.x;
           slab <= pieces.groups.divide(end - 1);
           slab += blockDim.x) {
        astray |= pieces.astray_slab[slab] != 0;
      }
      if (__syncthreads_or(astray)) { // every block answers alike
        if (in_use) {
          team.sync();
        }
        in_use = true;
        run(first, end);
      }
    }
  } else {
    // A block's share is contiguous: where nothing is astray, one look is enough.
    const auto begin = static_cast<Offset>(uint64_t{pieces.count} * blockIdx.x / gridDim.x);
    const auto end = static_cast<Offset>(uint64_t{pieces.count} * (blockIdx.x + 1) / gridDim.x);
    const auto astray = [&](Offset from, Offset to) {
      return __syncthreads_or(pieces.astray.any(
          pieces.groups.divide(from), pieces.groups.divide(to - 1) + 1, threadIdx.x, blockDim.x));
    };
    if (begin == end || !astray(begin, end)) {
      return;
    }
    for (Offset piece = begin; piece < end; ++piece) {
      if (astray(piece, piece + 1)) { // and the last piece's slots have been read
        run(piece, piece + 1);
      }
    }
  }
}

template <class Slot, class Index, class Offset, template <class> class Team>
__global__ void __launch_bounds__(Team<Slot>::kThreads, 1) irregular_forward(
    Pieces<Offset> pieces,
    Reduce reduce,
    const typename Slot::Element* __restrict__ input,
    const Index* __restrict__ indices,
    typename Slot::Element* __restrict__ output) {
  const Team<Slot> team;
  Slot* const slots = team.slots(pieces.slots);
  for_each_astray(team, pieces, [&](Offset first, Offset end) {
    fill_and_read(
        team,
        pieces,
        slots,
        indices,
        input,
        first,
        end,
        pieces.out_plane,
        [&](const auto& to, Offset i) {
          output[pieces.unpooled(to, to.position)] = slots[i].output(
              reduce, [&](Offset position) { return input[pieces.pooled(to, position)]; });
        });
  });
}

template <class Slot, class Index, class Offset, template <class> class Team>
__global__ void __launch_bounds__(Team<Slot>::kThreads, 1) irregular_backward(
    Pieces<Offset> pieces,
    const typename Slot::Element* __restrict__ grad_output,
    const Index* __restrict__ indices,
    typename Slot::Element* __restrict__ grad_input) {
  const Team<Slot> team;
  Slot* const slots = team.slots(pieces.slots);
  for_each_astray(team, pieces, [&](Offset first, Offset end) {
    fill_and_read(
        team,
        pieces,
        slots,
        indices,
        grad_output,
        first,
        end,
        pieces.in_plane,
        [&](const auto& to, Offset) {
          const Offset source = pieces.pooled(to, to.position);
          const Offset target = target_of<Offset>(indices[source]);
          typename Slot::Element grad{};
          if (target < pieces.out_plane.divisor()) {
            grad = slots[pieces.slot(to, target)].grad_input(
                to.position, grad_output[pieces.unpooled(to, target)]);
          }
          grad_input[source] = grad;
        });
  });
}

} // namespace maxunpool_cuda
