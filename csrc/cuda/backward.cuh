// SPDX-License-Identifier: BSD-3-Clause
// Gradient of the input: each pooled element gets the gradient of the output that its index names.
// A thread writes each element that it owns once. If an index is out of window, the thread flags
// that (see Report), and the fix-up kernel rewrites the image.
//
// A thread owns one cell in two or four planes (see Planes). Of a contiguous tensor with windows of
// 2x2, threads 0, 1, 2 .. of a warp own and read
//
//            indices, grad_input    grad_output
//   plane 0  0 1 2 3 4 5 ..         0 0 1 1 2 2 ..    of each window, the element that the index
//                                   0 0 1 1 2 2 ..    names
#pragma once

#include "report.cuh"
#include "tiling.cuh"

#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

// Planes of a thread, and blocks of a processor. kDropsLosers needs registers, and more threads to
// hide latency. For Blackwell, ptxas spills unless it has the 64 registers that 1024 threads leave.
// A processor of Turing (sm_75) has room for no more than these.
template <bool kDropsLosers>
constexpr int kPlanesOfThread = kDropsLosers ? 2 : 4;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 750
constexpr int kMostThreadsOfProcessor = 1024;
#else
constexpr int kMostThreadsOfProcessor = 1536;
#endif
template <class T, bool kDropsLosers>
constexpr int kGatherBlocks =
    (kDropsLosers && sizeof(T) < sizeof(uint64_t) ? kMostThreadsOfProcessor : 1024) / kThreads;

// The later cells whose windows overlap a cell's: the one to the right, and three of the row below.
constexpr int kLaterCells = 4;

struct GatherPlan {
  Planes planes;
  bool takes_out_of_window;     // out-of-window indices are valid: "sum"
  uint32_t shared[kLaterCells]; // a bit for each window offset: whether both windows cover it
};

// Gradient for 32-bit offsets.
//
// kDropsLosers: "last", of windows that overlap no later ones than kLaterCells. Of the cells whose
// indices name one output, only the last gets its gradient. So a thread compares its index with
// those of later cells.
template <class T, bool kOffsets, bool kDropsLosers>
__global__ void __launch_bounds__(kThreads, kGatherBlocks<T, kDropsLosers>) backward(
    Tiling<uint32_t> tiling,
    GatherPlan plan,
    Report report,
    const T* __restrict__ grad_output,
    AnyIndices indices,
    T* __restrict__ grad_input) {
  constexpr int kPlanes = kPlanesOfThread<kDropsLosers>;
  const Geometry<uint32_t>& g = tiling.geometry;
  const auto& [depth, height, width] = g.axis;
  const bool takes_out_of_window = !kDropsLosers && plan.takes_out_of_window,
             deep = plan.planes.deep;
  for_each_flagged_item<!kOffsets>(tiling.items, report, [&](uint32_t i) {
    const auto [images, cell, channel] = tiling.item(i, g.inner != 1, deep);
    const uint32_t outer = images * plan.planes.images;
    // If fewer planes are left than a thread has room for, it reads the first one again, and writes
    // it once.
    const uint32_t left = plan.planes.images == 1 ? kPlanes : g.outer - outer;
    const uint32_t first = tiling.pooled(outer, cell, channel);
    uint32_t own[kPlanes];
    RawIndex<kOffsets> raw[kPlanes];
#pragma unroll
    for (uint32_t u = 0; u < kPlanes; ++u) {
      own[u] = first + (u < left ? u : 0) * plan.planes.next_pooled;
      raw[u] = load_indices<kOffsets, 1>(indices, own[u])[0];
    }

    const Position<uint32_t> start = tiling.window_start(cell);
    const uint32_t output = outer * tiling.out_plane * g.inner + channel;
    T grad[kPlanes];
    uint32_t name[kPlanes];
    bool inside[kPlanes], all_inside = true, out_of_window = false;
#pragma unroll
    for (uint32_t u = 0; u < kPlanes; ++u) {
      name[u] = index_as<uint32_t>(raw[u]);
      const auto found = decoded<kOffsets>(tiling, name[u], start, deep);
      inside[u] = takes_out_of_window ? found.in_plane : found.in_window;
      all_inside &= inside[u];
      const uint32_t target = inside[u] ? found.target : 0;
      grad[u] =
          grad_output[target * g.inner + (output + (u < left ? u : 0) * plan.planes.next_output)];
    }
    if (!all_inside) {
#pragma unroll
      for (uint32_t u = 0; u < kPlanes; ++u) {
        if (!inside[u]) {
          grad[u] = T{};
          if (!kOffsets && name[u] < tiling.out_plane) {
            out_of_window = true;
          } else {
            report.errors.report(g, own[u], kOffsets, indices[own[u]]);
          }
        }
      }
    }

    if constexpr (kDropsLosers) {
      // All are read before one is used. In place of a cell that does not exist, the own is read.
      RawIndex<kOffsets> later[kLaterCells][kPlanes];
      bool exists[kLaterCells];
#pragma unroll
      for (int n = 0; n < kLaterCells; ++n) {
        const uint32_t down = n > 0 ? 1 : 0, right = n == 0 ? 1 : n - 2; // may wrap around
        exists[n] = cell[1] + down < height.in && cell[2] + right < width.in;
        const uint32_t away = exists[n] ? (down * width.in + right) * g.inner : 0;
#pragma unroll
        for (int u = 0; u < kPlanes; ++u) {
          later[n][u] = load_indices<kOffsets, 1>(indices, own[u] + away)[0];
        }
      }
#pragma unroll
      for (int n = 0; n < kLaterCells; ++n) {
        // In the later window, the offset of the same output is less by so much.
        const uint32_t down = n > 0 ? height.stride : 0, right = n == 0 ? 1 : n - 2;
        const uint32_t less = down * width.kernel + right * width.stride;
#pragma unroll
        for (int u = 0; u < kPlanes; ++u) {
          bool same = later[n][u] == raw[u];
          if constexpr (kOffsets) {
            same = later[n][u] + less == raw[u] && (plan.shared[n] >> raw[u] % 32 & 1) != 0;
          }
          grad[u] = exists[n] && same ? T{} : grad[u];
        }
      }
    }
#pragma unroll
    for (uint32_t u = 0; u < kPlanes; ++u) {
      if (u < left) {
        grad_input[own[u]] = grad[u];
      }
    }
    return out_of_window;
  });
}

} // namespace maxunpool_cuda
