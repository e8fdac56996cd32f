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

// What an index names. `at` counts from where its cell's window begins, or wraps around to; it is
// not set where flat indices are not asked for their windows.
template <class Offset>
struct Named {
  Offset target; // in the output plane, or beyond all planes
  Offset at[3];
  bool in_window; // and in the plane; or only the latter, if that is all that was asked for
};

template <class Index, class Offset>
__device__ inline Named<Offset> named(
    const Tiling<Offset>& tiling, Index index, const Offset (&start)[3], bool asks_window) {
  const Axis<Offset>(&axis)[3] = tiling.geometry.axis;
  Named<Offset> found;
  if constexpr (kIsWindowOffset<Index>) {
    found.at[2] = index;
    found.at[1] = split(found.at[2], tiling.kernel_width);
    found.at[0] = split(found.at[1], tiling.kernel_height);
    const Offset z = found.at[0] + start[0], y = found.at[1] + start[1], x = found.at[2] + start[2];
    found.in_window =
        (found.at[0] < axis[0].kernel) & (z < axis[0].out) & (y < axis[1].out) & (x < axis[2].out);
    found.target =
        found.in_window ? (z * axis[1].out + y) * axis[2].out + x : static_cast<Offset>(-1);
  } else {
    found.target = target_of<Offset>(index);
    found.in_window = found.target < tiling.out_plane;
    if (asks_window) {
      Offset x = found.target;
      Offset y = split(x, tiling.out_width);
      const Offset z = split(y, tiling.out_height);
      found.at[0] = z - start[0];
      found.at[1] = y - start[1];
      found.at[2] = x - start[2];
      found.in_window = found.in_window & (found.at[0] < axis[0].kernel) &
                        (found.at[1] < axis[1].kernel) & (found.at[2] < axis[2].kernel);
    }
  }
  return found;
}

// Reports that the index of this pooled element, counted through the tensor, is in no plane.
template <class Index, class Offset>
__device__ inline void report_element(
    const Tiling<Offset>& tiling, ErrorRecord* error, Offset element, Index index) {
  const Geometry<Offset>& g = tiling.geometry;
  const Offset cells = element / g.inner, planes = cells / g.in_plane();
  report_bad(
      error,
      g,
      planes,
      cells - planes * g.in_plane(),
      element - cells * g.inner,
      kIsWindowOffset<Index>,
      index);
}

#ifndef BW_U
#define BW_U 1
#endif
#ifndef BW_B
#define BW_B 4
#endif

// As many as 16 bytes hold of the indices.
template <class T, class Index>
constexpr int kBackwardVector = sizeof(Index) == 8 ? 2 : sizeof(T) < 4 ? 4 : 16 / sizeof(T);

template <class T, class Index, int V, bool kLooks>
__global__ void __launch_bounds__(kThreads, BW_B) backward(
    Tiling<uint32_t> tiling,
    Report report,
    bool checks,
    Position<uint32_t> reach,
    const T* __restrict__ grad_output,
    const Index* __restrict__ indices,
    T* __restrict__ grad_input) {
  constexpr int U = BW_U;
  const Geometry<uint32_t>& g = tiling.geometry;
  const uint32_t right = g.inner == 1 ? 1 : 0; // cells from one element to the next
  const auto gather = [&](uint32_t i, auto checked) {
    constexpr bool kChecks = decltype(checked)::value;
    const uint32_t chunk = i - threadIdx.x, rest = tiling.items - chunk;
    const uint32_t team = rest < blockDim.x ? rest : blockDim.x;
    typename Tiling<uint32_t>::Item item[U];
    Vector<Index, V> index[U];
    Vector<T, V> grad[U];
    uint32_t source[U];
    bool exists[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const uint32_t group = chunk * U + u * team + threadIdx.x;
      item[u] = tiling.item(group);
      if (V > 1 && right != 0) {
        item[u].tile.at[2] *= V;
      }
      source[u] = group * V;
      exists[u] = item[u].outer < g.outer;
      index[u] = exists[u] ? load<V>(indices + source[u]) : Vector<Index, V>{};
    }
    bool all_in_window = true, all_in_plane = true;
    Named<uint32_t> name[U][V];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const uint32_t plane = item[u].outer * tiling.out_plane;
      uint32_t start[3];
      for (int a = 0; a < 3; ++a) {
        start[a] = item[u].tile.at[a] * g.axis[a].stride - g.axis[a].padding;
      }
#pragma unroll
      for (int v = 0; v < V; ++v) {
        name[u][v] = named(tiling, index[u].at[v], start, kChecks);
        start[2] += right * g.axis[2].stride;
        const bool in_plane = name[u][v].target < tiling.out_plane;
        all_in_plane &= in_plane | !exists[u];
        all_in_window &= name[u][v].in_window | !exists[u];
        const uint32_t channel = (g.inner == 1 ? 0 : item[u].channels * V + v);
        grad[u].at[v] = in_plane & exists[u]
                            ? grad_output[(plane + name[u][v].target) * g.inner + channel]
                            : T{};
      }
    }
    if (!all_in_window) {
      bool stray = false;
#pragma unroll
      for (int u = 0; u < U; ++u) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          if (exists[u] && name[u][v].target >= tiling.out_plane) {
            report_element(tiling, report.error, source[u] + v, indices[source[u] + v]);
          } else {
            stray |= exists[u] && !name[u][v].in_window;
          }
        }
      }
      if (stray) {
        return true;
      }
    }
    if constexpr (kLooks) {
      const auto look = [&](uint32_t d, uint32_t h, uint32_t w) {
        const uint32_t cells = (d * g.axis[1].in + h) * g.axis[2].in + w;
        const uint32_t shift[] = {d * g.axis[0].stride, h * g.axis[1].stride, w * g.axis[2].stride};
        const uint32_t offsets =
            (shift[0] * g.axis[1].kernel + shift[1]) * g.axis[2].kernel + shift[2];
#pragma unroll
        for (int u = 0; u < U; ++u) {
          const bool row = (item[u].tile.at[0] + d < g.axis[0].in) &
                           (item[u].tile.at[1] + h < g.axis[1].in) & exists[u];
#pragma unroll
          for (int v = 0; v < V; ++v) {
            if (row && item[u].tile.at[2] + v * right + w < g.axis[2].in) {
              const Index held = indices[source[u] + v + cells * g.inner];
              bool same;
              if constexpr (kIsWindowOffset<Index>) {
                same = held + offsets == index[u].at[v];
                for (int a = 0; a < 3; ++a) {
                  same &= name[u][v].at[a] - shift[a] < g.axis[a].kernel;
                }
              } else {
                same = held == index[u].at[v];
              }
              grad[u].at[v] = same ? T{} : grad[u].at[v];
            }
          }
        }
      };
      for (uint32_t d = 0; d != reach.at[0] + 1; ++d) {
        for (uint32_t h = d == 0 ? 0 : -reach.at[1]; h != reach.at[1] + 1; ++h) {
          for (uint32_t w = (d | h) == 0 ? 1 : -reach.at[2]; w != reach.at[2] + 1; ++w) {
            look(d, h, w);
          }
        }
      }
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (exists[u]) {
        store(grad_input + source[u], grad[u]);
      }
    }
    return false;
  };
  if (kLooks || checks) {
    for_each_chunk<Index>(
        tiling.items, report, [&](uint32_t i) { return gather(i, std::true_type{}); });
  } else {
    for_each_item(tiling.items, [&](uint32_t i) { gather(i, std::false_type{}); });
  }
}

