// SPDX-License-Identifier: BSD-3-Clause
// The gradient of "last" in its most frequent and simplest case: flat indices, contiguous tensors,
// windows that do not overlap. Each pooled element then gets the gradient of the output that its
// index names: no other element can name it, if every index lies in its own window.
//
// It takes chunks from plan.h, the check of indices from windows.h, and the loop over a chunk from
// prefetch.h. The walk (walk.h) would give the same result; here no targets are computed, and
// threads divide elements, not outputs.
//
// Example: 4 outputs, windows of 2, grad_output = {5, 6, 7, 8}, indices = {1, 2}. Index 1 lies in
// the window of outputs 0 and 1, and index 2 in that of 2 and 3, so grad_input = {6, 7}. With
// indices = {1, 1} the second one is out of its window: gather_directly() returns false, and the
// walk gives {0, 6}.
#pragma once

#include "../calls.h"
#include "../dtypes.h"
#include "../reduction.h"
#include "machine.h"
#include "plan.h"
#include "prefetch.h"
#include "windows.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {
namespace { // Internal linkage: GCC inlines these more readily.

inline bool can_gather_directly(const UnpoolCall& call) {
  return !call.forward && call.reduce == Reduce::last && call.geometry.inner == 1 &&
         call.index_type != c10::ScalarType::Byte && OwnWindows::can_tell(call.geometry);
}

// Gathers a chunk whose indices lie in their own windows. Each index is read again here, so nobody
// may change it during the call.
template <class Element, class Index>
void gather_chunk(
    const UnpoolCall& call,
    const Plan& plan,
    const PrefetchPlan& prefetch,
    int64_t group,
    const Range& elements) {
  const int64_t begin = plan.pooled(group) + elements.begin;
  const int64_t out_plane = plan.geometry.out_plane();
  const auto* indices = static_cast<const Index*>(call.indices) + begin;
  const auto* grad_output = static_cast<const Element*>(call.values) + plan.unpooled(group);
  auto* grad_input = static_cast<Element*>(call.result) + begin;
  if (plan.images == 1) {
    prefetch.for_each<false>(group, elements, [=](int64_t i) MAXUNPOOL_INLINE {
      grad_input[i] = grad_output[indices[i]];
    });
    return;
  }
  const int64_t in_plane = plan.geometry.in_plane();
  for (int64_t i = 0; i < elements.size(); grad_output += out_plane) { // the group is one chunk
    for (const int64_t end = i + in_plane; i < end; ++i) {
      grad_input[i] = grad_output[indices[i]];
    }
  }
}

// Fills the result of a call for which can_gather_directly() is true. False, and the result is
// undefined, if an index does not lie in its own window.
inline bool gather_directly(const UnpoolCall& call) {
  const Plan plan(call, /*any_index=*/false);
  const PrefetchPlan prefetch(call, plan, /*reverse=*/false);
  const OwnWindows own_windows(call, plan);
  std::atomic<bool> all{true};
  const auto gather_chunks = [&]<class Element, class Index>(int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end && all; ++i) {
      const int64_t group = i / plan.chunks;
      const Range elements = plan.elements_of(group, i % plan.chunks);
      if (own_windows.hold(group, elements)) {
        gather_chunk<Element, Index>(call, plan, prefetch, group, elements);
      } else {
        all = false;
      }
    }
  };
  const int64_t outputs = plan.images * plan.geometry.out_image() / plan.chunks; // of a chunk
  const int64_t grain = divide_up(Plan::kGrain, std::max<int64_t>(1, outputs));
  using enum c10::ScalarType;
  with_type_of<Int, Long>(call.index_type, [&]<class Index>(std::type_identity<Index>) {
    with_bytes(call.element_size, [&]<class Element>(std::type_identity<Element>) {
      at::parallel_for(0, plan.groups * plan.chunks, grain, [&](int64_t begin, int64_t end) {
        gather_chunks.template operator()<Element, Index>(begin, end);
      });
    });
  });
  return all;
}

} // namespace
} // namespace maxunpool_cuda
