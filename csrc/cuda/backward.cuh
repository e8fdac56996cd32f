// Gradient of the input: each pooled element gathers the gradient of the output that its index
// names. Every element of grad_input is written once, by its owner. Chunks with a stray index are
// flagged (see Report), and stray.cuh rewrites their slabs.
//
// A thread of backward() owns one cell in two or four planes. Of a contiguous tensor with windows
// of 2x2, threads 0, 1, 2 .. of a warp own and read
//
//            indices, grad_input    grad_output
//   plane 0  0 1 2 3 4 5 ..         0 0 1 1 2 2 ..    of each window, the element that the index
//                                   0 0 1 1 2 2 ..    names
//   plane 1  0 1 2 3 4 5 ..         0 0 1 1 2 2 ..
//                                   0 0 1 1 2 2 ..
//   and so on
//
// So neighbouring threads access neighbouring elements, whatever the width of a row; the reads of
// two planes do not wait for each other; and a window's begin is computed once for all planes. Of a
// channels-last tensor, threads that follow each other own channels that do.
#pragma once

#include "../reduction.h"
#include "report.cuh"
#include "tiling.cuh"

#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

// Planes of a thread. kDropsLosers (see backward) needs registers, and more threads to hide
// latency.
template <bool kDropsLosers>
constexpr int kPlanesOfThread = kDropsLosers ? 2 : 4;

// Arguments of backward() beside its tiling.
struct GatherPlan {
  uint32_t slabs;                    // slabs of a thread's planes: as many, or one
  uint32_t next_pooled, next_output; // from one of its planes to the next, in elements
  bool takes_stray;                  // stray indices are valid: "sum"
  bool deep;                         // depth is not one everywhere
  Position<uint32_t> overlap;        // windows overlap those of cells up to so far away
};

