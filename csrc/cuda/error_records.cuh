// SPDX-License-Identifier: BSD-3-Clause
// The host's side of error records: it raises what kernels wrote. From report.cuh come the
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
#include "../torch.h"
#include "report.cuh"

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <vector>

namespace maxunpool_cuda {

// Whether a stream is capturing a graph: nothing runs then, and waiting would end that.
inline bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  STD_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

// While it exists, this thread may do what CUDA else refuses as long as any thread captures a
// graph.
class RelaxedCaptureMode {
 public:
  RelaxedCaptureMode() { STD_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~RelaxedCaptureMode() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  RelaxedCaptureMode(const RelaxedCaptureMode&) = delete;
  RelaxedCaptureMode& operator=(const RelaxedCaptureMode&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed; // then the one that was before
};

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
    const RelaxedCaptureMode relaxed;
    void* host = nullptr;
    STD_CUDA_CHECK(cudaHostAlloc(&host, sizeof(ErrorRecord), cudaHostAllocMapped));
    record_ = new (host) ErrorRecord{};
    words_ = words_of_current_device();
  }

  DeviceWords* words() const { return words_; }

  // Where the kernels of a call that is launched now, or captured by a graph, are to report to.
  Errors for_call(bool is_captured) const {
    return {
        .record = record_,
        .claimed = &words_->claimed,
        .epoch = is_captured ? Errors::kUnknown : epoch().load(),
        .first_element = 0};
  }

  // Raises what is reported, but not while this stream captures a graph: a later call will.
  void raise_if_reported(cudaStream_t stream) {
    uint32_t now = epoch().load();
    // Kernels write to this report again only in the epoch after the next.
    OutOfBoundsIndex& report = record_->reports[now % 2];
    if (std::atomic_ref(report.ready).load() != now + 1 || is_capturing(stream)) {
      return;
    }
    const std::string message =
        invalid_index(report.geometry, report.is_window_offset, report.index, report.element);
    // Of the threads that see the report, the one that begins the next epoch raises the error.
    if (epoch().compare_exchange_strong(now, now + 1)) {
      fail(message, " (in this call or an earlier one on this CUDA device)");
    }
  }

 private:
  std::atomic_ref<uint32_t> epoch() const { return std::atomic_ref(record_->epoch); }

  ErrorRecord* record_;
  DeviceWords* words_;
};

// Records of the devices that have been asked to unpool. Before one has, no function of CUDA is
// called, as a process that has used CUDA cannot be forked.
class ErrorRecords {
 public:
  static ErrorRecords& get() {
    static ErrorRecords records;
    return records;
  }

  DeviceErrors& of(int32_t device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return records_[device]; // made here, if it is not there
  }

  std::vector<int32_t> devices() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<int32_t> devices;
    for (const auto& [device, errors] : records_) {
      devices.push_back(device);
    }
    return devices;
  }

 private:
  std::mutex mutex_;
  std::map<int32_t, DeviceErrors> records_;
};

// maxunpool_cuda.check_errors() of Python: waits for the current stream of every device that was
// asked to unpool, and raises what kernels have recorded there. In operators.cu.
void check_errors();

} // namespace maxunpool_cuda
