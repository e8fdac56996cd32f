// The walk of a thread through the elements that name its outputs.
#pragma once

#include "../calls.h"
#include "machine.h"
#include "plan.h"
#include "targets.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace maxunpool_cuda {
namespace { // Internal linkage: GCC inlines these more readily.

// A part of a stack, and what its owner needs.
struct Part {
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

  const UnpoolCall& call;
  const Plan& plan;
  const Targets& targets;
  std::atomic<int64_t>& missed; // the first element of the tensor whose index is not allowed
  std::vector<std::max_align_t>& memory; // of the thread, for slots
  int64_t stack;
  Range outputs;

  // The call's arrays, from the begin of the stack on.
  template <class T>
  const T* values() const {
    const int64_t first = call.forward ? plan.pooled(stack) : plan.unpooled(stack);
    return static_cast<const T*>(call.values) + first;
  }
  template <class T>
  T* result() const {
    const int64_t first = call.forward ? plan.unpooled(stack) : plan.pooled(stack);
    return static_cast<T*>(call.result) + first;
  }

  // Visits the elements that name outputs of this part, in order or in reverse. Calls enter(reach)
  // for each chunk, given how much of its reach the part owns, and what that returned,
  // visit(element, target), for elements. Targets count from the begin of the given reach.
  template <bool kReverse, class Enter>
  void walk(const Enter& enter) const {
    uint32_t found[Chunk::kMost];
    for (int64_t i = 0; i < plan.chunks; ++i) {
      const Chunk chunk = plan.chunk(stack, kReverse ? plan.chunks - 1 - i : i, outputs);
      if (chunk.owned.empty()) {
        continue;
      }
      if (!plan.any_index && missed.load(std::memory_order_relaxed) != kNone) {
        return; // all will be done again
      }
      const auto visit = enter(chunk.owned);
      if (!targets.find(chunk, found)) {
        record_missed(chunk);
      } else if (chunk.owned == chunk.reach) {
        visit_all<kReverse>(chunk, found, visit);
      } else {
        for (int64_t k = 0, count = chunk.elements.size(); k < count; ++k) {
          const int64_t element = kReverse ? count - 1 - k : k;
          const auto target = static_cast<uint32_t>(found[element] - chunk.lead());
          if (target < chunk.owned.size()) {
            visit(chunk.elements.begin + element, target);
          }
        }
      }
    }
  }

 private:
  // Visits all elements of a chunk. Processors do not foresee what a walk in reverse reads next: it
  // prefetches indices, and two rows of what earlier windows read.
  template <bool kReverse, class Visit>
  void visit_all(const Chunk& chunk, const uint32_t* found, const Visit visit) const {
    constexpr int64_t kAhead = 8192, kOften = 8; // bytes, elements
    const int64_t count = chunk.elements.size(), size = static_cast<int64_t>(call.element_size);
    const auto index_size = static_cast<int64_t>(c10::elementSize(call.index_type));
    const int64_t previous = plan.pooled(stack) + chunk.elements.begin - count;
    const int64_t first = plan.unpooled(stack) + chunk.owned.begin;
    const auto indices = reinterpret_cast<uintptr_t>(call.indices) + previous * index_size;
    const auto values = reinterpret_cast<uintptr_t>(call.values) + first * size - kAhead;
    const int64_t row = plan.geometry.axis[2].out * plan.geometry.inner * size;
    for (int64_t k = 0; k < count; ++k) {
      const int64_t element = kReverse ? count - 1 - k : k;
      if (kReverse && k % kOften == 0) {
        MAXUNPOOL_PREFETCH(indices + element * index_size);
        MAXUNPOOL_PREFETCH(values + found[element] * size);
        MAXUNPOOL_PREFETCH(values + found[element] * size - row);
      }
      visit(chunk.elements.begin + element, found[element]);
    }
  }

  void record_missed(const Chunk& chunk) const {
    int64_t element = chunk.elements.begin; // if all will be done again, any will do
    while (plan.any_index && chunk.reach.holds(targets.output_of(stack, element))) {
      ++element;
    }
    element += plan.pooled(stack);
    int64_t seen = missed.load();
    while (element < seen && !missed.compare_exchange_weak(seen, element)) {
    }
  }
};

// What a kernel remembers of the outputs in reach. It is forgotten when they are out of reach.
template <class T>
class Slots {
 public:
  explicit Slots(const Part& part)
      : memory_(part.memory), held_{part.outputs.begin, part.outputs.begin} {}

  const Range& held() const { return held_; }
  T* begin() { return reinterpret_cast<T*>(memory_.data()); }

  // Slots of these outputs: zeros for those that were not held before.
  T* hold(const Range& reach) {
    static_assert(alignof(T) <= alignof(std::max_align_t));
    if (reach != held_) {
      const size_t blocks = reach.size() * sizeof(T) / sizeof(std::max_align_t) + 1;
      memory_.resize(std::max(memory_.size(), blocks));
      Range kept = reach.within(held_);
      kept = kept.empty() ? Range{reach.begin, reach.begin} : kept;
      T *slots = begin(), *first = slots + (kept.begin - reach.begin), *last = first + kept.size();
      if (!kept.empty()) {
        std::memmove(first, slots + (kept.begin - held_.begin), kept.size() * sizeof(T));
      }
      std::fill(slots, first, T{});
      std::fill(last, slots + reach.size(), T{});
      held_ = reach;
    }
    return begin();
  }

 private:
  std::vector<std::max_align_t>& memory_;
  Range held_;
};

} // namespace
} // namespace maxunpool_cuda
