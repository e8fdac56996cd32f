// The CPU kernels: one thread visits the indices of a part of an output slab in order, so the
// result does not depend on the number of threads, and any index is allowed.
#include "../dtypes.h"
#include "../geometry.h"
#include "../operator.h"
#include "../reduction.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

namespace maxunpool_cuda {
namespace {

// The output positions [begin, end) of every plane of a slab. One thread owns them, and with them
// each pooled element whose index lies among them.
struct Part {
  int64_t outer;
  int64_t begin;
  int64_t end;

  int64_t size() const { return end - begin; }
};

// Where the first bad index of the whole tensor lies.
class FirstBad {
 public:
  void found(int64_t element) {
    int64_t seen = element_.load(std::memory_order_relaxed);
    while (element < seen && !element_.compare_exchange_weak(seen, element)) {
    }
  }

  template <class Index>
  void raise_if_any(const Geometry<int64_t>& geometry, const Index* indices) const {
    const int64_t element = element_.load();
    if (element != kNone) {
      const int64_t outer = element / geometry.in_slab(), rest = element % geometry.in_slab();
      TORCH_CHECK(
          false,
          invalid_index(
              geometry.rank,
              {geometry.axis[0].out, geometry.axis[1].out, geometry.axis[2].out},
              indices[element],
              rest / geometry.inner,
              outer * geometry.inner + rest % geometry.inner));
    }
  }

 private:
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  std::atomic<int64_t> element_{kNone};
};

// Calls work(part) for parts that together cover every slab. Slabs are split only where there are
// fewer of them than threads: each thread of a split slab reads all of its indices.
template <class Work>
void for_each_part(const Geometry<int64_t>& geometry, const Work& work) {
  constexpr int64_t kGrain = 1 << 15; // elements worth a task of their own
  const int64_t positions = geometry.out_plane(), threads = at::get_num_threads();
  const int64_t worth = geometry.out_slab() / kGrain + 1;
  const int64_t wanted = geometry.outer < threads ? (threads - 1) / geometry.outer + 1 : 1;
  const int64_t splits = std::min({wanted, worth, positions});
  const int64_t grain = std::max<int64_t>(1, kGrain * splits / geometry.out_slab());
  at::parallel_for(0, geometry.outer * splits, grain, [&](int64_t first, int64_t last) {
    for (int64_t part = first; part < last; ++part) {
      const int64_t split = part % splits;
      const int64_t quotient = positions / splits, remainder = positions % splits;
      const int64_t begin = split * quotient + std::min(split, remainder);
      work(Part{part / splits, begin, begin + quotient + (split < remainder ? 1 : 0)});
    }
  });
}

// Calls visit(source, target) for the pooled elements that the part owns, cell by cell in row-major
// order or in reverse. source counts elements of the pooled slab, target those of the part.
template <bool kReverse, class Index, class Visit>
void for_each_index(
    const Geometry<int64_t>& geometry,
    const Part& part,
    const Index* indices,
    FirstBad& bad,
    const Visit& visit) {
  const int64_t cells = geometry.in_plane(), first = part.outer * geometry.in_slab();
  const auto positions = static_cast<uint64_t>(geometry.out_plane());
  const auto begin = static_cast<uint64_t>(part.begin), size = static_cast<uint64_t>(part.size());
  const auto run = [&](auto inner) { // a constant 1 makes a simple loop of it
    for (int64_t i = 0; i < cells; ++i) {
      for (int64_t j = 0; j < inner; ++j) { // in reverse too: memory is read in one direction
        const int64_t channel = kReverse ? inner - 1 - j : j;
        const int64_t source = (kReverse ? cells - 1 - i : i) * inner + channel;
        const auto index = static_cast<uint64_t>(static_cast<int64_t>(indices[first + source]));
        if (index - begin < size) {
          visit(source, static_cast<int64_t>(index - begin) * inner + channel);
        } else if (index >= positions) {
          bad.found(first + source);
        }
      }
    }
  };
  if (geometry.inner == 1) {
    run(std::integral_constant<int64_t, 1>{});
  } else {
    run(geometry.inner);
  }
}

template <class Element, class Index>
struct Slabs {
  const Call& call;
  const Geometry<int64_t>& geometry = call.geometry;
  const Index* indices = static_cast<const Index*>(call.indices.const_data_ptr());
  const Element* values = static_cast<const Element*>(call.values.const_data_ptr());
  Element* result = static_cast<Element*>(call.result.mutable_data_ptr());

