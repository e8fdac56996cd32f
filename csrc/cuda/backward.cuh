// SPDX-License-Identifier: BSD-3-Clause
// Gradient of the input: each pooled element gets the gradient of the output that its index names.
// A thread writes each element that it owns once. If an index is out of window, the thread flags
// that (see Report), and the fix-up kernel rewrites the image.
//
// A thread owns one cell in two or four planes (see Planes). It gathers: it reads the gradient
// where its index leads. Of a contiguous tensor with windows of 2x2, threads 0, 1, 2 .. of a warp
// own and read in one of their planes
//
//            indices, grad_input    grad_output
//   plane 0  0 1 2 3 4 5 ..         0 0 1 1 2 2 ..    of each window, the element that the index
//                                   0 0 1 1 2 2 ..    names
//
// If windows overlap, several cells may name one output. "last" gives its gradient to the last of
// them. So a thread compares its index with those of four later cells, and writes 0 if one of them
// names the same output. Example: windows of 3x3, 2 apart; cells
//
//   a b c    The windows of c, d, e and f share outputs with that of b, which the thread of b owns.
//   d e f    If b and e both name output 57, e gets its gradient, and b gets 0.
//
// What it takes from others: tiling.cuh places a thread's cell, indices.cuh reads and decodes
// indices, and report.cuh has the loop over a thread's items, whose flags it writes.
#pragma once

#include "../geometry.h"
#include "assert.cuh"
#include "indices.cuh"
#include "report.cuh"
#include "tiling.cuh"

#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

// Planes of a thread. With kDropsLosers it holds four later indices for each.
template <bool kDropsLosers>
constexpr int kPlanesOfThread = kDropsLosers ? 2 : 4;

// Blocks of a processor: 1536 threads with kDropsLosers, to hide its loads. Else 1024, which leave
// 64 registers for each: with fewer, ptxas spills for Blackwell. A processor of Turing (sm_75) has
// room for no more than 1024.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 750
constexpr int kMostThreadsOfProcessor = 1024;
#else
constexpr int kMostThreadsOfProcessor = 1536;
#endif
template <class T, bool kDropsLosers>
constexpr int kGatherBlocks =
    (kDropsLosers && sizeof(T) < sizeof(uint64_t) ? kMostThreadsOfProcessor : 1024) / kThreads;

// The way from a cell to another: so many rows down, and so many cells to the right.
struct Step {
  int down;
  int right;
};
// The later cells whose windows may overlap a cell's, if kernels are at most twice the strides. (A
// function, since device code cannot read an array of the host by a number.)
constexpr int kLaterCells = 4;
MAXUNPOOL_HOST_DEVICE constexpr Step step_to_later(int n) {
  constexpr Step kLater[kLaterCells] = {{0, 1}, {1, -1}, {1, 0}, {1, 1}};
  return kLater[n];
}

// What the host computes for the kernel.
struct GatherPlan {
  Planes planes;
  bool takes_out_of_window; // out-of-window indices are valid: "sum"
  // For each later cell, a bit for each offset of the window of an earlier one: whether the later
  // cell's window covers the same output. See set_shared_offsets().
  uint32_t shared[kLaterCells];
};

constexpr int64_t kMostSharedOffsets = 32; // bits of GatherPlan::shared

// Whether the kernel can tell who loses: windows overlap no later windows than those of
// step_to_later(), and `shared` has a bit for each offset.
inline bool overlaps_near_cells_only(const Geometry<int64_t>& geometry) {
  const auto& [depth, height, width] = geometry.axis;
  return depth.kernel == 1 && height.kernel <= 2 * height.stride &&
         width.kernel <= 2 * width.stride && height.kernel <= kMostSharedOffsets / width.kernel;
}

