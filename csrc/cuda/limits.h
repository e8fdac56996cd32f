// Limits: sizes from which on a call is done in another way.
#pragma once

#include <cstdint>

namespace maxunpool_cuda {

struct Limits {
  int64_t max_32bit_offset = int64_t{1} << 31; // offsets are 32-bit if all values stay below
  int64_t slot_bytes = 32 << 20;   // of slots in global memory, or of one piece's if that is more
  int64_t shared_bytes = 32 << 10; // of slots in a block's shared memory
  int64_t small_bytes = 16 << 10;  // of shared memory, for small planes that a block does whole
  int64_t small_plane = 64;        // groups of cells, up to which a block does several planes
};

// Limits in use. Tests lower them, while no call runs, to do small tensors as large ones are done.
Limits& limits();

} // namespace maxunpool_cuda
