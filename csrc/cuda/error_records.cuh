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
#include <string>
#include <vector>

namespace maxunpool_cuda {

// Whether the current stream is capturing a graph: nothing runs then, and waiting would end that.
inline bool is_capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

// Error record of a device. It is made by the device's first call, on that device, and never freed:
// a captured graph may write to it at any later time.
class DeviceErrors {
 public:
  DeviceErrors() {
    // Allocation is no part of a graph that is being captured.
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    void *host = nullptr, *device = nullptr;
    C10_CUDA_CHECK(cudaHostAlloc(&host, sizeof(uint32_t), cudaHostAllocMapped));
    C10_CUDA_CHECK(cudaMalloc(&device, sizeof(ErrorRecord)));
    ready_ = new (host) uint32_t{0};
    record_ = static_cast<ErrorRecord*>(device);
    clear();
  }

  ErrorRecord* record() const { return record_; }

  // Raises what is reported, but not while a graph is captured: a later call will. It waits for the
  // device only if there is a report: the kernel that wrote it may still run, and must not report
  // again what has been raised.
  void raise_if_reported() {
    const std::atomic_ref<uint32_t> ready(*ready_);
    if (ready.load(std::memory_order_relaxed) == 0 || is_capturing()) {
      return;
    }
    const std::lock_guard<std::mutex> lock(reading_);
    if (ready.load(std::memory_order_relaxed) == 0) {
      return;
    }
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    ErrorRecord found;
    copy(&found, record_);
    ready.store(0, std::memory_order_relaxed);
    clear();
    const std::string message = invalid_index(
        found.rank, found.out, found.in_window != 0, found.index, found.position, found.plane);
    TORCH_CHECK(false, message, " (in this call or an earlier one on this CUDA device)");
  }

 private:
  void clear() {
    ErrorRecord empty{};
    empty.ready = ready_;
    copy(record_, &empty);
  }

  // Copies on a stream of its own: the default one would wait for others, which a capture forbids.
  static void copy(ErrorRecord* to, const ErrorRecord* from) {
    cudaStream_t stream = nullptr;
    C10_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    C10_CUDA_CHECK(cudaMemcpyAsync(to, from, sizeof(ErrorRecord), cudaMemcpyDefault, stream));
    C10_CUDA_CHECK(cudaStreamSynchronize(stream));
    C10_CUDA_CHECK(cudaStreamDestroy(stream));
  }

  uint32_t* ready_; // in host memory that the device can write
  ErrorRecord* record_;
  std::mutex reading_; // one thread at a time takes a report and lets the device write again
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
