// SPDX-License-Identifier: BSD-3-Clause
// Choice of the kernel that a call of max pooling runs. The kernels are in pool.cuh and
// pool_lanes.cuh. max_pool.cu makes a PoolDispatch for each range of a call's images;
// Launch (launch.cuh) launches the kernel. `out` is the input's side, as in pool.cuh.
//
// Examples, of float32 inputs with 64 channels, a batch of 8:
//
//   112x112, window 3x3, stride 2, padding 1      pool_rows, whose rows divide into vectors
//   113x113, the same window                      pool_rows, one column of windows a thread
//   112x112 channels_last, the same window        pool_channels
//   7x7, window 7x7 (global pooling)              pool_lanes: 512 windows of 49 elements
//   112x112, window 5x5, or dilation 2            pool_windows
#pragma once

#include "../calls.h"
#include "../dtypes.h"
#include "../geometry.h"
#include "../torch.h"
#include "divider.cuh"
#include "launch.cuh"
#include "pool.cuh"
#include "pool_lanes.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace maxunpool_cuda {

class PoolDispatch {
 public:
  static constexpr int kMostRows = 4; // rows of windows that a thread does

  PoolDispatch(const Launch& launch, const PoolCall& call)
      : launch_(launch),
        call_(call),
        geometry_(call.geometry),
        fits_32bit_(fits_32bit(geometry_, call.dilation, kMostRows)) {}

  void run() const {
    with_ordered_type(call_.type, [&]<class T>(std::type_identity<T>) {
      // Other types are rarely pooled: the kernels for any window, with 64-bit offsets, will do.
      constexpr bool kIsUsual = !std::is_integral_v<T> && sizeof(T) < 8;
      if (!fits_32bit_) {
        return run_windows<T, uint64_t>();
      }
      if constexpr (kIsUsual) {
        if (run_windows_of<T, 2>() || run_windows_of<T, 3>()) {
          return;
        }
      }
      if (are_large_and_few()) {
        return run_lanes<T>();
      }
      run_windows<T, std::conditional_t<kIsUsual, uint32_t, uint64_t>>();
    });
  }

 private:
  // How many windows and channels a thread does.
  struct OfThread {
    int rows = 1;
    int columns = 1;
    int channels = 1;
  };

  // Runs a kernel compiled for windows of kKernel elements in height and width, without dilation,
  // if there is one for this call.
  template <class T, int kKernel>
  bool run_windows_of() const {
    const auto& [depth, height, width] = geometry_.axis;
    const auto is_one = [](int64_t step) { return step == 1; };
    const bool dilated = !std::all_of(call_.dilation, call_.dilation + 3, is_one);
    if (dilated || width.kernel != kKernel || (height.kernel != kKernel && !is_one_row())) {
      return false;
    }
    return (geometry_.inner == 1 && run_rows<T, kKernel>()) || run_channels<T, kKernel>();
  }

  // Inputs of one row, and windows of one row. For the kernels, such windows are as high as wide,
  // and all their rows but the first lie outside the input: these read the one row again.
  bool is_one_row() const {
    const auto& [depth, height, width] = geometry_.axis;
    return depth.kernel == 1 && height.kernel == 1 && height.out == 1;
  }
  bool are_arrays_aligned() const {
    return are_aligned({call_.input, call_.values, call_.indices});
  }

  template <class T, int kKernel>
  bool run_rows() const {
    const auto& [depth, height, width] = geometry_.axis;
    constexpr int kVector = kVectorBytes / sizeof(T);
    constexpr int kColumns = kVector / 2;
    // Of bfloat16, comparisons take longer than bytes, so a thread has two rows of windows, which
    // share those of a row. (Half, whose Element has two numbers, would not fit the registers.)
    constexpr int kRows = std::is_same_v<T, BFloat16> && kKernel == 3 ? 2 : 1;
    // Whether the call has this stride, for a kernel whose threads do so many rows of windows. In
    // an input of one row, threads of several rows would have nothing to share.
    const auto has_stride = [&](int64_t stride, int rows) {
      return width.stride == stride && (is_one_row() ? rows == 1 : height.stride == stride);
    };
    // Input rows divide into vectors, and windows begin at even columns, or one before (3x3).
    const bool divides =
        width.padding == kKernel - 2 && width.out % kVector == 0 && width.out == 2 * width.in;
    if (are_arrays_aligned() && divides && has_stride(2, kRows)) {
      return launch<T, uint32_t>(
          pool_rows<T, kKernel, 2, kColumns, kRows, true>, {.rows = kRows, .columns = kColumns});
    }
    if (has_stride(2, kMostRows)) {
      return launch<T, uint32_t>(
          pool_rows<T, kKernel, 2, 1, kMostRows, false>, {.rows = kMostRows});
    }
    if constexpr (kKernel == 3) {
      if (has_stride(1, kMostRows)) {
        return launch<T, uint32_t>(
            pool_rows<T, kKernel, 1, 1, kMostRows, false>, {.rows = kMostRows});
      }
    }
    return false;
  }

