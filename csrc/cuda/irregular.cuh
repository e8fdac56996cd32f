// The second kernel of a call. It returns at once unless the first has listed units (see Report),
// and writes those again, for any indices: pooled elements meet in a workspace of one slot per
// output element, by atomics. "last" is deterministic, a maximum of positions, and so are counts;
// the floating-point sums of "sum" and "mean" depend on the order the atomics take, unless
// `in_order` has one thread add up a plane.
//
// Both kernels need a cooperative launch: the whole grid passes from clearing the slots to filling
// them to reading them.
#pragma once

#include "../reduction.h"
#include "atomics.cuh"
#include "divider.cuh"
#include "report.cuh"
#include "tiling.cuh"

#include <cooperative_groups.h>

#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

constexpr int kIrregularThreads = 512;
constexpr int kIrregularBlocksPerProcessor = 2; // that every processor can hold at once

// A slot of the workspace: {} while empty, then add(position, value) for each pooled element that
// names its output, with value() to read the element. The owner of the output reads output(); the
// owner of a pooled element, in the backward, reads grad_input().
template <class T, class Offset>
struct LastSlot {
  using Element = T;
  static constexpr bool kAnyOrder = true; // add() commutes

  Offset end; // 1 + the position, in the plane, of the last pooled element

  template <class Value>
  __device__ void add(Offset position, const Value&) {
    atomic_max(&end, position + 1);
  }
  // pooled(position) reads an element of the slot's plane.
  template <class Pooled>
  __device__ T output(Reduce, const Pooled& pooled) const {
    return end == 0 ? T{} : pooled(end - 1);
  }
  __device__ T grad_input(Offset position, T grad) const {
    return end == position + 1 ? grad : T{};
  }
};

template <class T, class Offset>
struct SumSlot {
  using Element = T;
  static constexpr bool kAnyOrder = std::is_integral_v<T>;

  Sum<T> sum;

  template <class Value>
  __device__ void add(Offset, const Value& value) {
    atomic_add(&sum.sum, static_cast<Accumulator<T>>(value()));
    atomic_add(&sum.count, uint64_t{1});
  }
  template <class Pooled>
  __device__ T output(Reduce reduce, const Pooled&) const {
    return sum.result(reduce);
  }
};

template <class T, class Offset>
struct CountSlot {
  using Element = T;
  static constexpr bool kAnyOrder = true;

  uint64_t count;

  template <class Value>
  __device__ void add(Offset, const Value&) {
    atomic_add(&count, uint64_t{1});
  }
  __device__ T grad_input(Offset, T grad) const {
    return mean_of<T>(grad, static_cast<int64_t>(count));
  }
};

// The listed units, `capacity` of them at a time.
template <class Slot, class Offset>
struct Workspace {
  Geometry<Offset> geometry;
  Irregular irregular;
  bool in_order;
  Slot* slots; // [capacity][out_plane][channels]
  Offset capacity;
  Divider<Offset> channels; // of a unit: min(inner, kUnitChannels)
  Divider<Offset> blocks;   // units of a slab
  Divider<Offset> in_plane, out_plane;

  struct Place {
    Offset unit;     // in the workspace
    Offset position; // in the plane
    Offset lane;     // channel in the unit
    Offset outer;
    Offset channel;
    bool exists; // the last unit of a slab may have fewer channels than there is room for
  };
  // Element i of the units from list[first] on, which have plane.divisor() positions each.
  __device__ Place place(Offset i, Offset first, const Divider<Offset>& plane) const {
    Place place;
    place.lane = i;
    place.position = split(place.lane, channels);
    place.unit = split(place.position, plane);
    place.channel = static_cast<Offset>(irregular.list[first + place.unit]);
    place.outer = split(place.channel, blocks);
    place.channel = place.channel * kUnitChannels + place.lane;
    place.exists = place.channel < geometry.inner;
    return place;
  }
  __device__ Slot& slot(const Place& place, Offset target) const {
    return slots[(place.unit * out_plane.divisor() + target) * channels.divisor() + place.lane];
  }
  __device__ Offset pooled(const Place& place, Offset position) const {
    return (place.outer * in_plane.divisor() + position) * geometry.inner + place.channel;
  }
  __device__ Offset unpooled(const Place& place, Offset position) const {
    return (place.outer * out_plane.divisor() + position) * geometry.inner + place.channel;
  }
  __device__ bool is_valid(int64_t index) const {
    return index >= 0 && index < static_cast<int64_t>(out_plane.divisor());
  }

