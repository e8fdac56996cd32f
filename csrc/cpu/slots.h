// SPDX-License-Identifier: BSD-3-Clause
// What a kernel remembers of the outputs that a chunk may name and its thread owns, one slot for
// each. These outputs are called the reach here.
//
// It takes Range from plan.h. As the reach moves on, slots of outputs that stay in it are kept, and
// new ones begin with zero or with the output's value.
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
  // Slots of an image group, none at first. A slot begins with the value of its output in `values`,
  // if given, or with zero.
  explicit Slots(SlotMemory& memory, const T* values = nullptr)
      : memory_(memory), values_(values) {}

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
    start({reach.begin, common.begin});
    start({common.end, reach.end});
    return begin();
  }

 private:
  void start(const Range& outputs) {
    T* slots = begin() + (outputs.begin - reach_.begin);
    if (values_ == nullptr) {
      std::fill_n(slots, outputs.size(), T{});
    } else {
      std::copy_n(values_ + outputs.begin, outputs.size(), slots);
    }
  }

  SlotMemory& memory_;
  const T* const values_;
  Range reach_{0, 0};
};

} // namespace
} // namespace maxunpool_cuda