  Element* output(const Part& part) const {
    return result + part.outer * geometry.out_slab() + part.begin * geometry.inner;
  }
  const Element* grad_output(const Part& part) const {
    return values + part.outer * geometry.out_slab() + part.begin * geometry.inner;
  }
  const Element* input(const Part& part) const { return values + part.outer * geometry.in_slab(); }
  Element* grad_input(const Part& part) const { return result + part.outer * geometry.in_slab(); }
};

template <class Element, class Index>
void forward_last(const Slabs<Element, Index>& slabs, const Part& part, FirstBad& bad) {
  const Element* input = slabs.input(part);
  Element* output = slabs.output(part);
  std::fill_n(output, part.size() * slabs.geometry.inner, Element{});
  for_each_index<false>(
      slabs.geometry, part, slabs.indices, bad, [&](int64_t source, int64_t target) {
        output[target] = input[source];
      });
}

template <class Element, class Index>
void forward_sum(const Slabs<Element, Index>& slabs, const Part& part, FirstBad& bad) {
  const Element* input = slabs.input(part);
  Element* output = slabs.output(part);
  std::vector<Sum<Element>> sums(part.size() * slabs.geometry.inner);
  for_each_index<false>(
      slabs.geometry, part, slabs.indices, bad, [&](int64_t source, int64_t target) {
        sums[target].add(input[source]);
      });
  std::transform(sums.begin(), sums.end(), output, [&](const Sum<Element>& sum) {
    return sum.result(slabs.call.reduce);
  });
}

// The last visitor of a position is the first one in reverse: it takes the gradient.
template <class Element, class Index>
void backward_last(const Slabs<Element, Index>& slabs, const Part& part, FirstBad& bad) {
  const Element* grad_output = slabs.grad_output(part);
  Element* grad_input = slabs.grad_input(part);
  std::vector<uint8_t> taken(part.size() * slabs.geometry.inner);
  for_each_index<true>(
      slabs.geometry, part, slabs.indices, bad, [&](int64_t source, int64_t target) {
        grad_input[source] = taken[target] ? Element{} : grad_output[target];
        taken[target] = 1;
      });
}

template <class Element, class Index>
void backward_sum(const Slabs<Element, Index>& slabs, const Part& part, FirstBad& bad) {
  const Element* grad_output = slabs.grad_output(part);
  Element* grad_input = slabs.grad_input(part);
  for_each_index<false>(
      slabs.geometry, part, slabs.indices, bad, [&](int64_t source, int64_t target) {
        grad_input[source] = grad_output[target];
      });
}

template <class Element, class Index>
void backward_mean(const Slabs<Element, Index>& slabs, const Part& part, FirstBad& bad) {
  const Element* grad_output = slabs.grad_output(part);
  Element* grad_input = slabs.grad_input(part);
  std::vector<int64_t> counts(part.size() * slabs.geometry.inner);
  for_each_index<false>(
      slabs.geometry, part, slabs.indices, bad, [&](int64_t, int64_t target) { ++counts[target]; });
  for_each_index<false>(
      slabs.geometry, part, slabs.indices, bad, [&](int64_t source, int64_t target) {
        grad_input[source] = mean_of<Element>(grad_output[target], counts[target]);
      });
}

// Runs kernel(slabs, part, bad) over all parts, then raises if an index was bad.
template <class Element, class Kernel>
void run_parts(const Call& call, const Kernel& kernel) {
  with_index_type(call.indices.scalar_type(), [&]<class Index>(std::type_identity<Index>) {
    const Slabs<Element, Index> slabs{call};
    FirstBad bad;
    for_each_part(call.geometry, [&](const Part& part) { kernel(slabs, part, bad); });
    bad.raise_if_any(call.geometry, slabs.indices);
  });
}

void forward(const Call& call) {
  if (call.reduce == Reduce::last) {
    with_bytes(call.values.element_size(), [&]<class Element>(std::type_identity<Element>) {
      run_parts<Element>(call, [](auto&... args) { forward_last(args...); });
    });
  } else {
    with_arithmetic_type(
        call.values.scalar_type(), [&]<class Element>(std::type_identity<Element>) {
          run_parts<Element>(call, [](auto&... args) { forward_sum(args...); });
        });
  }
}

void backward(const Call& call) {
  if (call.reduce == Reduce::mean) {
    with_arithmetic_type(
        call.values.scalar_type(), [&]<class Element>(std::type_identity<Element>) {
          run_parts<Element>(call, [](auto&... args) { backward_mean(args...); });
        });
  } else {
    with_bytes(call.values.element_size(), [&]<class Element>(std::type_identity<Element>) {
      if (call.reduce == Reduce::last) {
        run_parts<Element>(call, [](auto&... args) { backward_last(args...); });
      } else {
        run_parts<Element>(call, [](auto&... args) { backward_sum(args...); });
      }
    });
  }
}

} // namespace

TORCH_LIBRARY_IMPL(maxunpool_cuda, CPU, m) {
  m.impl("max_unpool", run<true, forward>);
  m.impl("max_unpool_backward", run<false, backward>);
}

} // namespace maxunpool_cuda
