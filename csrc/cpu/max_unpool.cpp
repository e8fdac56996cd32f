// The CPU kernels. One thread visits the indices of a part of an output slab in order, so the
// result does not depend on the number of threads, and any index is allowed. Only the gradient of
// "last" has another way, for indices that lie in their windows: short runs of them, in any order.
#include "../dtypes.h"
#include "../geometry.h"
#include "../operator.h"
#include "../reduction.h"
#include "huge_pages.h"
#include "processor.h"
#include "runs.h"
#include "window_offsets.h"
#include "windows.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>

namespace maxunpool_cuda {
namespace {

constexpr int64_t kGrain = 1 << 15;       // elements of the output worth a task of their own
constexpr int64_t kPooledGrain = 1 << 13; // the same of the pooled tensor

// The output positions [begin, end) of every plane of a slab. One thread owns them, and with them
// each pooled element whose index lies among them.
struct Part {
  int64_t outer;
  int64_t begin;
  int64_t end;

  int64_t size() const { return end - begin; }
};

// The first index of the whole tensor that is not where it was looked for: bad, where all of its
// plane was looked at.
class FirstOutside {
 public:
  bool any() const { return element_.load() != kNone; }
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
              geometry.rank, {geometry.axis[0].out, geometry.axis[1].out, geometry.axis[2].out},
              kIsWindowOffset<Index>, indices[element], rest / geometry.inner,
              outer * geometry.inner + rest % geometry.inner));
    }
  }

 private:
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  std::atomic<int64_t> element_{kNone};
};

// Memory of a thread, for one part after the other.
class Scratch {
 public:
  template <class T>
  T* zeroed(int64_t count) {
    const size_t bytes = count * sizeof(T), units = (bytes - 1) / sizeof(Unit) + 1;
    if (units > units_) {
      memory_ = std::make_unique_for_overwrite<Unit[]>(units);
      units_ = units;
    }
    std::memset(memory_.get(), 0, bytes);
    return reinterpret_cast<T*>(memory_.get());
  }

 private:
  struct alignas(16) Unit {
    char bytes[16];
  };
  std::unique_ptr<Unit[]> memory_;
  size_t units_ = 0;
};

// How a call is cut into parts, and which indices the owner of a part reads.
class Partition {
 public:
  // `every`: each owner reads every index of its slab, and slabs are cut only where there are fewer
  // of them than threads. Else the owner reads only the indices of the pooled rows whose windows
  // reach its part, notes one outside their reach, and planes are cut to what a core's cache holds.
  Partition(const Geometry<int64_t>& geometry, int64_t element_size, bool every)
      : geometry_(geometry), positions_(geometry.out_plane()) {
    const int64_t threads = at::get_num_threads();
    const int64_t worth = geometry.out_slab() / kGrain + 1;
    const int64_t busy = geometry.outer < threads ? (threads - 1) / geometry.outer + 1 : 1;
    const int64_t cached =
        every || geometry.inner > 1 ? 1 : positions_ * element_size / kPartBytes + 1;
    splits_ = std::min({std::max(busy, cached), worth, positions_});
    while (lead_ < 2 && geometry.axis[lead_].in == 1 && geometry.axis[lead_].out == 1) {
      ++lead_;
    }
    for (int a = lead_ + 1; a < Geometry<int64_t>::kAxes; ++a) {
      row_cells_ *= geometry.axis[a].in;
      row_positions_ *= geometry.axis[a].out;
    }
    const Axis<int64_t>& axis = geometry.axis[lead_];
    const bool reaches =
        axis.kernel > axis.padding && (axis.in - 1) * axis.stride - axis.padding < axis.out;
    every_ = every || splits_ == 1 || !reaches;
    rows_ = every_ ? axis.in : std::max<int64_t>(1, kBlockElements / (row_cells_ * geometry.inner));
  }

  // Calls work(part, scratch) for parts that together cover every slab.
  template <class Work>
  void for_each_part(const Work& work) const {
    const int64_t grain = std::max<int64_t>(1, kGrain * splits_ / geometry_.out_slab());
    at::parallel_for(0, geometry_.outer * splits_, grain, [&](int64_t first, int64_t last) {
      Scratch scratch;
      for (int64_t part = first; part < last; ++part) {
        const int64_t split = part % splits_;
        const int64_t quotient = positions_ / splits_, remainder = positions_ % splits_;
        const int64_t begin = split * quotient + std::min(split, remainder);
        work(Part{part / splits_, begin, begin + quotient + (split < remainder ? 1 : 0)}, scratch);
      }
    });
  }

