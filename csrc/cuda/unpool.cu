// SPDX-License-Identifier: BSD-3-Clause
// A call of max unpooling as a whole: cut into launches that 32 bits can count. And the launches of
// the kernels of backward.cuh, slots.cuh and ordered.cuh. dispatch.cuh has the table of kernels,
// and the class Dispatch whose functions are defined here.
//
// Example: the backward of "last" for float32 [8][64][56][56], windows of 3x3, 2 apart, and int64
// indices launches backward<uint32_t, false, true, Form::cells> and then
// ordered<uint32_t, Order::gradient>, which finds no flag and ends.
#include "../calls.h"
#include "../dtypes.h"
#include "../geometry.h"
#include "../reduction.h"
#include "../torch.h"
#include "backward.cuh"
#include "dispatch.cuh"
#include "ordered.cuh"
#include "slots.cuh"
#include "tiling.cuh"

#include <cstdint>
#include <memory>
#include <type_traits>

namespace maxunpool_cuda {

// The call of `count` images of this call, from image `first` on.
static UnpoolCall images_of(const UnpoolCall& call, int64_t first, int64_t count) {
  const auto index_size = static_cast<int64_t>(element_size(call.index_type));
  const auto value_size = static_cast<int64_t>(call.element_size);
  const int64_t pooled = first * call.geometry.in_image(); // elements before the first
  const int64_t unpooled = first * call.geometry.out_image();
  const int64_t read = call.forward ? pooled : unpooled;
  const int64_t written = call.forward ? unpooled : pooled;
  UnpoolCall images = call;
  images.geometry.outer = count;
  images.values = static_cast<const char*>(call.values) + read * value_size;
  images.indices = static_cast<const char*>(call.indices) + pooled * index_size;
  images.result = static_cast<char*>(call.result) + written * value_size;
  return images;
}

// `ordered` counts with 64 bits, so with `simple` it does all images at once.
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
    if (!drops_losers) {
      is_done = offsets_ ? launch_backward<T, true, false>() : launch_backward<T, false, false>();
    } else if constexpr (sizeof(T) <= sizeof(uint64_t)) {
      is_done = offsets_ ? launch_backward<T, true, true>() : launch_backward<T, false, true>();
    }
  });
  return is_done;
}

// Launches `backward` for elements of the size of T. Returns whether it did.
template <class T, bool kOffsets, bool kDropsLosers>
bool Dispatch::launch_backward() {
  const auto& [depth, height, width] = geometry_.axis;
  BackwardPlan plan{.takes_out_of_window = !last_, .common_offsets = {}};
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
    return true;
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
  // With losers, columns of one cell would leave three quarters of a thread's work undone.
  return (!kDropsLosers || height.in > 1) && launch.template operator()<Form::column>();
}

bool Dispatch::slots() {
  const bool adds = call_.forward && !last_;
  const int64_t covering = adds ? most_covering(geometry_) : 1;
  if (covering > kMostCovering) {
    return false;
  }
  with_order([&]<class T, Order kOrder>() { launch_slots<T, kOrder>(divide_up(covering, 32)); });
  return true;
}

template <class T, Order kOrder>
void Dispatch::launch_slots(int64_t words_of_slot) {
  const SlotsPlan plan(geometry_, words_of_slot);
  if (may_leave_window_) {
    // Parts are chunks. One has several images, or an image has several.
    const int64_t images = plan.images;
    make_flags(plan.parts, images, images > 1 ? 1 : plan.parts / geometry_.outer);
  }
  launch_(
      maxunpool_cuda::slots<T, kOrder>,
      plan.parts,
      plan.threads,
      plan.shared_bytes,
      plan,
      report(),
      static_cast<const T*>(call_.values),
      any_indices(),
      static_cast<T*>(call_.result));
}

void Dispatch::ordered(bool is_fixup) {
  with_order([&]<class T, Order kOrder>() { launch_ordered<T, kOrder>(is_fixup); });
}

template <class T, Order kOrder>
void Dispatch::launch_ordered(bool is_fixup) {
  const AnyIndices indices = any_indices();
  OrderedPlan plan(
      geometry_, indices.bytes, remembered_bits<T, kOrder>(), launch_.processors(), is_fixup);
  plan.drops_losers = last_;
  plan.flags = flags_;
  const std::shared_ptr<uint32_t> memory = launch_.workspace(plan.words());
  plan.memory = memory.get();
  launch_(
      maxunpool_cuda::ordered<T, kOrder>,
      plan.blocks,
      plan.threads,
      Turns::shared_bytes(plan.threads),
      plan,
      errors_,
      static_cast<const T*>(call_.values),
      indices,
      static_cast<T*>(call_.result));
}

} // namespace maxunpool_cuda
