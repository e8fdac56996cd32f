// SPDX-License-Identifier: BSD-3-Clause
// Launches of `forward` (forward.cuh): which of its instantiations a call gets, if any.
// dispatch.cuh has the table of them, and the class Dispatch whose functions are defined here.
//
// Example: a call that moves float32 elements by flat indices asks forward_if() for the windows
// 2x2, 3x3 with padding 1, 3x3 without, 4x4, and 3x3 with stride 1, one after the other. The first
// whose windows are the call's launches forward<CombineLast<uint32_t>, false, Square<..>,
// Form::..>.
#include "../dtypes.h"
#include "../geometry.h"
#include "../reduction.h"
#include "../torch.h"
#include "dispatch.cuh"
#include "forward.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

namespace maxunpool_cuda {

// The bits of -0, if the call adds floating-point numbers, else 0: an argument of added_to_zero.
template <class T>
T negative_zero(const UnpoolCall& call) {
  if constexpr (std::is_unsigned_v<T>) {
    using enum ScalarType;
    const bool adds_floats = call.reduce == Reduce::sum &&
                             with_type_of<Half, BFloat16, Float, Double>(call.type, kNothing);
    return adds_floats ? T{1} << (8 * sizeof(T) - 1) : T{};
  }
  return T{};
}

bool Dispatch::forward() {
  // Tries the windows in their order, and stops at the first whose kernel it could launch.
  const auto launch_one_of = [&]<class Combine, class... Windows>() {
    return offsets_ ? (forward_if<Combine, true, Windows>() || ...)
                    : (forward_if<Combine, false, Windows>() || ...);
  };
  const auto launch_of_stride_1 = [&]<class Combine>() {
    return offsets_ ? forward_if<Combine, true, Square<3, 1, 1>>() ||
                          forward_if<Combine, true, Square<5, 1, 2>>()
                    : forward_if<Combine, false, Square<3, 1, 1>>();
  };
  bool is_done = false;
  using enum ScalarType;
  const bool is_complex = with_type_of<ComplexFloat, ComplexDouble>(call_.type, kNothing);
  // Where windows are disjoint, an output has one element at most, so a sum only moves it.
  if (last_ || (disjoint(geometry_) && !is_complex)) {
    with_bytes(call_.element_size, [&]<class T>(std::type_identity<T>) {
      if constexpr (sizeof(T) <= sizeof(uint64_t)) {
        is_done = launch_one_of.template
                  operator()<CombineLast<T>, Square<2, 2, 0>, Square<3, 2, 1>, Square<3, 2, 0>>();
      }
      if constexpr (sizeof(T) == 2 || sizeof(T) == 4) {
        is_done = is_done || launch_one_of.template operator()<CombineLast<T>, Square<4, 4, 0>>() ||
                  launch_of_stride_1.template operator()<CombineLast<T>>();
      }
    });
  } else {
    with_arithmetic_type(call_.type, [&]<class T>(std::type_identity<T>) {
      // The types that networks are trained in.
      if constexpr (std::is_floating_point_v<Accumulator<T>> && sizeof(T) <= sizeof(float)) {
        is_done =
            launch_one_of.template operator()<CombineSum<T>, Square<3, 2, 1>, Square<3, 2, 0>>() ||
            launch_of_stride_1.template operator()<CombineSum<T>>();
      }
    });
  }
  return is_done;
}

// Launches the kernel compiled for these windows, if the call's are these. Returns whether it did.
template <class Combine, bool kOffsets, class Window>
bool Dispatch::forward_if() {
  using T = typename Combine::Element;
  const auto geometry = with_windows<Window>();
  if (!geometry) {
    return false;
  }
  const auto& [depth, height, width] = geometry->axis;
  // Tiles along an axis: as many as cells, or more if the outputs beyond the last cell need them.
  const auto tiles = [](const Axis<int64_t>& axis) {
    return std::max(axis.in, divide_up(axis.out, Window::S));
  };
  const auto launch = [&]<Form kForm>() {
    using Traits = ForwardTraits<Combine, kOffsets, Window, kForm>;
    const Tiling<uint32_t> tiling(
        *geometry,
        {depth.out, divide_up(tiles(height), Traits::R), divide_up(tiles(width), Traits::V)},
        geometry->inner / Traits::C);
    launch_items<T>(
        maxunpool_cuda::forward<Combine, kOffsets, Window, kForm>,
        tiling,
        Divider<uint32_t>(depth.stride),
        negative_zero<T>(call_));
    return true;
  };
  // Three ways to divide the work, tried in the order of the table in dispatch.cuh.
  if constexpr (sizeof(T) < sizeof(uint64_t)) { // else a vector is no more than two elements
    // With stride 1 and flat indices, the reads of a column take fewer sectors (simulated).
    if constexpr (Window::S > 1 || kOffsets) {
      constexpr int kCells = OwnedByForward<T, kOffsets, Window, Form::cells>::V;
      if (is_aligned() && geometry->inner == 1 && width.in % kCells == 0 &&
          width.out == Window::S * width.in) {
        return launch.template operator()<Form::cells>();
      }
    }
    if constexpr (Window::S == 2) {
      constexpr int kChannels = OwnedByForward<T, kOffsets, Window, Form::channels>::C;
      if (is_aligned() && geometry->inner > 1 && geometry->inner % kChannels == 0) {
        return launch.template operator()<Form::channels>();
      }
    }
  }
  // Columns of one cell would leave three quarters of a thread's work undone.
  if constexpr (Window::S <= 2) {
    if (height.in > 1) {
      return launch.template operator()<Form::column>();
    }
  }
  return false; // larger windows are rare: `slots` does these
}

// The geometry, if windows are these in height and width and do not overlap in depth; or, with
// stride 1, if there is one depth. A plane of one row is done as if its windows were as high as
// wide, with all rows but one clipped. This changes no position. Offsets count the rows of a
// window: they stay as they are only if the one row is the first (no padding) of the only depth
// slice. Example: of a window of 3 with padding 1, offset 1 would become offset 4 of 3x3.
template <class Window>
std::optional<Geometry<int64_t>> Dispatch::with_windows() const {
  Geometry<int64_t> g = geometry_;
  auto& [depth, height, width] = g.axis;
  if (height.is_trivial() && (!offsets_ || (Window::P == 0 && depth.kernel == 1))) {
    height = {.in = 1, .out = 1, .kernel = Window::K, .stride = Window::S, .padding = Window::P};
  }
  const auto fits = [](const Axis<int64_t>& axis) {
    return axis.kernel == Window::K && axis.stride == Window::S && axis.padding == Window::P;
  };
  const bool simple_in_depth = depth.kernel <= depth.stride && depth.padding == 0 &&
                               (depth.in - 1) * depth.stride < depth.out;
  const bool fits_depth = Window::S > 1 ? simple_in_depth : depth.is_trivial();
  return fits(height) && fits(width) && fits_depth ? std::optional(g) : std::nullopt;
}

} // namespace maxunpool_cuda
