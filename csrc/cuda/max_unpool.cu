// Max unpooling on CUDA: registration, workspaces, launches on the current stream, and errors.
// Nothing here waits for the device, unless MAXUNPOOL_CUDA_SYNC_CHECK=1 or check_errors() asks for
// it, and then for the current stream alone.
#include "../errors.h"
#include "../max_unpool.h"
#include "dispatch.cuh"
#include "error_records.cuh"
#include "launch.cuh"
#include "limits.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Device.h>
#include <c10/core/TensorOptions.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <type_traits>
#include <vector>

namespace maxunpool_cuda {
namespace {

// Processors of a device, asked for once.
int64_t processors_of(c10::DeviceIndex device) {
  static const std::vector<int> all = [] {
    std::vector<int> counts(c10::cuda::device_count());
    for (size_t i = 0; i < counts.size(); ++i) {
      C10_CUDA_CHECK(cudaDeviceGetAttribute(
          &counts[i], cudaDevAttrMultiProcessorCount, static_cast<int>(i)));
    }
    return counts;
  }();
  return all.at(device);
}

struct UnpoolLaunch : ItemLaunch {
  static constexpr int64_t threads = kThreads;

  c10::Device device;
  int64_t most_blocks;
  at::Tensor& memory; // of the workspace

  uint32_t* workspace(int64_t count) const {
    memory = at::empty({count}, at::TensorOptions(device).dtype(c10::ScalarType::Int));
    return static_cast<uint32_t*>(memory.mutable_data_ptr());
  }
  template <class... Parameters>
  void parts(
      void (*kernel)(Parameters...), int64_t blocks, int64_t block_threads, int64_t shared_bytes,
      const std::type_identity_t<Parameters>&... arguments) const {
    kernel<<<
        static_cast<unsigned>(blocks), static_cast<unsigned>(block_threads), shared_bytes,
        stream>>>(arguments...);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

bool checks_in_step() {
  const char* value = std::getenv("MAXUNPOOL_CUDA_SYNC_CHECK");
  return value != nullptr && std::string_view(value) == "1";
}

void unpool_on_device(const UnpoolCall& call, c10::Device device) {
  TORCH_CHECK(
      device.is_cuda(), "max_unpool", call.geometry.rank,
      "d: expected CUDA tensors but got tensors on ", device);
  const c10::cuda::CUDAGuard guard(device);
  DeviceErrors& errors = ErrorRecords::get().of(device.index());
  errors.raise_if_reported();
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  constexpr int64_t kBlocksOfProcessor = 4;
  at::Tensor memory;
  const UnpoolLaunch launch{
      {stream}, device, kBlocksOfProcessor * processors_of(device.index()), memory};
  Dispatch(launch, call, errors.for_call(), limits()).run();
  if (checks_in_step() && !is_capturing()) {
    C10_CUDA_CHECK(cudaStreamSynchronize(stream));
    errors.raise_if_reported();
  }
}

} // namespace

Limits& limits() {
  static Limits usual;
  return usual;
}

void check_errors() {
  for (const c10::DeviceIndex device : ErrorRecords::get().devices()) {
    const c10::cuda::CUDAGuard guard(device);
    if (!is_capturing()) {
      C10_CUDA_CHECK(cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream().stream()));
      ErrorRecords::get().of(device).raise_if_reported();
    }
  }
}

TORCH_LIBRARY_IMPL(maxunpool_cuda, CUDA, m) {
  m.impl("max_unpool", run<int64_t, true, unpool_on_device>);
  m.impl("max_unpool_backward", run<int64_t, false, unpool_on_device>);
}

} // namespace maxunpool_cuda
