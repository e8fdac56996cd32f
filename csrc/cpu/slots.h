// SPDX-License-Identifier: BSD-3-Clause
// What a kernel remembers of outputs, one slot for each: those that a chunk may name, and that its
// thread owns. Here alone these are called the reach.
//
// It takes Range from plan.h. As the reach moves on, slots of outputs that stay in it are kept, and
// new ones begin with zero.
//
// Example: the reach moves from outputs [0, 6) to [4, 9). The slots of outputs 4 and 5 move from
// places 4 and 5 to places 0 and 1, and those of outputs 6 to 8 begin anew at places 2 to 4.
//
//   before   0 1 2 3 4 5
//   after            4 5 6 7 8
#pragma once

#include "plan.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace maxunpool_cuda {
namespace { // Internal linkage: GCC inlines these more readily.

// Memory that the parts of one thread use one after the other.
using SlotMemory = std::vector<std::max_align_t>;

template <class T>
class Slots {
 public:
  // Slots of an image group, none at first.
  explicit Slots(SlotMemory& memory) : memory_(memory) {}

  const Range& reach() const { return reach_; }
  T* begin() { return reinterpret_cast<T*>(memory_.data()); }

  // Moves to another reach, and returns its first slot.
  T* move_to(const Range& reach) {
    static_assert(alignof(T) <= alignof(std::max_align_t));
    if (reach == reach_) {
      return begin();
    }
    const size_t blocks = reach.size() * sizeof(T) / sizeof(std::max_align_t) + 1;
    memory_.resize(std::max(memory_.size(), blocks));
    Range common = reach.within(reach_);
    if (common.empty()) {
      common = {reach.begin, reach.begin};
    } else {
      T* from = begin() + (common.begin - reach_.begin);
      T* to = begin() + (common.begin - reach.begin);
      std::memmove(to, from, common.size() * sizeof(T));
    }
    reach_ = reach;
    T* slots = begin();
    std::fill(slots, slots + (common.begin - reach.begin), T{});
    std::fill(slots + (common.end - reach.begin), slots + reach.size(), T{});
    return slots;
  }

 private:
  SlotMemory& memory_;
  Range reach_{0, 0};
};

} // namespace
} // namespace maxunpool_cuda
