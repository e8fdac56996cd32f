// SPDX-License-Identifier: BSD-3-Clause
// A call of max pooling as a whole: cut into launches that 32 bits can count, and the choice of the
// kernel of each. The kernels are in pool.cuh and pool_lanes.cuh. As in all of csrc, `out`
// is the unpooled side, which is the input here.
//
// Examples, of float32 inputs with 64 channels, a batch of 8:
//
//   112x112, window 3x3, stride 2, padding 1      pool_rows, whose rows divide into vectors
//   113x113, the same window                      pool_rows, one column of windows a thread
//   112x112 channels_last, the same window        pool_channels
//   7x7, window 7x7 (global pooling)              pool_lanes: 512 windows of 49 elements
//   112x112, window 7x7, or dilation 2            pool_windows
//
// A call of 300 images (see geometry.h) of which 100 fit a launch runs four times, on 75 each, as
// 300 is halved until it fits.
#include "../calls.h"
#include "../dtypes.h"
#include "../geometry.h"
#include "../torch.h"
#include "dispatch.cuh"
#include "divider.cuh"
#include "launch.cuh"
#include "pool.cuh"
#include "pool_lanes.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <numeric>
#include <type_traits>
#include <utility>

namespace maxunpool_cuda {

namespace {

class PoolDispatch {
 public:
  static constexpr int kMostRows = 4; // rows of windows that a thread does

  PoolDispatch(const Launch& launch, const PoolCall& call)
      : launch_(launch),
        call_(call),
        geometry_(call.geometry),
        fits_32bit_(fits_32bit(geometry_, call.dilation, more_windows(call))) {}

  // See fits_32bit().
  static int64_t more_windows(const PoolCall& call) {
    return kMostRows * std::max(call.dilation[1], call.dilation[2]);
  }

