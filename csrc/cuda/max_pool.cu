// Max pooling on CUDA: registration, and one launch on the current stream.
#include "../max_pool.h"
#include "launch.cuh"
#include "limits.h"
#include "max_pool.cuh"

#include <c10/core/Device.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

namespace maxunpool_cuda {
namespace {

void pool_on_device(const PoolCall& call, c10::Device device) {
  TORCH_CHECK(
      device.is_cuda(), "max_pool", call.geometry.rank,
      "d: expected CUDA tensors but got tensors on ", device);
  const c10::cuda::CUDAGuard guard(device);
  const ItemLaunch launch{c10::cuda::getCurrentCUDAStream().stream()};
  PoolDispatch(launch, call, limits().max_32bit_offset).run();
}

} // namespace

TORCH_LIBRARY_IMPL(maxunpool_cuda, CUDA, m) {
  m.impl("max_pool", run_pool<int64_t, pool_on_device>);
}

} // namespace maxunpool_cuda
