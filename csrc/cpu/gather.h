// Gradient of "last" where no index is stray or bad: needs no memory of its own.
#pragma once

#include "../calls.h"
#include "../geometry.h"
#include "chunks.h"
#include "processor.h"
#include "scatter.h"
#include "targets.h"
#include "windows.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>

namespace maxunpool_cuda {
namespace { // Internal linkage: GCC inlines these more readily.

// Addresses to prefetch for a window: one for about each cache line that no earlier window reads.
struct Entered {
  static constexpr int64_t kMost = 8;

  int64_t count = 0;
  int64_t offset[kMost]; // in elements, from the beginning of the window
};

inline Entered entered_by(const Windows& windows) {
  const Geometry<int64_t>& geometry = windows.geometry();
  const auto steps = [&](int a) {
    return std::min(geometry.axis[a].stride, geometry.axis[a].kernel);
  };
  const int64_t columns = geometry.inner == 1 ? 1 : steps(2);
  Entered entered;
  for (int64_t z = 0; z < steps(0); ++z) {
    for (int64_t y = 0; y < steps(1); ++y) {
      for (int64_t x = 0; x < columns && entered.count < Entered::kMost; ++x) {
        entered.offset[entered.count++] = windows.offset(z, y, x) * geometry.inner;
      }
    }
  }
  return entered;
}

// Writes value(i) for each element i of a chunk, and prefetches what the next chunk will read.
template <class Element, class Index, class Value>
void gather_chunk(
    const Geometry<int64_t>& geometry, const Entered& entered, const Chunk& chunk,
    const Index* indices, const Element* grad_output, Element* grad_input, const Value& value) {
  constexpr int64_t kOften = 8;
  const int64_t ahead = chunk.count * geometry.out_plane() / geometry.in_plane();
  int64_t i = 0;
  for (; i + kOften <= chunk.count; i += kOften) {
    prefetch(indices, i + chunk.count + chunk.extent);
    const int64_t begin = static_cast<int32_t>(chunk.begin[i] + chunk.shift);
    const int64_t next = begin * geometry.inner + chunk.origin[i] + chunk.channel + ahead;
    for (int64_t k = 0; k < entered.count; ++k) {
      prefetch(grad_output, next + entered.offset[k]);
    }
    for (int64_t j = i; j < i + kOften; ++j) {
      grad_input[j] = value(j);
    }
  }
  for (; i < chunk.count; ++i) {
    grad_input[i] = value(i);
  }
}

// Computes the gradient. False, with an undefined result, where an index is stray or bad or the
// windows are not listed.
template <class Element, class Index>
bool gather_last(const UnpoolCall& call) {
  constexpr int64_t kGrain = 1 << 13; // pooled elements of a task
  const Geometry<int64_t>& geometry = call.geometry;
  const std::optional<Windows> listed = Windows::list(geometry);
  if (!listed) {
    return false;
  }
  const Windows& windows = *listed;
  const Chunks chunks(windows);
  if (kIsWindowOffset<Index> && !(chunks.know_all() && chunks.whole_cells())) {
    return false;
  }
  const Entered entered = entered_by(windows);
  const FindTargets<Index> find(windows);
  std::atomic<bool> failed{false};
  chunks.for_each(kGrain, [&](const Chunk& chunk) {
    const int64_t element = chunk.outer * geometry.in_slab() + chunk.first;
    const auto* indices = static_cast<const Index*>(call.indices) + element;
    const auto* grad_output =
        static_cast<const Element*>(call.values) + chunk.outer * geometry.out_slab();
    auto* grad_input = static_cast<Element*>(call.result) + element;
    Targets targets;
    if (failed.load(std::memory_order_relaxed) || !find(chunk, indices, targets)) {
      failed = true;
      return;
    }
    const auto gather = [&](const auto& value) {
      gather_chunk(geometry, entered, chunk, indices, grad_output, grad_input, value);
    };
    if (windows.shared()) {
      gather([&](int64_t i) {
        return zero_if(targets.has_later_duplicate[i], grad_output[targets.offset[i]]);
      });
    } else {
      gather([&](int64_t i) { return grad_output[targets.offset[i]]; });
    }
  });
  return !failed;
}

} // namespace
} // namespace maxunpool_cuda
