// SPDX-License-Identifier: BSD-3-Clause
// A loop over the elements of a chunk that prefetches what a later chunk will read.
//
// It takes the chunks from plan.h. A prefetch is a hint to the processor: it changes no result.
//
// Example: the gradient of 2x2 windows, float32, int64 indices, 4 rows of 112 cells in a chunk.
// While elements 0 to 7 of a chunk are visited, the indices of elements 448 to 455 are prefetched
// (8 of 8 bytes: one cache line), and the gradients of the 32 outputs that such 8 elements have on
// average (32 of 4 bytes: two cache lines), where those of elements 448 to 455 begin.
#pragma once

#include "../calls.h"
#include "machine.h"
#include "plan.h"

#include <algorithm>
#include <cstdint>

namespace maxunpool_cuda {
namespace { // Internal linkage: GCC inlines these more readily.

// What is prefetched, how far ahead and how many bytes. One plan serves a whole call.
class PrefetchPlan {
 public:
  // Elements between two prefetches of the same array: 8 int64 indices are a cache line.
  static constexpr int64_t kElements = 8;

  // `reverse`: chunks and their elements are visited from the last one to the first.
  PrefetchPlan(const UnpoolCall& call, const Plan& plan, bool reverse)
      : call_(call),
        plan_(plan),
        index_size_(static_cast<int64_t>(element_size(call.index_type))),
        element_size_(static_cast<int64_t>(call.element_size)) {
    const Geometry<int64_t>& geometry = plan.geometry;
    const int64_t row = geometry.axis[2].out * geometry.inner * element_size_;
    foreseen_ = !reverse && row < kShortRow;
    const int64_t unpooled = geometry.out_image() * element_size_;
    share_ = static_cast<double>(unpooled) / static_cast<double>(geometry.in_image());
    gradients_ = call.forward || foreseen_ ? 0 : std::min(share_of(kElements), kMostGradients);
  }

  // Calls visit(i) for each element i of a chunk, counted from the chunk's begin.
  template <bool kReverse, class Visit>
  void for_each(int64_t group, const Range& elements, const Visit visit) const {
    const int64_t count = elements.size();
    const auto element_of = [=](int64_t k) { return kReverse ? count - 1 - k : k; };
    // Addresses may lie outside of the arrays, where a prefetch does nothing.
    const uintptr_t indices = next_indices<kReverse>(group, elements);
    const uintptr_t gradients = next_gradients<kReverse>(group, elements);
    // Local, so that the compiler knows that visits do not change them.
    const bool prefetches_indices = !foreseen_;
    const int64_t index_size = index_size_;
    const int64_t prefetched = gradients_;
    const int64_t share = share_of(kElements);
    int64_t k = 0;
    for (; k + kElements <= count; k += kElements) {
      const int64_t element = element_of(k);
      if (prefetches_indices) {
        MAXUNPOOL_PREFETCH(indices + element * index_size);
      }
      for (int64_t byte = 0; byte < prefetched; byte += kLine) {
        MAXUNPOOL_PREFETCH(gradients + element * share / kElements + byte);
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
  static constexpr int64_t kLine = 64; // bytes of a cache line
  // Bytes of gradients for kElements elements. Where windows lie far apart, most outputs between
  // them are not read, and more prefetches than 32 lines would cost more than they save.
  static constexpr int64_t kMostGradients = 2048;
  // Bytes. Rows of outputs that are shorter and visited forward are read in nearly the order of
  // addresses, which the processor foresees: prefetches cost up to a half more time there.
  static constexpr int64_t kShortRow = 256;

  // Bytes of the outputs that so many elements have on average.
  int64_t share_of(int64_t elements) const { return static_cast<int64_t>(elements * share_); }

  // Address of the next chunk's first index.
  template <bool kReverse>
  uintptr_t next_indices(int64_t group, const Range& elements) const {
    const int64_t next = kReverse ? elements.begin - elements.size() : elements.end;
    return reinterpret_cast<uintptr_t>(call_.indices) + (plan_.pooled(group) + next) * index_size_;
  }

  // Address where the gradients of a later chunk begin, whose reach is another.
  template <bool kReverse>
  uintptr_t next_gradients(int64_t group, const Range& elements) const {
    const int64_t ahead = plan_.to_another_reach();
    const int64_t later = elements.begin + (kReverse ? -ahead : ahead);
    const int64_t begin = plan_.unpooled(group) * element_size_ + share_of(later);
    return reinterpret_cast<uintptr_t>(call_.values) + begin;
  }

  const UnpoolCall& call_;
  const Plan& plan_;
  int64_t index_size_;   // bytes
  int64_t element_size_; // bytes
  bool foreseen_;        // the processor foresees what will be read: nothing is prefetched
  double share_;         // bytes of the outputs of an element, on average
  int64_t gradients_;    // bytes that are prefetched for kElements elements
};

} // namespace
} // namespace maxunpool_cuda
