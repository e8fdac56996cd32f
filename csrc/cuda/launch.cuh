// Launches that the operators share.
#pragma once

#include "tiling.cuh"

#include <c10/cuda/CUDAException.h>

#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

// Launch on a stream: a thread for each item, of which memory has room for fewer than 2^38.
struct ItemLaunch {
  cudaStream_t stream;

  template <class... Parameters>
  void operator()(
      void (*kernel)(Parameters...), uint64_t items,
      const std::type_identity_t<Parameters>&... arguments) const {
    const uint64_t blocks = (items - 1) / kThreads + 1;
    kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(arguments...);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

} // namespace maxunpool_cuda