// The same for any windows, sizes and types: thread i owns pooled element i. kMean: the gradient is
// divided among the elements whose indices name the same output.
template <class T, bool kMean>
__global__ void __launch_bounds__(kThreads) backward_any(
    Tiling<uint64_t> tiling,
    Report report,
    bool checks,
    Position<uint64_t> reach,
    const T* __restrict__ grad_output,
    const void* __restrict__ indices,
    int index_size,
    T* __restrict__ grad_input) {
  const Geometry<uint64_t>& g = tiling.geometry;
  const bool offsets = index_size == 1;
  const auto index_of = [&](uint64_t element) {
    return offsets           ? static_cast<const uint8_t*>(indices)[element]
           : index_size == 4 ? static_cast<const int32_t*>(indices)[element]
                             : static_cast<const int64_t*>(indices)[element];
  };
  const auto name_of = [&](uint64_t element, const uint64_t (&p)[3]) {
    uint64_t start[3];
    for (int a = 0; a < 3; ++a) {
      start[a] = p[a] * g.axis[a].stride - g.axis[a].padding;
    }
    const int64_t index = index_of(element);
    return offsets ? named(tiling, static_cast<uint8_t>(index), start, checks)
                   : named(tiling, index, start, checks);
  };
  const auto gather = [&](uint64_t i) {
    const auto [outer, p, channel] = tiling.item(i);
    const auto own = name_of(i, p.at);
    T grad{};
    if (own.target >= tiling.out_plane) {
      report_element(tiling, report.error, i, index_of(i));
    } else if (!own.in_window) {
      return true;
    } else {
      grad = grad_output[(outer * tiling.out_plane + own.target) * g.inner + channel];
      // Is looked around for only the later cells, or for all of them?
      const Position<uint64_t> before = kMean ? reach : Position<uint64_t>{};
      int64_t count = 0;
      for (uint64_t d = -before.at[0]; d != reach.at[0] + 1; ++d) {
        for (uint64_t h = -reach.at[1]; h != reach.at[1] + 1; ++h) {
          for (uint64_t w = -reach.at[2]; w != reach.at[2] + 1; ++w) {
            const Position<uint64_t> q{{p.at[0] + d, p.at[1] + h, p.at[2] + w}};
            const uint64_t shift = tiling.cell({{d, h, w}});
            const bool later = static_cast<int64_t>(shift) > 0; // in row-major order
            if ((kMean || later) && tiling.is_cell(q)) {
              count += name_of(i + shift * g.inner, q.at).target == own.target;
            }
          }
        }
      }
      if constexpr (kMean) {
        grad = mean_of<T>(grad, count);
      } else {
        grad = count == 0 ? grad : T{};
      }
    }
    grad_input[i] = grad;
    return false;
  };
  if (checks && !offsets) {
    for_each_chunk<int64_t>(tiling.items, report, gather);
  } else {
    for_each_item(tiling.items, gather);
  }
}

} // namespace maxunpool_cuda
