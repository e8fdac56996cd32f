// Where a call goes another way because of its size.
#pragma once

#include <cstdint>

namespace maxunpool_cuda {

struct Limits {
  int64_t narrow = int64_t{1} << 31; // offsets are 32-bit where all values stay below
  int64_t slot_bytes = 32 << 20;     // for slots in global memory, or one piece's if that is more
  int64_t shared_bytes = 32 << 10;   // for slots in a block's shared memory
  int64_t small_bytes = 4 << 20;     // one launch for planes of at most small_plane where the
  int64_t small_plane = 4096;        // unpooled tensor is no larger
  int64_t enough_threads = 1 << 19;  // beyond them, planes share a thread
};

// Those that calls go by. Tests lower them, while no call runs, so that small tensors go the ways
// of large ones.
Limits& limits();

} // namespace maxunpool_cuda
