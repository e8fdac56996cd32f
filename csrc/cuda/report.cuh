// How the first kernel of a call tells what it found in the indices: to the second kernel, which
// slabs need it; to the host, that an index lies outside its output plane.
#pragma once

#include "../geometry.h"
#include "atomics.cuh"

#include <cstdint>

namespace maxunpool_cuda {

// One per device, in host memory that the device can write: the host reads it without waiting.
struct ErrorRecord {
  uint32_t claimed; // by the one kernel that may fill in the rest
  uint32_t ready;   // set last by the kernel; the host clears both
  int64_t index;
  int64_t position; // in the pooled plane
  int64_t plane;    // in batch * channels
  int64_t out[3];   // output sizes
  int32_t rank;
};

// The irregular units of one call, zeroed before it but for `list`. A unit is a block of up to
// kUnitChannels channels of a slab: one plane of a contiguous tensor.
constexpr int kUnitChannels = 32;

struct Irregular {
  uint32_t* has_bad;
  uint32_t* count;  // of the units listed
  uint32_t* listed; // per unit
  uint64_t* list;   // units, in no order
};

// An index outside its output plane, and where it was read.
template <class Offset>
struct Bad {
  bool found = false;
  int64_t index = 0;
  Offset outer = 0;
  Offset position = 0;
  Offset channel = 0;
};

template <class Offset>
struct Report {
  Irregular irregular;
  ErrorRecord* error;
  Geometry<int64_t> geometry;
  Offset blocks; // units per slab

  // For an index that is not in its own window: lists its unit, or if it is bad notes it in `bad`.
  __device__ void outside_window(
      Offset outer, Offset position, Offset channel, int64_t index, Bad<Offset>& bad) const {
    if (index >= 0 && index < geometry.out_plane()) {
      const Offset unit = outer * blocks + channel / kUnitChannels;
      if (first(irregular.listed + unit)) {
        irregular.list[atomicAdd(irregular.count, 1u)] = unit;
      }
    } else {
      bad = {true, index, outer, position, channel};
    }
  }

  // What a thread has noted, at its end.
  __device__ void tell(const Bad<Offset>& bad) const {
    if (bad.found && first(irregular.has_bad) && first(&error->claimed)) {
      error->index = bad.index;
      error->position = static_cast<int64_t>(bad.position);
      error->plane =
          static_cast<int64_t>(bad.outer) * geometry.inner + static_cast<int64_t>(bad.channel);
      for (int a = 0; a < 3; ++a) {
        error->out[a] = geometry.axis[a].out;
      }
      error->rank = geometry.rank;
      __threadfence_system();
      atomicExch(&error->ready, 1u);
    }
  }

 private:
  __device__ static bool first(uint32_t* flag) {
    return load_relaxed(flag) == 0 && atomicExch(flag, 1u) == 0;
  }
};

} // namespace maxunpool_cuda
