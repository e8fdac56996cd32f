// Where a call goes another way because of its size.
#pragma once

#include <cstdint>

namespace maxunpool_cuda {

struct Limits {
  int64_t narrow = int64_t{1} << 31; // offsets are 32-bit where all values stay below
  int64_t slot_bytes = 32 << 20;     // for slots in global memory, or one piece's if that is more
  int64_t shared_bytes = 32 << 10;   // for slots in a block's shared memory
  int64_t small_bytes = 16 << 10;    // of shared memory, for small planes that a block does whole;
  int64_t small_plane = 64;          // it takes several up to so many groups of cells
};

// Those that calls go by. Tests lower them, while no call runs, so that small tensors go the ways
// of large ones.
Limits& limits();

} // namespace maxunpool_cuda
