// Launches that the operators share.
#pragma once

#include "tiling.cuh"

#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace maxunpool_cuda {

// Launch on a stream: a thread for each item, as far as a grid has room (see for_each_item).
struct ItemLaunch {
  cudaStream_t stream;

  template <class... Parameters>
  void operator()(
      void (*kernel)(Parameters...), uint64_t items,
      const std::type_identity_t<Parameters>&... arguments) const {
    constexpr uint64_t kMostBlocks = std::numeric_limits<int32_t>::max();
    const uint64_t blocks = std::min((items - 1) / kThreads + 1, kMostBlocks);
    kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(arguments...);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

} // namespace maxunpool_cuda