  // A block of pooled rows, along the first axis that has some.
  struct Block {
    int64_t begin, end;              // cells
    uint64_t reach_begin, reach_end; // output positions, of this block's windows
  };
  int64_t blocks() const { return (geometry_.axis[lead_].in - 1) / rows_ + 1; }
  Block block(int64_t i) const {
    const Axis<int64_t>& axis = geometry_.axis[lead_];
    const int64_t begin = i * rows_, end = std::min(begin + rows_, axis.in);
    if (every_) {
      return {begin * row_cells_, end * row_cells_, 0, static_cast<uint64_t>(positions_)};
    }
    const int64_t first = std::max<int64_t>(0, begin * axis.stride - axis.padding);
    const int64_t last = std::min(axis.out, (end - 1) * axis.stride - axis.padding + axis.kernel);
    return {
        begin * row_cells_, end * row_cells_, static_cast<uint64_t>(first * row_positions_),
        static_cast<uint64_t>(last * row_positions_)};
  }

 private:
  static constexpr int64_t kBlockElements = 1 << 10, kPartBytes = 1 << 19;

  const Geometry<int64_t>& geometry_;
  int64_t positions_, splits_ = 1, row_cells_ = 1, row_positions_ = 1, rows_ = 1;
  int lead_ = 0;
  bool every_ = true;
};

// The positions in the output plane that indices name, as WindowOffsets has them: flat ones name
// themselves, and anything.
template <class Index>
struct Positions {
  struct Row {
    template <bool kReverse, class Inner, class Known, class Open>
    void for_each(
        const CellRange& cells,
        Inner inner,
        const Index* indices,
        bool,
        int64_t,
        int64_t,
        const Known&,
        const Open& open) const {
      for_each_element<kReverse>(cells, inner, [&](int64_t, int64_t channel, int64_t i) {
        open(static_cast<int64_t>(indices[i]), channel, i);
      });
    }
  };

  explicit Positions(const Geometry<int64_t>&) {}

  bool in_windows(const Index*, int64_t) const { return false; }

  template <bool kReverse, class Visit>
  void for_each_row(const CellRange& cells, const Visit& visit) const {
    visit(Row{}, cells);
  }
};

template <>
struct Positions<uint8_t> : WindowOffsets {
  using WindowOffsets::WindowOffsets;
};

// Calls visit(source, target) for the pooled elements that the part owns, cell by cell in row-major
// order or in reverse. source counts elements of the pooled slab, target those of the part.
// `gathered` is what visit reads or writes at the target: as windows follow one another, so do the
// lines of memory that it will need next, which the processor does not see by itself.
template <bool kReverse, class Index, class Gathered, class Visit>
void for_each_index(
    const Geometry<int64_t>& geometry,
    const Partition& partition,
    const Part& part,
    const Positions<Index>& positions,
    const Index* all_indices,
    FirstOutside& outside,
    const Gathered* gathered,
    const Visit& visit) {
  constexpr int64_t kOften = 8, kAhead = 2048; // elements, and bytes
  constexpr int64_t kIndices = kAhead / static_cast<int64_t>(sizeof(Index)) * (kReverse ? -1 : 1);
  constexpr int64_t kGathered =
      kAhead / static_cast<int64_t>(sizeof(Gathered)) * (kReverse ? -1 : 1);
  const int64_t line = geometry.axis[2].out * geometry.inner;
  const int64_t slab = part.outer * geometry.in_slab();
  const Index* indices = all_indices + slab;
  const auto begin = static_cast<uint64_t>(part.begin), size = static_cast<uint64_t>(part.size());
  const auto found = [&](int64_t source, int64_t target) MAXUNPOOL_INLINE {
    if (source % kOften == 0) {
      prefetch(indices, source + kIndices);
      prefetch(gathered, target + kGathered);
      prefetch(gathered, target + kGathered + line);
    }
    visit(source, target);
  };
  const auto run = [&](const Partition::Block& block, auto inner) {
    const uint64_t reach_begin = block.reach_begin, reach = block.reach_end - reach_begin;
    const bool in_windows =
        positions.in_windows(indices + block.begin * inner, (block.end - block.begin) * inner);
    positions.template for_each_row<kReverse>(
        {block.begin, block.end}, [&](const auto& row, const CellRange& cells) {
          row.template for_each<kReverse>(
              cells, inner, indices, in_windows, part.begin, part.end,
              [&](int64_t position, int64_t channel, int64_t source) {
                found(source, (position - part.begin) * inner + channel);
              },
              [&](int64_t position, int64_t channel, int64_t source) {
                const auto index = static_cast<uint64_t>(position);
                if (index - begin < size) {
                  found(source, static_cast<int64_t>(index - begin) * inner + channel);
                } else if (index - reach_begin >= reach) {
                  outside.found(slab + source);
                }
              });
        });
  };
  const int64_t blocks = partition.blocks();
  for (int64_t i = 0; i < blocks; ++i) {
    const Partition::Block block = partition.block(kReverse ? blocks - 1 - i : i);
    if (block.reach_end <= begin || begin + size <= block.reach_begin) {
      continue;
    }
    if (geometry.inner == 1) {
      run(block, std::integral_constant<int64_t, 1>{}); // a constant makes a simple loop of it
    } else {
      run(block, geometry.inner);
    }
  }
}

