// SPDX-License-Identifier: BSD-3-Clause
// Kernel of max pooling for large windows, where they are few: global pooling, above all.
//
// pool_lanes: some threads of a block, the lanes of a window, share it. A tap is named by its
// number, in row-major order. Each lane looks at every n-th tap of n lanes, and then the best of
// the lanes are merged in shared memory, by halves. Two windows of 7 taps, with 4 lanes each:
//
//      taps      0 1 2 3 4 5 6 | 0 1 2 3 4 5 6
//      threads   0 1 2 3 0 1 2 | 4 5 6 7 4 5 6
//
//   So neighbouring threads read neighbouring elements. In a channels_last tensor these are
//   channels: neighbouring threads then have windows of neighbouring channels.
#pragma once

#include "../geometry.h"
#include "divider.cuh"
#include "pool_taps.cuh"
#include "slots.cuh"
#include "tiling.cuh"

#include <algorithm>
#include <bit>
#include <cstdint>

namespace maxunpool_cuda {

constexpr int kMostLaneThreads = 8 * kThreads; // of a block; 1024, so each may have 64 registers

// How a block's threads share windows that have no dilation and lie in the input as a whole.
struct Lanes {
  static constexpr int kAtOnce = 4; // loads of a lane that do not wait for each other
  // Channels that neighbouring threads read at least: 32 bytes of float32, which memory moves as a
  // whole.
  static constexpr int64_t kNeighbours = 8;
  // Taps of a window that are worth lanes. Fewer would be two or three a lane.
  static constexpr int64_t kFewestTaps = 25;
  // Threads that an H100 runs at once, roughly. So many windows need no lanes.
  static constexpr int64_t kEnough = 1 << 18;

  uint32_t count;                  // of a window; a power of two
  uint32_t columns;                // windows of a block at once
  uint32_t taps;                   // of a window
  bool adjoin;                     // the lanes of a window are neighbouring threads
  bool is_run;                     // the taps of a window lie side by side
  Divider<uint32_t> height, width; // of a window

  explicit Lanes(const Geometry<int64_t>& g) : adjoin(g.inner < kNeighbours) {
    const auto& [depth, rows, row] = g.axis;
    const int64_t volume = depth.kernel * rows.kernel * row.kernel;
    const int64_t neighbours = adjoin ? 1 : kNeighbours;
    const int64_t windows = g.outer * g.in_image();
    const int64_t useful = divide_up(volume, 2 * kAtOnce);
    const int64_t wanted = divide_up(kEnough, windows);
    count = std::bit_ceil(static_cast<uint32_t>(std::min(useful, wanted)));
    count = std::min<uint32_t>(count, kMostLaneThreads / neighbours);
    columns = std::max<uint32_t>(neighbours, kThreads / count);
    taps = static_cast<uint32_t>(volume);
    const bool has_whole_rows = row.kernel == row.out || rows.kernel * depth.kernel == 1;
    is_run = has_whole_rows && (rows.kernel == rows.out || depth.kernel == 1);
    height = Divider<uint32_t>(rows.kernel);
    width = Divider<uint32_t>(row.kernel);
  }

  // Position of a tap, from that of the window's first one on.
  __device__ uint32_t position(const Geometry<uint32_t>& g, uint32_t tap) const {
    if (is_run) {
      return tap;
    }
    uint32_t x = tap;
    uint32_t y = split(x, width);
    const uint32_t z = split(y, height);
    return (z * g.axis[1].out + y) * g.axis[2].out + x;
  }
};

template <class T>
__global__ void __launch_bounds__(kMostLaneThreads, 1024 / kMostLaneThreads) pool_lanes(
    Tiling<uint32_t> tiling, const T* __restrict__ input, Pooled<T> pooled, Lanes lanes) {
  auto* const shared = shared_memory<Best<T>>();
  const Geometry<uint32_t>& g = tiling.geometry;
  const uint32_t lane = lanes.adjoin ? threadIdx.x % lanes.count : threadIdx.x / lanes.columns;
  const uint32_t column = lanes.adjoin ? threadIdx.x / lanes.count : threadIdx.x % lanes.columns;
  const uint32_t to_next_lane = lanes.adjoin ? 1 : lanes.columns;
  for (uint32_t begin = blockIdx.x * lanes.columns; begin < tiling.items;
       begin += gridDim.x * lanes.columns) {
    const bool is_item = begin + column < tiling.items;
    const uint32_t i = is_item ? begin + column : tiling.items - 1;
    const auto [outer, p, channel] = tiling.item(i);
    const auto [front, top, left] = tiling.window_start(p).at;
    const uint32_t first = (front * g.axis[1].out + top) * g.axis[2].out + left;
    const T* window = input + ((outer * tiling.out_plane + first) * g.inner + channel);
    Best<T> best{};
    for (uint32_t tap = lane; tap < lanes.taps; tap += Lanes::kAtOnce * lanes.count) {
      Best<T> next[Lanes::kAtOnce];
#pragma unroll
      for (int k = 0; k < Lanes::kAtOnce; ++k) { // the last tap stands for those beyond it
        const uint32_t wanted = tap + k * lanes.count;
        const uint32_t name = wanted < lanes.taps ? wanted : lanes.taps - 1;
        next[k] = {Tap<T>::of(window[lanes.position(g, name) * g.inner]), name};
      }
#pragma unroll
      for (int k = 0; k < Lanes::kAtOnce; ++k) {
        best.look_at(next[k].tap, next[k].name, k == 0 && tap == lane);
      }
    }
    shared[threadIdx.x] = best;
    for (uint32_t half = lanes.count / 2; half > 0; half /= 2) {
      __syncthreads();
      if (lane < half) {
        shared[threadIdx.x].merge(shared[threadIdx.x + half * to_next_lane]);
      }
    }
    if (lane == 0 && is_item) {
      Best<T> found[1] = {shared[threadIdx.x]};
      if (!pooled.takes_offsets()) {
        found[0].name = first + lanes.position(g, found[0].name);
      }
      pooled.store_best(tiling.pooled(outer, p, channel), found);
    }
    __syncthreads(); // the next windows' best overwrite these
  }
}

} // namespace maxunpool_cuda
