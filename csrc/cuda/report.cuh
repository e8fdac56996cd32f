// SPDX-License-Identifier: BSD-3-Clause
// Reports of kernels: to the fix-up kernel, that an index is out of window; to the host, that one
// is out of bounds.
#pragma once

#include "../geometry.h"
#include "divider.cuh"
#include "indices.cuh"
#include "tiling.cuh"

#include <cstdint>

namespace maxunpool_cuda {

// Loads what another thread may write meanwhile.
template <class T>
__device__ inline T load_relaxed(const T* from) {
#ifdef __CUDA_ARCH__
  return *static_cast<const volatile T*>(from);
#else
  return __atomic_load_n(from, __ATOMIC_RELAXED);
#endif
}

// Stores what the host waits for, after all that this thread has stored before.
__device__ inline void store_for_host(uint32_t* to, uint32_t value) {
#ifdef __CUDA_ARCH__
  __threadfence_system();
  *static_cast<volatile uint32_t*>(to) = value;
#else
  __atomic_store_n(to, value, __ATOMIC_RELEASE);
#endif
}

// An out-of-bounds index, in host memory that the device can write.
struct OutOfBoundsIndex {
  uint32_t ready; // 1 + the epoch of the report, once the rest is there
  bool in_window; // the index is a window offset
  int64_t index;
  int64_t element;            // of the pooled tensor
  Geometry<int64_t> geometry; // as far as the message names it
};

// Record of a device, in host memory that the device can access. The host counts `epoch` up when it
// raises an error; each epoch has room for one report. See error_records.cuh.
struct ErrorRecord {
  uint32_t epoch;
  OutOfBoundsIndex found[2]; // of even and of odd epochs
};

// Where kernels report out-of-bounds indices. Of all that the calls of one epoch find, one is
// reported: one error stands for all of them.
struct Errors {
  static constexpr uint32_t kUnknown = ~0u;
  ErrorRecord* record;
  uint32_t* claimed;     // in device memory: 1 + the last epoch that has a report
  uint32_t epoch;        // of the call, or kUnknown for one that a graph will run later
  int64_t first_element; // number, in the whole pooled tensor, of the launch's first element

  // The errors of a launch that works on the elements from this one on.
  Errors from(int64_t element) const {
    Errors errors = *this;
    errors.first_element += element;
    return errors;
  }

  // Reports the out-of-bounds index of a pooled element, which is counted from the launch's first
  // one.
  template <class Offset>
  __device__ void report(
      const Geometry<Offset>& geometry, Offset element, bool in_window, int64_t index) const {
    const uint32_t now = (epoch == kUnknown ? load_relaxed(&record->epoch) : epoch) + 1;
    if (load_relaxed(claimed) >= now || atomicMax(claimed, now) >= now) {
      return;
    }
    OutOfBoundsIndex& found = record->found[(now - 1) % 2];
    found.in_window = in_window;
    found.index = index;
    found.element = first_element + static_cast<int64_t>(element);
    found.geometry.rank = geometry.rank;
    found.geometry.inner = static_cast<int64_t>(geometry.inner);
    for (int a = 0; a < 3; ++a) {
      found.geometry.axis[a].in = static_cast<int64_t>(geometry.axis[a].in);
      found.geometry.axis[a].out = static_cast<int64_t>(geometry.axis[a].out);
    }
    store_for_host(&found.ready, now);
  }
};

// One word of the device that tells most fix-up kernels at once that they have nothing to do: it
// holds the largest number of all launches that found an out-of-window index. Launches have numbers
// from 1 on, no two the same. If the word is smaller than a launch's number, that launch found
// none. If it is not, it may be of another launch, on another stream, or of an earlier replay of
// the same graph: then the launch's flags tell.
struct OutOfWindowLaunches {
  unsigned long long* largest; // only grows
  unsigned long long launch;   // the number of this launch

  __device__ void add() const {
    if (load_relaxed(largest) < launch) {
      atomicMax(largest, launch);
    }
  }
  __device__ bool may_have() const { return load_relaxed(largest) >= launch; }
};

// Where a kernel reports to. The fast kernel works in chunks of consecutive items. The one block
// that does a chunk writes out_of_window_flags[chunk]: nonzero if an index of the chunk's cells is
// out of window. Every flag is written, and flags are in the order of the images.
struct Report {
  uint32_t* out_of_window_flags; // null: no index can be out of window
  OutOfWindowLaunches out_of_window_launches;
  Errors errors;

  // Called by one thread of the block that did the chunk.
  __device__ void write_flag(uint64_t chunk, bool is_out_of_window) const {
    out_of_window_flags[chunk] = is_out_of_window ? 1 : 0;
    if (is_out_of_window) {
      out_of_window_launches.add();
    }
  }
};

// Decodes the index of a pooled element, whose window begins at `start`, and reports it if it is
// out of bounds.
template <class Offset>
__device__ inline Decoded<Offset> decoded_or_reported(
    const Decoder<Offset>& decoder,
    const Errors& errors,
    const AnyIndices& indices,
    Offset element,
    const Position<Offset>& start) {
  const int64_t index = indices[element];
  const auto unsigned_index = index_as<Offset>(static_cast<uint64_t>(index));
  const auto found = indices.are_offsets() ? decoded<true>(decoder, unsigned_index, start, true)
                                           : decoded<false>(decoder, unsigned_index, start, true);
  if (!found.in_plane) {
    errors.report(decoder.geometry, element, indices.are_offsets(), index);
  }
  return found;
}

// Calls visit(i) for this thread's items, under any grid and block size; visit returns whether an
// index is out of window. Chunks have blockDim.x items. Unless kMayLeaveWindow, no flags are
// written.
template <bool kMayLeaveWindow, class Visit>
__device__ inline void for_each_flagged_item(
    uint32_t items, const Report& report, const Visit& visit) {
  for (uint32_t chunk = blockIdx.x; chunk * blockDim.x < items; chunk += gridDim.x) {
    const uint32_t i = chunk * blockDim.x + threadIdx.x;
    const bool out_of_window = i < items && visit(i);
    if (kMayLeaveWindow && report.out_of_window_flags != nullptr) {
      const int any = __syncthreads_or(out_of_window);
      if (threadIdx.x == 0) {
        report.write_flag(chunk, any != 0);
      }
    }
  }
}

// Out-of-window flags, as the fix-up kernel reads them. A chunk that two images share counts for
// both.
struct OutOfWindowFlags {
  const uint32_t* flags;
  OutOfWindowLaunches launches;
  Divider<uint64_t> chunk_items; // items of a chunk
  Divider<uint64_t> images;      // that threads do together, see Planes
  uint64_t image_items;          // items of these images

  // Whether a chunk of the image is flagged, of those that this thread reads. It reads kAtOnce
  // flags before it looks at one, since each wait for memory takes longer than all else here.
  __device__ bool any(uint64_t image) const {
    constexpr uint32_t kAtOnce = 8;
    const uint64_t first_item = images.divide(image) * image_items;
    const uint64_t begin = chunk_items.divide(first_item);
    const uint64_t last = chunk_items.divide(first_item + image_items - 1);
    uint32_t found = 0;
    for (uint64_t i = begin + threadIdx.x; i <= last; i += kAtOnce * blockDim.x) {
#pragma unroll
      for (uint32_t k = 0; k < kAtOnce; ++k) {
        const uint64_t later = i + k * blockDim.x;
        found |= flags[later <= last ? later : i];
      }
    }
    return found != 0;
  }
};

} // namespace maxunpool_cuda
