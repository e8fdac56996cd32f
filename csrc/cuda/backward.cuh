// The gradient of the input: each pooled element gathers the gradient of the output it was written
// to. Every element of grad_input is written once, by its owner. What indices outside their own
// windows spoil is reported, and written again by irregular.cuh.
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
// - kLooks: look() is told of each cell around, be it only of later ones (kLater) or of all,
//   itself too, whether it has the same index.
template <class T>
struct GiveAll { // "sum"
  using Element = T;
  static constexpr bool kChecks = false, kLooks = false, kLater = false;
};
template <class T>
struct GiveAlone { // windows that do not overlap
  using Element = T;
  static constexpr bool kChecks = true, kLooks = false, kLater = false;
};
template <class T>
struct GiveLast {
  using Element = T;
  static constexpr bool kChecks = true, kLooks = true, kLater = true;

  bool beaten = false;

  __device__ void look(bool same) { beaten |= same; }
  __device__ T result(T grad) const { return beaten ? T{} : grad; }
};
template <class T>
struct GiveMean {
  using Element = T;
  static constexpr bool kChecks = true, kLooks = true, kLater = false;

  int64_t count = 0;

  __device__ void look(bool same) { count += same ? 1 : 0; }
  __device__ T result(T grad) const { return mean_of<T>(grad, count); }
};

// What a thread's V pooled elements are.
enum class Group : int8_t {
  channels, // of one cell, aligned
  row,      // cells of a row of a contiguous tensor (inner == 1)
  even_row, // that, aligned; windows reach one cell in width at most
};

// An item's tile is a group of pooled elements. Windows overlap with those of the cells up to
// `reach` away in each dimension.
template <class Give, class Index, class Offset, int V, Group kGroup>
__global__ void __launch_bounds__(kThreads, sizeof(Offset) == 4 ? 4 : 2) backward(
    Tiling<Offset> tiling,
    Report report,
    Position<Offset> reach,
    const typename Give::Element* __restrict__ grad_output,
    const Index* __restrict__ indices,
    typename Give::Element* __restrict__ grad_input) {
  using Element = typename Give::Element;
  constexpr bool kRow = kGroup != Group::channels;
  const Geometry<Offset>& g = tiling.geometry;
  const auto gather = [&](Offset i) {
    const auto item = kRow ? tiling.template row_item<true>(i) : tiling.item(i);
    Position<Offset> p = item.tile;
    p.at[2] *= kRow ? V : 1;
    const Offset channel = kRow ? 0 : item.channels * V;
    const Offset row = tiling.pooled_row(item.outer, p.at[0], p.at[1]);
    const Offset source = (row + p.at[2]) * g.inner + channel;
    const auto exists = [&](int v) { return kGroup != Group::row || p.at[2] + v < g.axis[2].in; };

    using Row = CellRow<Index, Offset>;
    const Row named(tiling, p.at[0], p.at[1]);
    Vector<Index, V> index;
    if constexpr (kGroup != Group::row) {
      index = load<V>(indices + source);
    }
    Offset target[V];
    typename Row::Name name[V];
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if constexpr (kGroup == Group::row) {
        index.at[v] = exists(v) ? indices[source + v] : -1;
      }
      target[v] = named.target(index.at[v], p.at[2] + (kRow ? v : 0));
      name[v] = named.name(index.at[v], p.at[2] + (kRow ? v : 0));
    }
    const bool astray = is_astray<kRow, true, Give::kChecks>(
        tiling,
        report.error,
        item.outer,
        p,
        tiling.template window<true>(p),
        channel,
        target,
        exists,
        indices);
    if (astray) {
      return true;
    }

    Vector<Element, V> grad{};
    const Offset plane = item.outer * tiling.out_plane;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (target[v] < tiling.out_plane) {
        grad.at[v] = grad_output[(plane + target[v]) * g.inner + channel + (kRow ? 0 : v)];
      }
    }
    if constexpr (Give::kLooks) {
      // Differences are unsigned: what is left of a row wraps around to the right of it.
      constexpr bool kAll = !Give::kLater;
      Give give[V];
      for (Offset d = kAll ? -reach.at[0] : 0; d != reach.at[0] + 1; ++d) {
        for (Offset h = kAll || d != 0 ? -reach.at[1] : 0; h != reach.at[1] + 1; ++h) {
          const Position<Offset> from{{p.at[0] + d, p.at[1] + h, 0}};
          if (from.at[0] >= g.axis[0].in || from.at[1] >= g.axis[1].in) {
            continue;
          }
          const Offset other = tiling.pooled_row(item.outer, from.at[0], from.at[1]);
          const Row others(tiling, from.at[0], from.at[1]);
          const bool all_around = kAll || d != 0 || h != 0; // else only what is later in the row
          if constexpr (kGroup == Group::even_row) {
            const Index* const at = indices + (other + p.at[2]);
            const Offset left = p.at[2] - 1, right = p.at[2] + V;
            using Name = typename Row::Name;
            constexpr auto kNone = static_cast<Name>(-1);
            Name held[V + 2]; // from the cell on the left to that on the right
            held[0] = all_around && left < g.axis[2].in ? others.name(at[-1], left) : kNone;
            held[V + 1] = right < g.axis[2].in ? others.name(at[V], right) : kNone;
            const auto above = all_around ? load<V>(at) : index;
#pragma unroll
            for (int v = 0; v < V; ++v) {
              held[v + 1] = all_around ? others.name(above.at[v], p.at[2] + v) : name[v];
            }
#pragma unroll
            for (int v = 0; v < V; ++v) {
              give[v].look(held[v + 2] == name[v]);
              if (all_around) {
                give[v].look(held[v + 1] == name[v]);
                give[v].look(held[v] == name[v]);
              }
            }
          } else {
            for (Offset w = all_around ? -reach.at[2] : 1; w != reach.at[2] + 1; ++w) {
              if constexpr (kRow) {
#pragma unroll
                for (int v = 0; v < V; ++v) {
                  const Offset column = p.at[2] + v + w;
                  give[v].look(
                      column < g.axis[2].in &&
                      others.name(indices[other + column], column) == name[v]);
                }
              } else if (p.at[2] + w < g.axis[2].in) {
                const auto held = load<V>(indices + (other + p.at[2] + w) * g.inner + channel);
#pragma unroll
                for (int v = 0; v < V; ++v) {
                  give[v].look(others.name(held.at[v], p.at[2] + w) == name[v]);
                }
              }
            }
          }
        }
      }
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (target[v] < tiling.out_plane) {
          grad.at[v] = give[v].result(grad.at[v]);
        }
      }
    }
    if constexpr (kGroup != Group::row) {
      store(grad_input + source, grad);
    } else {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (exists(v)) {
          grad_input[source + v] = grad.at[v];
        }
      }
    }
    return false;
  };
  if constexpr (Give::kChecks) {
    for_each_chunk<Index>(tiling.items, report, gather);
  } else {
    for_each_item(tiling.items, gather);
  }
}

} // namespace maxunpool_cuda
