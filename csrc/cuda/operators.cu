// SPDX-License-Identifier: BSD-3-Clause
// The operators on CUDA: registration, and what a call needs of PyTorch: workspaces, the current
// stream, errors. unpool() and pool() choose the kernels and launch them (dispatch.cuh). This file
// compiles no kernel.
//
// Nothing here waits for the device, unless MAXUNPOOL_CUDA_SYNC_CHECK=1 or check_errors() asks for
// it, and then for the current stream alone. With MAXUNPOOL_CUDA_SIMPLE_KERNELS=1, `ordered` alone
// does all unpooling: to compare the other kernels with it, or to leave them out.
//
// Example: torch.ops.maxunpool_cuda.max_unpool on cuda:1 comes here as run<..>, which asks the
// guard and makes an UnpoolCall (max_unpool.h). unpool_on_device() makes cuda:1 the current device,
// raises what an earlier call has reported there, and launches.
#include "../calls.h"
#include "../layout.h"
#include "../max_pool.h"
#include "../max_unpool.h"
#include "../torch.h"
#include "dispatch.cuh"
#include "error_records.cuh"
#include "launch.cuh"

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string_view>

namespace maxunpool_cuda {

std::shared_ptr<uint32_t> Launch::workspace(int64_t words) const {
  if (words == 0) {
    return nullptr;
  }
  const auto try_words = [&](int64_t size) {
    return try_empty({size}, {1}, ScalarType::Int, aoti_torch_device_type_cuda(), device);
  };
  const std::optional<Tensor> made = try_words(words);
  if (!made) {
    raise_out_of_memory({words}, ScalarType::Int, /*like=*/try_words(0).value());
  }
  const auto owner = std::make_shared<Tensor>(*made);
  return {owner, static_cast<uint32_t*>(made->mutable_data_ptr())};
}

int64_t Launch::processors() const {
  int count = 0;
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

OutOfWindowLaunches Launch::out_of_window_launches(uint32_t* own, int64_t flags) const {
  if (is_captured && flags > kFewFlags) {
    auto* const largest = reinterpret_cast<unsigned long long*>(own);
    STD_CUDA_CHECK(cudaMemsetAsync(largest, 0, sizeof(*largest), stream));
    return {.largest = largest, .launch = 1};
  }
  static std::atomic<unsigned long long> launches = 0;
  return {.largest = largest_out_of_window_launch, .launch = ++launches};
}

namespace {

__device__ DeviceWords device_words; // zero when the library is loaded

// Waits for a stream, and raises what was reported on its device. While this stream captures a
// graph, nothing happens. While another thread captures one, CUDA may refuse to wait, and end that
// capture, unless this thread's mode is relaxed.
void raise_after_waiting(DeviceErrors& errors, cudaStream_t stream) {
  if (!is_capturing(stream)) {
    const RelaxedCaptureMode relaxed;
    STD_CUDA_CHECK(cudaStreamSynchronize(stream));
    errors.raise_if_reported(stream);
  }
}

// Whether this environment variable is 1.
bool is_set(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && std::string_view(value) == "1";
}

void unpool_on_device(const UnpoolCall& call, int32_t device) {
  const DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  DeviceErrors& errors = ErrorRecords::get().of(device);
  errors.raise_if_reported(stream);
  const bool is_captured = is_capturing(stream);
  const Launch launch{
      .device = device,
      .stream = stream,
      .is_captured = is_captured,
      .largest_out_of_window_launch = &errors.words()->largest_out_of_window_launch};
  unpool(launch, call, errors.for_call(is_captured), is_set("MAXUNPOOL_CUDA_SIMPLE_KERNELS"));
  if (is_set("MAXUNPOOL_CUDA_SYNC_CHECK")) {
    raise_after_waiting(errors, stream);
  }
}

void pool_on_device(const PoolCall& call, int32_t device) {
  const DeviceGuard guard(device);
  const Launch launch{
      .device = device,
      .stream = current_stream(device),
      .is_captured = false, // which makes no difference here
      .largest_out_of_window_launch = nullptr};
  pool(launch, call);
}

} // namespace

DeviceWords* words_of_current_device() {
  void* words = nullptr;
  STD_CUDA_CHECK(cudaGetSymbolAddress(&words, device_words));
  return static_cast<DeviceWords*>(words);
}

void check_errors() {
  for (const int32_t device : ErrorRecords::get().devices()) {
    const DeviceGuard guard(device);
    raise_after_waiting(ErrorRecords::get().of(device), current_stream(device));
  }
}

STABLE_TORCH_LIBRARY_IMPL(maxunpool_cuda, CUDA, m) {
  m.impl("max_unpool", TORCH_BOX((&run<true, unpool_on_device, aoti_torch_device_type_cuda>)));
  m.impl(
      "max_unpool_backward",
      TORCH_BOX((&run<false, unpool_on_device, aoti_torch_device_type_cuda>)));
  m.impl("max_pool", TORCH_BOX((&run_pool<pool_on_device, aoti_torch_device_type_cuda>)));
  m.impl(
      "_max_unpool", TORCH_BOX((&run_short<true, unpool_on_device, aoti_torch_device_type_cuda>)));
  m.impl(
      "_max_unpool_backward",
      TORCH_BOX((&run_short<false, unpool_on_device, aoti_torch_device_type_cuda>)));
  m.impl("_max_pool", TORCH_BOX((&run_pool_short<pool_on_device, aoti_torch_device_type_cuda>)));
}

} // namespace maxunpool_cuda

// csrc/bindings.cpp finds it in the library by this name.
extern "C" void maxunpool_cuda_check_errors() {
  maxunpool_cuda::check_errors();
}