template <class Element, class Index>
struct Slabs {
  const Call& call;
  const Geometry<int64_t>& geometry = call.geometry;
  const Positions<Index> positions{geometry};
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

// One part of a call, and what doing it takes.
template <class Element, class Index>
struct Task {
  const Slabs<Element, Index>& slabs;
  const Partition& partition;
  const Part& part;
  Scratch& scratch;
  FirstOutside& outside;

  int64_t outputs() const { return part.size() * slabs.geometry.inner; }

  template <bool kReverse, class Visit>
  void for_each_index(const Element* gathered, const Visit& visit) const {
    maxunpool_cuda::for_each_index<kReverse>(
        slabs.geometry, partition, part, slabs.positions, slabs.indices, outside, gathered, visit);
  }
};

template <class Element, class Index>
void forward_last(const Task<Element, Index>& task) {
  const Element* input = task.slabs.input(task.part);
  Element* output = task.slabs.output(task.part);
  std::fill_n(output, task.outputs(), Element{});
  task.template for_each_index<false>(
      output, [&](int64_t source, int64_t target) { output[target] = input[source]; });
}

// Of a half type: +0 or -0.
template <class Half>
bool is_zero(Half value) {
  return (value.x & 0x7fff) == 0;
}

// Sums are added up in the output if they need neither a wider type nor a count. Nor do they if
// every output has one element at most, which shows as it is done.
template <class Element, class Index>
void forward_sum(const Task<Element, Index>& task) {
  using Wide = Accumulator<Element>;
  constexpr bool kWide = !std::is_integral_v<Element> && !std::is_same_v<Element, Wide>;
  const Element* input = task.slabs.input(task.part);
  Element* output = task.slabs.output(task.part);
  if (task.slabs.call.reduce == Reduce::mean) {
    auto* sums = task.scratch.template zeroed<Sum<Element>>(task.outputs());
    task.template for_each_index<false>(
        output, [&](int64_t source, int64_t target) { sums[target].add(input[source]); });
    std::transform(sums, sums + task.outputs(), output, [](const Sum<Element>& sum) {
      return sum.result(Reduce::mean);
    });
    return;
  }
  if (!kWide || windows_are_apart(task.slabs.geometry)) {
    bool again = false;
    std::fill_n(output, task.outputs(), Element{});
    task.template for_each_index<false>(output, [&](int64_t source, int64_t target) {
      if constexpr (kWide) {
        again |= !is_zero(output[target]);
        output[target] = is_zero(input[source]) ? Element{} : input[source];
      } else {
        output[target] = static_cast<Element>(plus<Element>(output[target], input[source]));
      }
    });
    if (!again) {
      return;
    }
  }
  auto* sums = task.scratch.template zeroed<Wide>(task.outputs());
  task.template for_each_index<false>(output, [&](int64_t source, int64_t target) {
    sums[target] = plus(sums[target], input[source]);
  });
  std::transform(
      sums, sums + task.outputs(), output, [](Wide sum) { return static_cast<Element>(sum); });
}

// Whether an element loses is as good as random, so nothing branches on it. `condition`: 0 or 1.
template <class Element>
Element zero_if(uint8_t condition, Element value) {
  if constexpr (std::is_integral_v<Element>) {
    return value & (Element{condition} - Element{1});
  } else {
    return condition ? Element{} : value;
  }
}

// The last visitor of a position is the first one in reverse: it takes the gradient.
template <class Element, class Index>
void backward_last(const Task<Element, Index>& task) {
  const Element* grad_output = task.slabs.grad_output(task.part);
  Element* grad_input = task.slabs.grad_input(task.part);
  auto* taken = task.scratch.template zeroed<uint8_t>(task.outputs());
  task.template for_each_index<true>(grad_output, [&](int64_t source, int64_t target) {
    grad_input[source] = zero_if(taken[target], grad_output[target]);
    taken[target] = 1;
  });
}

template <class Element, class Index>
void backward_sum(const Task<Element, Index>& task) {
  const Element* grad_output = task.slabs.grad_output(task.part);
  Element* grad_input = task.slabs.grad_input(task.part);
  task.template for_each_index<false>(grad_output, [&](int64_t source, int64_t target) {
    grad_input[source] = grad_output[target];
  });
}

template <class Element, class Index>
void backward_mean(const Task<Element, Index>& task) {
  const Element* grad_output = task.slabs.grad_output(task.part);
  Element* grad_input = task.slabs.grad_input(task.part);
  auto* counts = task.scratch.template zeroed<int64_t>(task.outputs());
  task.template for_each_index<false>(
      grad_output, [&](int64_t, int64_t target) { ++counts[target]; });
  task.template for_each_index<false>(grad_output, [&](int64_t source, int64_t target) {
    grad_input[source] = mean_of<Element>(grad_output[target], counts[target]);
  });
}

// Runs kernel(task) over all parts; a second time where an index lay elsewhere than in the first
// one's short search. Then raises if an index is bad.
template <class Element, class Kernel>
void run_parts(const Call& call, const Kernel& kernel) {
  with_index_type(call.indices.scalar_type(), [&]<class Index>(std::type_identity<Index>) {
    const Slabs<Element, Index> slabs{call};
    const auto run = [&](bool every, FirstOutside& outside) {
      const Partition partition(call.geometry, sizeof(Element), every);
      partition.for_each_part([&](const Part& part, Scratch& scratch) {
        kernel(Task<Element, Index>{slabs, partition, part, scratch, outside});
      });
    };
    FirstOutside outside, bad;
    run(false, outside);
    if (outside.any()) {
      run(true, bad);
      bad.raise_if_any(call.geometry, slabs.indices);
    }
  });
}

// Where a window has memory that those before it have not: one address for about a line of it.
struct Entered {
  static constexpr int64_t kMost = 8;

