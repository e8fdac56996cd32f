// Reports of a first kernel: to the second kernel, that an index is stray; to the host, that one is
// bad.
#pragma once

#include "../geometry.h"
#include "atomics.cuh"
#include "decoder.cuh"
#include "divider.cuh"
#include "tiling.cuh"

#include <cstdint>

namespace maxunpool_cuda {

// Error record of a device, in its memory, where many bad indices cost little to look up. The host
// looks at `ready` alone, without waiting; see error_records.cuh.
struct ErrorRecord {
  uint32_t* ready;  // in host memory: set when the rest is filled in
  uint32_t claimed; // by the one thread that may fill in the rest, until the host has read it
  int64_t index;
  int64_t position; // in the pooled plane
  int64_t plane;    // in batch * channels
  int64_t out[3];   // output sizes
  int32_t rank;
  int32_t in_window; // the index is a window offset
};

// Reports the bad index of a pooled element, which is counted through the tensor.
template <class Offset>
__device__ inline void report_bad(
    ErrorRecord* error, const Geometry<Offset>& geometry, Offset element, bool in_window,
    int64_t index) {
  // Computed before the claim, which takes fewer registers.
  const Offset cell = element / geometry.inner, outer = cell / geometry.in_plane();
  const Offset position = cell - outer * geometry.in_plane();
  const Offset channel = element - cell * geometry.inner;
  if (load_relaxed(&error->claimed) != 0 || atomicExch(&error->claimed, 1u) != 0) {
    return;
  }
  error->index = index;
  error->position = static_cast<int64_t>(position);
  error->plane = static_cast<int64_t>(outer * geometry.inner + channel);
  for (int a = 0; a < 3; ++a) {
    error->out[a] = static_cast<int64_t>(geometry.axis[a].out);
  }
  error->rank = geometry.rank;
  error->in_window = in_window ? 1 : 0;
  store_for_host(error->ready, 1u);
}

// Whether the index of a pooled element, of that cell, is stray. Reports it if it is bad.
template <class Indices, class Offset>
__device__ inline bool is_stray(
    const Decoder<Offset>& decoder, ErrorRecord* error, const Indices& indices, Offset element,
    const Position<Offset>& cell) {
  const auto found = decoded_at(decoder, indices, element, cell);
  if (!found.in_plane) {
    report_bad(error, decoder.geometry, element, are_offsets(indices), indices[element]);
  }
  return found.in_plane && !found.in_window;
}

// Addresses that a first kernel reports to.
//
// The kernel works in chunks of blockDim.x consecutive items. The one block that does a chunk
// writes stray_flags[chunk]: nonzero if an index of the chunk's cells is stray. Every flag is
// written, and flags are in the order of the slabs.
struct Report {
  uint32_t* stray_flags;
  ErrorRecord* error;
};

// Calls visit(i) for this thread's items, under any grid and block size. If `finds_stray`, visit
// returns whether an index is stray. Window offsets cannot be.
template <class Index, class Offset, class Visit>
__device__ inline void for_each_chunk(
    Offset items, const Report& report, const Visit& visit, bool finds_stray = true) {
  if (kIsWindowOffset<Index> || !finds_stray) {
    for_each_item(items, visit);
    return;
  }
  for (Offset chunk = blockIdx.x; chunk * blockDim.x < items; chunk += gridDim.x) {
    const Offset i = chunk * blockDim.x + threadIdx.x;
    const int stray = __syncthreads_or(i < items && visit(i));
    if (threadIdx.x == 0 && report.stray_flags != nullptr) {
      report.stray_flags[chunk] = static_cast<uint32_t>(stray);
    }
  }
}

// What the stray flags of a first kernel belong to: a flag to so many items, and so many slabs to
// slab_items items.
struct FlagLayout {
  int64_t items, slab_items, slabs;
};

// Stray flags, as the second kernel reads them: which chunks hold items of a slab. A chunk that two
// slabs share counts for both.
template <class Offset>
struct StrayFlags {
  const uint32_t* flags;
  Divider<Offset> chunk_items; // see FlagLayout
  Divider<Offset> slabs;
  Offset slab_items;

  // Whether slabs [first, end) are flagged, as far as this thread looks.
  __device__ bool any(Offset first, Offset end) const {
    const Offset last = chunk_items.divide((slabs.divide(end - 1) + 1) * slab_items - 1);
    bool found = false;
    for (Offset chunk = chunk_items.divide(slabs.divide(first) * slab_items) + threadIdx.x;
         chunk <= last; chunk += blockDim.x) {
      found |= flags[chunk] != 0;
    }
    return found;
  }
};

} // namespace maxunpool_cuda
