// SPDX-License-Identifier: BSD-3-Clause
// Launch: all that the files that choose kernels need of a device and of PyTorch: to run a kernel
// on the stream of the call, a workspace, the number of processors, and a number for the launch.
// operators.cu makes a Launch for each call, and defines the functions that are only declared here.
//
// Example: launch(kernel, 10, 128, 0, plan, input) runs 10 blocks of 128 threads without shared
// memory, and returns before they have run. kernel is void(Plan, const float*).
#pragma once

#include "../torch.h"
#include "report.cuh"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <type_traits>

namespace maxunpool_cuda {

struct Launch {
  // Out-of-window flags that a block reads in about a microsecond. On an H200, 131,072 took 40.
  static constexpr int64_t kFewFlags = 4096;
  // Words that a workspace for flags has in front of these, for out_of_window_launches().
  static constexpr int64_t kOwnWords = sizeof(unsigned long long) / sizeof(uint32_t);

  int32_t device;
  cudaStream_t stream;
  bool is_captured; // by a graph, which will run the launch, with these arguments, again and again
  unsigned long long* largest_out_of_window_launch; // of the device; null for pooling

  // Room for so many words of 32 bits, undefined; null for none. Kernels that are launched before
  // it is freed may use it.
  std::shared_ptr<uint32_t> workspace(int64_t words) const;
  // Multiprocessors of the device.
  int64_t processors() const;
  // A number for a launch with so many flags, and the word that it is compared with. In a graph the
  // number stays the same, so after a larger one in the word of the device all replays would read
  // the flags. Unless these are few, the launch then has a word of its own, in front of the flags,
  // and each replay of the graph sets it to zero first.
  OutOfWindowLaunches out_of_window_launches(uint32_t* own, int64_t flags) const;

  template <class... Parameters>
  void operator()(
      void (*kernel)(Parameters...),
      int64_t blocks,
      int64_t threads, // of a block
      int64_t shared_bytes,
      const std::type_identity_t<Parameters>&... arguments) const {
    kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), shared_bytes, stream>>>(
        arguments...);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

} // namespace maxunpool_cuda
