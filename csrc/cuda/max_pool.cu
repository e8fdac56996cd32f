// Max pooling's face to PyTorch: one launch on the current stream.
#include "../pool.h"
#include "max_pool.cuh"

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace maxunpool_cuda {
namespace {

struct PoolLaunch {
  template <class... Parameters>
  void operator()(
      void (*kernel)(Parameters...),
      uint64_t items,
      const std::type_identity_t<Parameters>&... arguments) const {
    constexpr uint64_t kMostBlocks = std::numeric_limits<int32_t>::max();
    const uint64_t blocks = std::min((items - 1) / kThreads + 1, kMostBlocks);
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
    kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(arguments...);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

void pool_on_device(const PoolCall& call) {
  TORCH_CHECK(
      call.input.is_cuda(),
      "max_pool",
      call.geometry.rank,
      "d: expected CUDA tensors but got tensors on ",
      call.input.device());
  const c10::cuda::CUDAGuard guard(call.input.device());
  PoolArguments arguments{
      call.geometry,
      {call.dilation[0], call.dilation[1], call.dilation[2]},
      call.input.scalar_type(),
      call.indices.scalar_type(),
      call.input.const_data_ptr(),
      call.values.mutable_data_ptr(),
      call.indices.mutable_data_ptr()};
  const PoolLaunch launch;
  PoolDispatch(launch, arguments).run();
}

} // namespace

TORCH_LIBRARY_IMPL(maxunpool_cuda, CUDA, m) {
  m.impl("max_pool", run_pool<pool_on_device>);
}

} // namespace maxunpool_cuda
