// SPDX-License-Identifier: BSD-3-Clause
// Choice of the kernels that a call of max unpooling runs, their plans and their launches. `Launch`
// does the launches, so that the choice can be tested without a GPU:
//   launch(kernel, blocks, threads, shared_bytes, arguments...)
//   launch.workspace(count)   address of so many uint32_t
//   launch.most_blocks()      of a fix-up kernel
//   launch.out_of_window_launches()   a new number for a launch, and the word that it is compared
//   with
#pragma once

#include "../calls.h"
#include "../dtypes.h"
#include "../geometry.h"
#include "../reduction.h"
#include "backward.cuh"
#include "forward.cuh"
#include "report.cuh"
#include "slots.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <type_traits>

namespace maxunpool_cuda {

template <class Launch>
class Dispatch {
 public:
  Dispatch(const Launch& launch, const UnpoolCall& call, const Errors& errors)
      : launch_(launch),
        call_(call),
        geometry_(call.geometry),
        report_{.out_of_window_flags = nullptr, .out_of_window_launches = {}, .errors = errors},
        last_(call.reduce == Reduce::last),
        offsets_(call.index_type == c10::ScalarType::Byte),
        may_leave_window_(!offsets_ && (call.forward || last_)) {}

  // `simple`: the kernels of slots.cuh do all.
  void run(bool simple) {
    if (!simple && fits_32bit(geometry_)) {
      call_.forward ? forward() : backward();
    }
    if (!launched_) {
      slots();
    }
    if (may_leave_window_) {
      is_fixup_ = true;
      report_.out_of_window_flags = nullptr;
      slots();
    }
  }

 private:
  // ---- forward.cuh

  void forward() {
    const auto launch_one_of = [&]<class Combine, class... Windows>() {
      offsets_ ? (forward_if<Combine, true, Windows>(), ...)
               : (forward_if<Combine, false, Windows>(), ...);
    };
    // Where windows are disjoint, an output has one element at most, so a sum only moves it.
    if (last_ || (disjoint(geometry_) && !c10::isComplexType(call_.type))) {
      with_bytes(call_.element_size, [&]<class T>(std::type_identity<T>) {
        if constexpr (sizeof(T) <= sizeof(uint64_t)) {
          launch_one_of.template
          operator()<CombineLast<T>, Square<2, 2, 0>, Square<3, 2, 1>, Square<3, 2, 0>>();
        }
        if constexpr (sizeof(T) == 2 || sizeof(T) == 4) {
          launch_one_of.template operator()<CombineLast<T>, Square<4, 4, 0>>();
        }
      });
    } else {
      with_arithmetic_type(call_.type, [&]<class T>(std::type_identity<T>) {
        // The types that networks are trained in.
        if constexpr (std::is_floating_point_v<Accumulator<T>> && sizeof(T) <= sizeof(float)) {
          launch_one_of.template operator()<CombineSum<T>, Square<3, 2, 1>, Square<3, 2, 0>>();
        }
      });
    }
  }

  // Launches the kernel compiled for these windows, if the call's are these.
  template <class Combine, bool kOffsets, class Window>
  void forward_if() {
    using T = typename Combine::Element;
    const auto geometry = with_windows<Window>();
    if (!geometry) {
      return;
    }
    const auto& [depth, height, width] = geometry->axis;
    const auto tiles = [](const Axis<int64_t>& axis) {
      return std::max(axis.in, divide_up(axis.out, Window::S));
    };
    const auto launch = [&]<Elements kOf>(const Tiling<uint32_t>& tiling, const Planes& planes) {
      launch_items<T>(
          maxunpool_cuda::forward<Combine, kOffsets, Window, kOf>,
          tiling,
          planes.images,
          planes,
          negative_zero<T>());
    };
    if constexpr (sizeof(T) < sizeof(uint64_t)) { // else a vector is no more than two elements
      constexpr int kCells = elements_of_thread<T, kOffsets, Window, Elements::cells>();
      const bool aligned = are_aligned({call_.values, call_.indices, call_.result});
      if (aligned && geometry->inner == 1 && width.in % kCells == 0 &&
          width.out == Window::S * width.in) {
        return launch.template operator()<Elements::cells>(
            {*geometry, {depth.out, tiles(height), width.in / kCells}, 1}, Planes(*geometry));
      }
      if constexpr (Window::S == 2) {
        constexpr int kChannels = elements_of_thread<T, kOffsets, Window, Elements::channels>();
        if (aligned && geometry->inner > 1 && geometry->inner % kChannels == 0) {
          return launch.template operator()<Elements::channels>(
              {*geometry, {depth.out, tiles(height), tiles(width)}, geometry->inner / kChannels},
              Planes(*geometry));
        }
      }
    }
    if constexpr (Window::S == 2) { // larger windows are rare: slots() does them
      constexpr int kPlanes = elements_of_thread<T, kOffsets, Window, Elements::planes>();
      const Planes planes(*geometry, kPlanes);
      launch.template operator()<Elements::planes>(
          {*geometry,
           {depth.out, tiles(height), tiles(width)},
           planes.images == 1 ? geometry->inner / kPlanes : geometry->inner,
           planes.images},
          planes);
    }
  }

