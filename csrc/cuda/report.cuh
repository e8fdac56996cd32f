// How the first kernel of a call tells what it found in the indices: to the second kernel, where
// it is needed; to the host, that an index lies outside its output plane.
#pragma once

#include "../geometry.h"
#include "atomics.cuh"
#include "divider.cuh"
#include "tiling.cuh"
#include "windows.cuh"

#include <cstdint>

namespace maxunpool_cuda {

// One per device, in its memory, where a flood of bad indices is looked up at no cost to others.
// The host looks at `ready` alone, without waiting; see error_records.cuh for its side.
struct ErrorRecord {
  uint32_t* ready;  // in host memory: set by who has claimed the record
  uint32_t claimed; // by the one thread that may fill in the rest, until the host has read it
  int64_t index;
  int64_t position; // in the pooled plane
  int64_t plane;    // in batch * channels
  int64_t out[3];   // output sizes
  int32_t rank;
  int32_t in_window; // the index is an offset in its window
};

// An index that names no output, of a pooled element, counted through the tensor.
template <class Offset>
__device__ inline void report_bad(
    ErrorRecord* error,
    const Geometry<Offset>& geometry,
    Offset element,
    bool in_window,
    int64_t index) {
  // All of this before the claim: then it takes fewer registers.
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

// Looks at the index of a pooled element, of that cell: reports it if it names no output, and
// answers whether it names one that the cell's window does not cover.
template <class Indices, class Offset>
__device__ inline bool is_stray(
    const Windows<Offset>& windows,
    ErrorRecord* error,
    const Indices& indices,
    Offset element,
    const Position<Offset>& cell) {
  const auto found = named_by(windows, indices, element, cell);
  if (!found.in_plane) {
    report_bad(error, windows.geometry, element, are_offsets(indices), indices[element]);
  }
  return found.in_plane && !found.in_window;
}

// What a first kernel reports to.
//
// It works in chunks of blockDim.x consecutive items, each done by one block, which writes
// stray[chunk]: nonzero if an index of the chunk's cells lies outside its own window, though in
// the plane. Nobody has to clear these flags beforehand, and their order is that of the slabs.
struct Report {
  uint32_t* stray;
  ErrorRecord* error;
};

// Calls visit(i) for this thread's items, under any grid and block size; visit answers whether an
// index is stray, if `notes`. Window offsets cannot be, and have no second kernel.
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
    if (threadIdx.x == 0 && report.stray != nullptr) {
      report.stray[chunk] = static_cast<uint32_t>(stray);
    }
  }
}

// The second kernel's side of it: which chunks hold items of a slab. A chunk that two slabs share
// speaks for both.
template <class Offset>
struct StrayNotes {
  const uint32_t* chunks;
  Divider<Offset> chunk_items; // items of a chunk
  Divider<Offset> slabs;       // that items are shared by: slab_items of them
  Offset slab_items;

  // This thread's part of the question whether one of the slabs [first, end) is stray.
  __device__ bool any(Offset first, Offset end, unsigned thread, unsigned threads) const {
    const Offset last = chunk_items.divide((slabs.divide(end - 1) + 1) * slab_items - 1);
    bool found = false;
    for (Offset chunk = chunk_items.divide(slabs.divide(first) * slab_items) + thread;
         chunk <= last; chunk += threads) {
      found |= chunks[chunk] != 0;
    }
    return found;
  }
};

} // namespace maxunpool_cuda