  template <class T, int kKernel>
  bool run_channels() const {
    constexpr int kVector = kVectorBytes / sizeof(T);
    // Eight of Half would spill; eight of bfloat16 with 3x3 windows fill all 64 registers (sm_90).
    constexpr int kChannels = std::is_same_v<T, Half> || kKernel == 3 ? 4 : kVector;
    if (!are_arrays_aligned() || geometry_.inner % kChannels != 0) {
      return false;
    }
    return launch<T, uint32_t>(pool_channels<T, kKernel, kChannels>, {.channels = kChannels});
  }

  // Whether the windows are for pool_lanes. Each has to lie in the input as a whole.
  bool are_large_and_few() const {
    int64_t elements = 1;
    for (int a = 0; a < 3; ++a) {
      const Axis<int64_t>& axis = geometry_.axis[a];
      const int64_t end = (axis.in - 1) * axis.stride + axis.kernel;
      if (call_.dilation[a] != 1 || axis.padding != 0 || end > axis.out) {
        return false;
      }
      elements *= axis.kernel;
    }
    const int64_t windows = geometry_.outer * geometry_.in_image();
    return elements >= Lanes::kFewestElements && windows < Lanes::kEnoughThreads;
  }

  template <class T>
  void run_lanes() const {
    const Lanes lanes(geometry_);
    const auto& [depth, height, width] = geometry_.axis;
    const Tiling<uint32_t> tiling(geometry_, {depth.in, height.in, width.in}, geometry_.inner);
    const int64_t threads = lanes.count * lanes.windows;
    launch_(
        pool_lanes<T>,
        divide_up(tiling.items, lanes.windows),
        threads,
        threads * sizeof(Candidate<T>),
        tiling,
        input<T>(),
        result<T>(),
        lanes);
  }

  template <class T, class Offset>
  void run_windows() const {
    using Limits = std::numeric_limits<T>;
    const T lowest = static_cast<T>(Limits::has_infinity ? -Limits::infinity() : Limits::lowest());
    const auto& [depth, height, width] = call_.dilation;
    const Dilation<Offset> dilation{
        {Divider<Offset>(depth), Divider<Offset>(height), Divider<Offset>(width)}};
    launch<T, Offset>(pool_windows<T, Offset>, {}, dilation, lowest);
  }

  // Launches a kernel, each of whose threads does so many windows and channels.
  template <class T, class Offset, class Kernel, class... Rest>
  bool launch(Kernel* kernel, const OfThread& of_thread, const Rest&... rest) const {
    const auto& [depth, height, width] = geometry_.axis;
    const Tiling<Offset> tiling(
        geometry_,
        {depth.in, divide_up(height.in, of_thread.rows), divide_up(width.in, of_thread.columns)},
        geometry_.inner / of_thread.channels);
    launch_(
        kernel,
        divide_up(static_cast<int64_t>(tiling.items), kThreads),
        kThreads,
        0,
        tiling,
        input<T>(),
        result<T>(),
        rest...);
    return true;
  }

  template <class T>
  const T* input() const {
    return static_cast<const T*>(call_.input);
  }
  template <class T>
  PoolResult<T> result() const {
    return {
        .values = static_cast<T*>(call_.values),
        .indices = call_.indices,
        .index_bytes = element_size(call_.index_type)};
  }

  const Launch& launch_;
  const PoolCall& call_;
  const Geometry<int64_t>& geometry_;
  const bool fits_32bit_;
};

} // namespace maxunpool_cuda
