// Reports of kernels: to the second kernel, that an index is stray; to the host, that one is bad.
#pragma once

#include "../geometry.h"
#include "divider.cuh"
#include "indices.cuh"
#include "tiling.cuh"

#include <cstdint>

namespace maxunpool_cuda {

// Loads what another thread may write meanwhile.
__device__ inline uint32_t load_relaxed(const uint32_t* from) {
#ifdef __CUDA_ARCH__
  return *static_cast<const volatile uint32_t*>(from);
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

// A bad index, in host memory that the device can write.
struct BadIndex {
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
  BadIndex found[2]; // of even and of odd epochs
};

// Where kernels report bad indices. Of all that the calls of one epoch find, one is reported: one
// error stands for all of them.
struct Errors {
  static constexpr uint32_t kUnknown = ~0u;
  ErrorRecord* record;
  uint32_t* claimed; // in device memory: 1 + the last epoch that has a report
  uint32_t epoch;    // of the call, or kUnknown for one that a graph will run later

  // Reports the bad index of a pooled element, which is counted through the tensor.
  template <class Offset>
  __device__ void report(
      const Geometry<Offset>& geometry, Offset element, bool in_window, int64_t index) const {
    const uint32_t now = (epoch == kUnknown ? load_relaxed(&record->epoch) : epoch) + 1;
    if (load_relaxed(claimed) >= now || atomicMax(claimed, now) >= now) {
      return;
    }
    BadIndex& found = record->found[(now - 1) % 2];
    found.in_window = in_window;
    found.index = index;
    found.element = static_cast<int64_t>(element);
    found.geometry.rank = geometry.rank;
    found.geometry.inner = static_cast<int64_t>(geometry.inner);
    for (int a = 0; a < 3; ++a) {
      found.geometry.axis[a].in = static_cast<int64_t>(geometry.axis[a].in);
      found.geometry.axis[a].out = static_cast<int64_t>(geometry.axis[a].out);
    }
    store_for_host(&found.ready, now);
  }
};

// Where a kernel reports to. The first kernel works in chunks of consecutive items. The one block
// that does a chunk writes stray_flags[chunk]: nonzero if an index of the chunk's cells is stray.
// Every flag is written, and flags are in the order of the slabs.
struct Report {
  uint32_t* stray_flags; // null: no index can be stray
  Errors errors;
};

// Decodes the index of a pooled element, whose window begins at `start`, and reports it if it is
// bad.
template <class Offset>
__device__ inline Decoded<Offset> decoded_or_reported(
    const Decoder<Offset>& decoder, const Errors& errors, const AnyIndices& indices, Offset element,
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
// index is stray. Chunks have blockDim.x items.
template <class Visit>
__device__ inline void for_each_flagged_item(
    uint32_t items, uint32_t* stray_flags, const Visit& visit) {
  for (uint32_t chunk = blockIdx.x; chunk * blockDim.x < items; chunk += gridDim.x) {
    const uint32_t i = chunk * blockDim.x + threadIdx.x;
    const bool stray = i < items && visit(i);
    if (stray_flags != nullptr) {
      const int any = __syncthreads_or(stray);
      if (threadIdx.x == 0) {
        stray_flags[chunk] = static_cast<uint32_t>(any);
      }
    }
  }
}

// Stray flags, as the second kernel reads them. A chunk that two slabs share counts for both.
struct StrayFlags {
  const uint32_t* flags;
  Divider<uint64_t> chunk_items; // items of a chunk
  Divider<uint64_t> slabs;       // that threads do together, see Planes
  uint64_t slab_items;           // items of these slabs

  // Whether a chunk of slabs [first, end) is flagged, of those that this thread reads.
  __device__ bool any(uint64_t first, uint64_t end) const {
    const uint64_t begin = chunk_items.divide(slabs.divide(first) * slab_items);
    const uint64_t last = chunk_items.divide((slabs.divide(end - 1) + 1) * slab_items - 1);
    bool found = false;
    for (uint64_t i = begin + threadIdx.x; i <= last; i += blockDim.x) {
      found |= flags[i] != 0;
    }
    return found;
  }
};

} // namespace maxunpool_cuda
