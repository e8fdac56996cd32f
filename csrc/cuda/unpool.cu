// SPDX-License-Identifier: BSD-3-Clause
// A call of max unpooling as a whole: cut into launches that 32 bits can count. And the launches of
// the kernels of backward.cuh, slots.cuh and ordered.cuh. dispatch.cuh has the table of kernels,
// and the class Dispatch whose functions are defined here.
//
// Example: the backward of "last" for float32 [8][64][56][56], windows of 3x3, 2 apart, and int64
// indices launches backward<uint32_t, false, true> and then ordered<uint32_t, false>, which finds
// no flag and ends.
#include "../calls.h"
#include "../dtypes.h"
#include "../errors.h"
#include "../geometry.h"
#include "../reduction.h"
#include "../torch.h"
#include "backward.cuh"
#include "combine.cuh"
#include "dispatch.cuh"
#include "ordered.cuh"
#include "slots.cuh"
#include "tiling.cuh"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace maxunpool_cuda {

// The call of `count` images of this call, from image `first` on.
static UnpoolCall images_of(const UnpoolCall& call, int64_t first, int64_t count) {
  const auto index_size = static_cast<int64_t>(element_size(call.index_type));
  const auto element_size = static_cast<int64_t>(call.element_size);
  const int64_t pooled = first * call.geometry.in_image(); // elements before the first
  const int64_t unpooled = first * call.geometry.out_image();
  const int64_t read = call.forward ? pooled : unpooled;
  const int64_t written = call.forward ? unpooled : pooled;
  UnpoolCall images = call;
  images.geometry.outer = count;
  images.values = static_cast<const char*>(call.values) + read * element_size;
  images.indices = static_cast<const char*>(call.indices) + pooled * index_size;
  images.result = static_cast<char*>(call.result) + written * element_size;
  return images;
}

// The kernels of slots.cuh and ordered.cuh can count with 64 bits, so with `simple` they do all
// images at once.
void unpool(const Launch& launch, const UnpoolCall& call, const Errors& errors, bool simple) {
  const Geometry<int64_t>& geometry = call.geometry;
  const int64_t fitting = simple ? 0 : outer_that_fits(geometry);
  for_each_range_of_images(geometry.outer, fitting, [&](int64_t first, int64_t count) {
    const UnpoolCall images = images_of(call, first, count);
    Dispatch(launch, images, errors.from(first * geometry.in_image())).run(simple);
  });
}

bool Dispatch::backward() {
  // Where windows are disjoint, no two indices in their windows name one output: there is no loser.
  const bool drops_losers = last_ && !disjoint(geometry_);
  if (drops_losers && !overlaps_near_cells_only(geometry_)) {
    return false;
  }
  bool is_done = false;
  with_bytes(call_.element_size, [&]<class T>(std::type_identity<T>) {
    if constexpr (sizeof(T) <= sizeof(uint64_t)) {
      if (drops_losers) {
        offsets_ ? launch_backward<T, true, true>() : launch_backward<T, false, true>();
      } else {
        offsets_ ? launch_backward<T, true, false>() : launch_backward<T, false, false>();
      }
      is_done = true;
    }
  });
  return is_done;
}

// Launches `backward` for elements of the size of T.
template <class T, bool kOffsets, bool kDropsLosers>
void Dispatch::launch_backward() {
  const auto& [depth, height, width] = geometry_.axis;
  GatherPlan plan{.takes_out_of_window = !last_, .common_offsets = {}};
  if (kDropsLosers) {
    set_common_offsets(plan, geometry_);
  }
  const auto launch = [&]<Form kForm>() {
    using Traits = BackwardTraits<T, kOffsets, kDropsLosers, kForm>;
    const Tiling<uint32_t> tiling(
        geometry_,
        {depth.in, divide_up(height.in, Traits::R), width.in / Traits::V},
        geometry_.inner / Traits::C);
    launch_items<T>(maxunpool_cuda::backward<T, kOffsets, kDropsLosers, kForm>, tiling, plan);
  };
  if constexpr (sizeof(T) < sizeof(uint64_t)) { // else a vector is no more than two elements
    constexpr int kCells = OwnedByBackward<T, kOffsets, kDropsLosers, Form::cells>::V;
    constexpr int kChannels = OwnedByBackward<T, kOffsets, kDropsLosers, Form::channels>::C;
    if (is_aligned() && geometry_.inner == 1 && width.in % kCells == 0) {
      return launch.template operator()<Form::cells>();
    }
    if (is_aligned() && geometry_.inner > 1 && geometry_.inner % kChannels == 0) {
      return launch.template operator()<Form::channels>();
    }
  }
  launch.template operator()<Form::column>();
}

void Dispatch::ordered() {
  with_bytes(call_.element_size, [&]<class T>(std::type_identity<T>) {
    const auto kernel =
        call_.forward ? maxunpool_cuda::ordered<T, true> : maxunpool_cuda::ordered<T, false>;
    launch_(
        kernel,
        ordered_.blocks,
        ordered_.threads,
        Turns::shared_bytes(ordered_.threads),
        ordered_,
        static_cast<const T*>(call_.values),
        any_indices(),
        static_cast<T*>(call_.result));
  });
}

void Dispatch::slots() {
  fits_32bit(geometry_) ? slots_of<uint32_t>() : slots_of<uint64_t>();
}

// Launches the kernel of slots.cuh for the call. Offset counts the call's elements. Few calls get
// to backward_sum_slots and forward_any_sum_slots, so these always count with 64 bits.
template <class Offset>
void Dispatch::slots_of() {
  // All but the sum only move elements, so the size of an element is enough.
  if (last_ || !call_.forward) {
    with_bytes(call_.element_size, [&]<class T>(std::type_identity<T>) {
      if (call_.forward) {
        launch_parts<T>(forward_last_slots<Offset, T>, parts<Offset>(sizeof(uint32_t)));
      } else if (last_) {
        launch_parts<T>(backward_last_slots<Offset, T>, parts<Offset>(sizeof(uint32_t)));
      } else {
        launch_parts<T>(backward_sum_slots<T>, parts<uint64_t>(0));
      }
    });
    return;
  }
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

// The parts of the call, for the fast kernel or for the fix-up kernel, with slots of so many bytes.
template <class Offset>
Parts<Offset> Dispatch::parts(int64_t slot_bytes) const {
  const int64_t cells = geometry_.in_plane();
  if (cells >= std::numeric_limits<uint32_t>::max()) {
    fail(
        "max_unpool",
        geometry_.rank,
        "d: expected fewer than 2^32 - 1 pooled elements in a plane on CUDA but got ",
        cells);
  }
  return Parts<Offset>(geometry_, slot_bytes, is_fixup_ ? &out_of_window_flags_ : nullptr);
}

// Launches the kernel as the fast one, or as the fix-up kernel.
template <class T, class Kernel, class Offset, class... Rest>
void Dispatch::launch_parts(Kernel* kernel, const Parts<Offset>& parts, const Rest&... rest) {
  const auto parts_of_image =
      static_cast<int64_t>(parts.groups_of_image.divisor() * parts.parts_of_group);
  const auto all = static_cast<int64_t>(parts.groups * parts.parts_of_group);
  if (!is_fixup_) { // an item is a part, and a chunk one item
    flag(all, 1, parts_of_image, static_cast<int64_t>(parts.images_of_group));
  }
  // The fix-up kernel mostly has nothing to do, so it has no more blocks than run at once.
  const int64_t most = is_fixup_ ? launch_.processors() * kSlotBlocksOfProcessor : int64_t{1} << 30;
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

} // namespace maxunpool_cuda
