// SPDX-License-Identifier: BSD-3-Clause
// Error records on the host, who raises what kernels write to them. From report.cuh come the
// record's layout and the kernels' side, from errors.h the message.
//
// The four states of a record, by example; `epoch` and `ready` are the record's:
//
//   epoch 0, reports[0].ready 0    nothing is reported: raise_if_reported() does nothing
//   epoch 0, reports[0].ready 1    a kernel reported: raise_if_reported() raises, begins epoch 1
//   epoch 1, reports[1].ready 0    calls report anew; reports[0] is no longer looked at
//   epoch 1, reports[1].ready 2    a kernel of a later call reported, and so on
#pragma once

#include "../errors.h"
#include "report.cuh"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

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

// What the kernels of all calls share in the memory of a device; zero at first. It is a variable of
// the library, so a first call allocates nothing on a GPU that PyTorch's allocator has filled.
struct DeviceWords {
  unsigned long long largest_out_of_window_launch; // see OutOfWindowLaunches
  uint32_t claimed;                                // see Errors
};
DeviceWords* words_of_current_device(); // defined where the variable is, in operators.cu

// Error record of a device. It is made by the device's first call, on that device, and never freed:
// a captured graph may write to it at any later time.
//
// An error that is raised stands for all out-of-bounds indices of the calls launched before it.
// Later calls belong to the next epoch and report anew, so nothing waits for the device or is
// cleared, and no call raises twice. If one thread raises just while another thread is about to
// launch, the call of the other may count as launched before.
class DeviceErrors {
 public:
  DeviceErrors() {
    // Allocation is no part of a graph that is being captured.
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    void* host = nullptr;
    C10_CUDA_CHECK(cudaHostAlloc(&host, sizeof(ErrorRecord), cudaHostAllocMapped));
    record_ = new (host) ErrorRecord{};
    words_ = words_of_current_device();
  }

  DeviceWords* words() const { return words_; }

  // Where the kernels of a call that is launched now are to report to.
  Errors for_call() const {
    return {
        .record = record_,
        .claimed = &words_->claimed,
        .epoch = is_capturing() ? Errors::kUnknown : epoch().load(),
        .first_element = 0};
  }

  // Raises what is reported, but not while a graph is captured: a later call will.
  void raise_if_reported() {
    uint32_t now = epoch().load();
    // Kernels write to this report again only in the epoch after the next.
    OutOfBoundsIndex& report = record_->reports[now % 2];
    if (std::atomic_ref(report.ready).load() != now + 1 || is_capturing()) {
      return;
    }
    const std::string message =
        invalid_index(report.geometry, report.is_window_offset, report.index, report.element);
    // Of the threads that see the report, the one that begins the next epoch raises the error.
    const bool begins_epoch = epoch().compare_exchange_strong(now, now + 1);
    TORCH_CHECK(!begins_epoch, message, " (in this call or an earlier one on this CUDA device)");
  }

 private:
  std::atomic_ref<uint32_t> epoch() const { return std::atomic_ref(record_->epoch); }

  ErrorRecord* record_;
  DeviceWords* words_;
};

// Records of the devices that have been asked to unpool. Asks nothing of CUDA before one
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
    std::vector<c10::DeviceIndex> devices;
    for (const auto& [device, errors] : records_) {
      devices.push_back(device);
    }
    return devices;
  }

 private:
  std::mutex mutex_;
  std::map<c10::DeviceIndex, DeviceErrors> records_;
};

} // namespace maxunpool_cuda
