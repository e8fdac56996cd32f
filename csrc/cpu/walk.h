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
        visit_all<kReverse, true>(chunk, found, visit);
      } else {
        visit_all<kReverse, false>(chunk, found, visit);
      }
    }
  }

 private:
  // Visits the elements of a chunk that name owned outputs. Prefetches the indices of the next
  // chunk and, in a gradient, what lies ahead in this row of outputs and the next. Processors
  // foresee that themselves where gradients are read in order, but not in rows of large planes.
  template <bool kReverse, bool kOwnsAll, class Visit>
  void visit_all(const Chunk& chunk, const uint32_t* found, const Visit visit) const {
    constexpr int64_t kAhead = 8192, kOften = 8, kLarge = 1 << 17; // bytes, elements, bytes
    constexpr int64_t kSign = kReverse ? -1 : 1;
    const Geometry<int64_t>& geometry = plan.geometry;
    const int64_t count = chunk.elements.size(), size = static_cast<int64_t>(call.element_size);
    const auto index_size = static_cast<int64_t>(c10::elementSize(call.index_type));
    const int64_t next = plan.pooled(stack) + chunk.elements.begin + kSign * count;
    const int64_t first = plan.unpooled(stack) + chunk.reach.begin;
    const auto indices = reinterpret_cast<uintptr_t>(call.indices) + next * index_size;
    const auto values = reinterpret_cast<uintptr_t>(call.values) + first * size + kSign * kAhead;
    const int64_t row = kSign * geometry.axis[2].out * geometry.inner * size;
    const bool large = geometry.axis[1].kernel > 1 && geometry.out_slab() * size >= kLarge;
    const bool foreseen = !kReverse && !call.forward && !large;
    const auto element_of = [=](int64_t k) { return kReverse ? count - 1 - k : k; };
    const auto visit_one = [=](int64_t element) MAXUNPOOL_INLINE {
      const auto target = static_cast<uint32_t>(found[element] - (kOwnsAll ? 0 : chunk.lead()));
      if (kOwnsAll || target < chunk.owned.size()) {
        visit(chunk.elements.begin + element, target);
      }
    };
    int64_t k = 0;
    for (; k + kOften <= count; k += kOften) {
      const int64_t element = element_of(k);
      if (!foreseen) {
        MAXUNPOOL_PREFETCH(indices + element * index_size);
      }
      if (!foreseen && !call.forward) {
        MAXUNPOOL_PREFETCH(values + found[element] * size);
        MAXUNPOOL_PREFETCH(values + found[element] * size + row);
      }
#pragma GCC unroll 8
      for (int64_t i = 0; i < kOften; ++i) {
        visit_one(element_of(k + i));
      }
    }
    for (; k < count; ++k) {
      visit_one(element_of(k));
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
