// SPDX-License-Identifier: BSD-3-Clause
// The operators on CUDA: registration, workspaces, launches on the current stream, and errors. They
// are one file, so that nvcc reads the headers of PyTorch once.
//
// Nothing here waits for the device, unless MAXUNPOOL_CUDA_SYNC_CHECK=1 or check_errors() asks for
// it, and then for the current stream alone. MAXUNPOOL_CUDA_SIMPLE_KERNELS=1 has the kernels of
// slots.cuh do all unpooling: to compare the others with them, or to do without these.
#include "../errors.h"
#include "../max_pool.h"
#include "../max_unpool.h"
#include "dispatch.cuh"
#include "error_records.cuh"
#include "max_pool.cuh"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Device.h>
#include <c10/core/TensorOptions.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <type_traits>

namespace maxunpool_cuda {
namespace {

__device__ DeviceWords device_words; // zero when the library is loaded

// Launches on a stream of a device.
struct StreamLaunch {
  c10::Device device;
  at::Tensor& memory; // of the workspace
  DeviceWords* words; // of the device
  cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();

  uint32_t* workspace(int64_t count) const {
    memory = at::empty({count}, at::TensorOptions(device).dtype(c10::ScalarType::Int));
    return static_cast<uint32_t*>(memory.mutable_data_ptr());
  }
  // As many blocks of a fix-up kernel as the processors can run at once.
  int64_t most_blocks() const {
    int processors = 0;
    C10_CUDA_CHECK(cudaDeviceGetAttribute(
        &processors, cudaDevAttrMultiProcessorCount, static_cast<int>(device.index())));
    return int64_t{processors} * kSlotBlocksOfProcessor;
  }
  OutOfWindowLaunches out_of_window_launches() const {
    static std::atomic<unsigned long long> launches = 0;
    return {.largest = &words->largest_out_of_window_launch, .launch = ++launches};
  }
  template <class... Parameters>
  void operator()(
      void (*kernel)(Parameters...),
      int64_t blocks,
      int64_t threads,
      int64_t shared_bytes,
      const std::type_identity_t<Parameters>&... arguments) const {
    kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), shared_bytes, stream>>>(
        arguments...);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

// Waits for the current stream, and raises what was reported on its device. While this stream
// captures a graph, nothing happens. While another thread captures one, CUDA may refuse to wait,
// and end that capture, unless this thread's mode is relaxed.
void raise_after_waiting(DeviceErrors& errors) {
  if (!is_capturing()) {
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    C10_CUDA_CHECK(cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream().stream()));
    errors.raise_if_reported();
  }
}

// Whether this environment variable is 1.
bool is_set(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && std::string_view(value) == "1";
}

void unpool_on_device(const UnpoolCall& call, c10::Device device) {
  TORCH_CHECK(
      device.is_cuda(),
      "max_unpool",
      call.geometry.rank,
      "d: expected CUDA tensors but got tensors on ",
      device);
  const c10::cuda::CUDAGuard guard(device);
  DeviceErrors& errors = ErrorRecords::get().of(device.index());
  errors.raise_if_reported();
  at::Tensor memory;
  const StreamLaunch launch{.device = device, .memory = memory, .words = errors.words()};
  unpool(launch, call, errors.for_call(), is_set("MAXUNPOOL_CUDA_SIMPLE_KERNELS"));
  if (is_set("MAXUNPOOL_CUDA_SYNC_CHECK")) {
    raise_after_waiting(errors);
  }
}

void pool_on_device(const PoolCall& call, c10::Device device) {
  TORCH_CHECK(
      device.is_cuda(),
      "max_pool",
      call.geometry.rank,
      "d: expected CUDA tensors but got tensors on ",
      device);
  const c10::cuda::CUDAGuard guard(device);
  at::Tensor no_memory;
  pool(StreamLaunch{.device = device, .memory = no_memory, .words = nullptr}, call);
}

} // namespace

DeviceWords* words_of_current_device() {
  void* words = nullptr;
  C10_CUDA_CHECK(cudaGetSymbolAddress(&words, device_words));
  return static_cast<DeviceWords*>(words);
}

void check_errors() {
  for (const c10::DeviceIndex device : ErrorRecords::get().devices()) {
    const c10::cuda::CUDAGuard guard(device);
    raise_after_waiting(ErrorRecords::get().of(device));
  }
}

TORCH_LIBRARY_IMPL(maxunpool_cuda, CUDA, m) {
  m.impl("max_unpool", run<int64_t, true, unpool_on_device>);
  m.impl("max_unpool_backward", run<int64_t, false, unpool_on_device>);
  m.impl("max_pool", run_pool<int64_t, pool_on_device>);
}

} // namespace maxunpool_cuda