// Sets plan.shared, which was 0, for windows that overlap_near_cells_only(). Of a window of 3x3, 2
// apart, the cell to the right shares offsets 2, 5 and 8: its bits are 0b100100100.
inline void set_shared_offsets(GatherPlan& plan, const Geometry<int64_t>& geometry) {
  const auto& [depth, height, width] = geometry.axis;
  for (int n = 0; n < kLaterCells; ++n) {
    // Where the later window begins, as a row and a column of the earlier one.
    const int64_t down = step_to_later(n).down * height.stride;
    const int64_t right = step_to_later(n).right * width.stride;
    for (int64_t offset = 0; offset < height.kernel * width.kernel; ++offset) {
      const int64_t row = offset / width.kernel;
      const int64_t column = offset % width.kernel;
      const bool is_shared = row >= down && column >= right && column < width.kernel + right;
      plan.shared[n] |= is_shared ? 1u << offset : 0;
    }
  }
}

// What a thread owns: one cell in each of its planes, with its indices.
template <bool kOffsets, int kPlanes>
struct OwnedCell {
  Position<uint32_t> cell;
  uint32_t element[kPlanes];       // numbers in the pooled tensor
  RawIndex<kOffsets> raw[kPlanes]; // their indices
  uint32_t output; // number of the first plane's first element in the unpooled tensor
  uint32_t planes; // how many exist, from the first on; may exceed kPlanes

  // The number, among the thread's planes, of the plane that stands for plane u: u itself, or 0 if
  // u does not exist. So loops over planes need no condition until they store.
  __device__ uint32_t plane(uint32_t u) const { return u < planes ? u : 0; }
};

// The cell of an item of the tiling, in kPlanes planes. Loads its indices as soon as possible.
template <bool kOffsets, int kPlanes>
__device__ inline OwnedCell<kOffsets, kPlanes> owned_cell(
    const Tiling<uint32_t>& tiling,
    const Planes& planes,
    const AnyIndices& indices,
    uint32_t item) {
  const Geometry<uint32_t>& g = tiling.geometry;
  const auto [image_set, cell, channel] = tiling.item(item, g.inner != 1, planes.deep);
  const uint32_t outer = image_set * planes.images;
  OwnedCell<kOffsets, kPlanes> own;
  own.cell = cell;
  own.planes = planes.images == 1 ? kPlanes : g.outer - outer;
  own.output = outer * tiling.out_plane * g.inner + channel;
  const uint32_t first = tiling.pooled(outer, cell, channel);
#pragma unroll
  for (uint32_t u = 0; u < kPlanes; ++u) {
    own.element[u] = first + own.plane(u) * planes.next_pooled;
    MAXUNPOOL_ASSERT(own.element[u] < g.outer * g.in_image());
    own.raw[u] = load_indices<kOffsets, 1>(indices, own.element[u])[0];
  }
  return own;
}

// The gradients of a thread's elements.
template <class T, int kPlanes>
struct Gathered {
  T grad[kPlanes];
  bool out_of_window; // of an index
};

// Gathers the gradients that the indices of the thread's elements name. An index that is out of
// bounds is reported, and its gradient is 0. So is the gradient of an index out of window, unless
// takes_out_of_window: that is plan.takes_out_of_window, or a false known at compile time.
template <bool kOffsets, class T, int kPlanes>
__device__ inline Gathered<T, kPlanes> gather(
    const Tiling<uint32_t>& tiling,
    const GatherPlan& plan,
    bool takes_out_of_window,
    const Errors& errors,
    const T* grad_output,
    const AnyIndices& indices,
    const OwnedCell<kOffsets, kPlanes>& own) {
  const Geometry<uint32_t>& g = tiling.geometry;
  const Position<uint32_t> start = tiling.window_start(own.cell);
  Gathered<T, kPlanes> gathered{};
  uint32_t index[kPlanes];
  bool is_valid[kPlanes];
  bool are_valid = true;
#pragma unroll
  for (uint32_t u = 0; u < kPlanes; ++u) {
    index[u] = index_as<uint32_t>(own.raw[u]);
    const auto named = decoded<kOffsets>(tiling, index[u], start, plan.planes.deep);
    is_valid[u] = takes_out_of_window ? named.in_plane : named.in_window;
    are_valid &= is_valid[u];
    const uint32_t target = is_valid[u] ? named.target : 0;
    const uint32_t plane_begin = own.output + own.plane(u) * plan.planes.next_output;
    MAXUNPOOL_ASSERT(target * g.inner + plane_begin < g.outer * g.out_image());
    gathered.grad[u] = grad_output[target * g.inner + plane_begin];
  }
  if (are_valid) {
    return gathered;
  }
#pragma unroll
  for (uint32_t u = 0; u < kPlanes; ++u) {
    if (is_valid[u]) {
      continue;
    }
    gathered.grad[u] = T{};
    if (!kOffsets && index[u] < tiling.out_plane) {
      gathered.out_of_window = true;
    } else {
      errors.report(g, own.element[u], kOffsets, indices[own.element[u]]);
    }
  }
  return gathered;
}