  int64_t count = 0;
  int64_t offset[kMost]; // in elements, from the beginning of the window

  explicit Entered(const Windows& windows) {
    const Geometry<int64_t>& geometry = windows.geometry();
    const auto steps = [&](int a) {
      return std::min(geometry.axis[a].stride, geometry.axis[a].kernel);
    };
    for (int64_t z = 0; z < steps(0); ++z) {
      for (int64_t y = 0; y < steps(1); ++y) {
        for (int64_t x = 0; x < (geometry.inner == 1 ? 1 : steps(2)) && count < kMost; ++x) {
          offset[count++] = windows.offset(z, y, x) * geometry.inner;
        }
      }
    }
  }
};

// find_targets() for all kinds of indices.
template <class Index>
struct FindTargets {
  const Windows& windows;

  explicit FindTargets(const Windows& all) : windows(all) {}
  bool operator()(const Run& run, const Index* indices, Targets& targets) const {
    return find_targets(windows, run, indices, targets);
  }
};

template <>
struct FindTargets<uint8_t> {
  const Windows& windows;
  const WindowOffsets offsets;

  explicit FindTargets(const Windows& all) : windows(all), offsets(all.geometry()) {}
  bool operator()(const Run& run, const uint8_t* indices, Targets& targets) const {
    if (!offsets.in_windows(indices, run.known)) {
      return false;
    }
    find_targets(windows, run, indices, targets);
    // That leaves out the elements behind the run, and does not know of clipped windows.
    const int64_t inner = windows.geometry().inner;
    bool in_plane = true;
    offsets.for_each_row<false>(
        {run.first / inner, (run.first + run.known) / inner},
        [&](const WindowOffsets::Row& row, const CellRange& cells) {
          const CellRange behind = cells.within({(run.first + run.count) / inner, cells.end});
          const auto set = [&](int64_t position, int64_t, int64_t element) {
            const int64_t i = element - run.first;
            targets.offset[i] = static_cast<uint32_t>(position * inner) + run.origin[i];
            in_plane &= position >= 0;
          };
          row.for_each_clipped(cells, inner, indices - run.first, set);
          row.for_each<false>(
              behind, inner, indices - run.first, true, 0, windows.geometry().out_plane(), set,
              set);
        });
    if (in_plane && !windows.disjoint()) {
      mark_repeated(windows, run, targets);
    }
    return in_plane;
  }
};

// The gradient for "last" where every index lies in its window: it needs no memory of its own.
// Returns false if one does not; the result is to be computed in another way then.
template <class Element>
bool backward_regular(const Call& call) {
  const Geometry<int64_t>& geometry = call.geometry;
  const Windows windows(geometry);
  if (!windows.listed()) {
    return false;
  }
  const Entered entered(windows);
  std::atomic<bool> regular{true};
  with_index_type(call.indices.scalar_type(), [&]<class Index>(std::type_identity<Index>) {
    const Runs runs(windows);
    if (kIsWindowOffset<Index> && !(runs.know_all() && runs.whole_cells())) {
      regular = false;
      return;
    }
    const Slabs<Element, Index> slabs{call};
    const FindTargets<Index> find(windows);
    runs.for_each(kPooledGrain, [&](const Run& run) {
      const int64_t element = run.outer * geometry.in_slab() + run.first;
      const Index* indices = slabs.indices + element;
      const Element* grad_output = slabs.values + run.outer * geometry.out_slab();
      Element* grad_input = slabs.result + element;
      Targets targets;
      if (!regular.load(std::memory_order_relaxed) || !find(run, indices, targets)) {
        regular = false;
        return;
      }
      const int64_t ahead = run.count * geometry.out_plane() / geometry.in_plane();
      const auto gather = [&](const auto& value) {
        constexpr int64_t kOften = 8;
        int64_t i = 0;
        for (; i + kOften <= run.count; i += kOften) {
          prefetch(indices, i + run.count + run.reach);
          const int64_t begin = static_cast<int32_t>(run.begin[i] + run.shift);
          const int64_t next = begin * geometry.inner + run.origin[i] + run.channel + ahead;
          for (int64_t k = 0; k < entered.count; ++k) {
            prefetch(grad_output, next + entered.offset[k]);
          }
          for (int64_t j = i; j < i + kOften; ++j) {
            grad_input[j] = value(j);
          }
        }
        for (; i < run.count; ++i) {
          grad_input[i] = value(i);
        }
      };
      if (windows.disjoint()) {
        gather([&](int64_t i) { return grad_output[targets.offset[i]]; });
      } else {
        gather(
            [&](int64_t i) { return zero_if(targets.again[i], grad_output[targets.offset[i]]); });
      }
    });
  });
  return regular;
}

void forward(const Call& call) {
  use_huge_pages(call.result);
  if (call.reduce == Reduce::last) {
    with_bytes(call.values.element_size(), [&]<class Element>(std::type_identity<Element>) {
      run_parts<Element>(call, [](const auto& task) { forward_last(task); });
    });
  } else {
    with_arithmetic_type(
        call.values.scalar_type(), [&]<class Element>(std::type_identity<Element>) {
          run_parts<Element>(call, [](const auto& task) { forward_sum(task); });
        });
  }
}

void backward(const Call& call) {
  use_huge_pages(call.result);
  if (call.reduce == Reduce::mean) {
    with_arithmetic_type(
        call.values.scalar_type(), [&]<class Element>(std::type_identity<Element>) {
          run_parts<Element>(call, [](const auto& task) { backward_mean(task); });
        });
  } else {
    with_bytes(call.values.element_size(), [&]<class Element>(std::type_identity<Element>) {
      if (call.reduce == Reduce::sum) {
        run_parts<Element>(call, [](const auto& task) { backward_sum(task); });
        return;
      }
      if (!backward_regular<Element>(call)) {
        run_parts<Element>(call, [](const auto& task) { backward_last(task); });
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