  void run() const {
    with_ordered_type(call_.type, [&]<class T>(std::type_identity<T>) {
      // Other types are rarely pooled: the kernels for any window will do, of which pool_windows
      // has 64-bit offsets then.
      constexpr bool kIsUsual = !std::is_integral_v<T> && sizeof(T) < 8;
      if (!fits_32bit_) {
        return run_windows<T, uint64_t>();
      }
      if constexpr (kIsUsual) {
        if (run_windows_of<T, 2>() || run_windows_of<T, 3>() || run_windows_of<T, 4>() ||
            run_windows_of<T, 5>()) {
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
    if (geometry_.inner == 1) {
      return run_rows<T, kKernel>();
    }
    if constexpr (kKernel <= 3) {
      return run_channels<T, kKernel>();
    }
    return false;
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
    // Whether the call has this stride, for a kernel whose threads do so many rows of windows. In
    // an input of one row, threads of several rows would have nothing to share.
    const auto has_stride = [&](int64_t stride, int rows) {
      return width.stride == stride && (is_one_row() ? rows == 1 : height.stride == stride);
    };
    if constexpr (kKernel <= 3) {
      constexpr int kVector = kVectorBytes / sizeof(T);
      constexpr int kColumns = kVector / 2;
      // Of bfloat16, comparisons take longer than bytes, so a thread has two rows of windows, which
      // share those of a row. (Half, whose Element has two numbers, would not fit the registers.)
      constexpr int kRows = std::is_same_v<T, BFloat16> && kKernel == 3 ? 2 : 1;
      // Input rows divide into vectors, and windows begin at even columns, or one before (3x3).
      const bool divides =
          width.padding == kKernel - 2 && width.out % kVector == 0 && width.out == 2 * width.in;
      if (are_arrays_aligned() && divides && has_stride(2, kRows)) {
        return launch<T>(
            pool_rows<T, kKernel, 2, kColumns, kRows, true>, {.rows = kRows, .columns = kColumns});
      }
      if (has_stride(2, kMostRows)) {
        return launch<T>(pool_rows<T, kKernel, 2, 1, kMostRows, false>, {.rows = kMostRows});
      }
    }
    // Five columns of Half would spill.
    if constexpr (kKernel >= 3 && !(kKernel == 5 && std::is_same_v<T, Half>)) {
      if (has_stride(1, kMostRows)) {
        return launch<T>(pool_rows<T, kKernel, 1, 1, kMostRows, false>, {.rows = kMostRows});
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
    return launch<T>(pool_channels<T, kKernel, kChannels>, {.channels = kChannels});
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

  // Any windows. Those of a signal are taken as a column's, so that a thread may own several.
  template <class T, class Offset>
  void run_windows() const {
    Geometry<int64_t> geometry = geometry_;
    auto& [depth, height, width] = geometry.axis;
    std::array dilation = std::to_array(call_.dilation);
    if (height.is_trivial()) {
      std::swap(height, width);
      std::swap(dilation[1], dilation[2]);
    }
    // Of windows that begin whole dilations apart, one has rows of elements in common with the
    // next.
    const int64_t common = std::gcd(height.stride, dilation[1]);
    const int64_t apart = dilation[1] / common;
    const int64_t rows_apart = height.stride / common;
    const WindowSteps<Offset> steps{
        .dilation =
            {Divider<Offset>(dilation[0]),
             Divider<Offset>(dilation[1]),
             Divider<Offset>(dilation[2])},
        .apart = Divider<Offset>(apart),
        .rows_apart = static_cast<Offset>(rows_apart)};
    if constexpr (sizeof(Offset) == sizeof(uint32_t)) {
      constexpr int kVector = 4;
      if (are_arrays_aligned() && geometry.inner % kVector == 0) {
        return launch_windows<T, Offset, 1, kVector>(geometry, height.in, steps);
      }
      // With fewer rows in common, threads of one window each are as fast.
      if (height.in > apart && 2 * rows_apart <= height.kernel) {
        const int64_t groups = divide_up(height.in, kMostRows * apart);
        return launch_windows<T, Offset, kMostRows, 1>(geometry, groups * apart, steps);
      }
    }
    launch_windows<T, Offset, 1, 1>(geometry, height.in, steps);
  }

  template <class T, class Offset, int R, int V>
  void launch_windows(
      const Geometry<int64_t>& geometry, int64_t rows, const WindowSteps<Offset>& steps) const {
    using Limits = std::numeric_limits<T>;
    const T lowest = static_cast<T>(Limits::has_infinity ? -Limits::infinity() : Limits::lowest());
    const Tiling<Offset> tiling(
        geometry, {geometry.axis[0].in, rows, geometry.axis[2].in}, geometry.inner / V);
    launch<T>(pool_windows<T, Offset, R, V>, tiling, steps, lowest);
  }

  // Launches a kernel, each of whose threads does so many windows and channels.
  template <class T, class Kernel>
  bool launch(Kernel* kernel, const OfThread& of_thread) const {
    const auto& [depth, height, width] = geometry_.axis;
    const Tiling<uint32_t> tiling(
        geometry_,
        {depth.in, divide_up(height.in, of_thread.rows), divide_up(width.in, of_thread.columns)},
        geometry_.inner / of_thread.channels);
    launch<T>(kernel, tiling);
    return true;
  }
  // Launches a kernel, each of whose threads does one of the tiling's items.
  template <class T, class Kernel, class Tiling, class... Rest>
  void launch(Kernel* kernel, const Tiling& tiling, const Rest&... rest) const {
    launch_(
        kernel,
        divide_up(static_cast<int64_t>(tiling.items), kThreads),
        kThreads,
        0,
        tiling,
        input<T>(),
        result<T>(),
        rest...);
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

} // namespace

// The call of `count` images of this call, from image `first` on.
static PoolCall images_of(const PoolCall& call, int64_t first, int64_t count) {
  const auto value_size = static_cast<int64_t>(element_size(call.type));
  const auto index_size = static_cast<int64_t>(element_size(call.index_type));
  const int64_t pooled = first * call.geometry.in_image(); // elements before the first
  const int64_t unpooled = first * call.geometry.out_image();
  PoolCall images = call;
  images.geometry.outer = count;
  images.input = static_cast<const char*>(call.input) + unpooled * value_size;
  images.values = static_cast<char*>(call.values) + pooled * value_size;
  images.indices = static_cast<char*>(call.indices) + pooled * index_size;
  return images;
}

void pool(const Launch& launch, const PoolCall& call) {
  const Geometry<int64_t>& geometry = call.geometry;
  const int64_t fitting =
      outer_that_fits(geometry, call.dilation, PoolDispatch::more_windows(call));
  for_each_range_of_images(geometry.outer, fitting, [&](int64_t first, int64_t count) {
    const PoolCall images = images_of(call, first, count);
    PoolDispatch(launch, images).run();
  });
}

} // namespace maxunpool_cuda
