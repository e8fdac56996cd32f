// SPDX-License-Identifier: BSD-3-Clause
// A call of max unpooling as a whole: cut into launches that 32 bits can count. And the launches of
// the kernels of backward.cuh and slots.cuh. dispatch.cuh has the table of kernels, and the class
// Dispatch whose functions are defined here.
//
// Example: the backward of "last" for float32 [8][64][56][56], windows of 3x3, 2 apart, and int64
// indices launches backward<uint32_t, false, true> and then backward_last_slots<uint32_t>, which
// finds no flag and ends.
#include "../calls.h"
#include "../dtypes.h"
#include "../geometry.h"
#include "../reduction.h"
#include "backward.cuh"
#include "dispatch.cuh"
#include "slots.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace maxunpool_cuda {

// The call of `count` images of this call, from image `first` on.
static UnpoolCall images_of(const UnpoolCall& call, int64_t first, int64_t count) {
  const auto index_size = static_cast<int64_t>(c10::elementSize(call.index_type));
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

// The kernels of slots.cuh count with 64 bits, so with `simple` they do all images at once.
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
      drops_losers ? launch_backward<T, true>() : launch_backward<T, false>();
      is_done = true;
    }
  });
  return is_done;
}

// Launches `backward` for elements of the size of T.
template <class T, bool kDropsLosers>
void Dispatch::launch_backward() {
  constexpr int kPlanes = kPlanesOfThread<kDropsLosers>;
  const auto& [depth, height, width] = geometry_.axis;
  GatherPlan plan{
      .planes = Planes(geometry_, kPlanes), .takes_out_of_window = !last_, .shared = {}};
  if (kDropsLosers) {
    set_shared_offsets(plan, geometry_);
  }
  const Tiling<uint32_t> tiling(
      geometry_,
      {depth.in, height.in, width.in},
      plan.planes.images == 1 ? geometry_.inner / kPlanes : geometry_.inner,
      plan.planes.images);
  const auto kernel = offsets_ ? maxunpool_cuda::backward<T, true, kDropsLosers>
                               : maxunpool_cuda::backward<T, false, kDropsLosers>;
  launch_items<T>(kernel, tiling, plan.planes.images, plan);
}

void Dispatch::slots() {
  // All but the sum only move elements, so the size of an element is enough.
  if (last_ || !call_.forward) {
    with_bytes(call_.element_size, [&]<class T>(std::type_identity<T>) {
      if (call_.forward) {
        launch_parts<T>(forward_last_slots<T>, 0);
      } else if (last_) {
        launch_parts<T>(backward_last_slots<T>, 0);
      } else {
        launch_parts<T>(backward_sum_slots<T>, 0);
      }
    });
  } else {
    with_arithmetic_type(call_.type, [&]<class T>(std::type_identity<T>) {
      launch_parts<T>(forward_sum_slots<T>, sizeof(CombineSum<T>));
    });
  }
}

// Launches the kernel as the fast one, or as the fix-up.
template <class T, class Kernel>
void Dispatch::launch_parts(Kernel* kernel, int64_t value_bytes) {
  constexpr int64_t kWarp = 32;
  constexpr int64_t kOutputsOfThread = 8;
  constexpr int64_t kSharedBytes = 32 << 10; // of a block's slots
  const int64_t cells = geometry_.in_plane();
  const int64_t outputs = geometry_.out_plane();
  TORCH_CHECK(
      cells < std::numeric_limits<uint32_t>::max(),
      "max_unpool",
      geometry_.rank,
      "d: expected fewer than 2^32 - 1 pooled elements in a plane on CUDA but got ",
      cells);
  const int64_t slot = value_bytes + sizeof(uint32_t);
  const int64_t room = std::clamp<int64_t>(kSharedBytes / slot, 1, outputs);
  const int64_t part = divide_up(outputs, divide_up(outputs, room));
  const int64_t count = divide_up(outputs, part);
  const int64_t planes = geometry_.outer * geometry_.inner;
  Parts parts{
      .decoder = Decoder<uint64_t>(geometry_),
      .stride = {},
      .height = Divider<uint64_t>(geometry_.axis[1].in),
      .width = Divider<uint64_t>(geometry_.axis[2].in),
      .inner = Divider<uint64_t>(geometry_.inner),
      .part = static_cast<uint64_t>(part),
      .part_cells = static_cast<uint64_t>(divide_up(cells, count)),
      .parts = static_cast<uint64_t>(count),
      .planes = static_cast<uint64_t>(planes),
      .all_cells = is_fixup_,
      .is_fixup = is_fixup_,
      .out_of_window_flags = out_of_window_flags_};
  for (int a = 0; a < 3; ++a) {
    const auto& [in, out, kernel, stride, padding] = geometry_.axis[a];
    parts.stride[a] = Divider<uint64_t>(stride);
    // The index of a window that covers no output is checked all the same.
    parts.all_cells |= padding >= kernel || (in - 1) * stride - padding >= out;
  }
  if (!is_fixup_) { // a chunk is a part of a plane
    flag(planes * count, 1, geometry_.inner * count, 1);
  }
  const int64_t work = divide_up(std::max(cells, divide_up(part, kOutputsOfThread)), kWarp);
  const int64_t threads = std::min<int64_t>(work * kWarp, kSlotThreads);
  const int64_t most = is_fixup_ ? launch_.processors() * kSlotBlocksOfProcessor : int64_t{1} << 30;
  const int64_t blocks = std::min(planes * count, most);
  launch_(
      kernel,
      blocks,
      threads,
      part * slot,
      parts,
      report_,
      static_cast<const T*>(call_.values),
      any_indices(),
      static_cast<T*>(call_.result));
}

} // namespace maxunpool_cuda
