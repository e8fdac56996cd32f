// Gradient of "last" for small contiguous planes (inner == 1), of which a block does some whole
// (see bands.cuh), wherever indices lie. Claims are forward_bands.cuh's. There is no second kernel.
//
//     indices      |0 1 2 3 4 5 6|     each cell claims the output that its index names, and is
//     slots        |. 1 . 2 . . .|     given the gradient there if its claim is the one that stays
#pragma once

#include "bands.cuh"
#include "report.cuh"
#include "shared.cuh"
#include "vector.cuh"

#include <cstdint>

namespace maxunpool_cuda {

template <class Element, class Index>
__global__ void __launch_bounds__(kBandThreads, 4) backward_bands(
    Bands all, Report report, const Element* __restrict__ grad_output,
    const Index* __restrict__ indices, Element* __restrict__ grad_input) {
  constexpr int V = cells_of_group(sizeof(Element), sizeof(Index));
  auto* const slots = shared_memory<uint32_t>();
  for (uint32_t number = blockIdx.x; number < all.count; number += gridDim.x) {
    const auto band = Band<V, 1>::of_planes(all, number);
    const auto& cells = band.cells;
    struct Group {
      uint32_t slot[V];
      Vector<Element, V> grad;
    };
    constexpr uint32_t kNone = ~0u;
    const auto read = [&](uint32_t i) {
      const uint32_t at = cells.base + i * V;
      Neighbours<Index, V> index(indices, cells, at, at + V <= all.readable);
      index.drop_others(cells, at);
      Group group{};
#pragma unroll
      for (int v = 0; v < V; ++v) {
        group.slot[v] = kNone;
      }
      for_each_of_group<false>(
          all, band, report.error, indices, at, index, [&](int v, uint32_t slot) {
            group.slot[v] = slot;
            group.grad[v] = grad_output[band.outputs.begin + slot];
          });
      return group;
    };
    const auto claim = [&](uint32_t i, const Group& group) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (group.slot[v] != kNone) {
          atomicMax(slots + group.slot[v], i * V + v + 1);
        }
      }
    };
    const auto give = [&](uint32_t i, Group group) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (group.slot[v] != kNone && slots[group.slot[v]] != i * V + v + 1) {
          group.grad[v] = Element{};
        }
      }
      Element* const to = grad_input + cells.base + i * V;
      if (cells.holds_all(i)) {
        store(to, group.grad);
        return;
      }
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (cells.holds(cells.base + i * V + v)) {
          to[v] = group.grad[v];
        }
      }
    };

    Group first;
    if (threadIdx.x < cells.vectors) {
      first = read(threadIdx.x);
    }
    clear(slots, band.outputs.vectors);
    __syncthreads();
    for_each_group(cells.vectors, first, read, claim);
    __syncthreads();
    for_each_group(cells.vectors, first, read, give);
    __syncthreads();
  }
}

} // namespace maxunpool_cuda