  // The geometry, if windows are these in height and width and do not overlap in depth. A plane of
  // one row is done as if its windows were as high as wide, with all rows but one clipped. This
  // changes no position; it changes no offset if there is one slice and no row above is clipped.
  template <class Window>
  std::optional<Geometry<int64_t>> with_windows() const {
    Geometry<int64_t> g = geometry_;
    auto& [depth, height, width] = g.axis;
    const bool one_row =
        height.in == 1 && height.out == 1 && height.kernel == 1 && height.padding == 0;
    if (one_row && (!offsets_ || (Window::P == 0 && depth.kernel == 1))) {
      height = {1, 1, Window::K, Window::S, Window::P};
    }
    const auto fits = [](const Axis<int64_t>& axis) {
      return axis.kernel == Window::K && axis.stride == Window::S && axis.padding == Window::P;
    };
    const bool simple_in_depth = depth.kernel <= depth.stride && depth.padding == 0 &&
                                 (depth.in - 1) * depth.stride < depth.out;
    return fits(height) && fits(width) && simple_in_depth ? std::optional(g) : std::nullopt;
  }

  // ---- backward.cuh

  void backward() {
    const auto& [depth, height, width] = geometry_.axis;
    const bool drops_losers = last_ && !disjoint(geometry_);
    GatherPlan plan{Planes(geometry_), !last_, {}};
    if (drops_losers) {
      if (depth.kernel > 1 || height.kernel > 2 * height.stride ||
          width.kernel > 2 * width.stride || height.kernel > 32 / width.kernel) {
        return;
      }
      for (int64_t bit = 0; bit < height.kernel * width.kernel; ++bit) {
        const int64_t y = bit / width.kernel, x = bit % width.kernel;
        for (int n = 0; n < kLaterCells; ++n) { // its window begins so far down and right
          const int64_t down = n > 0 ? height.stride : 0;
          const int64_t right = (n == 0 ? 1 : n - 2) * width.stride;
          const bool is_shared = y >= down && x >= right && x < width.kernel + right;
          plan.shared[n] |= is_shared ? 1u << bit : 0;
        }
      }
    }
    with_bytes(call_.element_size, [&]<class T>(std::type_identity<T>) {
      const auto launch = [&]<bool kOffsets, bool kDropsLosers>() {
        constexpr int kPlanes = kPlanesOfThread<kDropsLosers>;
        plan.planes = Planes(geometry_, kPlanes);
        const Tiling<uint32_t> tiling(
            geometry_,
            {depth.in, height.in, width.in},
            plan.planes.images == 1 ? geometry_.inner / kPlanes : geometry_.inner,
            plan.planes.images);
        launch_items<T>(
            maxunpool_cuda::backward<T, kOffsets, kDropsLosers>, tiling, plan.planes.images, plan);
      };
      if constexpr (sizeof(T) <= sizeof(uint64_t)) {
        drops_losers ? offsets_ ? launch.template operator()<true, true>()
                                : launch.template operator()<false, true>()
        : offsets_   ? launch.template operator()<true, false>()
                     : launch.template operator()<false, false>();
      }
    });
  }

  // ---- slots.cuh

  void slots() { fits_32bit(geometry_) ? slots_of<uint32_t>() : slots_of<uint64_t>(); }

  template <class Offset>
  void slots_of() {
    if (last_ || !call_.forward) {
      with_bytes(call_.element_size, [&]<class T>(std::type_identity<T>) {
        if (call_.forward) {
          launch_parts<T>(forward_last_slots<Offset, T>, parts<Offset>(sizeof(uint32_t)));
        } else if (last_) {
          launch_parts<T>(backward_last_slots<Offset, T>, parts<Offset>(sizeof(uint32_t)));
        } else { // backward() does nearly all that fits 32 bits
          launch_parts<T>(backward_sum_slots<T>, parts<uint64_t>(0));
        }
      });
    } else {
      with_arithmetic_type(call_.type, [&]<class T>(std::type_identity<T>) {
        if constexpr (sizeof(Offset) == sizeof(uint32_t)) {
          if (!is_fixup_ && CoveringWindows::most(geometry_) <= CoveringWindows::kMost) {
            const CoveringWindows covering(geometry_);
            const int64_t slot_bytes = covering.words * int64_t{sizeof(uint32_t)};
            Parts<Offset> plan = parts<Offset>(slot_bytes);
            plan.shared_bytes += covering.all * int64_t{sizeof(uint32_t)};
            launch_parts<T>(forward_own_sum_slots<T>, plan, covering);
            return;
          }
        }
        const int64_t slot_bytes = sizeof(CombineSum<T>) + sizeof(uint32_t);
        launch_parts<T>(forward_any_sum_slots<T>, parts<uint64_t>(slot_bytes));
      });
    }
  }

