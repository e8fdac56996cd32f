// Kernel of max pooling. It compares neighbours in memory at once, windows of a row or channels of
// a window: a strided row is deinterleaved first, so that the same element of each window lies side
// by side.
#pragma once

#include "../geometry.h"
#include "compare.h"
#include "pool_plan.h"
#include "processor.h"

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {
namespace { // Internal linkage: GCC inlines these more readily.

// Deinterleaves `count` elements of a row of `width`, from coordinate `begin` on, into kStep
// phases, each with room for `room`: element i becomes element i / kStep of phase i % kStep.
// `padding` stands in for elements outside of the row.
template <int kStep, class Element>
void deinterleave(
    const Element* row, int64_t width, int64_t begin, int64_t count, Element padding,
    Element* __restrict phases, int64_t room) {
  const auto staged = [&](int64_t i) -> Element& { return phases[i % kStep * room + i / kStep]; };
  const int64_t end = std::min(count, width - begin);
  int64_t i = 0;
  for (; i < count && begin + i < 0; ++i) {
    staged(i) = padding;
  }
  for (; i < end && i % kStep != 0; ++i) {
    staged(i) = row[begin + i];
  }
  const int64_t rounds = i < end ? (end - i) / kStep : 0;
  const Element* from = row + (rounds > 0 ? begin + i : 0);
  Element* to = phases + i / kStep;
  for (int64_t j = 0; j < rounds; ++j) {
    for (int k = 0; k < kStep; ++k) {
      to[k * room + j] = from[j * kStep + k];
    }
  }
  for (i += rounds * kStep; i < end; ++i) {
    staged(i) = row[begin + i];
  }
  for (; i < count; ++i) {
    staged(i) = padding;
  }
}

// Pools windows as planned, with the memory of one thread.
template <class Order, class Index>
class Pool {
  using Element = typename Order::Element;
  using Mark = typename Order::Mark;
  static constexpr bool kOffsets = kIsWindowOffset<Index>;

 public:
  explicit Pool(const PoolPlan& plan)
      : plan_(plan),
        geometry_(plan.geometry()),
        input_(static_cast<const Element*>(plan.call.input)),
        values_(static_cast<Element*>(plan.call.values)),
        indices_(static_cast<Index*>(plan.call.indices)) {
    if (plan.at_once > 0) { // vectors are compared whole, beyond what is staged
      const auto& [depth, height, width] = geometry_.axis;
      const int64_t neighbours =
          divide_up(std::min(plan.at_once, width.in), PoolPlan::kVector) * PoolPlan::kVector;
      const int64_t rows = std::min(depth.kernel, PoolPlan::kMostStaged) *
                           std::min(height.kernel, PoolPlan::kMostStaged);
      const int64_t staged = (neighbours + plan.extent / width.stride) * width.stride * rows;
      std::fill_n(staged_, std::min(PoolPlan::kMostStaged, staged), Element{});
    }
  }

  // Pools windows [first, end) of row (z, y) of pooled slab `outer`.
  void row(int64_t outer, int64_t z, int64_t y, int64_t first, int64_t end) {
    constexpr int64_t kFewest = 4; // fewer are not worth comparing at once
    const auto& [depth, height, width] = geometry_.axis;
    const Span zs(depth, plan_.call.dilation[0], z), ys(height, plan_.call.dilation[1], y);
    const int64_t inner = geometry_.inner;
    const int64_t to = ((outer * depth.in + z) * height.in + y) * width.in * inner;
    const Element* slab = input_ + outer * geometry_.out_slab();
    const auto box = [&](int64_t x) { return Box{zs, ys, Span(width, plan_.call.dilation[2], x)}; };
    if (inner > 1 && plan_.marked) {
      for (int64_t x = first; x < end; ++x) {
        channels(slab, box(x), to + x * inner);
      }
    } else if (
        zs.empty() || ys.empty() || width.in < kFewest || plan_.at_once == 0 || !plan_.marked) {
      for (int64_t x = first; x < end; ++x) {
        for (int64_t c = 0; c < inner; ++c) {
          window(slab + c, box(x), to + x * inner + c);
        }
      }
    } else {
      for (int64_t x = first; x < end; x += plan_.at_once) {
        windows(slab, box(x), x, std::min(plan_.at_once, end - x), to + x);
      }
    }
  }

 private:
  Mark mark(int64_t z, int64_t y, int64_t x) const {
    return static_cast<Mark>(
        plan_.numbered ? plan_.number_of(z, y, x) : plan_.position_of(z, y, x));
  }
  Index index_of_first(const Box& box) const {
    const int64_t z = box.z.first, y = box.y.first, x = box.x.first;
    return static_cast<Index>(
        kOffsets ? plan_.number_of(z, y, x) : plan_.begin(box) + plan_.position_of(z, y, x));
  }

  // Pools the channels of one window.
  void channels(const Element* slab, const Box& box, int64_t to) {
    const Axis<int64_t>& width = geometry_.axis[2];
    const int64_t inner = geometry_.inner, start = plan_.begin(box);
    constexpr int64_t kAhead = 2048 / sizeof(Element), kLine = 64 / sizeof(Element);
    if (box.empty()) {
      std::fill_n(values_ + to, inner, Order::kLowest);
      std::fill_n(indices_ + to, inner, index_of_first(box));
      return;
    }
    for (int64_t c = 0; c < inner; c += PoolPlan::kMostAtOnce) {
      const int64_t count = std::min(PoolPlan::kMostAtOnce, inner - c);
      Comparison<Order> comparison(count, values_ + to + c, marks_);
      for (int64_t z = box.z.first; z < box.z.end; ++z) {
        for (int64_t y = box.y.first; y < box.y.end; ++y) {
          for (int64_t x = box.x.first; x < box.x.end; ++x) {
            const Element* from = slab + (start + plan_.position_of(z, y, x)) * inner + c;
            comparison.add(from, mark(z, y, x));
            // Prefetches what the window to the left has not read. The processor itself prefetches
            // along one row, but too late for the rows of a window.
            for (int64_t i = 0; x + width.stride >= box.x.end && i < count; i += kLine) {
              prefetch(from, kAhead + i);
            }
          }
        }
      }
      comparison.compare();
      put_indices(count, start, 0, to + c);
    }
  }

  // Pools `count` windows of a row of a contiguous tensor, from window x on, whose box is `box`.
  void windows(const Element* slab, const Box& box, int64_t x, int64_t count, int64_t to) {
    const Axis<int64_t>& width = geometry_.axis[2];
    const int64_t* dilation = plan_.call.dilation;
    const int64_t compared = divide_up(count, PoolPlan::kVector) * PoolPlan::kVector;
    const int64_t room = compared + (plan_.extent - 1) / width.stride;
    Comparison<Order> comparison(compared, best_, marks_);
    int64_t staged = 0;
    for (int64_t z = box.z.first; z < box.z.end; ++z) {
      for (int64_t y = box.y.first; y < box.y.end; ++y) {
        if (staged + room * width.stride > PoolPlan::kMostStaged) {
          comparison.compare();
          staged = 0;
        }
        const int64_t row = ((box.z.start + z * dilation[0]) * geometry_.axis[1].out + box.y.start +
                             y * dilation[1]) *
                            width.out;
        Element* phases = staged_ + staged;
        stage(slab + row, box.x.start, (count - 1) * width.stride + plan_.extent, phases, room);
        staged += room * width.stride;
        for (int64_t k = 0; k < width.kernel; ++k) {
          const int64_t i = k * dilation[2];
          comparison.add(phases + i % width.stride * room + i / width.stride, mark(z, y, k));
        }
      }
    }
    comparison.compare();
    std::copy_n(best_, count, values_ + to);
    put_indices(count, plan_.begin(box), width.stride, to);
    // Windows that lie in the row only in part may have found nothing above the padding.
    const int64_t left = divide_up(width.padding, width.stride);
    const int64_t rest = width.out + width.padding - plan_.extent;
    const int64_t right = rest < 0 ? 0 : rest / width.stride + 1;
    for (int64_t i = 0; i < count; ++i) {
      if (x + i >= left && x + i < right) {
        i = right - x - 1;
      } else if (Order::key(best_[i]) == Order::key(Order::kLowest)) {
        window(slab, {box.z, box.y, Span(width, dilation[2], x + i)}, to + i);
      }
    }
  }

  void stage(
      const Element* row, int64_t begin, int64_t count, Element* phases, int64_t room) const {
    const auto in_steps = [&]<int kStep>(std::integral_constant<int, kStep>) {
      deinterleave<kStep>(row, geometry_.axis[2].out, begin, count, Order::kLowest, phases, room);
    };
    switch (geometry_.axis[2].stride) {
      case 1:
        return in_steps(std::integral_constant<int, 1>{});
      case 2:
        return in_steps(std::integral_constant<int, 2>{});
      case 3:
        return in_steps(std::integral_constant<int, 3>{});
      default:
        return in_steps(std::integral_constant<int, PoolPlan::kMostStep>{});
    }
  }

  // Writes the indices of windows: the first begins at `start`, each other one `shift` further on.
  void put_indices(int64_t count, int64_t start, int64_t shift, int64_t to) {
    Index* indices = indices_ + to;
    if constexpr (kOffsets) {
      std::copy_n(marks_, count, indices);
    } else if (plan_.numbered) {
      for (int64_t i = 0; i < count; ++i) {
        indices[i] = static_cast<Index>(plan_.position[marks_[i]] + (start + i * shift));
      }
    } else {
      for (int64_t i = 0; i < count; ++i) {
        indices[i] = static_cast<Index>(marks_[i]) + static_cast<Index>(start + i * shift);
      }
    }
  }

  // Pools one window of a plane, given its first element. It may have no element in the input.
  void window(const Element* plane, const Box& box, int64_t to) {
    const int64_t start = plan_.begin(box);
    Element value = Order::kLowest;
    auto best = Order::key(value);
    Index index = index_of_first(box);
    for (int64_t z = box.z.first; z < box.z.end; ++z) {
      for (int64_t y = box.y.first; y < box.y.end; ++y) {
        const int64_t row = start + plan_.position_of(z, y, 0);
        for (int64_t x = box.x.first; x < box.x.end; ++x) {
          const int64_t position = row + x * plan_.step[2];
          const Element next = plane[position * geometry_.inner];
          if (Order::takes(Order::key(next), best)) {
            best = Order::key(next);
            value = next;
            index = static_cast<Index>(kOffsets ? plan_.number_of(z, y, x) : position);
          }
        }
      }
    }
    values_[to] = value;
    indices_[to] = index;
  }

  const PoolPlan& plan_;
  const Geometry<int64_t>& geometry_;
  const Element* input_;
  Element* values_;
  Index* indices_;
  Mark marks_[PoolPlan::kMostAtOnce];
  Element best_[PoolPlan::kMostAtOnce];
  Element staged_[PoolPlan::kMostStaged];
};

} // namespace
} // namespace maxunpool_cuda
