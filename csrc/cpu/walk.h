// SPDX-License-Identifier: BSD-3-Clause
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
  // chunk and, in a gradient, values for later elements: each has an equal share of the outputs, of
  // which at most kMost bytes are worth it, as windows that lie far apart leave most unread.
  // Processors foresee this themselves where the walk goes forward and rows are short.
  template <bool kReverse, bool kOwnsAll, class Visit>
  void visit_all(const Chunk& chunk, const uint32_t* found, const Visit visit) const {
    constexpr int64_t kOften = 8, kLine = 64, kMost = 2048, kShort = 256; // elements; bytes
    constexpr int64_t kSign = kReverse ? -1 : 1;
    const Geometry<int64_t>& geometry = plan.geometry;
    const int64_t count = chunk.elements.size(), size = static_cast<int64_t>(call.element_size);
    const auto index_size = static_cast<int64_t>(c10::elementSize(call.index_type));
    const int64_t next = plan.pooled(stack) + chunk.elements.begin + kSign * count;
    const auto indices = reinterpret_cast<uintptr_t>(call.indices) + next * index_size;
    const double share = static_cast<double>(geometry.out_image() * size) / geometry.in_image();
    const auto bytes_of = [=](int64_t elements) { return static_cast<int64_t>(elements * share); };
    const int64_t row = geometry.axis[2].out * geometry.inner * size, step = bytes_of(kOften);
    const bool foreseen = !kReverse && row < kShort;
    const int64_t prefetched = call.forward || foreseen ? 0 : std::min(step, kMost);
    const uintptr_t values = reinterpret_cast<uintptr_t>(call.values) +
                             plan.unpooled(stack) * size +
                             bytes_of(chunk.elements.begin + kSign * plan.ahead());
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
      for (int64_t byte = 0; byte < prefetched; byte += kLine) {
        MAXUNPOOL_PREFETCH(values + element * step / kOften + byte);
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
  // A slot starts with the value of its output in `values`, if given, or with zero.
  explicit Slots(const Part& part, const T* values = nullptr)
      : memory_(part.memory), held_{part.outputs.begin, part.outputs.begin}, values_(values) {}

  const Range& held() const { return held_; }
  T* begin() { return reinterpret_cast<T*>(memory_.data()); }

  // Slots of these outputs. Those that were not held before start anew.
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
      const auto start = [&](T* from, T* to) {
        if (values_ == nullptr) {
          std::fill(from, to, T{});
        } else {
          std::copy_n(values_ + reach.begin + (from - slots), to - from, from);
        }
      };
      start(slots, first);
      start(last, slots + reach.size());
      held_ = reach;
    }
    return begin();
  }

 private:
  std::vector<std::max_align_t>& memory_;
  Range held_;
  const T* const values_;
};

} // namespace
} // namespace maxunpool_cuda
