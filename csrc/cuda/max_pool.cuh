// Choice of the kernel that a call of max pooling runs. `Launch` launches it; see dispatch.cuh.
#pragma once

#include "../calls.h"
#include "../dtypes.h"
#include "../geometry.h"
#include "call.cuh"
#include "divider.cuh"
#include "pool_channels.cuh"
#include "pool_plan.cuh"
#include "pool_rows.cuh"
#include "pool_windows.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace maxunpool_cuda {

template <class Launch>
class PoolDispatch {
 public:
  // `max_32bit_offset`: see Limits.
  PoolDispatch(const Launch& launch, const PoolCall& call, int64_t max_32bit_offset)
      : launch_(launch),
        call_(call),
        geometry_(call.geometry),
        max_32bit_offset_(max_32bit_offset),
        aligned_(are_aligned({call.input, call.values, call.indices})) {}

  void run() const {
    with_ordered_type(call_.type, [&]<class T>(std::type_identity<T>) {
      if constexpr (std::is_integral_v<T> || sizeof(T) == 8) { // rarely pooled: one kernel will do
        run_windows<T, uint64_t>();
      } else if (!fits_32bit(
                     geometry_, geometry_.inner, max_32bit_offset_, call_.dilation, kMostRows)) {
        run_windows<T, uint64_t>();
      } else if (has_pool_windows(geometry_, call_.dilation, 2)) {
        run_window_of<T, 2>();
      } else if (has_pool_windows(geometry_, call_.dilation, 3)) {
        run_window_of<T, 3>();
      } else {
        run_windows<T, uint32_t>();
      }
    });
  }

 private:
  template <class T, int K>
  void run_window_of() const {
    constexpr int kVector = kVectorBytes / sizeof(T);
    // Rows of windows of a thread. bfloat16 is little to move for so many comparisons, so windows
    // share those of a row. (Half, whose Tap has two numbers, would not fit the registers.)
    constexpr int kRows = std::is_same_v<T, c10::BFloat16> && K == 3 ? 2 : 1;
    const bool contiguous = geometry_.inner == 1;
    with_index_type(call_.index_type, [&]<class Index>(std::type_identity<Index>) {
      constexpr int kIndices = kVectorBytes / sizeof(Index);
      constexpr int kInRow = std::min(kVector / 2, kIndices);
      constexpr int V = std::min({kVector, kIndices, std::is_same_v<T, c10::Half> ? 4 : 8});
      if (contiguous && aligned_ && has_pool_stride(geometry_, 2, kRows == 1) &&
          divides_into_rows(geometry_, K, kInRow)) {
        return run_rows<T, Index, K, 2, kInRow, kRows, true>();
      }
      if (contiguous && has_pool_stride(geometry_, 2, false)) {
        return run_rows<T, void, K, 2, 1, kMostRows, false>();
      }
      if (contiguous && K == 3 && has_pool_stride(geometry_, 1, false)) {
        return run_rows<T, void, 3, 1, 1, kMostRows, false>();
      }
      if (aligned_ && geometry_.inner % V == 0) {
        return launch<uint32_t, T, Index>(pool_channels<T, Index, K, V>, 1, 1, V);
      }
      run_windows<T, uint32_t>();
    });
  }

  template <class T, class Index, int K, int S, int V, int R, bool kEven>
  void run_rows() const {
    static_assert(R <= kMostRows);
    launch<uint32_t, T, Index>(pool_rows<T, Index, K, S, V, R, kEven>, R, V, 1);
  }
  template <class T, class Offset>
  void run_windows() const {
    using Limits = std::numeric_limits<T>;
    const T lowest = static_cast<T>(Limits::has_infinity ? -Limits::infinity() : Limits::lowest());
    const auto& [depth, height, width] = call_.dilation;
    const Dilation<Offset> dilation{
        {divider<Offset>(depth), divider<Offset>(height), divider<Offset>(width)}};
    launch<Offset, T, void>(pool_windows<T, Offset>, 1, 1, 1, dilation, lowest);
  }

  // Launches a thread for so many windows in height and width, and so many channels.
  template <class Offset, class T, class Index, class Kernel, class... Parameters>
  void launch(
      Kernel* kernel, int rows, int columns, int channels, const Parameters&... parameters) const {
    const auto tiling = tile_cells<Offset>(geometry_, geometry_.inner / channels, 1, rows, columns);
    launch_(
        kernel, tiling.items, tiling, parameters..., static_cast<const T*>(call_.input),
        static_cast<T*>(call_.values),
        IndexArray<Index>{call_.indices, c10::elementSize(call_.index_type)});
  }

  const Launch& launch_;
  const PoolCall& call_;
  const Geometry<int64_t>& geometry_;
  const int64_t max_32bit_offset_;
  const bool aligned_;
};

} // namespace maxunpool_cuda
