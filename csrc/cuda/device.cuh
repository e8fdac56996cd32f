// SPDX-License-Identifier: BSD-3-Clause
// Device: what only a GPU's compiler understands, and the limits that only a GPU's memory reaches.
//
// This is the one file of csrc/cuda that the tests replace as a whole when they compile the kernels
// for the CPU: tests/emulation/device.cuh declares the same names. So whatever g++ cannot compile,
// or small tensors would never reach, has its place here, and docs/emulation.md has a row for each.
// For instance, a call of 300 planes of 1,000 elements is one range with the limit of 2^31 below;
// with 2^17, the limit of the tests, it is four ranges of 75 planes.
#pragma once

#include <cstdint>

namespace maxunpool_cuda {

// Threads of a block in which each thread does items of its own (see for_each_item). Four warps:
// small enough that the blocks of a small tensor reach all processors.
constexpr int kThreads = 128;

// Calls whose intermediate values stay below this limit are computed in 32 bits (see fits_32bit).
// Half of what 32 bits hold: a difference of two such values keeps its sign, and Divider needs it.
constexpr int64_t kMost32BitOffset = int64_t{1} << 31;

// Shared memory for the slots of a block of slots.cuh, at most. Three such blocks of 256 threads
// fit a processor that has 100 KB, such as that of sm_86 or sm_120.
constexpr int64_t kSharedBytes = 32 << 10;

// Blocks of ordered.cuh: their threads, at most; the channels of a group, at most; and after how
// many turns the next chunk begins to count them anew. 32 bits hold 2^31 turns and those of a
// chunk, which are at most 1024 for each of at most 1024 rounds.
constexpr int kOrderedThreads = 1024;
constexpr int kOrderedChannels = 32;
constexpr uint32_t kMostTurns = uint32_t{1} << 31;

// Address of the block's dynamic shared memory, a multiple of 16 bytes. Undefined until written.
template <class T>
__device__ inline T* shared_memory() {
  extern __shared__ uint4 memory_of_block[];
  return reinterpret_cast<T*>(memory_of_block);
}

// Loads what another thread may write meanwhile.
template <class T>
__device__ inline T load_relaxed(const T* address) {
  return *static_cast<const volatile T*>(address);
}

// Stores what the host waits for. The host that sees it also sees all that this thread has stored
// before.
__device__ inline void store_for_host(uint32_t* address, uint32_t value) {
  __threadfence_system();
  *static_cast<volatile uint32_t*>(address) = value;
}

} // namespace maxunpool_cuda
