// Kernels that take any index. One thread visits the indices of a part in order, so the result does
// not depend on the number of threads.
#pragma once

#include "../calls.h"
#include "../dtypes.h"
#include "../geometry.h"
#include "../reduction.h"
#include "parts.h"
#include "processor.h"
#include "window_offsets.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

namespace maxunpool_cuda {
namespace { // Internal linkage: GCC inlines these more readily.

// Part of a call, and what its kernel needs.
template <class Element, class Index>
struct Task {
  const UnpoolCall& call;
  const std::optional<WindowOffsets>& offsets; // of uint8 indices
  const Partition& partition;
  const Part& part;
  Scratch& scratch;
  FirstBadIndex& bad_index;
  const Geometry<int64_t>& geometry = call.geometry;
  const int64_t pooled = part.outer * geometry.in_slab(); // the slab's first element
  const int64_t unpooled = part.outer * geometry.out_slab() + part.begin * geometry.inner;
  const int64_t outputs = part.size() * geometry.inner;

  const Index* indices() const { return static_cast<const Index*>(call.indices) + pooled; }
  const Element* input() const { return static_cast<const Element*>(call.values) + pooled; }
  Element* grad_input() const { return static_cast<Element*>(call.result) + pooled; }
  Element* output() const { return static_cast<Element*>(call.result) + unpooled; }
  const Element* grad_output() const { return static_cast<const Element*>(call.values) + unpooled; }
};

// Calls visit(source, target) for the pooled elements that the part owns, cell by cell in row-major
// order or in reverse. `source` counts elements of the pooled slab, `target` those of the part.
// `gathered` is what visit reads or writes at the target: consecutive windows read consecutive
// cache lines, which the processor's prefetcher cannot see through the indices.
template <bool kReverse, class Element, class Index, class Visit>
void for_each_index(const Task<Element, Index>& task, const Element* gathered, const Visit& visit) {
  constexpr int64_t kOften = 8, kAhead = 2048; // elements, and bytes
  constexpr int64_t kIndices = kAhead / static_cast<int64_t>(sizeof(Index)) * (kReverse ? -1 : 1);
  constexpr int64_t kGathered =
      kAhead / static_cast<int64_t>(sizeof(Element)) * (kReverse ? -1 : 1);
  const Geometry<int64_t>& geometry = task.geometry;
  const Partition& partition = task.partition;
  const Part& part = task.part;
  const int64_t line = geometry.axis[2].out * geometry.inner;
  const int64_t slab = task.pooled;
  const Index* indices = task.indices();
  const auto begin = static_cast<uint64_t>(part.begin), size = static_cast<uint64_t>(part.size());
  const auto found = [&](int64_t source, int64_t target) MAXUNPOOL_INLINE {
    if (source % kOften == 0) {
      prefetch(indices, source + kIndices);
      prefetch(gathered, target + kGathered);
      prefetch(gathered, target + kGathered + line);
    }
    visit(source, target);
  };
  // Visitor of an element whose index is a position.
  const auto look_in = [&](const Rows& rows, auto inner) MAXUNPOOL_INLINE {
    const uint64_t extent_begin = rows.extent_begin, extent = rows.extent_end - extent_begin;
    return [=, &task, &found](int64_t position, int64_t channel, int64_t source) MAXUNPOOL_INLINE {
      const auto index = static_cast<uint64_t>(position);
      if (index - begin < size) {
        found(source, static_cast<int64_t>(index - begin) * inner + channel);
      } else if (index - extent_begin >= extent) {
        task.bad_index.record(slab + source);
      }
    };
  };
  const auto visit_positions = [&](const Rows& rows, auto inner) MAXUNPOOL_INLINE {
    const auto look = look_in(rows, inner);
    for_each_element<kReverse>(
        {rows.begin, rows.end}, inner,
        [&](int64_t, int64_t channel, int64_t source)
            MAXUNPOOL_INLINE { look(static_cast<int64_t>(indices[source]), channel, source); });
  };
  const auto visit_offsets = [&](const Rows& rows, auto inner) { // longer, and better not inlined
    const auto look = look_in(rows, inner);
    const bool in_windows =
        task.offsets->in_windows(indices + rows.begin * inner, (rows.end - rows.begin) * inner);
    task.offsets->template for_each_row<kReverse>(
        {rows.begin, rows.end},
        [&](const WindowOffsets::Row& row, const CellRange& cells) MAXUNPOOL_INLINE {
          row.for_each<kReverse>(
              cells, inner, indices, in_windows, part.begin, part.end,
              [&](int64_t position, int64_t channel, int64_t source)
                  MAXUNPOOL_INLINE { found(source, (position - part.begin) * inner + channel); },
              look);
        });
  };
  const auto visit_rows = [&](const Rows& rows, auto inner) MAXUNPOOL_INLINE {
    if constexpr (kIsWindowOffset<Index>) {
      visit_offsets(rows, inner);
    } else {
      visit_positions(rows, inner);
    }
  };
  for (int64_t i = 0; i < partition.chunks; ++i) {
    const Rows rows = partition.chunk(kReverse ? partition.chunks - 1 - i : i);
    if (rows.extent_end <= begin || begin + size <= rows.extent_begin) {
      continue;
    }
    if (geometry.inner == 1) {
      visit_rows(rows, std::integral_constant<int64_t, 1>{}); // a constant makes a simple loop
    } else {
      visit_rows(rows, geometry.inner);
    }
  }
}

template <class Element, class Index>
void forward_last(const Task<Element, Index>& task) {
  const Element* input = task.input();
  Element* output = task.output();
  std::fill_n(output, task.outputs, Element{});
  for_each_index<false>(
      task, output, [&](int64_t source, int64_t target) { output[target] = input[source]; });
}

// Whether a half is +0 or -0.
template <class Half>
bool is_zero(Half value) {
  return (value.x & 0x7fff) == 0;
}

// Sums of a half type, where every output has one element at most. False where one has more: a
// second element then finds the first in the output, unless that is zero.
template <class Element, class Index>
bool forward_single(const Task<Element, Index>& task) {
  const Element* input = task.input();
  Element* output = task.output();
  uint16_t displaced = 0; // bits of the elements that were written over
  std::fill_n(output, task.outputs, Element{});
  for_each_index<false>(task, output, [&](int64_t source, int64_t target) MAXUNPOOL_INLINE {
    displaced |= output[target].x;
    output[target] = is_zero(input[source]) ? Element{} : input[source];
  });
  return displaced == 0;
}

template <class Element, class Index>
void forward_sum(const Task<Element, Index>& task) {
  using Wide = Accumulator<Element>;
  const Element* input = task.input();
  Element* output = task.output();
  if constexpr (std::is_integral_v<Element> || std::is_same_v<Element, Wide>) {
    std::fill_n(output, task.outputs, Element{});
    for_each_index<false>(task, output, [&](int64_t source, int64_t target) {
      output[target] = static_cast<Element>(plus<Element>(output[target], input[source]));
    });
  } else if (!disjoint(task.geometry) || !forward_single(task)) {
    auto* sums = task.scratch.template zeroed<Wide>(task.outputs);
    for_each_index<false>(task, output, [&](int64_t source, int64_t target) {
      sums[target] = plus(sums[target], input[source]);
    });
    std::transform(
        sums, sums + task.outputs, output, [](Wide sum) { return static_cast<Element>(sum); });
  }
}

// `value` where `condition` is 0, zero where 1. Nothing branches on it: it is as good as random.
template <class Element>
Element zero_if(uint8_t condition, Element value) {
  if constexpr (std::is_integral_v<Element>) {
    return value & (Element{condition} - Element{1});
  } else {
    return condition ? Element{} : value;
  }
}

// Gradient of "last": the last element to name an output, the first one in reverse, takes it.
template <class Element, class Index>
void backward_last(const Task<Element, Index>& task) {
  const Element* grad_output = task.grad_output();
  Element* grad_input = task.grad_input();
  auto* taken = task.scratch.template zeroed<uint8_t>(task.outputs);
  for_each_index<true>(task, grad_output, [&](int64_t source, int64_t target) {
    grad_input[source] = zero_if(taken[target], grad_output[target]);
    taken[target] = 1;
  });
}

template <class Element, class Index>
void backward_sum(const Task<Element, Index>& task) {
  const Element* grad_output = task.grad_output();
  Element* grad_input = task.grad_input();
  for_each_index<false>(task, grad_output, [&](int64_t source, int64_t target) {
    grad_input[source] = grad_output[target];
  });
}

// Runs kernel(task) over all parts. If a nearby search finds the outputs of some index nowhere,
// runs the kernel once more with a search of everything, and raises an error if an index is bad.
template <class Element, class Kernel>
void run_parts(const UnpoolCall& call, const Kernel& kernel) {
  with_index_type(call.index_type, [&]<class Index>(std::type_identity<Index>) {
    std::optional<WindowOffsets> offsets;
    if (kIsWindowOffset<Index>) {
      offsets.emplace(call.geometry);
    }
    const auto search = [&](Search which, FirstBadIndex& bad_index) {
      const Partition partition = make_partition(call.geometry, sizeof(Element), which);
      for_each_part(partition, [&](const Part& part, Scratch& scratch) {
        kernel(Task<Element, Index>{call, offsets, partition, part, scratch, bad_index});
      });
    };
    FirstBadIndex suspected, bad;
    search(Search::nearby, suspected);
    if (suspected.any()) {
      search(Search::everything, bad);
      bad.raise_if_any(call.geometry, static_cast<const Index*>(call.indices));
    }
  });
}

} // namespace
} // namespace maxunpool_cuda
