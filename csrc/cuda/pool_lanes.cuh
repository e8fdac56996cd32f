// SPDX-License-Identifier: BSD-3-Clause
// Kernel of max pooling for large windows, where they are few: global pooling, above all. The
// comparison and the store are in pool_elements.cuh, the items in tiling.cuh.
//
// pool_lanes: some threads of a block, the lanes of a window, share it. An element has a number, in
// row-major order of its window. Of n lanes, each looks at every n-th element; then the candidates
// of the lanes are merged in shared memory, by halves. Two windows of 7 elements, with 4 lanes
// each:
//
//      number    0 1 2 3 4 5 6 | 0 1 2 3 4 5 6
//      element   3 8 2 8 5 0 6 | ..
//      threads   0 1 2 3 0 1 2 | 4 5 6 7 4 5 6
//
//      candidates of threads 0 to 3    {5, 4}  {8, 1}  {6, 6}  {8, 3}      {value, number}
//      merged with 2 threads further   {6, 6}  {8, 1}                      of equal values the
//      merged with 1 thread further    {8, 1}                              smaller number stays
//
//   So neighbouring threads read neighbouring elements. In a channels_last tensor these are
//   channels: neighbouring threads then have windows of neighbouring channels.
#pragma once

#include "../geometry.h"
#include "device.cuh"
#include "divider.cuh"
#include "pool_elements.cuh"
#include "tiling.cuh"

#include <algorithm>
#include <bit>
#include <cstdint>

namespace maxunpool_cuda {

constexpr int kMostLaneThreads = 8 * kThreads; // of a block; 1024, so each may have 64 registers

// How a block's threads share windows that have no dilation and lie in the input as a whole.
struct Lanes {
  // Loads of a lane that do not wait for each other.
  static constexpr int kAtOnce = 4;
  // Neighbouring channels that neighbouring threads read, at least: 8 floats are the 32 bytes that
  // memory moves as a whole.
  static constexpr int64_t kNeighbours = 8;
  // Elements of a window that are worth lanes: of fewer, a thread reads 4 at once, and soon is
  // done.
  static constexpr int64_t kFewestElements = 25;
  // Threads that an H100 runs at once, roughly. So many windows need no lanes.
  static constexpr int64_t kEnoughThreads = 1 << 18;

  uint32_t count;           // lanes of a window: a power of two
  uint32_t windows;         // how many a block does at once; it has count * windows threads
  uint32_t elements;        // of a window
  bool are_neighbours;      // the lanes of a window are neighbouring threads
  bool is_run;              // the elements of a window lie side by side
  Divider<uint32_t> height; // of a window
  Divider<uint32_t> width;

  // Example: 512 windows of 7x7 = 49 elements, contiguous. 49 / 8 is 7 lanes that are useful, and
  // 2^18 / 512 = 512 would be wanted, so count is 8, and windows is 128 / 8 = 16: 32 blocks of 128
  // threads, and thread 1 is lane 1 of window 0. In channels_last, with 64 channels, the numbers
  // are the same, but thread 1 is lane 0 of window 1, which is that of the next channel.
  explicit Lanes(const Geometry<int64_t>& geometry)
      : are_neighbours(geometry.inner < kNeighbours),
        height(Divider<uint32_t>(geometry.axis[1].kernel)),
        width(Divider<uint32_t>(geometry.axis[2].kernel)) {
    const Axis<int64_t>& depth = geometry.axis[0];
    const Axis<int64_t>& rows = geometry.axis[1];
    const Axis<int64_t>& row = geometry.axis[2];
    const int64_t volume = depth.kernel * rows.kernel * row.kernel;
    elements = static_cast<uint32_t>(volume);
    const bool has_whole_rows = row.kernel == row.out || rows.kernel * depth.kernel == 1;
    is_run = has_whole_rows && (rows.kernel == rows.out || depth.kernel == 1);

    const int64_t neighbours = are_neighbours ? 1 : kNeighbours;
    const int64_t useful = divide_up(volume, 2 * kAtOnce); // then a lane reads kAtOnce twice
    const int64_t wanted = divide_up(kEnoughThreads, geometry.outer * geometry.in_image());
    count = std::bit_ceil(static_cast<uint32_t>(std::min(useful, wanted)));
    count = std::min<uint32_t>(count, kMostLaneThreads / neighbours);
    windows = std::max<uint32_t>(neighbours, kThreads / count);
  }