// Gradient of "last" and "sum", for 32-bit offsets and elements of up to eight bytes.
//
// kDropsLosers: "last" of windows that overlap. Of the cells whose indices name one output, only
// the last gets its gradient, so a thread compares its index with those of later cells.
template <class T, class Index, bool kDropsLosers>
__global__ void __launch_bounds__(kThreads, (kDropsLosers ? 1536 : 1280) / kThreads) backward(
    Tiling<uint32_t> tiling, Report report, GatherPlan plan, const T* __restrict__ grad_output,
    const Index* __restrict__ indices, T* __restrict__ grad_input) {
  constexpr int kPlanes = kPlanesOfThread<kDropsLosers>;
  const bool takes_stray = !kDropsLosers && plan.takes_stray;
  const auto gather = [&](uint32_t i) {
    const Geometry<uint32_t>& g = tiling.geometry;
    const auto& [depth, height, width] = g.axis;
    const bool deep = plan.deep;
    const auto [slabs, cell, channel] = tiling.item(i, g.inner != 1, deep);
    const uint32_t outer = slabs * plan.slabs;
    // Where fewer planes are left than a thread has room for, the first one is done again, and
    // written once.
    const uint32_t planes = plan.slabs == 1 ? kPlanes : g.outer - outer;
    const auto plane = [&](uint32_t u) { return u < planes ? u : 0; };
    const uint32_t first = tiling.pooled(outer, cell, channel);
    uint32_t own[kPlanes];
    const Index* source[kPlanes];
    Index index[kPlanes];
#pragma unroll
    for (uint32_t u = 0; u < kPlanes; ++u) {
      own[u] = first + plane(u) * plan.next_pooled;
      source[u] = indices + own[u];
      index[u] = *source[u];
    }

    const Position<uint32_t> start = window_start(tiling, cell);
    const auto fits = [&](int a) { // false where the window begins left of the output
      const uint32_t out = g.axis[a].out, kernel = g.axis[a].kernel;
      return start[a] < out && kernel <= out - start[a];
    };
    const bool whole = !deep && fits(1) && fits(2);
    const uint32_t output = outer * tiling.out_plane * g.inner + channel;
    T grad[kPlanes];
    bool inside[kPlanes], all_inside = true, stray = false;
#pragma unroll
    for (uint32_t u = 0; u < kPlanes; ++u) {
      const auto found = decoded(tiling, index[u], start, deep, whole);
      inside[u] = takes_stray ? found.in_plane : found.in_window;
      all_inside &= inside[u];
      const uint32_t target = inside[u] ? found.target : 0;
      grad[u] = grad_output[target * g.inner + (output + plane(u) * plan.next_output)];
    }
    if (!all_inside) {
#pragma unroll
      for (uint32_t u = 0; u < kPlanes; ++u) {
        if (!inside[u]) {
          grad[u] = T{};
          if (!kIsWindowOffset<Index> && target_of<uint32_t>(index[u]) < tiling.out_plane) {
            stray = true;
          } else {
            report_bad(report.error, g, own[u], kIsWindowOffset<Index>, index[u]);
          }
        }
      }
    }

    if constexpr (kDropsLosers) {
      // Looks at kCells cells of a row, the first one at distance (d, h, w): all are read before
      // one is used. For cells beyond the row, the cell right below stands in.
      const auto look =
          [&]<int kCells>(std::integral_constant<int, kCells>, uint32_t d, uint32_t h, uint32_t w) {
            if ((d != 0 && cell[0] + d >= depth.in) || (h != 0 && cell[1] + h >= height.in) ||
                (kCells == 1 && cell[2] + w >= width.in)) {
              return;
            }
            uint32_t right[kCells]; // in cells
            Index held[kCells][kPlanes];
#pragma unroll
            for (uint32_t c = 0; c < kCells; ++c) {
              right[c] = kCells == 1 || cell[2] + w + c < width.in ? w + c : 0;
              const auto later = static_cast<int32_t>(tiling.cell({{d, h, right[c]}}) * g.inner);
#pragma unroll
              for (int u = 0; u < kPlanes; ++u) {
                held[c][u] = source[u][later];
              }
            }
#pragma unroll
            for (uint32_t c = 0; c < kCells; ++c) {
              // Columns and rows from the window's begin to the later one's; `less` as an offset.
              const uint32_t columns = right[c] * width.stride, rows = h * height.stride;
              const uint32_t less =
                  (d * depth.stride * height.kernel + rows) * width.kernel + columns;
#pragma unroll
              for (int u = 0; u < kPlanes; ++u) {
                bool same = held[c][u] == index[u];
                if constexpr (kIsWindowOffset<Index>) {
                  uint32_t x = index[u], y = split(x, tiling.kernel_width);
                  same = (held[c][u] + less == index[u]) & (x - columns < width.kernel);
                  if (deep) {
                    split(y, tiling.kernel_height);
                    same &= y - rows < height.kernel;
                  }
                }
                grad[u] = same ? T{} : grad[u];
              }
            }
          };
      const std::integral_constant<int, 1> one;
      const Position<uint32_t> overlap = plan.overlap;
      if (overlap[0] == 0 && overlap[1] <= 1 && overlap[2] <= 1) {
        look(one, 0, 0, 1);
        look(std::integral_constant<int, 3>{}, 0, 1, ~0u);
      } else {
#pragma unroll 1
        for (uint32_t d = 0; d != overlap[0] + 1; ++d) {
#pragma unroll 1
          for (uint32_t h = d == 0 ? 0 : -overlap[1]; h != overlap[1] + 1; ++h) {
#pragma unroll 1
            for (uint32_t w = (d | h) == 0 ? 1 : -overlap[2]; w != overlap[2] + 1; ++w) {
              look(one, d, h, w);
            }
          }
        }
      }
    }
#pragma unroll
    for (uint32_t u = 0; u < kPlanes; ++u) {
      if (u < planes) {
        grad_input[own[u]] = grad[u];
      }
    }
    return stray;
  };
  for_each_chunk<Index>(tiling.items, report, gather, !takes_stray);
}

// Gradient for any windows, sizes and types: thread i owns pooled element i.
template <class T>
__global__ void __launch_bounds__(kThreads, 512 / kThreads) backward_any(
    Tiling<uint64_t> tiling, Report report, bool checks, Position<uint64_t> overlap,
    const T* __restrict__ grad_output, AnyIndices indices, T* __restrict__ grad_input) {
  const Geometry<uint64_t>& g = tiling.geometry;
  const auto gather = [&](uint64_t i) {
    const auto [outer, p, channel] = tiling.item(i);
    const auto own = decoded_at(tiling, indices, i, p);
    T grad{};
    if (!own.in_plane) {
      report_bad(report.error, g, i, are_offsets(indices), indices[i]);
    } else if (checks && !own.in_window) {
      return true;
    } else {
      grad = grad_output[(outer * tiling.out_plane + own.target) * g.inner + channel];
      for (uint64_t d = 0; d != overlap[0] + 1; ++d) {
        for (uint64_t h = -overlap[1]; h != overlap[1] + 1; ++h) {
          for (uint64_t w = -overlap[2]; w != overlap[2] + 1; ++w) {
            const Position<uint64_t> q{{p[0] + d, p[1] + h, p[2] + w}};
            const uint64_t shift = tiling.cell({{d, h, w}});
            const bool later = static_cast<int64_t>(shift) > 0; // in row-major order
            if (later && tiling.is_cell(q) &&
                decoded_at(tiling, indices, i + shift * g.inner, q).target == own.target) {
              grad = T{};
            }
          }
        }
      }
    }
    grad_input[i] = grad;
    return false;
  };
  for_each_chunk<int64_t>(tiling.items, report, gather, checks && !are_offsets(indices));
}

} // namespace maxunpool_cuda