  // The parts of the call, for the fast kernel or for the fix-up kernel, with slots of so many
  // bytes.
  template <class Offset>
  Parts<Offset> parts(int64_t slot_bytes) const {
    const int64_t cells = geometry_.in_plane();
    TORCH_CHECK(
        cells < std::numeric_limits<uint32_t>::max(),
        "max_unpool",
        geometry_.rank,
        "d: expected fewer than 2^32 - 1 pooled elements in a plane on CUDA but got ",
        cells);
    return Parts<Offset>(geometry_, slot_bytes, is_fixup_ ? &out_of_window_flags_ : nullptr);
  }

  // Launches the kernel as the fast one, or as the fix-up kernel.
  template <class T, class Kernel, class Offset, class... Rest>
  void launch_parts(Kernel* kernel, const Parts<Offset>& parts, const Rest&... rest) {
    const auto parts_of_image =
        static_cast<int64_t>(parts.groups_of_image.divisor() * parts.parts_of_group);
    const auto all = static_cast<int64_t>(parts.groups * parts.parts_of_group);
    if (!is_fixup_) {
      flag(all, 1, parts_of_image, static_cast<int64_t>(parts.images_of_group));
    }
    const int64_t most = is_fixup_ ? launch_.most_blocks() : int64_t{1} << 30;
    launch_(
        kernel,
        std::min(all, most),
        parts.threads(kSlotThreads),
        parts.shared_bytes,
        parts,
        rest...,
        report_,
        static_cast<const T*>(call_.values),
        any_indices(),
        static_cast<T*>(call_.result));
  }

  // ---- what both need

  // Launches a fast kernel whose items are in so many images each.
  template <class T, class Kernel, class Plan, class... Rest>
  void launch_items(
      Kernel* kernel,
      const Tiling<uint32_t>& tiling,
      int64_t images,
      const Plan& plan,
      const Rest&... rest) {
    const int64_t items = tiling.items, blocks = divide_up(items, kThreads);
    flag(blocks, kThreads, items / divide_up(geometry_.outer, images), images);
    launch_(
        kernel,
        blocks,
        kThreads,
        0,
        tiling,
        plan,
        report_,
        rest...,
        static_cast<const T*>(call_.values),
        any_indices(),
        static_cast<T*>(call_.result));
  }

  // Makes room for the out-of-window flags of the fast kernel. See OutOfWindowFlags.
  void flag(int64_t count, int64_t chunk_items, int64_t image_items, int64_t images) {
    launched_ = true;
    if (may_leave_window_) {
      report_.out_of_window_flags = launch_.workspace(count);
      report_.out_of_window_launches = launch_.out_of_window_launches();
      out_of_window_flags_ = {
          .flags = report_.out_of_window_flags,
          .launches = report_.out_of_window_launches,
          .chunk_items = Divider<uint64_t>(chunk_items),
          .images = Divider<uint64_t>(images),
          .image_items = static_cast<uint64_t>(image_items)};
    }
  }

  AnyIndices any_indices() const {
    return {call_.indices, static_cast<int>(c10::elementSize(call_.index_type))};
  }
  // Argument of added_to_zero.
  template <class T>
  T negative_zero() const {
    if constexpr (std::is_unsigned_v<T>) {
      return !last_ && c10::isFloatingType(call_.type) ? T{1} << (8 * sizeof(T) - 1) : T{};
    }
    return T{};
  }

  const Launch& launch_;
  const UnpoolCall& call_;
  const Geometry<int64_t>& geometry_;
  Report report_;
  const bool last_, offsets_, may_leave_window_;
  OutOfWindowFlags out_of_window_flags_{};
  bool launched_ = false;
  bool is_fixup_ = false;
};

// The part of a call that begins at this outer index and has so many.
inline UnpoolCall part_of(const UnpoolCall& call, int64_t first, int64_t outer) {
  const auto index_size = static_cast<int64_t>(c10::elementSize(call.index_type));
  const auto element_size = static_cast<int64_t>(call.element_size);
  const int64_t pooled = first * call.geometry.in_image();
  const int64_t unpooled = first * call.geometry.out_image();
  UnpoolCall part = call;
  part.geometry.outer = outer;
  part.values =
      static_cast<const char*>(call.values) + (call.forward ? pooled : unpooled) * element_size;
  part.indices = static_cast<const char*>(call.indices) + pooled * index_size;
  part.result = static_cast<char*>(call.result) + (call.forward ? unpooled : pooled) * element_size;
  return part;
}

// Runs a call of max unpooling. One that is too large for 32-bit offsets is cut by its outer index
// into parts that are not, if there are such. `simple`: kernels of slots.cuh alone, and no cut.
template <class Launch>
void unpool(const Launch& launch, const UnpoolCall& call, const Errors& errors, bool simple) {
  const Geometry<int64_t>& geometry = call.geometry;
  const int64_t fitting = simple ? 0 : outer_that_fits(geometry);
  const int64_t step = fitting == 0 ? geometry.outer : fitting;
  for (int64_t first = 0; first < geometry.outer; first += step) {
    const UnpoolCall part = part_of(call, first, std::min(step, geometry.outer - first));
    Dispatch(launch, part, errors.from(first * geometry.in_image())).run(simple);
  }
}

} // namespace maxunpool_cuda