  __device__ uint32_t lane(uint32_t thread) const {
    return are_neighbours ? thread % count : thread / windows;
  }
  __device__ uint32_t window(uint32_t thread) const {
    return are_neighbours ? thread / count : thread % windows;
  }
  // From a thread to that of the next lane of its window.
  __device__ uint32_t to_next_lane() const { return are_neighbours ? 1 : windows; }

  // Position in the plane of the element with this number, counted from the window's first element.
  __device__ uint32_t position(const Geometry<uint32_t>& geometry, uint32_t number) const {
    if (is_run) {
      return number;
    }
    uint32_t x = number;
    uint32_t y = split(x, width);
    const uint32_t z = split(y, height);
    return (z * geometry.axis[1].out + y) * geometry.axis[2].out + x;
  }
};

// The candidate of a lane, whose index is the element's number. `window` is the address of the
// window's first element.
template <class T>
__device__ inline Candidate<T> candidate_of_lane(
    const Lanes& lanes, const Geometry<uint32_t>& geometry, const T* window, uint32_t lane) {
  Candidate<T> best{};
  for (uint32_t first = lane; first < lanes.elements; first += Lanes::kAtOnce * lanes.count) {
    Candidate<T> next[Lanes::kAtOnce];
#pragma unroll
    for (int k = 0; k < Lanes::kAtOnce; ++k) {
      // In place of those beyond the window, its last element is read again.
      const uint32_t wanted = first + k * lanes.count;
      const uint32_t number = wanted < lanes.elements ? wanted : lanes.elements - 1;
      const T* address = window + lanes.position(geometry, number) * geometry.inner;
      next[k] = {Element<T>::of(*address), number};
    }
#pragma unroll
    for (int k = 0; k < Lanes::kAtOnce; ++k) {
      best.update(next[k].value, next[k].index, k == 0 && first == lane);
    }
  }
  return best;
}

// Merges the candidates of the block's threads, [threads], window by window, into the one of each
// window's lane 0. All threads of the block call it.
template <class T>
__device__ inline void merge_lanes(const Lanes& lanes, Candidate<T>* candidates, uint32_t lane) {
  for (uint32_t half = lanes.count / 2; half > 0; half /= 2) {
    __syncthreads();
    if (lane < half) {
      candidates[threadIdx.x].merge(candidates[threadIdx.x + half * lanes.to_next_lane()]);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kMostLaneThreads, 1024 / kMostLaneThreads) pool_lanes(
    Tiling<uint32_t> tiling, const T* __restrict__ input, PoolResult<T> result, Lanes lanes) {
  auto* const candidates = shared_memory<Candidate<T>>();
  const Geometry<uint32_t>& geometry = tiling.geometry;
  const uint32_t lane = lanes.lane(threadIdx.x);
  const uint32_t window = lanes.window(threadIdx.x);
  for (uint32_t begin = blockIdx.x * lanes.windows; begin < tiling.items;
       begin += gridDim.x * lanes.windows) {
    const bool is_item = begin + window < tiling.items; // else the thread does the last item, too
    const uint32_t item = is_item ? begin + window : tiling.items - 1;
    const auto [outer, cell, channel] = tiling.item(item);
    const auto [front, top, left] = tiling.window_start(cell).at;
    const uint32_t first = (front * geometry.axis[1].out + top) * geometry.axis[2].out + left;
    const T* address = input + ((outer * tiling.out_plane + first) * geometry.inner + channel);
    candidates[threadIdx.x] = candidate_of_lane(lanes, geometry, address, lane);
    merge_lanes(lanes, candidates, lane);
    if (lane == 0 && is_item) {
      Candidate<T> best[1] = {candidates[threadIdx.x]};
      if (!result.takes_offsets()) {
        best[0].index = first + lanes.position(geometry, best[0].index);
      }
      result.store_candidates(tiling.pooled(outer, cell, channel), best);
    }
    __syncthreads(); // the candidates of the next windows overwrite these
  }
}

} // namespace maxunpool_cuda
