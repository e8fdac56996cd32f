// SPDX-License-Identifier: BSD-3-Clause
// Reports of kernels: to the fix-up kernel, that an index is out of window; to the host, that one
// is out of bounds. Both are decoded as in indices.cuh. The host's side is in error_records.cuh.
//
// Out of window, by example. A kernel of 300 items has blocks of 128 threads, so three chunks, and
// four images of 75 items. Item 130 meets an index that is out of window:
//
//   fast kernel     the block of chunk 1 writes flags[1] = 1; those of chunks 0 and 2 write 0
//   fix-up kernel   images 1 (items 75 to 149), 2 and 3 have items in chunk 1 (128 to 255), so they
//                   are computed anew; image 0 has none, and stays
//
// Out of bounds, by example. Two calls, A and B, meet such an index:
//
//   A runs in epoch 0      claimed = 1, reports[0] is written, then reports[0].ready = 1
//   the host calls B       epoch 0 has a report: it begins epoch 1 and raises the error
//   B is called again      it runs in epoch 1: claimed = 2, reports[1] and its ready = 2
//   a late kernel of A     claims epoch 0, but claimed is not below 1: it reports nothing
#pragma once

#include "../geometry.h"
#include "device.cuh"
#include "divider.cuh"
#include "indices.cuh"

#include <cstdint>

namespace maxunpool_cuda {

// An out-of-bounds index, in host memory that the device can write.
struct OutOfBoundsIndex {
  uint32_t ready;        // 1 + the epoch of the report, once the rest is there
  bool is_window_offset; // whether the index is one
  int64_t index;
  int64_t element;            // of the pooled tensor
  Geometry<int64_t> geometry; // as far as the message names it
};

// Record of a device, in host memory that the device can access. The host counts `epoch` up when it
// raises an error; each epoch has room for one report.
struct ErrorRecord {
  uint32_t epoch;
  OutOfBoundsIndex reports[2]; // of even and of odd epochs
};

// Where kernels report out-of-bounds indices. Of all that the calls of one epoch meet, one is
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
      const Geometry<Offset>& geometry,
      Offset element,
      bool is_window_offset,
      int64_t index) const {
    const uint32_t claim = (epoch == kUnknown ? load_relaxed(&record->epoch) : epoch) + 1;
    // `claimed` only grows, so the first thread of an epoch passes, and no thread of an epoch that
    // already has a report. Without the first test, all threads would do the atomic operation.
    if (load_relaxed(claimed) >= claim || atomicMax(claimed, claim) >= claim) {
      return;
    }
    OutOfBoundsIndex& report = record->reports[(claim - 1) % 2];
    report.is_window_offset = is_window_offset;
    report.index = index;
    report.element = first_element + static_cast<int64_t>(element);
    report.geometry.rank = geometry.rank;
    report.geometry.inner = static_cast<int64_t>(geometry.inner);
    for (int a = 0; a < 3; ++a) {
      report.geometry.axis[a].in = static_cast<int64_t>(geometry.axis[a].in);
      report.geometry.axis[a].out = static_cast<int64_t>(geometry.axis[a].out);
    }
    store_for_host(&report.ready, claim);
  }
};

// One word of the device that tells most fix-up kernels at once that they have nothing to do: the
// largest number of all launches that met an out-of-window index. Launches have numbers from 1 on,
// no two the same. If the word is smaller than a launch's number, that launch met none. If it is
// not, the word may come from another launch, on another stream, or from an earlier replay of the
// same graph: then the launch's flags tell. Launch says which launches of a graph have a word of
// their own.
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
// out of window. Every flag is written. Items are numbered image by image, so the chunks of an
// image follow each other; OutOfWindowFlags relies on that.
struct Report {
  uint32_t* out_of_window_flags; // null: the kernel writes none
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

// Decodes the index of a pooled element, whose window begins at `start`, and reports the index if
// it is out of bounds.
template <class Offset>
__device__ inline Decoded<Offset> decoded_or_reported(
    const Decoder<Offset>& decoder,
    const Errors& errors,
    const AnyIndices& indices,
    Offset element,
    const Position<Offset>& start) {
  const int64_t index = indices[element];
  const auto unsigned_index = index_as<Offset>(static_cast<uint64_t>(index));
  const auto result = decoded(decoder, indices.are_offsets(), unsigned_index, start);
  if (!result.in_plane) {
    errors.report(decoder.geometry, element, indices.are_offsets(), index);
  }
  return result;
}

// Calls visit(i) for this thread's items, under any grid of at most 2^31 threads; visit returns
// whether an index is out of window. Chunks have blockDim.x items. Unless kMayLeaveWindow, no flags
// are written.
template <bool kMayLeaveWindow, class Visit>
__device__ inline void for_each_flagged_item(
    uint32_t items, const Report& report, const Visit& visit) {
  for (uint32_t chunk = blockIdx.x; chunk * blockDim.x < items; chunk += gridDim.x) {
    const uint32_t i = chunk * blockDim.x + threadIdx.x;
    const bool out_of_window = i < items && visit(i);
    if (kMayLeaveWindow && report.out_of_window_flags != nullptr) {
      const int any_thread = __syncthreads_or(out_of_window);
      if (threadIdx.x == 0) {
        report.write_flag(chunk, any_thread != 0);
      }
    }
  }
}

// Out-of-window flags, as the fix-up kernel reads them. A chunk that two images share counts for
// both. Example: chunks have 128 items, and images 75 (image_items). Items 150 to 224 are image
// 2's: all are in chunk 1.
struct OutOfWindowFlags {
  uint32_t* flags; // of the chunks
  OutOfWindowLaunches launches;
  Divider<uint64_t> chunk_items; // items of a chunk
  uint64_t image_items;          // items of an image

  // Whether a chunk of the image is flagged, among the chunks that this thread reads. Together, the
  // threads of a block read all chunks of the image.
  __device__ bool any(uint64_t image) const {
    // Flags that a thread reads before it looks at one, since waiting for memory takes longer than
    // all else here. Those beyond the last chunk are replaced by the first one, read again.
    constexpr uint32_t kAtOnce = 8;
    const uint64_t first_item = image * image_items;
    const uint64_t first_chunk = chunk_items.divide(first_item);
    const uint64_t last_chunk = chunk_items.divide(first_item + image_items - 1);
    uint32_t any_flag = 0;
    for (uint64_t chunk = first_chunk + threadIdx.x; chunk <= last_chunk;
         chunk += kAtOnce * blockDim.x) {
#pragma unroll
      for (uint32_t k = 0; k < kAtOnce; ++k) {
        const uint64_t later_chunk = chunk + k * blockDim.x;
        any_flag |= flags[later_chunk <= last_chunk ? later_chunk : chunk];
      }
    }
    return any_flag != 0;
  }
};

} // namespace maxunpool_cuda
