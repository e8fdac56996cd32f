// The second kernel of a call with flat indices: it writes again what stray indices have spoiled.
// Pooled elements meet in slots, one per output element, by atomics. "last" is deterministic, a
// maximum of positions, and so are counts; the floating-point sums of "sum" and "mean" depend on
// the order the atomics take, unless `in_order` has one thread add up a plane.
//
//     a slab's outputs   |---- part 0 ----|---- part 1 ----|-- 2 --|    x groups of channels
//                              ^ a piece: its block clears the slots,
//     a slab's cells     [ all of them ]  fills them from all cells of the slab, reads them
//
// A block does one piece after the other, of those that a first kernel has noted (see Report).
// Slots are in its shared memory, or, of planes so large that they would be read too often and of
// sums, in a part of the workspace that is the block's own; then the plane is one part. No block
// waits for another.
#pragma once

#include "../reduction.h"
#include "atomics.cuh"
#include "divider.cuh"
#include "report.cuh"
#include "shared.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

constexpr int kBlockTeam = 512; // threads at most

// A slot: {} while empty, then add(position, value) for each pooled element that names its output,
// with value() to read the element; or add_in_order(element), of one thread alone. The owner of the
// output reads output(); the owner of a pooled element, in the backward, reads grad_input().
template <class T, class Offset>
struct LastSlot {
  using Element = T;

  Offset end; // 1 + the position, in the plane, of the last pooled element

  template <class Value>
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

// Integers and complex numbers are rarely summed: in order alone.
template <class T, class Offset>
struct SumSlot {
  using Element = T;

  Sum<T> sum;

  template <class Value>
  __device__ void add(Offset, const Value& value) {
    if constexpr (std::is_floating_point_v<Accumulator<T>>) {
      atomic_add(&sum.sum, static_cast<Accumulator<T>>(value()));
      atomic_add(&sum.count, 1);
    }
  }
  __device__ void add_in_order(T value) { sum.add(value); }
  template <class Pooled>
  __device__ T output(Reduce reduce, const Pooled&) const {
    return sum.result(reduce);
  }
};

// Of any type: only the owner of a pooled element looks at its gradient.
template <class T, class Offset>
struct CountSlot {
  using Element = T;

  uint64_t count;

  template <class Value>
  __device__ void add(Offset, const Value&) {
    atomic_add(&count, 1);
  }
  __device__ T grad_input(Offset, T grad) const {
    return mean_of<T>(grad, static_cast<int64_t>(count));
  }
};

template <class Offset>
struct Pieces {
  StrayNotes<Offset> notes;
  bool in_order;            // add_in_order()
  Offset count;             // of all pieces
  Divider<Offset> channels; // of a piece; the last one of a slab may have fewer
  Divider<Offset> groups;   // of channels, in a slab
  Divider<Offset> parts;    // of a plane
  Offset in_plane, out_plane, inner;
  Offset part; // outputs of one; the last may have fewer
  char* slots; // unless they are in shared memory: [blocks][slot_bytes]
  uint64_t slot_bytes;
};

// Element `lane` of a piece's channels, at a position of the plane or of the piece.
template <class Offset>
struct Place {
  Offset position, lane;
};

// A pooled element: where it is, and the output that its index names.
template <class Offset>
struct Pooled {
  Place<Offset> place;
  bool exists;
  Offset source, target;
};

// One of them: channels from `channel` on, outputs [first, first + count).
template <class Offset>
struct Piece {
  const Pieces<Offset>& all;
  Offset outer, channel, first, count;

  __device__ Piece(const Pieces<Offset>& pieces, Offset number) : all(pieces), first(number) {
    channel = split(first, all.parts);
    outer = split(channel, all.groups);
    channel *= all.channels.divisor();
    first *= all.part;
    const Offset rest = all.out_plane - first;
    count = rest < all.part ? rest : all.part;
  }

  // Element i of a row-major array [positions][channels].
  __device__ Place<Offset> place(Offset i) const {
    Place<Offset> place{0, i};
    place.position = split(place.lane, all.channels);
    return place;
  }
  __device__ bool exists(const Place<Offset>& place) const {
    return channel + place.lane < all.inner;
  }
  __device__ Offset slot(const Place<Offset>& place, Offset target) const {
    return (target - first) * all.channels.divisor() + place.lane;
  }
  __device__ Offset pooled(const Place<Offset>& place, Offset position) const {
    return (outer * all.in_plane + position) * all.inner + channel + place.lane;
  }
  __device__ Offset unpooled(const Place<Offset>& place, Offset position) const {
    return (outer * all.out_plane + position) * all.inner + channel + place.lane;
  }

