// The gradient of the input: each pooled element gathers the gradient of the output it was written
// to. Every element of grad_input is written once, by its owner. Where an index outside its own
// window makes that more than a look around, the slab is reported, and written again by
// irregular.cuh.
#pragma once

#include "../reduction.h"
#include "report.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <cstdint>

namespace maxunpool_cuda {

// What a pooled element is given of the gradient at its index, which depends on the other windows
// that hold the same index.
// - kChecks: that is told only for an index in its own window, so others are reported;
// - kLooks: the other windows over the output are looked at, in reverse row-major order. look()
//   takes each, and answers whether to go on.
template <class T>
struct GiveAll { // "sum"
  using Element = T;
  static constexpr bool kChecks = false, kLooks = false;
};
template <class T>
struct GiveAlone { // windows that do not overlap
  using Element = T;
  static constexpr bool kChecks = true, kLooks = false;
};
template <class T>
struct GiveLast {
  using Element = T;
  static constexpr bool kChecks = true, kLooks = true;

  bool beaten = false;

  template <class Offset>
  __device__ bool look(Offset other, Offset cell, bool same) {
    beaten = other > cell && same;
    return other > cell && !same;
  }
  __device__ T result(T grad) const { return beaten ? T{} : grad; }
};
template <class T>
struct GiveMean {
  using Element = T;
  static constexpr bool kChecks = true, kLooks = true;

  int64_t count = 0;

  template <class Offset>
  __device__ bool look(Offset, Offset, bool same) {
    count += same ? 1 : 0;
    return true;
  }
  __device__ T result(T grad) const { return mean_of<T>(grad, count); }
};

// A thread owns V neighbours in pooled memory. Here a tile is a pooled cell: tiling.tiles are the
// pooled sizes, tiling.channels is inner, and tiling.items counts groups of V elements.
template <class Give, class Index, class Offset, int V>
__global__ void backward(
    Tiling<Offset> tiling,
    Report<Offset> report,
    const typename Give::Element* __restrict__ grad_output,
    const Index* __restrict__ indices,
    typename Give::Element* __restrict__ grad_input) {
  const Geometry<Offset>& g = tiling.geometry;
  for_each_item(tiling.items, [&](Offset i) {
    const auto index = load<V>(indices + i * V);
    Vector<typename Give::Element, V> grad;
    Bad<Offset> bad;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const auto item = tiling.item(i * V + v);
      const int64_t target = index.at[v];
      const bool inside = Give::kChecks
                              ? tiling.in_window(item.tile, target)
                              : target >= 0 && target < static_cast<int64_t>(g.out_plane());
      grad.at[v] = {};
      if (inside) {
        grad.at[v] = grad_output
            [item.outer * g.out_slab() + static_cast<Offset>(target) * g.inner + item.channels];
      } else {
        report.outside_window(item.outer, tiling.cell(item.tile), item.channels, target, bad);
      }
      if constexpr (Give::kLooks) {
        if (inside) {
          Give give;
          const Offset cell = tiling.cell(item.tile);
          const auto o = tiling.coordinates(static_cast<Offset>(target));
          tiling.template for_each_window_over<true>(o, [&](Offset other) {
            const Index held = indices[item.outer * g.in_slab() + other * g.inner + item.channels];
            return give.look(other, cell, held == index.at[v]);
          });
          grad.at[v] = give.result(grad.at[v]);
        }
      }
    }
    store(grad_input + i * V, grad);
    report.tell(bad);
  });
}

} // namespace maxunpool_cuda