// Sets the gradient of an element to 0 if a later cell of its plane names the same output.
template <bool kOffsets, class T, int kPlanes>
__device__ inline void drop_losers(
    const Geometry<uint32_t>& g,
    const GatherPlan& plan,
    const AnyIndices& indices,
    const OwnedCell<kOffsets, kPlanes>& own,
    T (&grad)[kPlanes]) {
  const auto& [depth, height, width] = g.axis;
  // All are read before one is used. In place of a cell that does not exist, the own cell is read.
  RawIndex<kOffsets> later[kLaterCells][kPlanes];
  bool exists[kLaterCells];
#pragma unroll
  for (int n = 0; n < kLaterCells; ++n) {
    const uint32_t down = step_to_later(n).down;
    const uint32_t right = step_to_later(n).right; // -1 wraps around
    exists[n] = own.cell[1] + down < height.in && own.cell[2] + right < width.in;
    const uint32_t away = exists[n] ? (down * width.in + right) * g.inner : 0;
#pragma unroll
    for (int u = 0; u < kPlanes; ++u) {
      later[n][u] = load_indices<kOffsets, 1>(indices, own.element[u] + away)[0];
    }
  }
#pragma unroll
  for (int n = 0; n < kLaterCells; ++n) {
    // In the later window, the offset of the same output is less by so much: of 3x3 windows, 2
    // apart, offset 8 of a cell is offset 6 of the cell to the right, and offset 2 of the cell
    // below. For the cell on the lower left, 2 * 3 - 2 = 4.
    const uint32_t down = step_to_later(n).down * height.stride;
    const uint32_t right = step_to_later(n).right * width.stride;
    const uint32_t less = down * width.kernel + right;
#pragma unroll
    for (int u = 0; u < kPlanes; ++u) {
      bool same = later[n][u] == own.raw[u];
      if constexpr (kOffsets) {
        same = later[n][u] + less == own.raw[u] && (plan.shared[n] >> own.raw[u] % 32 & 1) != 0;
      }
      grad[u] = exists[n] && same ? T{} : grad[u];
    }
  }
}

// Gradient of a call whose numbers fit 32 bits. kOffsets: indices are uint8. kDropsLosers: the
// gradient of "last" for windows that overlap_near_cells_only(); else each cell gets its gradient.
template <class T, bool kOffsets, bool kDropsLosers>
__global__ void __launch_bounds__(kThreads, kGatherBlocks<T, kDropsLosers>) backward(
    Tiling<uint32_t> tiling,
    Report report,
    GatherPlan plan,
    const T* __restrict__ grad_output,
    AnyIndices indices,
    T* __restrict__ grad_input) {
  constexpr int kPlanes = kPlanesOfThread<kDropsLosers>;
  const bool takes_out_of_window = !kDropsLosers && plan.takes_out_of_window;
  for_each_flagged_item<!kOffsets>(tiling.items, report, [&](uint32_t item) {
    const auto own = owned_cell<kOffsets, kPlanes>(tiling, plan.planes, indices, item);
    auto gathered = gather<kOffsets>(
        tiling, plan, takes_out_of_window, report.errors, grad_output, indices, own);
    if constexpr (kDropsLosers) {
      drop_losers<kOffsets>(tiling.geometry, plan, indices, own, gathered.grad);
    }
#pragma unroll
    for (uint32_t u = 0; u < kPlanes; ++u) {
      if (u < own.planes) {
        grad_input[own.element[u]] = gathered.grad[u];
      }
    }
    return gathered.out_of_window;
  });
}

} // namespace maxunpool_cuda
