// SPDX-License-Identifier: BSD-3-Clause
// Choice of the kernel that a call of max pooling runs. max_pool.cu makes a PoolDispatch for each
// call, whose Launch launches the kernel (launch.cuh).
#pragma once

#include "../calls.h"
#include "../dtypes.h"
#include "../geometry.h"
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
  static constexpr int kMostRows = 4; // of windows of a thread

  PoolDispatch(const Launch& launch, const PoolCall& call)
      : launch_(launch),
        call_(call),
        geometry_(call.geometry),
        fits_32bit_(fits_32bit(geometry_, call.dilation, kMostRows)) {}

  void run() const {
    with_ordered_type(call_.type, [&]<class T>(std::type_identity<T>) {
      // Other types are rarely pooled: the kernels for any window will do.
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
  // Runs a kernel compiled for undilated windows of K elements in height and width, if there is
  // one. Flat inputs of one row may have windows of one row.
  template <class T, int K>
  bool run_windows_of() const {
    const auto& [depth, height, width] = geometry_.axis;
    const bool one_row = depth.kernel == 1 && height.kernel == 1 && height.out == 1;
    const bool dilated =
        std::any_of(call_.dilation, call_.dilation + 3, [](int64_t step) { return step != 1; });
    if (dilated || width.kernel != K || (height.kernel != K && !one_row)) {
      return false;
    }
    constexpr int kVector = kVectorBytes / sizeof(T), kInRow = kVector / 2;
    // Rows of windows of a thread. bfloat16 is little to move for so many comparisons, so windows
    // share those of a row. (Half, whose Tap has two numbers, would not fit the registers.)
    constexpr int kRows = std::is_same_v<T, c10::BFloat16> && K == 3 ? 2 : 1;
    constexpr int kChannels = std::is_same_v<T, c10::Half> || K == 3 ? 4 : kVector;
    const bool aligned = are_aligned({call_.input, call_.values, call_.indices});
    // In one row, threads of several rows would have nothing to share.
    const auto has_stride = [&](int64_t stride, bool also_in_one_row) {
      return width.stride == stride && (one_row ? also_in_one_row : height.stride == stride);
    };
    const bool divides =
        width.padding == K - 2 && width.out % kVector == 0 && width.out == 2 * width.in;
    if (geometry_.inner == 1) {
      if (aligned && divides && has_stride(2, kRows == 1)) {
        return launch<T, uint32_t>(pool_rows<T, K, 2, kInRow, kRows, true>, kRows, kInRow, 1);
      }
      if (has_stride(2, false)) {
        return launch<T, uint32_t>(pool_rows<T, K, 2, 1, kMostRows, false>, kMostRows, 1, 1);
      }
      if constexpr (K == 3) {
        if (has_stride(1, false)) {
          return launch<T, uint32_t>(pool_rows<T, K, 1, 1, kMostRows, false>, kMostRows, 1, 1);
        }
      }
    }
    if (aligned && geometry_.inner % kChannels == 0) {
      return launch<T, uint32_t>(pool_channels<T, K, kChannels>, 1, 1, kChannels);
    }
    return false;
  }

  // Whether the windows are for pool_lanes(). Each has to lie in the input as a whole.
  bool are_large_and_few() const {
    int64_t taps = 1;
    for (int a = 0; a < 3; ++a) {
      const Axis<int64_t>& axis = geometry_.axis[a];
      const int64_t end = (axis.in - 1) * axis.stride + axis.kernel;
      if (call_.dilation[a] != 1 || axis.padding != 0 || end > axis.out) {
        return false;
      }
      taps *= axis.kernel;
    }
    return taps >= Lanes::kFewestTaps && geometry_.outer * geometry_.in_image() < Lanes::kEnough;
  }

  template <class T>
  void run_lanes() const {
    const Lanes lanes(geometry_);
    const auto& [depth, height, width] = geometry_.axis;
    const Tiling<uint32_t> tiling(geometry_, {depth.in, height.in, width.in}, geometry_.inner);
    const int64_t threads = lanes.count * lanes.columns;
    launch_(
        pool_lanes<T>,
        divide_up(tiling.items, lanes.columns),
        threads,
        threads * sizeof(Best<T>),
        tiling,
        input<T>(),
        pooled<T>(),
        lanes);
  }

  template <class T, class Offset>
  void run_windows() const {
    using Limits = std::numeric_limits<T>;
    const T lowest = static_cast<T>(Limits::has_infinity ? -Limits::infinity() : Limits::lowest());
    const auto& [depth, height, width] = call_.dilation;
    const Dilation<Offset> dilation{
        {Divider<Offset>(depth), Divider<Offset>(height), Divider<Offset>(width)}};
    launch<T, Offset>(pool_windows<T, Offset>, 1, 1, 1, dilation, lowest);
  }

  // Launches a thread for so many windows in height and width, and so many channels.
  template <class T, class Offset, class Kernel, class... Rest>
  bool launch(Kernel* kernel, int rows, int columns, int channels, const Rest&... rest) const {
    const auto& [depth, height, width] = geometry_.axis;
    const Tiling<Offset> tiling(
        geometry_,
        {depth.in, divide_up(height.in, rows), divide_up(width.in, columns)},
        geometry_.inner / channels);
    launch_(
        kernel,
        divide_up(static_cast<int64_t>(tiling.items), kThreads),
        kThreads,
        0,
        tiling,
        input<T>(),
        pooled<T>(),
        rest...);
    return true;
  }

  template <class T>
  const T* input() const {
    return static_cast<const T*>(call_.input);
  }
  template <class T>
  Pooled<T> pooled() const {
    return {static_cast<T*>(call_.values), call_.indices, c10::elementSize(call_.index_type)};
  }

  const Launch& launch_;
  const PoolCall& call_;
  const Geometry<int64_t>& geometry_;
  const bool fits_32bit_;
};

} // namespace maxunpool_cuda
