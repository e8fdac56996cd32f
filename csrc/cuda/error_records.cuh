// Error records on the host, who raises what kernels write to them (see report.cuh).
#pragma once

#include "../errors.h"
#include "report.cuh"

#include <c10/core/Device.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/util/Exception.h>

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <vector>

namespace maxunpool_cuda {

// Whether the current stream is capturing a graph: nothing runs then, and waiting would end that.
inline bool is_capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

// Error record of a device. It is made by the device's first call, on that device, and never freed:
// a captured graph may write to it at any later time.
//
// An error that is raised stands for all bad indices of the calls launched before it. Later calls
// belong to the next epoch and report anew, so nothing waits for the device or is cleared, and no
// call raises twice.
class DeviceErrors {
 public:
  DeviceErrors() {
    // Allocation is no part of a graph that is being captured, nor is the default stream, which
    // would wait for others.
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    void *host = nullptr, *device = nullptr;
    C10_CUDA_CHECK(cudaHostAlloc(&host, sizeof(ErrorRecord), cudaHostAllocMapped));
    C10_CUDA_CHECK(cudaMalloc(&device, sizeof(uint32_t)));
    cudaStream_t stream = nullptr;
    C10_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    C10_CUDA_CHECK(cudaMemsetAsync(device, 0, sizeof(uint32_t), stream));
    C10_CUDA_CHECK(cudaStreamSynchronize(stream));
    C10_CUDA_CHECK(cudaStreamDestroy(stream));
    record_ = new (host) ErrorRecord{};
    claimed_ = static_cast<uint32_t*>(device);
  }

  // Where the kernels of a call that is launched now report to.
  Errors for_call() const {
    return {record_, claimed_, is_capturing() ? Errors::kUnknown : epoch().load()};
  }

  // Raises what is reported, but not while a graph is captured: a later call will.
  void raise_if_reported() {
    uint32_t now = epoch().load();
    BadIndex& found = record_->found[now % 2]; // as it is until the epoch after the next one
    if (std::atomic_ref(found.ready).load() != now + 1 || is_capturing()) {
      return;
    }
    const std::string message =
        invalid_index(found.geometry, found.in_window, found.index, found.element);
    const bool is_first = epoch().compare_exchange_strong(now, now + 1); // of threads that see it
    TORCH_CHECK(!is_first, message, " (in this call or an earlier one on this CUDA device)");
  }

 private:
  std::atomic_ref<uint32_t> epoch() const { return std::atomic_ref(record_->epoch); }

  ErrorRecord* record_;
  uint32_t* claimed_; // see Errors
};

// Records of the devices that have run a kernel of this library. Asks nothing of CUDA before one
// has: a process that has used CUDA cannot be forked.
class ErrorRecords {
 public:
  static ErrorRecords& get() {
    static ErrorRecords records;
    return records;
  }

  DeviceErrors& of(c10::DeviceIndex device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return records_[device]; // made here, if it is not there
  }

  std::vector<c10::DeviceIndex> devices() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<c10::DeviceIndex> used;
    for (const auto& [device, errors] : records_) {
      used.push_back(device);
    }
    return used;
  }

 private:
  std::mutex mutex_;
  std::map<c10::DeviceIndex, DeviceErrors> records_;
};

} // namespace maxunpool_cuda
