// The second kernel of a call with flat indices: it rewrites the slabs that have stray indices.
// Pooled elements meet in slots, one per output, by atomics. "last" is deterministic, a maximum of
// positions; floating-point sums depend on the order the atomics take, unless `in_order` has one
// thread add up a plane.
//
//     a slab's outputs   |---- part 0 ----|---- part 1 ----|-- 2 --|    x groups of channels
//                              ^ a piece: its block clears the slots,
//     a slab's cells     [ all of them ]  fills them from all cells of the slab, reads them
//
// A block does one piece after the other, of slabs that a first kernel has flagged (see Report).
// Slots are in its shared memory. For sums, and for planes so large that too many parts would read
// them, slots are in a region of the workspace that is the block's own; then the plane is one part.
// No block waits for another.
#pragma once

#include "../reduction.h"
#include "atomics.cuh"
#include "divider.cuh"
#include "report.cuh"
#include "shared.cuh"
#include "vector.cuh"

#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

constexpr int kStrayThreads = 512; // threads of a block, at most

// Slot: {} while empty, then add(position, value) for each pooled element that names its output,
// with value() to read the element; or add_in_order(element), by one thread alone. The owner of the
// output reads output(); the owner of a pooled element, in the backward, reads grad_input().
template <class T, class OffsetType>
struct LastSlot {
  using Element = T;
  using Offset = OffsetType;

  Offset end; // 1 + the position, in the plane, of the last pooled element

  template <class Value>
  __device__ void add(Offset position, const Value&) {
    atomic_max(&end, position + 1);
  }
  // pooled(position) reads an element of the slot's plane.
  template <class Pooled>
  __device__ T output(const Pooled& pooled) const {
    return end == 0 ? T{} : pooled(end - 1);
  }
  __device__ T grad_input(Offset position, T grad) const {
    return end == position + 1 ? grad : T{};
  }
};

// Slot of sums. Integers and complex numbers, which are rarely summed, are added in order alone.
template <class T>
struct SumSlot {
  using Element = T;
  using Offset = uint64_t;

  Accumulator<T> sum;

  template <class Value>
  __device__ void add(Offset, const Value& value) {
    if constexpr (std::is_floating_point_v<Accumulator<T>>) {
      atomic_add(&sum, static_cast<Accumulator<T>>(value()));
    }
  }
  __device__ void add_in_order(T value) { sum = plus(sum, value); }
  template <class Pooled>
  __device__ T output(const Pooled&) const {
    return static_cast<T>(sum);
  }
};

template <class Offset>
struct Pieces {
  StrayFlags<Offset> stray_flags;
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

// Piece: channels from `channel` on, outputs [first, first + count).
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

  struct Place {
    Offset position, channel; // in the piece
  };
  // Place of element i of a row-major array [positions][channels].
  __device__ Place place(Offset i) const {
    Place place{0, i};
    place.position = split(place.channel, all.channels);
    return place;
  }
  __device__ bool exists(const Place& place) const { return channel + place.channel < all.inner; }
  __device__ bool holds(Offset target) const { return target - first < count; }
  __device__ Offset slot(const Place& place, Offset target) const {
    return (target - first) * all.channels.divisor() + place.channel;
  }
  __device__ Offset pooled(const Place& place, Offset position) const {
    return (outer * all.in_plane + position) * all.inner + channel + place.channel;
  }
  __device__ Offset unpooled(const Place& place, Offset position) const {
    return (outer * all.out_plane + position) * all.inner + channel + place.channel;
  }
};

// Whether slots are in shared memory. Those that are have 32-bit offsets, and "last" alone has
// them.
template <class Slot>
constexpr bool kIsShared = sizeof(typename Slot::Offset) == sizeof(uint32_t);

// Slots of this block.
template <class Slot>
__device__ inline Slot* slots_of_block(const Pieces<typename Slot::Offset>& pieces) {
  if constexpr (kIsShared<Slot>) {
    return shared_memory<Slot>();
  } else {
    return reinterpret_cast<Slot*>(pieces.slots + blockIdx.x * pieces.slot_bytes);
  }
}

// Calls visit(place, target) for the pooled elements of a piece.
template <class Slot, class Indices, class Offset, class Visit>
__device__ inline void for_each_pooled(
    const Piece<Offset>& piece, const Indices& indices, const Visit& visit) {
  const Pieces<Offset>& all = piece.all;
  Offset done = 0;
  if constexpr (kIsShared<Slot>) { // a contiguous plane is read in vectors
    using Index = std::remove_cvref_t<decltype(*indices)>;
    constexpr int V = kVectorBytes / sizeof(Index), kInFlight = 4;
    const Index* const plane = indices + piece.outer * all.in_plane;
    if (all.inner == 1 && reinterpret_cast<uintptr_t>(plane) % kVectorBytes == 0) {
      const Offset vectors = all.in_plane / V;
      for (Offset i = threadIdx.x; i < vectors; i += blockDim.x * kInFlight) {
        Vector<Index, V> index[kInFlight];
#pragma unroll
        for (int u = 0; u < kInFlight; ++u) {
          const Offset at = i + u * blockDim.x;
          index[u] = load<V>(plane + (at < vectors ? at : i) * V);
        }
#pragma unroll
        for (int u = 0; u < kInFlight; ++u) {
          const Offset at = i + u * blockDim.x;
          if (at < vectors) {
#pragma unroll
            for (int v = 0; v < V; ++v) {
              visit({at * V + v, 0}, target_of<Offset>(index[u][v]));
            }
          }
        }
      }
      done = vectors * V;
    }
  }
  for_each_in_block(all.in_plane * all.channels.divisor() - done, [&](Offset i) {
    const auto place = piece.place(done + i);
    if (piece.exists(place)) {
      visit(place, target_of<Offset>(indices[piece.pooled(place, place.position)]));
    }
  });
}

