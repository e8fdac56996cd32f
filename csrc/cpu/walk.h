// SPDX-License-Identifier: BSD-3-Clause
// The walk of a thread through the pooled elements that name outputs of its part.
//
// It takes parts and chunks from plan.h, the outputs that indices name from targets.h, and the loop
// over a chunk from prefetch.h. What is done with an element is up to the kernel that walks.
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
#include "prefetch.h"
#include "slots.h"
#include "targets.h"

#include <atomic>
#include <cstdint>
#include <limits>

namespace maxunpool_cuda {
namespace { // Internal linkage: GCC inlines these more readily.

// The smallest of the elements that threads report.
class FirstElement {
 public:
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

  int64_t get() const { return element_.load(std::memory_order_relaxed); }
  bool exists() const { return get() != kNone; }
  void report(int64_t element) {
    int64_t first = element_.load();
    while (element < first && !element_.compare_exchange_weak(first, element)) {
    }
  }

 private:
  std::atomic<int64_t> element_{kNone};
};

// What all parts of a call share.
struct Work {
  const UnpoolCall& call;
  const Plan& plan;
  const Targets& targets;
  const PrefetchPlan& prefetch;
  FirstElement& out_of_reach; // the tensor's first whose index is not allowed: see record()
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
  // elements come in order, or all in reverse.
  //
  // If an index is not allowed, its chunk's elements are not visited, and the result is undefined.
  template <bool kReverse, class Enter>
  void walk(const Enter& enter) const {
    const Plan& plan = work.plan;
    alignas(64) uint32_t targets[Chunk::kMost]; // no vector of it lies in two cache lines
    for (int64_t i = 0; i < plan.chunks; ++i) {
      const Chunk chunk = plan.chunk(group, kReverse ? plan.chunks - 1 - i : i, outputs);
      if (chunk.owned.empty()) {
        continue;
      }
      if (!plan.any_index && work.out_of_reach.exists()) {
        return; // everything will be done again
      }
      const auto visit = enter(chunk.owned);
      if (!work.targets.find(chunk, targets)) {
        record(chunk);
      } else if (chunk.owned == chunk.reach) {
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

  // If the plan allows any index, records the chunk's first element whose index is out of bounds.
  // Else records any element of the chunk: everything will be done again. Indices are read anew, so
  // if another thread has made all of them good, records the last element.
  void record(const Chunk& chunk) const {
    int64_t element = chunk.elements.begin;
    const int64_t last = chunk.elements.end - 1;
    while (work.plan.any_index && element < last &&
           chunk.reach.holds(work.targets.output_of(group, element))) {
      ++element;
    }
    work.out_of_reach.report(work.plan.pooled(group) + element);
  }
};

} // namespace
} // namespace maxunpool_cuda
