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
  const auto found = named_by(decoder, indices, element, cell);
  if (!found.in_plane) {
    report_bad(error, decoder.geometry, element, are_offsets(indices), indices[element]);
  }
  return found.in_plane && !found.in_window;
}

// Addresses that a first kernel reports to.
//
// It works in chunks of blockDim.x consecutive items, each done by one block, which writes
// notes[chunk], a note: nonzero if an index of the chunk's cells is stray. Notes need not be
// cleared beforehand, and their order is that of the slabs.
struct Report {
  uint32_t* notes;
  ErrorRecord* error;
};

// Calls visit(i) for this thread's items, under any grid and block size. If `notes`, visit returns
// whether an index is stray. Window offsets cannot be.
template <class Index, class Offset, class Visit>
__device__ inline void for_each_chunk(
    Offset items, const Report& report, const Visit& visit, bool notes = true) {
  if (kIsWindowOffset<Index> || !notes) {
    for_each_item(items, visit);
    return;
  }
  for (Offset chunk = blockIdx.x; chunk * blockDim.x < items; chunk += gridDim.x) {
    const Offset i = chunk * blockDim.x + threadIdx.x;
    const int stray = __syncthreads_or(i < items && visit(i));
    if (threadIdx.x == 0 && report.notes != nullptr) {
      report.notes[chunk] = static_cast<uint32_t>(stray);
    }
  }
}

// How a first kernel notes: the items of a chunk, and the slabs that an item is of, which
// slab_items items share.
struct Noted {
  int64_t items, slab_items, slabs;
};

// Notes, as the second kernel reads them: which chunks hold items of a slab. A chunk that two slabs
// share counts for both.
template <class Offset>
struct StrayNotes {
  const uint32_t* notes;
  Divider<Offset> chunk_items; // see Noted
  Divider<Offset> slabs;
  Offset slab_items;

  // Whether slabs [first, end) are noted as stray, as far as this thread looks.
  __device__ bool any(Offset first, Offset end) const {
    const Offset last = chunk_items.divide((slabs.divide(end - 1) + 1) * slab_items - 1);
    bool found = false;
    for (Offset chunk = chunk_items.divide(slabs.divide(first) * slab_items) + threadIdx.x;
         chunk <= last; chunk += blockDim.x) {
      found |= notes[chunk] != 0;
    }
    return found;
  }
};

} // namespace maxunpool_cuda
