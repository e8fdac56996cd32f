// Which kernel a call of max pooling runs. Everything but the launch itself; see dispatch.cuh.
#pragma once

#include "../dtypes.h"
#include "../geometry.h"
#include "divider.cuh"
#include "plan.cuh"
#include "pool_channels.cuh"
#include "pool_rows.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace maxunpool_cuda {

struct PoolArguments {
  Geometry<int64_t> geometry;
  int64_t dilation[3];
  c10::ScalarType type;
  c10::ScalarType index_type;
  const void* input;
  void* values;
  void* indices;
  int64_t narrow = int64_t{1} << 31; // as in Limits
};

template <class Launch>
class PoolDispatch {
 public:
  PoolDispatch(const Launch& launch, const PoolArguments& arguments)
      : launch_(launch), arguments_(arguments) {}

  void run() const {
    with_ordered_type(arguments_.type, [&]<class T>(std::type_identity<T>) {
      if constexpr (std::is_integral_v<T>) { // rarely pooled: one kernel will do
        run_windows<T, uint64_t>();
      } else if (!fits()) {
        run_windows<T, uint64_t>();
      } else if (is_window_of(2)) {
        run_window_of<T, 2>();
      } else if (is_window_of(3)) {
        run_window_of<T, 3>();
      } else {
        run_windows<T, uint32_t>();
      }
    });
  }

 private:
  // Are the windows of `size` cells in height and width, without dilation? An input of one row may
  // have windows of one row.
  bool is_window_of(int64_t size) const {
    const auto& [depth, height, width] = arguments_.geometry.axis;
    const auto& dilation = arguments_.dilation;
    return std::all_of(dilation, dilation + 3, [](int64_t d) { return d == 1; }) &&
           width.kernel == size && (height.kernel == size || is_one_row());
  }
  bool is_one_row() const {
    const Axis<int64_t>& height = arguments_.geometry.axis[1];
    return height.kernel == 1 && height.out == 1 && height.in == 1;
  }

  template <class T, int K>
  void run_window_of() const {
    constexpr bool kRare = sizeof(T) == 8;
    constexpr int kVector = kVectorBytes / sizeof(T);
    // bfloat16 is little to move for so many compares: its threads share rows where windows do.
    // (Half, which is kept beside its number, would not fit into the registers.)
    constexpr int kRows = std::is_same_v<T, c10::BFloat16> && K == 3 ? 2 : 1;
    const int64_t inner = arguments_.geometry.inner;
    with_index_type(arguments_.index_type, [&]<class Index>(std::type_identity<Index>) {
      constexpr int kIndices = kVectorBytes / sizeof(Index);
      constexpr int kInRow = std::min(kVector / 2, kIndices);
      constexpr int V = std::min({kVector, kIndices, std::is_same_v<T, c10::Half> ? 4 : 8});
      if constexpr (!kRare || K == 2) {
        if (inner == 1 && is_apart(2, kRows == 1) && divides_into_rows(K, kInRow)) {
          return run_rows<T, Index, K, 2, kInRow, kRows, true>();
        }
      }
      if constexpr (!kRare) {
        if (inner == 1 && is_apart(2, false)) {
          return run_rows<T, void, K, 2, 1, kMostRows, false>();
        }
        if (inner == 1 && K == 3 && is_apart(1, false)) {
          return run_rows<T, void, 3, 1, 1, kMostRows, false>();
        }
        if (inner % V == 0 && is_aligned()) {
          return launch<uint32_t, T, Index>(pool_channels<T, Index, K, V>, 1, 1, V);
        }
      }
      run_windows<T, uint32_t>();
    });
  }

  // The threads of several rows would have nothing to share in one.
  bool is_apart(int64_t stride, bool also_in_one_row) const {
    const auto& [depth, height, width] = arguments_.geometry.axis;
    return width.stride == stride && (is_one_row() ? also_in_one_row : height.stride == stride);
  }
  bool divides_into_rows(int64_t kernel, int64_t vector) const {
    const auto& [depth, height, width] = arguments_.geometry.axis;
    return width.padding == kernel - 2 && width.in % vector == 0 && width.out % (2 * vector) == 0 &&
           width.out >= 2 * width.in && is_aligned();
  }

  bool is_aligned() const {
    return are_aligned({arguments_.input, arguments_.values, arguments_.indices});
  }

  // Is every value that the kernels compute below the limit?
  bool fits() const {
    const Geometry<int64_t>& g = arguments_.geometry;
    double elements = static_cast<double>(g.outer) * static_cast<double>(g.inner);
    double number = 1, reach = 0;
    for (int a = 0; a < 3; ++a) {
      const Axis<int64_t>& axis = g.axis[a];
      const auto dilation = static_cast<double>(arguments_.dilation[a]);
      // A thread's windows may not all exist.
      const auto size = static_cast<double>(std::max(axis.in + (a == 1 ? kMostRows : 0), axis.out));
      number *= static_cast<double>(axis.kernel);
      elements *= dilation == 1 ? size : size + dilation;
      reach = std::max(
          reach, (size + 1) * static_cast<double>(axis.stride) + static_cast<double>(axis.padding) +
                     (static_cast<double>(axis.kernel) + 1) * dilation);
    }
    return std::max({elements, reach, number}) < static_cast<double>(arguments_.narrow);
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
    const auto& [depth, height, width] = arguments_.dilation;
    const PoolCells<Offset> cells{
        {divider<Offset>(depth), divider<Offset>(height), divider<Offset>(width)}};
    launch<Offset, T, void>(pool_windows<T, Offset>, 1, 1, 1, cells, lowest);
  }

  // A thread for so many windows in height and width, and so many channels.
  template <class Offset, class T, class Index, class Kernel, class... Parameters>
  void launch(
      Kernel* kernel, int rows, int columns, int channels, const Parameters&... parameters) const {
    const auto& [depth, height, width] = arguments_.geometry.axis;
    const auto tiling = make_tiling<Offset>(
        arguments_.geometry, {1, 1, 1}, {depth.in, divide_up(height.in, rows), width.in / columns},
        arguments_.geometry.inner / channels);
    launch_(
        kernel, tiling.items, tiling, parameters..., static_cast<const T*>(arguments_.input),
        static_cast<T*>(arguments_.values),
        IndexArray<Index>{arguments_.indices, c10::elementSize(arguments_.index_type)});
  }

  static constexpr int kMostRows = 4; // of windows that a thread does

  const Launch& launch_;
  const PoolArguments& arguments_;
};

} // namespace maxunpool_cuda
