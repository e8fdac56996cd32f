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

// First element of the tensor whose index leads out of its reach.
class FirstMissed {
 public:
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

  int64_t element() const { return element_.load(std::memory_order_relaxed); }
  bool any() const { return element() != kNone; }
  void record(int64_t element) {
    int64_t seen = element_.load(std::memory_order_relaxed);
    while (element < seen && !element_.compare_exchange_weak(seen, element)) {
    }
  }

 private:
  std::atomic<int64_t> element_{kNone};
};

// A part of a stack, and what its owner needs.
struct Part {
  const UnpoolCall& call;
  const Plan& plan;
  const Targets& targets;
  FirstMissed& missed;
  std::vector<std::max_align_t>& memory; // of the thread, for slots
  int64_t stack;
  Range outputs;

  // The call's arrays, from the begin of the stack on.
  template <class T>
  const T* values() const {
    return static_cast<const T*>(call.values) +
           (call.forward ? plan.pooled(stack) : plan.unpooled(stack));
  }
  template <class T>
  T* result() const {
    return static_cast<T*>(call.result) +
           (call.forward ? plan.unpooled(stack) : plan.pooled(stack));
  }

  // Visits the elements that name outputs of this part, in order or in reverse. Calls enter(reach)
  // for each chunk, given how much of its reach the part owns, and what that returned,
  // visit(element, target), for elements. Targets count from the begin of the given reach.
  template <bool kReverse, class Enter>
  void walk(const Enter& enter) const {
    const auto nth = [](int64_t i, int64_t count) { return kReverse ? count - 1 - i : i; };
    uint32_t found[Plan::kChunk];
    for (int64_t i = 0; i < plan.chunks(); ++i) {
      const int64_t at = nth(i, plan.chunks());
      const Range chunk = plan.chunk(stack, at), reach = plan.reach(stack, at);
      const Range owned = reach.within(outputs);
      if (owned.empty()) {
        continue;
      }
      if (!plan.any_index() && missed.any()) {
        return; // all will be done again
      }
      const auto visit = enter(owned);
      if (!targets.find(stack, chunk, reach, owned, found)) {
        record_missed(chunk, reach);
      } else if (outputs.holds(reach)) {
        visit_all<kReverse>(chunk, owned, found, visit);
      } else {
        for (int64_t k = 0; k < chunk.size(); ++k) {
          const int64_t element = nth(k, chunk.size());
          if (found[element] < owned.size()) {
            visit(chunk.begin + element, found[element]);
          }
        }
      }
    }
  }

 private:
  // Visits all elements of a chunk. Prefetches the next chunk's indices, and what later windows
  // read or write: this lies in two rows, which the processor does not see through the indices.
  template <bool kReverse, class Visit>
  void visit_all(
      const Range& chunk, const Range& owned, const uint32_t* found, const Visit visit) const {
    constexpr int64_t kOften = 8, kDirection = kReverse ? -1 : 1; // elements
    constexpr int64_t kAhead = kDirection * 8192;                 // bytes
    const int64_t count = chunk.size(), size = static_cast<int64_t>(call.element_size);
    const auto index_size = static_cast<int64_t>(c10::elementSize(call.index_type));
    const int64_t row = plan.geometry().axis[2].out * plan.geometry().inner * size;
    const auto address = [](const void* array, int64_t bytes) {
      return reinterpret_cast<uintptr_t>(array) + static_cast<uintptr_t>(bytes);
    };
    const uintptr_t indices = address(
        call.indices, (plan.pooled(stack) + chunk.begin + kDirection * Plan::kChunk) * index_size);
    const uintptr_t outputs_ahead = address(
        call.forward ? call.result : call.values,
        (plan.unpooled(stack) + owned.begin) * size + kAhead);
    const auto one = [&](int64_t k) MAXUNPOOL_INLINE {
      const int64_t element = kReverse ? count - 1 - k : k;
      visit(chunk.begin + element, found[element]);
    };
    int64_t k = 0;
    for (; k + kOften <= count; k += kOften) {
      const int64_t element = kReverse ? count - 1 - k : k;
      const uintptr_t ahead = outputs_ahead + found[element] * size;
      MAXUNPOOL_PREFETCH(indices + element * index_size);
      MAXUNPOOL_PREFETCH(ahead);
      MAXUNPOOL_PREFETCH(ahead + row);
      for (int64_t j = k; j < k + kOften; ++j) {
        one(j);
      }
    }
    for (; k < count; ++k) {
      one(k);
    }
  }

  // Of no consequence in the first run, whose misses have all done again.
  void record_missed(const Range& chunk, const Range& reach) const {
    int64_t element = chunk.begin;
    while (plan.any_index() && reach.holds(targets.output_of(stack, element))) {
      ++element;
    }
    missed.record(plan.pooled(stack) + element);
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
      std::memmove(first, slots + (kept.begin - held_.begin), kept.size() * sizeof(T));
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
