// Unpooling of contiguous planes (inner == 1) of any windows and sizes in one pass: a block does a
// band of the output (see bands.cuh).
//
//     input,   ... |0 1 2 3 4 5 6|0 1 2 3 4 5 6| ...   cells of two planes, which one block reads
//     indices        \_______/ \_______/               in groups: vectors where they are whole
//                      | atomicMax of a claim
//     slots,       |. 1 . 2 . . .|. 4 . . 7 . .|       one for each output, in shared memory
//                      | the last cell that named it
//     output   ... |0 a 0 b 0 0 0|0 c 0 0 d 0 0| ...   in vectors, but at the block's ends
//
// "last" is a maximum of positions, so it does not depend on the order the atomics take. "sum"
// comes here only if windows share no output: only stray indices then give one output two cells.
//
// In bands of whole planes, indices may lie anywhere, and there is no second kernel: where several
// cells name one output of a sum, every output of the band adds up its cells in row-major order. A
// band that is a part flags its plane (see Report) if an index of its own cells is stray and names
// no output of the part, or if several cells name one output of a sum. The second kernel then
// rewrites the plane.
#pragma once

#include "../reduction.h"
#include "bands.cuh"
#include "report.cuh"
#include "shared.cuh"
#include "vector.cuh"

#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

// Sum of all cells of a plane that name an output, added up in order; its bits.
template <class Element, class Index>
__device__ inline Element sum_of(
    const Bands& all, uint32_t output, const Element* input, const Index* indices) {
  const uint32_t plane = output / all.decoder.out_plane, target = output % all.decoder.out_plane;
  const auto sum = [&]<class T>(T) {
    Accumulator<T> sum{};
    for (uint32_t cell = plane * all.decoder.in_plane; cell < (plane + 1) * all.decoder.in_plane;
         ++cell) {
      if (target_of<uint32_t>(indices[cell]) == target) {
        sum = plus(sum, __builtin_bit_cast(T, input[cell]));
      }
    }
    return sum;
  };
  if constexpr (sizeof(Element) == sizeof(double)) {
    return __builtin_bit_cast(Element, sum(double{}));
  } else if constexpr (sizeof(Element) == sizeof(float)) {
    return __builtin_bit_cast(Element, sum(float{}));
  } else if (all.bfloat16) {
    return c10::detail::round_to_nearest_even(sum(c10::BFloat16{})); // on any architecture
  } else {
    return __builtin_bit_cast(Element, static_cast<c10::Half>(sum(c10::Half{})));
  }
}

// Forward of bands. What a slot holds:
// - kClaims: the largest claim of a cell, the later the larger; 0: no cell has named the output. A
//   claim has a small element in its low bits. For a larger one it is the offset of the staged
//   element in the block's memory, in bytes. At 0 lies zero.
// - otherwise, where no two indices can name one output: the element.
template <class Element, class Index, bool kClaims>
__global__ void __launch_bounds__(kBandThreads, sizeof(Element) == 1 ? 3 : 4) forward_bands(
    Bands all, Report report, Element negative_zero, const Element* __restrict__ input,
    const Index* __restrict__ indices, Element* __restrict__ output) {
  constexpr int V = cells_of_group(sizeof(Element), sizeof(Index));
  constexpr int N = kVectorBytes / sizeof(Element);
  constexpr bool kStaged = kClaims && is_staged(sizeof(Element));
  constexpr bool kStray = kClaims && !kIsWindowOffset<Index>;
  constexpr bool kSums = kStray && sizeof(Element) > 1;
  using Slot = std::conditional_t<kClaims, uint32_t, Element>;
  constexpr uint32_t kStep = kStaged ? sizeof(Element) : 1; // from one claim to the next
  char* const memory = shared_memory<char>();
  auto* const stage = reinterpret_cast<Element*>(memory);
  auto* const shared = reinterpret_cast<Band<V, N>*>(memory + all.staged);
  auto* const slots = reinterpret_cast<Slot*>(shared + 1);
  for (uint32_t number = blockIdx.x; number < all.count; number += gridDim.x) {
    Band<V, N> band;
    if (all.planes != 0) {
      band = Band<V, N>::of_planes(all, number);
    } else {
      if (threadIdx.x == 0) {
        *shared = Band<V, N>::of_part(all, number);
      }
      __syncthreads();
      band = *shared;
    }
    const auto& cells = band.cells;
    const auto& outputs = band.outputs;
    bool incomplete = false; // whether slots lack a stray index, or an element of a sum
    struct Group {
      Neighbours<Index, V> index;
      Neighbours<Element, V> value;
    };
    const auto read = [&](uint32_t i) {
      const uint32_t at = cells.base + i * V;
      const bool readable = at + V <= all.readable; // asked once, for want of registers
      Group group{{indices, cells, at, readable}, {input, cells, at, readable}};
      group.index.drop_others(cells, at);
      return group;
    };
    const auto claim = [&](uint32_t i, const Group& group) {
      Vector<Element, V> value;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        value[v] = group.value[v];
      }
      add_to_zero(value.at, negative_zero);
      if constexpr (kStaged) {
        store(stage + (i + 1) * V, value);
      }
      incomplete |= for_each_of_group<!kClaims>(
          all, band, report.error, indices, cells.base + i * V, group.index,
          [&](int v, uint32_t number_of_slot) {
            Slot* const slot = slots + number_of_slot;
            if constexpr (kClaims) {
              uint32_t mine = ((i + 1) * V + v) * kStep;
              if constexpr (!kStaged) {
                mine = mine << 16 | value[v];
              }
              incomplete |= atomicMax(slot, mine) != 0 && kStray && all.sums;
            } else {
              *slot = value[v];
            }
          });
    };

    Group first;
    if (threadIdx.x < cells.vectors) {
      first = read(threadIdx.x);
    }
    clear(slots, outputs.vectors * N);
    if (kStaged && threadIdx.x == 0) {
      stage[0] = Element{};
    }
    __syncthreads();
    for_each_group(cells.vectors, first, read, claim);
    const int any_incomplete = __syncthreads_or(incomplete);
    if (!kIsWindowOffset<Index> && threadIdx.x == 0 && all.planes == 0) {
      report.stray_flags[number] = static_cast<uint32_t>(any_incomplete);
    }
    if constexpr (kSums) {
      if (any_incomplete && all.planes != 0 && all.sums) {
        for_each_in_block(outputs.end - outputs.begin, [&](uint32_t i) {
          output[outputs.begin + i] = sum_of(all, outputs.begin + i, input, indices);
        });
        continue;
      }
    }

    const auto element = [&](Slot slot) {
      if constexpr (kStaged) {
        return *reinterpret_cast<const Element*>(memory + slot);
      } else {
        return static_cast<Element>(slot);
      }
    };
    Element* const to = output + outputs.base;
    for_each_in_block(outputs.wholes, [&](uint32_t vector) {
      const uint32_t i = (outputs.first_whole + vector) * N;
      const auto taken = load<N>(slots + i);
      Vector<Element, N> stored;
#pragma unroll
      for (int v = 0; v < N; ++v) {
        stored[v] = element(taken[v]);
      }
      store(to + i, stored);
    });
    for_each_in_block(outputs.rest(), [&](uint32_t number) {
      const uint32_t i = outputs.number_of_rest(number);
      to[i] = element(slots[i]);
    });
    __syncthreads();
  }
}

} // namespace maxunpool_cuda
