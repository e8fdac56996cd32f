// Max pooling's face to PyTorch: one launch on the current stream.
#include "../pool.h"
#include "launch.cuh"
#include "limits.h"
#include "max_pool.cuh"

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

namespace maxunpool_cuda {
namespace {

void pool_on_device(const PoolCall& call) {
  TORCH_CHECK(
      call.input.is_cuda(), "max_pool", call.geometry.rank,
      "d: expected CUDA tensors but got tensors on ", call.input.device());
  const c10::cuda::CUDAGuard guard(call.input.device());
  const PoolArguments arguments{
      call.geometry,
      {call.dilation[0], call.dilation[1], call.dilation[2]},
      call.input.scalar_type(),
      call.indices.scalar_type(),
      call.input.const_data_ptr(),
      call.values.mutable_data_ptr(),
      call.indices.mutable_data_ptr(),
      limits().narrow};
  const ItemLaunch launch{c10::cuda::getCurrentCUDAStream().stream()};
  PoolDispatch(launch, arguments).run();
}

} // namespace

TORCH_LIBRARY_IMPL(maxunpool_cuda, CUDA, m) {
  m.impl("max_pool", run_pool<pool_on_device>);
}

} // namespace maxunpool_cuda
