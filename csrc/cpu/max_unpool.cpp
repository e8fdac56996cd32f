// SPDX-License-Identifier: BSD-3-Clause
// Max unpooling and its transpose on the CPU: the kernels, their choice, registration. The owner of
// an output visits the elements that name it in order, whatever the number of threads.
#include "../max_unpool.h"
#include "../errors.h"
#include "../reduction.h"
#include "walk.h"

#include <c10/core/Device.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

namespace maxunpool_cuda {
namespace {

// What an output becomes when an element names it.
template <class Element>
MAXUNPOOL_INLINE inline void keep(Element& output, Element value) {
  output = value;
}

// Sums of types that are accumulated in themselves, or, as integers, wrap to the same.
template <class Element>
MAXUNPOOL_INLINE inline void add(Element& output, Element value) {
  output = static_cast<Element>(plus<Element>(output, value));
}

// Sums of one 16-bit float at most: the element as it is, but 0 for -0.
template <class Element>
MAXUNPOOL_INLINE inline void add_to_zero(Element& output, Element value) {
  output = (value.x & 0x7fff) == 0 ? Element{} : value;
}

// Fills outputs with zeros just before they come into reach, and puts elements in.
template <class Element, void (*put)(Element&, Element)>
void forward(const Part& part) {
  const auto* input = part.values<Element>();
  auto* output = part.result<Element>();
  int64_t zeroed = part.outputs.begin;
  part.walk<false>([&](const Range& reach) {
    std::fill(output + zeroed, output + std::max(zeroed, reach.end), Element{});
    zeroed = std::max(zeroed, reach.end);
    return [from = input, to = output + reach.begin](int64_t element, int64_t target)
               MAXUNPOOL_INLINE { put(to[target], from[element]); };
  });
}

// Sums of 16-bit floats, accumulated in wider slots.
template <class Element>
void forward_wide_sum(const Part& part) {
  const auto* input = part.values<Element>();
  auto* output = part.result<Element>();
  Slots<Accumulator<Element>> slots(part);
  const auto write = [&](int64_t end) { // outputs that no later chunk reaches
    const Range done = slots.held().within({0, end});
    in_vectors([=, from = slots.begin(), to = output + done.begin]() MAXUNPOOL_INLINE {
      for (int64_t i = 0; i < done.size(); ++i) {
        to[i] = static_cast<Element>(from[i]);
      }
    });
  };
  part.walk<false>([&](const Range& reach) {
    write(reach.begin);
    return [sums = slots.hold(reach), from = input](int64_t element, int64_t target)
               MAXUNPOOL_INLINE { sums[target] = plus(sums[target], from[element]); };
  });
  write(part.outputs.end);
}

// Gradient where every element gets that of its output.
template <class Element>
void backward_sum(const Part& part) {
  const auto* grad_output = part.values<Element>();
  auto* grad_input = part.result<Element>();
  part.walk<false>([&](const Range& reach) {
    return [from = grad_output + reach.begin, to = grad_input](int64_t element, int64_t target)
               MAXUNPOOL_INLINE { to[element] = from[target]; };
  });
}

// Gradient of "last": the last element to name an output, the first one in reverse, takes its
// gradient, and leaves zero to the others.
template <class Element>
void backward_last(const Part& part) {
  auto* grad_input = part.result<Element>();
  Slots<Element> slots(part, part.values<Element>());
  part.walk<true>([&](const Range& reach) {
    return [left = slots.hold(reach), to = grad_input](int64_t element, int64_t target)
               MAXUNPOOL_INLINE { to[element] = std::exchange(left[target], Element{}); };
  });
}

using Kernel = void(const Part&);

// Kernel that adds elements up. `single`: no output has two.
template <class Element>
Kernel* adding_kernel(bool single) {
  if constexpr (std::is_integral_v<Element> || std::is_same_v<Element, Accumulator<Element>>) {
    return forward<Element, add<Element>>;
  } else {
    return single ? forward<Element, add_to_zero<Element>> : forward_wide_sum<Element>;
  }
}

// Kernel that only moves elements.
template <class Element>
Kernel* moving_kernel(const UnpoolCall& call, bool single) {
  return call.forward                           ? forward<Element, keep<Element>>
         : single || call.reduce == Reduce::sum ? backward_sum<Element>
                                                : backward_last<Element>;
}

// Runs a call, and returns the first element whose index leads out of its reach, if any does: its
// result is undefined then. With `any_index` such an index is out of bounds.
int64_t run_parts(const UnpoolCall& call, bool any_index) {
  const bool offsets = call.index_type == c10::ScalarType::Byte;
  const bool adds = call.forward && call.reduce == Reduce::sum;
  const bool half = call.type == c10::ScalarType::Half || call.type == c10::ScalarType::BFloat16;
  // Whether no output has two elements matters for sums of 16-bit floats, and for the gradient of
  // "last". Flat indices have to lie in their windows for it.
  const bool matters = adds ? half : !call.forward && call.reduce == Reduce::last;
  const bool own_window =
      matters && !offsets && !any_index && Targets::can_tell_windows(call.geometry);
  const bool single = own_window || (offsets && disjoint(call.geometry));
  Kernel* kernel = nullptr;
  if (adds) {
    with_arithmetic_type(call.type, [&]<class Element>(std::type_identity<Element>) {
      kernel = adding_kernel<Element>(single);
    });
  } else {
    with_bytes(call.element_size, [&]<class Element>(std::type_identity<Element>) {
      kernel = moving_kernel<Element>(call, single);
    });
  }
  const bool reverse = !call.forward && call.reduce == Reduce::last && !single;
  const Plan plan(call, any_index);
  const Targets targets(call, plan, own_window);
  std::atomic<int64_t> missed{Part::kNone};
  at::parallel_for(0, plan.total, plan.grain, [&](int64_t begin, int64_t end) {
    std::vector<std::max_align_t> memory;
    for (int64_t k = begin; k < end; ++k) { // a walk in reverse comes from the stacks behind
      const int64_t i = reverse ? begin + end - 1 - k : k;
      const int64_t stack = i / plan.parts;
      kernel({call, plan, targets, missed, memory, stack, plan.part(stack, i % plan.parts)});
    }
  });
  return missed;
}

[[noreturn]] void raise_out_of_bounds(const UnpoolCall& call, int64_t element) {
  int64_t index = 0;
  with_index_type(call.index_type, [&]<class Index>(std::type_identity<Index>) {
    index = static_cast<const Index*>(call.indices)[element];
  });
  const bool in_window = call.index_type == c10::ScalarType::Byte;
  TORCH_CHECK(false, invalid_index(call.geometry, in_window, index, element));
}

void unpool(const UnpoolCall& call, c10::Device) {
  const Geometry<int64_t>& geometry = call.geometry;
  const int64_t image = call.forward ? geometry.out_image() : geometry.in_image();
  use_huge_pages(call.result, geometry.outer * image * call.element_size);
  if (run_parts(call, false) != Part::kNone) {
    const int64_t out_of_bounds = run_parts(call, true);
    if (out_of_bounds != Part::kNone) {
      raise_out_of_bounds(call, out_of_bounds);
    }
  }
}

} // namespace

TORCH_LIBRARY_IMPL(maxunpool_cuda, CPU, m) {
  m.impl("max_unpool", run<int64_t, true, unpool>);
  m.impl("max_unpool_backward", run<int64_t, false, unpool>);
}

} // namespace maxunpool_cuda