// Clears the slots, and adds the pooled elements of a piece.
template <class Slot, class Indices, class Offset>
__device__ inline void fill(
    const Piece<Offset>& piece, Slot* slots, const Indices& indices,
    const typename Slot::Element* __restrict__ values) {
  using Place = typename Piece<Offset>::Place;
  const Offset channels = piece.all.channels.divisor();
  // Slots have room up to a whole vector.
  const uint64_t bytes = uint64_t{piece.count} * channels * sizeof(Slot);
  for_each_in_block((bytes - 1) / kVectorBytes + 1, [&](uint64_t i) {
    reinterpret_cast<Vector<uint32_t, 4>*>(slots)[i] = {};
  });
  __syncthreads();
  bool is_done = false;
  if constexpr (requires { &Slot::add_in_order; }) {
    if (piece.all.in_order) { // by a thread a channel
      is_done = true;
      for_each_in_block(channels, [&](Offset channel) {
        Place from{0, channel};
        for (; piece.exists(from) && from.position < piece.all.in_plane; ++from.position) {
          const Offset source = piece.pooled(from, from.position);
          const Offset target = target_of<Offset>(indices[source]);
          if (piece.holds(target)) {
            slots[piece.slot(from, target)].add_in_order(values[source]);
          }
        }
      });
    }
  }
  if (!is_done) {
    for_each_pooled<Slot>(piece, indices, [&](const Place& from, Offset target) {
      if (piece.holds(target)) {
        slots[piece.slot(from, target)].add(
            from.position, [&] { return values[piece.pooled(from, from.position)]; });
      }
    });
  }
  __syncthreads();
}

// Calls visit(piece) for this block's pieces whose slabs are flagged. The block's share of all
// pieces is contiguous: where no slab is flagged, one look is enough.
template <class Offset, class Visit>
__device__ inline void for_each_stray(const Pieces<Offset>& pieces, const Visit& visit) {
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
    return __syncthreads_or(pieces.stray_flags.any(slab(from), slab(to - 1) + 1));
  };
  if (!stray(begin, end)) {
    return;
  }
  for (Offset number = begin; number < end; ++number) {
    if (stray(number, number + 1)) { // waits until the last piece's slots have been read
      visit(Piece<Offset>(pieces, number));
    }
  }
}

// Indices are a pointer if slots are in shared memory, else AnyIndices.
template <class Slot, class Indices>
__global__ void __launch_bounds__(kStrayThreads, kIsShared<Slot> ? 2 : 1) forward_stray(
    Pieces<typename Slot::Offset> pieces, const typename Slot::Element* __restrict__ input,
    Indices indices, typename Slot::Element* __restrict__ output) {
  using Offset = typename Slot::Offset;
  Slot* const slots = slots_of_block<Slot>(pieces);
  for_each_stray(pieces, [&](const Piece<Offset>& piece) {
    fill(piece, slots, indices, input);
    using Element = typename Slot::Element;
    const auto output_of = [&](Offset i, const auto& to) {
      return slots[i].output([&](Offset position) { return input[piece.pooled(to, position)]; });
    };
    constexpr int V = kVectorBytes / sizeof(Element);
    Element* const part = output + piece.outer * pieces.out_plane + piece.first;
    Offset done = 0;
    if (kIsShared<Slot> && V > 1 && pieces.inner == 1 &&
        reinterpret_cast<uintptr_t>(part) % kVectorBytes == 0) {
      for_each_in_block(piece.count / V, [&](Offset i) {
        Vector<Element, V> stored;
#pragma unroll
        for (int v = 0; v < V; ++v) {
          stored[v] = output_of(i * V + v, piece.place(0));
        }
        store(part + i * V, stored);
      });
      done = piece.count / V * V;
    }
    for_each_in_block(piece.count * pieces.channels.divisor() - done, [&](Offset i) {
      const auto to = piece.place(done + i);
      if (piece.exists(to)) {
        output[piece.unpooled(to, piece.first + to.position)] = output_of(done + i, to);
      }
    });
  });
}

template <class Slot, class Indices>
__global__ void __launch_bounds__(kStrayThreads, kIsShared<Slot> ? 2 : 1) backward_stray(
    Pieces<typename Slot::Offset> pieces, const typename Slot::Element* __restrict__ grad_output,
    Indices indices, typename Slot::Element* __restrict__ grad_input) {
  using Offset = typename Slot::Offset;
  Slot* const slots = slots_of_block<Slot>(pieces);
  for_each_stray(pieces, [&](const Piece<Offset>& piece) {
    fill(piece, slots, indices, grad_output);
    for_each_pooled<Slot>(
        piece, indices, [&](const typename Piece<Offset>::Place& to, Offset target) {
          auto& grad = grad_input[piece.pooled(to, to.position)];
          if (piece.holds(target)) {
            const auto& slot = slots[piece.slot(to, target)];
            grad = slot.grad_input(to.position, grad_output[piece.unpooled(to, target)]);
          } else if (target >= pieces.out_plane && piece.first == 0) {
            grad = {};
          }
        });
  });
}

} // namespace maxunpool_cuda