  // Fills the slots chunk by chunk and calls read(first, units) for each, the whole grid in step.
  template <class Index, class Read>
  __device__ void for_each_chunk(
      const Index* indices, const typename Slot::Element* values, const Read& read) const {
    const auto grid = cooperative_groups::this_grid();
    const Offset count = *irregular.count;
    for (Offset first = 0; first < count; first += capacity) {
      const Offset units = count - first < capacity ? count - first : capacity;
      if (first > 0) {
        grid.sync(); // the last chunk's slots have been read
      }
      for_each_item(
          units * out_plane.divisor() * channels.divisor(), [&](Offset i) { slots[i] = Slot{}; });
      grid.sync();
      const auto add = [&](Offset i) {
        const Place from = place(i, first, in_plane);
        if (from.exists) {
          const Offset source = pooled(from, from.position);
          const int64_t index = indices[source];
          if (is_valid(index)) {
            slot(from, static_cast<Offset>(index)).add(from.position, [&] {
              return values[source];
            });
          }
        }
      };
      if (Slot::kAnyOrder || !in_order) {
        for_each_item(units * in_plane.divisor() * channels.divisor(), add);
      } else {
        for_each_item(units * channels.divisor(), [&](Offset lane) {
          const Offset unit = split(lane, channels);
          for (Offset position = 0; position < in_plane.divisor(); ++position) {
            add((unit * in_plane.divisor() + position) * channels.divisor() + lane);
          }
        });
      }
      grid.sync();
      read(first, units);
    }
  }
};

template <class Slot, class Index, class Offset>
__global__ void __launch_bounds__(kIrregularThreads, kIrregularBlocksPerProcessor)
    irregular_forward(
        Workspace<Slot, Offset> workspace,
        Reduce reduce,
        const typename Slot::Element* __restrict__ input,
        const Index* __restrict__ indices,
        typename Slot::Element* __restrict__ output) {
  const Offset unit = workspace.out_plane.divisor() * workspace.channels.divisor();
  workspace.for_each_chunk(indices, input, [&](Offset first, Offset units) {
    for_each_item(units * unit, [&](Offset i) {
      const auto to = workspace.place(i, first, workspace.out_plane);
      if (to.exists) {
        output[workspace.unpooled(to, to.position)] = workspace.slots[i].output(
            reduce, [&](Offset position) { return input[workspace.pooled(to, position)]; });
      }
    });
  });
}

template <class Slot, class Index, class Offset>
__global__ void __launch_bounds__(kIrregularThreads, kIrregularBlocksPerProcessor)
    irregular_backward(
        Workspace<Slot, Offset> workspace,
        const typename Slot::Element* __restrict__ grad_output,
        const Index* __restrict__ indices,
        typename Slot::Element* __restrict__ grad_input) {
  const Offset unit = workspace.in_plane.divisor() * workspace.channels.divisor();
  workspace.for_each_chunk(indices, grad_output, [&](Offset first, Offset units) {
    for_each_item(units * unit, [&](Offset i) {
      const auto to = workspace.place(i, first, workspace.in_plane);
      if (to.exists) {
        const Offset source = workspace.pooled(to, to.position);
        const int64_t index = indices[source];
        typename Slot::Element grad{};
        if (workspace.is_valid(index)) {
          const auto target = static_cast<Offset>(index);
          grad = workspace.slot(to, target)
                     .grad_input(to.position, grad_output[workspace.unpooled(to, target)]);
        }
        grad_input[source] = grad;
      }
    });
  });
}

} // namespace maxunpool_cuda
