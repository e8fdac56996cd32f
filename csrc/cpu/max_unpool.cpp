// SPDX-License-Identifier: BSD-3-Clause
// Max unpooling and its transpose on the CPU: the kernels, their choice, registration.
//
// It takes the call from ../max_unpool.h, which has checked it. A kernel walks (walk.h) through the
// pooled elements that name the outputs of its part, in order or in reverse, and does one thing
// with each of them. The result does not depend on the number of threads, because every output has
// one owner.
//
// Example: one plane, input = {3, 4, 5}, indices = {0, 1, 1}, three outputs.
//   scatter, "last"     output = {3, 5, 0}: 4 was overwritten
//   scatter, "sum"      output = {3, 9, 0}
// And with grad_output = {6, 7, 8}:
//   gather, "sum"       grad_input = {6, 7, 7}
//   gather_last         grad_input = {6, 0, 7}: from the last element on, each takes what is left
#include "../max_unpool.h"
#include "../errors.h"
#include "../reduction.h"
#include "../torch.h"
#include "walk.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {
namespace {

// What an output becomes when an element names it.
template <class Element>
MAXUNPOOL_INLINE inline void overwrite(Element& output, Element value) {
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

// Fills outputs with zeros just before they come into reach, and combines elements with them.
template <class Element, void (*combine)(Element&, Element)>
void scatter(const Part& part) {
  const auto* input = part.values<Element>();
  auto* output = part.result<Element>();
  int64_t zeros_end = part.outputs.begin;
  part.walk<false>([&](const Range& owned) {
    const int64_t end = std::max(zeros_end, owned.end);
    std::fill(output + zeros_end, output + end, Element{});
    zeros_end = end;
    return [from = input, to = output + owned.begin](int64_t element, int64_t target)
               MAXUNPOOL_INLINE { combine(to[target], from[element]); };
  });
}

// Sums of 16-bit floats, accumulated in float slots.
template <class Element>
void scatter_wide_sum(const Part& part) {
  const auto* input = part.values<Element>();
  auto* output = part.result<Element>();
  Slots<Accumulator<Element>> slots(part.memory);
  const auto write_until = [&](int64_t end) { // outputs that no later chunk reaches
    const Range complete = slots.reach().within({0, end});
    in_vectors([=, from = slots.begin(), to = output + complete.begin]() MAXUNPOOL_INLINE {
      for (int64_t i = 0; i < complete.size(); ++i) {
        to[i] = static_cast<Element>(from[i]);
      }
    });
  };
  part.walk<false>([&](const Range& owned) {
    write_until(owned.begin);
    return [sums = slots.move_to(owned), from = input](int64_t element, int64_t target)
               MAXUNPOOL_INLINE { sums[target] = plus(sums[target], from[element]); };
  });
  write_until(part.outputs.end);
}

// Gradient where every element gets that of its output: of "sum", and of "last" if no output has
// two elements.
template <class Element>
void gather(const Part& part) {
  const auto* grad_output = part.values<Element>();
  auto* grad_input = part.result<Element>();
  part.walk<false>([&](const Range& owned) {
    return [from = grad_output + owned.begin, to = grad_input](int64_t element, int64_t target)
               MAXUNPOOL_INLINE { to[element] = from[target]; };
  });
}

// `value`, or zero if `taken`, which is 0 or 1. Without a branch, which processors mispredict where
// windows overlap.
template <class Element>
MAXUNPOOL_INLINE inline Element unless(uint8_t taken, Element value) {
  if constexpr (std::is_integral_v<Element>) {
    return value & (static_cast<Element>(taken) - 1);
  } else {
    return taken ? Element{} : value;
  }
}

// Gradient of "last": the last element that names an output, which is the first one in reverse,
// takes the output's gradient, and leaves zero for the others.
template <class Element>
void gather_last(const Part& part) {
  const auto* grad_output = part.values<Element>();
  auto* grad_input = part.result<Element>();
  Slots<uint8_t> slots(part.memory);
  part.walk<true>([&](const Range& owned) {
    return [taken = slots.move_to(owned), from = grad_output + owned.begin, to = grad_input](
               int64_t element, int64_t target) MAXUNPOOL_INLINE {
      to[element] = unless(taken[target], from[target]);
      taken[target] = 1;
    };
  });
}

// A kernel, and the order in which it visits elements.
struct Kernel {
  void (*run)(const Part&) = nullptr;
  bool reverse = false;
};

// Kernel that adds elements up. `single`: no output has two.
template <class Element>
Kernel adding_kernel(bool single) {
  if constexpr (std::is_integral_v<Element> || std::is_same_v<Element, Accumulator<Element>>) {
    return {scatter<Element, add<Element>>};
  } else {
    return {single ? scatter<Element, add_to_zero<Element>> : scatter_wide_sum<Element>};
  }
}

// Kernel that only moves elements.
template <class Element>
Kernel moving_kernel(const UnpoolCall& call, bool single) {
  if (call.forward) {
    return {scatter<Element, overwrite<Element>>};
  }
  if (single || call.reduce == Reduce::sum) {
    return {gather<Element>};
  }
  return {gather_last<Element>, /*reverse=*/true};
}

Kernel kernel_of(const UnpoolCall& call, bool single) {
  Kernel kernel;
  if (call.forward && call.reduce == Reduce::sum) {
    with_arithmetic_type(call.type, [&]<class Element>(std::type_identity<Element>) {
      kernel = adding_kernel<Element>(single);
    });
  } else {
    with_bytes(call.element_size, [&]<class Element>(std::type_identity<Element>) {
      kernel = moving_kernel<Element>(call, single);
    });
  }
  return kernel;
}

// Whether another kernel is faster if no output has two elements: for sums of 16-bit floats, and
// for the gradient of "last".
bool gains_if_single(const UnpoolCall& call) {
  if (call.forward) {
    const bool is_half = call.type == ScalarType::Half;
    return call.reduce == Reduce::sum && (is_half || call.type == ScalarType::BFloat16);
  }
  return call.reduce == Reduce::last;
}

// Runs a call by walks. False, and the result is undefined, if an index leads out of its reach,
// which is its whole image group with `any_index`.
bool walk_parts(const UnpoolCall& call, bool any_index) {
  const bool offsets = call.index_type == ScalarType::Byte;
  const bool checks_windows =
      gains_if_single(call) && !offsets && !any_index && OwnWindows::can_tell(call.geometry);
  const bool single = checks_windows || (offsets && disjoint(call.geometry));
  const Kernel kernel = kernel_of(call, single);
  const Plan plan(call, any_index);
  const Targets targets(call, plan, /*in_own_windows=*/checks_windows);
  const Prefetch prefetch(call, plan);
  std::atomic<bool> failed{false};
  const Work work{
      .call = call, .plan = plan, .targets = targets, .prefetch = prefetch, .failed = failed};
  parallel_for(0, plan.groups * plan.parts, plan.grain, [&](int64_t begin, int64_t end) {
    SlotMemory memory;
    for (int64_t k = begin; k < end; ++k) {
      // In reverse, so that memory is read in one direction from group to group, too.
      const int64_t i = kernel.reverse ? begin + end - 1 - k : k;
      const int64_t group = i / plan.parts;
      const Range outputs = plan.part(group, i % plan.parts);
      kernel.run({.work = work, .memory = memory, .group = group, .outputs = outputs});
    }
  });
  return !failed;
}

// Raises the error of the first index that is out of bounds. If there is none any more, as another
// thread has changed it, that of the last index.
[[noreturn]] void raise_out_of_bounds(const UnpoolCall& call) {
  const Geometry<int64_t>& geometry = call.geometry;
  const Plan plan(call, /*any_index=*/true);
  const Targets targets(call, plan, /*in_own_windows=*/false);
  const int64_t last = geometry.outer * geometry.in_image() - 1;
  int64_t element = 0;
  while (element < last && targets.output_of(element) != Targets::kNone) {
    ++element;
  }
  int64_t index = 0;
  with_index_type(call.index_type, [&]<class Index>(std::type_identity<Index>) {
    index = static_cast<const Index*>(call.indices)[element];
  });
  const bool in_window = call.index_type == ScalarType::Byte;
  fail(invalid_index(geometry, in_window, index, element));
}

// Tries the fastest way first. The second way allows any index that is in bounds.
void unpool(const UnpoolCall& call, int32_t) {
  const Geometry<int64_t>& geometry = call.geometry;
  const int64_t image = call.forward ? geometry.out_image() : geometry.in_image();
  use_huge_pages(call.result, geometry.outer * image * call.element_size);
  if (!walk_parts(call, /*any_index=*/false) && !walk_parts(call, /*any_index=*/true)) {
    raise_out_of_bounds(call);
  }
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(maxunpool_cuda, CPU, m) {
  m.impl("max_unpool", TORCH_BOX((&run<true, unpool, aoti_torch_device_type_cpu>)));
  m.impl("max_unpool_backward", TORCH_BOX((&run<false, unpool, aoti_torch_device_type_cpu>)));
  m.impl("_max_unpool", TORCH_BOX((&run_short<true, unpool, aoti_torch_device_type_cpu>)));
  m.impl(
      "_max_unpool_backward", TORCH_BOX((&run_short<false, unpool, aoti_torch_device_type_cpu>)));
}

} // namespace maxunpool_cuda
