// Max unpooling on the CPU: choice of kernels, registration.
#include "../max_unpool.h"
#include "gather.h"
#include "huge_pages.h"
#include "scatter.h"

#include <c10/core/Device.h>
#include <torch/library.h>

#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {
namespace {

// Runs calls that only move elements.
template <class Element>
void run_moves(const UnpoolCall& call) {
  if (call.forward) {
    run_parts<Element>(call, [](const auto& task) { forward_last(task); });
  } else if (call.reduce == Reduce::sum) {
    run_parts<Element>(call, [](const auto& task) { backward_sum(task); });
  } else {
    bool done = false;
    with_index_type(call.index_type, [&]<class Index>(std::type_identity<Index>) {
      done = gather_last<Element, Index>(call);
    });
    if (!done) {
      run_parts<Element>(call, [](const auto& task) { backward_last(task); });
    }
  }
}

void unpool(const UnpoolCall& call, c10::Device) {
  const Geometry<int64_t>& geometry = call.geometry;
  const int64_t slab = call.forward ? geometry.out_slab() : geometry.in_slab();
  use_huge_pages(call.result, geometry.outer * slab * call.element_size);
  if (call.forward && call.reduce == Reduce::sum) {
    with_arithmetic_type(call.type, [&]<class Element>(std::type_identity<Element>) {
      run_parts<Element>(call, [](const auto& task) { forward_sum(task); });
    });
  } else {
    with_bytes(call.element_size, [&]<class Element>(std::type_identity<Element>) {
      run_moves<Element>(call);
    });
  }
}

} // namespace

TORCH_LIBRARY_IMPL(maxunpool_cuda, CPU, m) {
  m.impl("max_unpool", run<int64_t, true, unpool>);
  m.impl("max_unpool_backward", run<int64_t, false, unpool>);
}

} // namespace maxunpool_cuda
