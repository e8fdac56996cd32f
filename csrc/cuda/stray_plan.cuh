// Plan of the second kernel (see stray.cuh), and the memory of its slots.
#pragma once

#include "../dtypes.h"
#include "../geometry.h"
#include "../reduction.h"
#include "call.cuh"
#include "divider.cuh"
#include "report.cuh"
#include "stray.cuh"
#include "vector.cuh"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

namespace maxunpool_cuda {

constexpr int64_t kMostChannels = 32; // of a piece

struct StrayPlan {
  BlockShape shape;
  bool shared;                    // slots are in shared memory, else in the workspace
  int64_t channels, part, pieces; // see Pieces
  int64_t slot_bytes;             // of a piece
};

// Channels, rounded up to what the pieces of a slab have room for.
inline int64_t align_channels(int64_t channels) {
  const int64_t group = std::min(channels, kMostChannels);
  return divide_up(channels, group) * group;
}

// Bytes of a slot in global memory. 0: there is no second kernel.
inline int64_t slot_size(const Arguments& arguments) {
  if (arguments.index_type == c10::ScalarType::Byte) {
    return 0;
  }
  if (arguments.reduce == Reduce::last) {
    return sizeof(uint64_t); // of a position
  }
  int64_t size = 0;
  if (arguments.forward) {
    with_arithmetic_type(
        arguments.type, [&]<class T>(std::type_identity<T>) { size = sizeof(SumSlot<T>); });
  }
  return size;
}

inline std::optional<StrayPlan> make_stray_plan(const Arguments& arguments, bool is_64bit) {
  constexpr int64_t kMostParts = 64, kSmallSlot = sizeof(uint32_t), kSlotsOfThread = 4;
  constexpr int64_t kGrain = 16; // outputs, so that parts begin where vectors do
  const Geometry<int64_t>& g = arguments.geometry;
  int64_t slot = slot_size(arguments);
  if (slot == 0) {
    return {};
  }
  StrayPlan plan{};
  plan.channels = std::min(g.inner, kMostChannels);
  const int64_t room =
      arguments.limits.shared_bytes / (kSmallSlot * plan.channels) / kGrain * kGrain;
  plan.shared = arguments.reduce == Reduce::last && !is_64bit &&
                arguments.element_size <= sizeof(uint64_t) && g.out_plane() <= kMostParts * room;
  plan.part = g.out_plane();
  if (plan.shared) {
    slot = kSmallSlot;
    plan.part = std::min(
        divide_up(divide_up(plan.part, divide_up(plan.part, room)), kGrain) * kGrain, plan.part);
  }
  plan.pieces = g.outer * divide_up(g.inner, plan.channels) * divide_up(g.out_plane(), plan.part);
  const int64_t slots = plan.part * plan.channels;
  plan.slot_bytes = align(slots * slot);
  int64_t blocks = plan.pieces;
  if (!plan.shared) {
    const int64_t fit = arguments.limits.slot_bytes / plan.slot_bytes;
    blocks = std::clamp<int64_t>(fit, 1, std::min(plan.pieces, arguments.blocks));
  }
  plan.shape = {blocks, slots / kSlotsOfThread, plan.shared ? plan.slot_bytes : 0, false};
  return plan;
}

// Whether one thread adds up a plane. Else atomics add floating-point numbers, in any order.
inline bool sums_in_order(const Arguments& arguments) {
  return arguments.forward && arguments.reduce == Reduce::sum &&
         (arguments.deterministic || !c10::isFloatingType(arguments.type));
}

// Argument of the second kernel. `slots` is their memory in the workspace.
template <class Offset>
Pieces<Offset> make_pieces(
    const Arguments& arguments, const StrayPlan& plan, const FlagLayout& layout,
    const uint32_t* stray_flags, char* slots) {
  const Geometry<int64_t>& g = arguments.geometry;
  return {
      {stray_flags, divider<Offset>(layout.items), divider<Offset>(layout.slabs),
       static_cast<Offset>(layout.slab_items)},
      sums_in_order(arguments),
      static_cast<Offset>(plan.pieces),
      divider<Offset>(plan.channels),
      divider<Offset>(divide_up(g.inner, plan.channels)),
      divider<Offset>(divide_up(g.out_plane(), plan.part)),
      static_cast<Offset>(g.in_plane()),
      static_cast<Offset>(g.out_plane()),
      static_cast<Offset>(g.inner),
      static_cast<Offset>(plan.part),
      slots,
      static_cast<uint64_t>(plan.slot_bytes)};
}

} // namespace maxunpool_cuda
