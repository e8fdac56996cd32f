// SPDX-License-Identifier: BSD-3-Clause
// The operators on CUDA: registration, and what a call needs of PyTorch: workspaces, the current
// stream, errors. unpool() and pool() choose the kernels and launch them (dispatch.cuh). This is
// the one file of csrc/cuda that reads PyTorch's large headers, and it compiles no kernel.
//
// Nothing here waits for the device, unless MAXUNPOOL_CUDA_SYNC_CHECK=1 or check_errors() asks for
// it, and then for the current stream alone. With MAXUNPOOL_CUDA_SIMPLE_KERNELS=1, the kernels of
// slots.cuh do all unpooling: to compare the other kernels with them, or to leave these out.
//
// Example: torch.ops.maxunpool_cuda.max_unpool on cuda:1 comes here as run<..>, which asks the
// guard and makes an UnpoolCall (max_unpool.h). unpool_on_device() makes cuda:1 the current device,
// raises what an earlier call has reported there, and launches.
#include "../calls.h"
#include "../errors.h"
#include "../max_pool.h"
#include "../max_unpool.h"
#include "dispatch.cuh"
#include "error_records.cuh"
#include "launch.cuh"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/TensorOptions.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <string_view>

namespace maxunpool_cuda {

uint32_t* Launch::workspace(int64_t words) const {
  memory = at::empty({words}, at::TensorOptions(device).dtype(ScalarType::Int));
  return static_cast<uint32_t*>(memory.mutable_data_ptr());
}

int64_t Launch::processors() const {
  int count = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(
      &count, cudaDevAttrMultiProcessorCount, static_cast<int>(device.index())));
  return count;
}

OutOfWindowLaunches Launch::out_of_window_launches() const {
  static std::atomic<unsigned long long> launches = 0;
  return {.largest = largest_out_of_window_launch, .launch = ++launches};
}

namespace {

__device__ DeviceWords device_words; // zero when the library is loaded

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
  const Launch launch{
      .device = device,
      .stream = c10::cuda::getCurrentCUDAStream().stream(),
      .memory = memory,
      .largest_out_of_window_launch = &errors.words()->largest_out_of_window_launch};
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
  const Launch launch{
      .device = device,
      .stream = c10::cuda::getCurrentCUDAStream().stream(),
      .memory = no_memory,
      .largest_out_of_window_launch = nullptr};
  pool(launch, call);
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
  m.impl("max_unpool", run<true, unpool_on_device>);
  m.impl("max_unpool_backward", run<false, unpool_on_device>);
  m.impl("max_pool", run_pool<pool_on_device>);
  m.impl("_max_unpool", run_short<true, unpool_on_device>);
  m.impl("_max_unpool_backward", run_short<false, unpool_on_device>);
  m.impl("_max_pool", run_pool_short<pool_on_device>);
}

} // namespace maxunpool_cuda
