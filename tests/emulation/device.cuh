// SPDX-License-Identifier: BSD-3-Clause
// In place of csrc/cuda/device.cuh, on the CPU. The limits let small tensors go the ways of large
// ones. The functions do what those of a GPU promise, in words that g++ and the sanitizers know.
// docs/emulation.md has a row for each.
#pragma once

#include "cuda_shim.h"

#include <cstdint>

namespace maxunpool_cuda {

constexpr int kThreads = 8; // so ten items are two blocks

constexpr int64_t kMost32BitOffset = 1 << 17; // so a tensor of 1 MB of float64 is cut into ranges

constexpr int64_t kSharedBytes = 512; // so a plane of more than 128 outputs has several parts

constexpr int kOrderedThreads = 16; // so a plane of 17 cells is several chunks

constexpr int kOrderedChannels = 4; // so six channels are two groups, of which one is not full

constexpr uint32_t kMostTurns = 64; // so they are counted anew after four rounds

template <class T>
T* shared_memory() {
  return static_cast<T*>(shim::shared_memory());
}

template <class T>
T load_relaxed(const T* address) {
  return __atomic_load_n(address, __ATOMIC_RELAXED);
}

inline void store_for_host(uint32_t* address, uint32_t value) {
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
}

} // namespace maxunpool_cuda