  __device__ Offset pooled_elements() const { return all.in_plane * all.channels.divisor(); }
  template <class Indices>
  __device__ Pooled<Offset> pooled(const Indices& indices, Offset i) const {
    Pooled<Offset> found{place(i), false, 0, 0};
    found.exists = exists(found.place);
    if (found.exists) {
      found.source = pooled(found.place, found.place.position);
      found.target = target_of<Offset>(indices[found.source]);
    }
    return found;
  }
  __device__ bool holds(const Pooled<Offset>& from) const {
    return from.exists && from.target - first < count;
  }
};

// Loads of a thread that wait for memory at once.
template <class Indices>
constexpr int kInFlight = std::is_pointer_v<Indices> ? 4 : 1;

// The block's own.
template <class Slot, bool kShared, class Offset>
__device__ inline Slot* slots_of_block(const Pieces<Offset>& pieces) {
  if constexpr (!kShared) {
    return reinterpret_cast<Slot*>(pieces.slots + blockIdx.x * pieces.slot_bytes);
  } else {
    return shared_memory<Slot>();
  }
}

// Clears the slots, and add()s the pooled elements of a piece.
template <class Slot, class Indices, class Offset>
__device__ inline void fill(
    const Piece<Offset>& piece,
    Slot* slots,
    const Indices& indices,
    const typename Slot::Element* __restrict__ values) {
  const Offset channels = piece.all.channels.divisor();
  // There is room up to a whole vector.
  using Clear = Vector<uint32_t, 4>;
  const uint64_t bytes = uint64_t{piece.count} * channels * sizeof(Slot);
  for_each_in_block((bytes - 1) / sizeof(Clear) + 1, [&](uint64_t i) {
    reinterpret_cast<Clear*>(slots)[i] = Clear{};
  });
  __syncthreads();
  const auto pooled = [&](Offset i) { return piece.pooled(indices, i); };
  const auto slot_of = [&](const Pooled<Offset>& from) -> Slot& {
    return slots[piece.slot(from.place, from.target)];
  };
  if constexpr (requires { &Slot::add_in_order; }) {
    if (piece.all.in_order) { // a thread a channel
      for_each_in_block(channels, [&](Offset lane) {
        for (Offset i = lane; i < piece.pooled_elements(); i += channels) {
          const auto from = pooled(i);
          if (piece.holds(from)) {
            slot_of(from).add_in_order(values[from.source]);
          }
        }
      });
      __syncthreads();
      return;
    }
  }
  for_each_in_block<kInFlight<Indices>>(
      piece.pooled_elements(), pooled, [&](Offset, const Pooled<Offset>& from) {
        if (piece.holds(from)) {
          slot_of(from).add(from.place.position, [&] { return values[from.source]; });
        }
      });
  __syncthreads();
}

// Finds this block's pieces that are stray. Its share of all is contiguous: where nothing is stray,
// one look is enough.
template <class Offset, class Do>
__device__ inline void for_each_stray(const Pieces<Offset>& pieces, const Do& run) {
  const Offset blocks = gridDim.x, block = blockIdx.x;
  const Offset share = pieces.count / blocks, longer = pieces.count - share * blocks;
  const Offset begin = block * share + (block < longer ? block : longer);
  const Offset end = begin + share + (block < longer ? 1 : 0);
  if (begin == end) {
    return;
  }
  const auto slab = [&](Offset number) {
    return pieces.groups.divide(pieces.parts.divide(number));
  };
  const auto stray = [&](Offset from, Offset to) {
    return __syncthreads_or(
        pieces.notes.any(slab(from), slab(to - 1) + 1, threadIdx.x, blockDim.x));
  };
  if (!stray(begin, end)) {
    return;
  }
  for (Offset number = begin; number < end; ++number) {
    if (stray(number, number + 1)) { // and the last piece's slots have been read
      run(Piece<Offset>(pieces, number));
    }
  }
}

// Indices are a pointer, or AnyIndices.
template <class Slot, class Indices, class Offset, bool kShared>
__global__ void __launch_bounds__(kBlockTeam, kShared ? 3 : 1) forward_stray(
    Pieces<Offset> pieces,
    Reduce reduce,
    const typename Slot::Element* __restrict__ input,
    Indices indices,
    typename Slot::Element* __restrict__ output) {
  using Element = typename Slot::Element;
  Slot* const slots = slots_of_block<Slot, kShared>(pieces);
  for_each_stray(pieces, [&](const Piece<Offset>& piece) {
    fill(piece, slots, indices, input);
    for_each_in_block<kInFlight<Indices>>(
        piece.count * pieces.channels.divisor(),
        [&](Offset i) {
          const auto to = piece.place(i);
          return slots[i].output(
              reduce, [&](Offset position) { return input[piece.pooled(to, position)]; });
        },
        [&](Offset i, Element value) {
          const auto to = piece.place(i);
          if (piece.exists(to)) {
            output[piece.unpooled(to, piece.first + to.position)] = value;
          }
        });
  });
}

template <class Slot, class Indices, class Offset, bool kShared>
__global__ void __launch_bounds__(kBlockTeam, kShared ? 3 : 1) backward_stray(
    Pieces<Offset> pieces,
    const typename Slot::Element* __restrict__ grad_output,
    Indices indices,
    typename Slot::Element* __restrict__ grad_input) {
  using Element = typename Slot::Element;
  Slot* const slots = slots_of_block<Slot, kShared>(pieces);
  for_each_stray(pieces, [&](const Piece<Offset>& piece) {
    fill(piece, slots, indices, grad_output);
    struct Grad {
      Offset source;
      bool exists; // of the piece, or of none
      Element value;
    };
    for_each_in_block<kInFlight<Indices>>(
        piece.pooled_elements(),
        [&](Offset i) {
          const auto to = piece.pooled(indices, i);
          Grad grad{to.source, to.exists && to.target >= pieces.out_plane && piece.first == 0, {}};
          if (piece.holds(to)) {
            grad.exists = true;
            grad.value = slots[piece.slot(to.place, to.target)].grad_input(
                to.place.position, grad_output[piece.unpooled(to.place, to.target)]);
          }
          return grad;
        },
        [&](Offset, const Grad& grad) {
          if (grad.exists) {
            grad_input[grad.source] = grad.value;
          }
        });
  });
}

} // namespace maxunpool_cuda
