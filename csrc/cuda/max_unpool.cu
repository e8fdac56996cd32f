// Max unpooling on CUDA: registration, workspaces, launches on the current stream, and errors.
// Nothing here waits for the device, unless an error is raised or MAXUNPOOL_CUDA_SYNC_CHECK=1 asks
// for it.
#include "../errors.h"
#include "../max_unpool.h"
#include "dispatch.cuh"
#include "error_records.cuh"
#include "launch.cuh"
#include "limits.h"

#include <ATen/Context.h>
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

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <type_traits>
#include <vector>

namespace maxunpool_cuda {
namespace {

// Properties of a device that launches depend on, asked for once.
struct Processors {
  int count, shared_bytes;

  static const Processors& of(int device) {
    static const std::vector<Processors> all = [] {
      std::vector<Processors> found(c10::cuda::device_count());
      for (size_t i = 0; i < found.size(); ++i) {
        const auto ask = [&](int& value, cudaDeviceAttr what) {
          C10_CUDA_CHECK(cudaDeviceGetAttribute(&value, what, static_cast<int>(i)));
        };
        ask(found[i].count, cudaDevAttrMultiProcessorCount);
        ask(found[i].shared_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
      }
      return found;
    }();
    return all.at(device);
  }
};

struct StreamLaunch : ItemLaunch {
  const Processors& processors;

  template <class... Parameters>
  void shared(
      void (*kernel)(Parameters...), const BlockShape& shape,
      const std::type_identity_t<Parameters>&... arguments) const {
    constexpr int64_t kWarp = 32, kReserved = 1 << 10, kMost = 2048;
    const int64_t threads =
        std::clamp<int64_t>(divide_up(shape.threads, kWarp) * kWarp, kWarp, kStrayThreads);
    int64_t blocks = shape.blocks;
    if (!shape.all_busy) { // as many as run at once
      const int64_t resident = std::clamp<int64_t>(
          processors.shared_bytes / (shape.shared_bytes + kReserved), 1, kMost / threads);
      blocks = std::min(blocks, processors.count * resident);
    }
    kernel<<<
        static_cast<unsigned>(blocks), static_cast<unsigned>(threads), shape.shared_bytes,
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
  const Processors& processors = Processors::of(device.index());
  const Arguments arguments{
      call,
      at::globalContext().deterministicAlgorithms(),
      errors.record(),
      limits(),
      kThreads,
      2 * processors.count};
  const Plan plan(arguments);
  at::Tensor workspace;
  if (plan.bytes > 0) {
    workspace = at::empty(
        {static_cast<int64_t>(plan.bytes)}, at::TensorOptions(device).dtype(c10::ScalarType::Byte));
  }
  const StreamLaunch launch{{c10::cuda::getCurrentCUDAStream().stream()}, processors};
  Dispatch(launch, arguments, plan, plan.bytes > 0 ? workspace.mutable_data_ptr() : nullptr).run();
  if (checks_in_step() && !is_capturing()) {
    C10_CUDA_CHECK(cudaStreamSynchronize(launch.stream));
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
      C10_CUDA_CHECK(cudaDeviceSynchronize());
      ErrorRecords::get().of(device).raise_if_reported();
    }
  }
}

TORCH_LIBRARY_IMPL(maxunpool_cuda, CUDA, m) {
  m.impl("max_unpool", run<int64_t, true, unpool_on_device>);
  m.impl("max_unpool_backward", run<int64_t, false, unpool_on_device>);
}

} // namespace maxunpool_cuda
