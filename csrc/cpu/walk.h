// SPDX-License-Identifier: BSD-3-Clause
// The walk of a thread through the pooled elements that name outputs of its part.
//
// It takes parts and chunks from plan.h, and the outputs that indices name from targets.h. What is
// done with an element is up to the kernel that walks. While a chunk is visited, what a later chunk
// will read is prefetched. A prefetch is a hint to the processor: it changes no result.
//
// Example: 2x2 windows; a plane of 1024x1024 cells has two parts, the outputs [0, 2097152) and
// those after. Each chunk is half a row of cells, 512 elements, whose reach is two rows of outputs.
// The owner of the first part visits the chunks 0 to 1023 and skips all others, whose reach belongs
// to another part. With 3x3 windows and stride 2, neighbouring rows of windows share a row of
// outputs. So a few chunks reach into both parts. Both owners visit these, and each skips elements
// that name outputs of the other.
#pragma once

#include "../calls.h"
#include "machine.h"
#include "plan.h"
#include "slots.h"
#include "targets.h"

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace maxunpool_cuda {
namespace { // Internal linkage: GCC inlines these more readily.

// What is prefetched, and how far ahead: indices and outputs (in the backward: gradients of
// outputs). One serves a whole call.
//
// Example: 2x2 windows, float32, int64 indices, 4 rows of 112 cells in a chunk. While elements 0 to
// 7 of a chunk are visited, the indices of elements 448 to 455 are prefetched (8 of 8 bytes: one
// cache line), and the 32 outputs that such 8 elements have on average (32 of 4 bytes: two cache
// lines), where those of elements 448 to 455 begin.
class Prefetch {
 public:
  // Elements between two prefetches of the same array: 8 int64 indices are a cache line.
  static constexpr int64_t kElements = 8;

  Prefetch(const UnpoolCall& call, const Plan& plan)
      : call_(call),
        plan_(plan),
        index_size_(static_cast<int64_t>(element_size(call.index_type))),
        element_size_(static_cast<int64_t>(call.element_size)) {
    const int64_t unpooled = plan.geometry.out_image() * element_size_;
    share_ = static_cast<double>(unpooled) / static_cast<double>(plan.geometry.in_image());
    const bool long_fills =
        share_of(plan.to_another_reach()) > kMostFilled || share_of(kElements) > kMostFilledShare;
    outputs_ = call.forward && long_fills ? 0 : std::min(share_of(kElements), kMostOutputs);
  }

  // Calls visit(i) for each element i of a chunk, counted from the chunk's begin.
  template <bool kReverse, class Visit>
  void for_each(int64_t group, const Range& elements, const Visit visit) const {
    const int64_t count = elements.size();
    const auto element_of = [=](int64_t k) { return kReverse ? count - 1 - k : k; };
    // Addresses may lie outside of the arrays, where a prefetch does nothing.
    const uintptr_t indices = next_indices<kReverse>(group, elements);
    const uintptr_t outputs = next_outputs<kReverse>(group, elements);
    // Local, so that the compiler knows that visits do not change them.
    const int64_t index_size = index_size_;
    const int64_t prefetched = outputs_;
    const int64_t share = share_of(kElements);
    int64_t k = 0;
    for (; k + kElements <= count; k += kElements) {
      const int64_t element = element_of(k);
      MAXUNPOOL_PREFETCH(indices + element * index_size);
      for (int64_t byte = 0; byte < prefetched; byte += kLine) {
        MAXUNPOOL_PREFETCH(outputs + element * share / kElements + byte);
      }
#pragma GCC unroll 8
      for (int64_t i = 0; i < kElements; ++i) {
        visit(element_of(k + i));
      }
    }
    for (; k < count; ++k) {
      visit(element_of(k));
    }
  }

 private:
  // Bytes of outputs for kElements elements. Where windows lie far apart, most outputs between them
  // are not used, and more prefetches than 32 lines would cost more than they save.
  static constexpr int64_t kMostOutputs = 2048;

  // Bytes of outputs that are prefetched before they are filled with zeros: of a chunk, and of
  // kElements elements. More would take the place of what is in use, in a first cache of 32 KiB,
  // and the processor foresees long fills.
  static constexpr int64_t kMostFilled = 30 << 10;
  static constexpr int64_t kMostFilledShare = 4 * kLine;

  // Bytes of the outputs that so many elements have on average.
  int64_t share_of(int64_t elements) const { return static_cast<int64_t>(elements * share_); }

  // Address of the next chunk's first index.
  template <bool kReverse>
  uintptr_t next_indices(int64_t group, const Range& elements) const {
    const int64_t next = kReverse ? elements.begin - elements.size() : elements.end;
    return reinterpret_cast<uintptr_t>(call_.indices) + (plan_.pooled(group) + next) * index_size_;
  }

  // Address where the outputs of a later chunk begin, whose reach is another.
  template <bool kReverse>
  uintptr_t next_outputs(int64_t group, const Range& elements) const {
    const int64_t ahead = plan_.to_another_reach();
    const int64_t later = elements.begin + (kReverse ? -ahead : ahead);
    const int64_t begin = plan_.unpooled(group) * element_size_ + share_of(later);
    return reinterpret_cast<uintptr_t>(call_.forward ? call_.result : call_.values) + begin;
  }

  const UnpoolCall& call_;
  const Plan& plan_;
  const int64_t index_size_;   // bytes
  const int64_t element_size_; // bytes
  double share_;               // bytes of the outputs of an element, on average
  int64_t outputs_;            // bytes that are prefetched for kElements elements
};

// What all parts of a call share.
struct Work {
  const UnpoolCall& call;
  const Plan& plan;
  const Targets& targets;
  const Prefetch& prefetch;
  std::atomic<bool>& failed; // some index leads out of its reach: the result is undefined
};

// A part of an image group, and what its owner needs.
struct Part {
  const Work& work;
  SlotMemory& memory; // of the thread
  int64_t group;
  Range outputs;

  // The call's arrays, from the begin of the group on.
  template <class T>
  const T* values() const {
    const Plan& plan = work.plan;
    const int64_t begin = work.call.forward ? plan.pooled(group) : plan.unpooled(group);
    return static_cast<const T*>(work.call.values) + begin;
  }
  template <class T>
  T* result() const {
    const Plan& plan = work.plan;
    const int64_t begin = work.call.forward ? plan.unpooled(group) : plan.pooled(group);
    return static_cast<T*>(work.call.result) + begin;
  }

  // For each chunk whose reach has outputs of this part, calls `visit = enter(owned)`, where
  // `owned` are those outputs. Then calls `visit(element, target)` for each element of the chunk
  // whose index names one of them, where `target` is counted from the first of them. Chunks and
  // elements come in order, or all in reverse. Ends early if the call has failed.
  template <bool kReverse, class Enter>
  void walk(const Enter& enter) const {
    const Plan& plan = work.plan;
    alignas(64) uint32_t targets[Chunk::kMost]; // no vector of it lies in two cache lines
    for (int64_t i = 0; i < plan.chunks; ++i) {
      const Chunk chunk = plan.chunk(group, kReverse ? plan.chunks - 1 - i : i, outputs);
      if (chunk.owned.empty()) {
        continue;
      }
      const auto visit = enter(chunk.owned);
      if (work.failed.load(std::memory_order_relaxed) || !work.targets.find(chunk, targets)) {
        work.failed = true;
        return;
      }
      if (chunk.owned == chunk.reach) {
        visit_all<kReverse>(chunk, targets, visit);
      } else {
        visit_owned<kReverse>(chunk, targets, visit);
      }
    }
  }

 private:
  template <bool kReverse, class Visit>
  void visit_all(const Chunk& chunk, const uint32_t* targets, const Visit visit) const {
    const int64_t begin = chunk.elements.begin;
    work.prefetch.for_each<kReverse>(
        group, chunk.elements, [=](int64_t i) MAXUNPOOL_INLINE { visit(begin + i, targets[i]); });
  }

  // The reach has outputs of other parts, too.
  template <bool kReverse, class Visit>
  void visit_owned(const Chunk& chunk, const uint32_t* targets, const Visit visit) const {
    const int64_t begin = chunk.elements.begin;
    const auto lead = static_cast<uint32_t>(chunk.lead());
    const auto owned = static_cast<uint32_t>(chunk.owned.size());
    work.prefetch.for_each<kReverse>(group, chunk.elements, [=](int64_t i) MAXUNPOOL_INLINE {
      const uint32_t target = targets[i] - lead; // wraps around before the owned
      if (target < owned) {
        visit(begin + i, target);
      }
    });
  }
};

} // namespace
} // namespace maxunpool_cuda
