// Limits: sizes from which on a call is done in another way.
#pragma once

#include <cstdint>

namespace maxunpool_cuda {

struct Limits {
  int64_t max_32bit_offset = int64_t{1} << 31; // offsets are 32-bit if all values stay below
  int64_t shared_bytes = 32 << 10;             // of slots in a block's shared memory
};

// Limits in use. Tests lower them, while no call runs, to do small tensors as large ones are done.
Limits& limits();

} // namespace maxunpool_cuda
