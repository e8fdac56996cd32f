// Max pooling on the CPU. Windows that lie side by side in memory are compared at once: channels of
// a cell, or windows of a row, whose elements are first put side by side.
#include "../max_pool.h"
#include "../dtypes.h"
#include "machine.h"
#include "order.h"
#include "plan.h"

#include <ATen/Parallel.h>
#include <c10/core/Device.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <type_traits>
#include <utility>

namespace maxunpool_cuda {
namespace {

// Elements [begin, end) of a window that lie in the input, along an axis. Element 0 would have
// coordinate `start`.
struct Span {
  int64_t start, begin, end;

  Span(const Axis<int64_t>& axis, int64_t dilation, int64_t p)
      : start(p * axis.stride - axis.padding),
        begin(start < 0 ? steps(dilation - 1 - start, dilation) : 0),
        end(start < axis.out ? std::min(axis.kernel, steps(axis.out - 1 - start, dilation) + 1)
                             : 0) {}

  bool empty() const { return begin >= end; }

 private:
  // Each row has spans, each cell of channels too, and divisions cost as much as short ones.
  static int64_t steps(int64_t distance, int64_t dilation) {
    return dilation == 1 ? distance : distance / dilation;
  }
};

// Pools rows of windows, with the memory of one thread.
template <class Order, class Index>
class Pool {
  using Element = typename Order::Element;
  using Mark = typename Order::Mark;

 public:
  explicit Pool(const PoolCall& call) : call_(call) {
    // The elements of a window have to fit what is listed, and all their rows what is staged.
    if (depth_.kernel <= kMost / width_.kernel / height_.kernel && width_.stride <= kMostStep) {
      const int64_t room = kStaged / (depth_.kernel * height_.kernel) - extent_;
      block_ = std::min(kBlock, room / width_.stride / kLanes * kLanes - kLanes);
      std::fill_n(staged_, kStaged, Element{}); // vectors are compared whole, beyond what is staged
    }
  }

  // Pools windows [first, end) of row (z, y) of pooled slab `outer`.
  void row(int64_t outer, int64_t z, int64_t y, int64_t first, int64_t end) {
    const Span zs(depth_, call_.dilation[0], z), ys(height_, call_.dilation[1], y);
    const int64_t to = ((outer * depth_.in + z) * height_.in + y) * width_.in * inner_;
    const Element* slab = static_cast<const Element*>(call_.input) + outer * geometry_.out_slab();
    const bool empty = zs.empty() || ys.empty();
    if (block_ > 0 && inner_ == 1 && !empty) {
      for (int64_t x = first; x < end; x += block_) {
        windows(slab, zs, ys, x, std::min(block_, end - x), to + x);
      }
      return;
    }
    for (int64_t x = first; x < end; ++x) {
      const Span xs(width_, call_.dilation[2], x);
      const int64_t last = position(zs.end - 1, ys.end - 1, xs.end - 1) + begin(zs, ys, xs);
      if (inner_ > 1 && !empty && !xs.empty() && slab + last * inner_ + kLanes <= end_) {
        channels(slab, zs, ys, xs, to + x * inner_);
        continue;
      }
      for (int64_t c = 0; c < inner_; ++c) {
        window(slab + c, zs, ys, xs, to + x * inner_ + c);
      }
    }
  }

 private:
  static constexpr bool kOffsets = kIsWindowOffset<Index>;
  // Elements of a window that are listed at once, no more than marks can count.
  static constexpr int64_t kMost = sizeof(Element) == 1 ? 1 << 8 : 1 << 12;
  static constexpr int64_t kBlock = 512;  // windows or channels that are compared at once
  static constexpr int64_t kMostStep = 4; // between windows of a row that are
  static constexpr int64_t kVector = 32, kLanes = kVector / sizeof(Element); // bytes, elements
  static constexpr int64_t kLine = 64 / sizeof(Element), kAhead = 2048 / sizeof(Element);
  static constexpr int64_t kStaged = (1 << 15) / sizeof(Element);
  typedef Element Elements __attribute__((vector_size(kVector)));
  typedef Mark Marks __attribute__((vector_size(kVector)));

  int64_t position(int64_t z, int64_t y, int64_t x) const {
    return z * step_[0] + y * step_[1] + x * step_[2];
  }
  // Index of an element: from the window's begin on, unless it is an offset.
  int64_t place(int64_t z, int64_t y, int64_t x) const {
    return kOffsets ? (z * height_.kernel + y) * width_.kernel + x : position(z, y, x);
  }
  // Position where a window begins, before it is clipped.
  int64_t begin(const Span& z, const Span& y, const Span& x) const {
    return (z.start * height_.out + y.start) * width_.out + x.start;
  }

  // Lists elements of a window, unless they are listed already. `offset_of` takes coordinates from
  // the first one on, and changes with `layout` alone.
  template <class Offset>
  void list(int64_t depth, int64_t height, int64_t width, int64_t layout, const Offset& offset_of) {
    const int64_t box[] = {depth, height, width, layout};
    if (std::equal(std::begin(box), std::end(box), box_)) {
      return;
    }
    std::copy(std::begin(box), std::end(box), box_);
    count_ = 0;
    numbered_ = place(depth - 1, height - 1, width - 1) > std::numeric_limits<Mark>::max();
    for (int64_t k = 0; k < depth; ++k) {
      for (int64_t j = 0; j < height; ++j) {
        for (int64_t i = 0; i < width; ++i, ++count_) {
          offset_[count_] = offset_of(k, j, i);
          place_[count_] = place(k, j, i);
          mark_[count_] = static_cast<Mark>(numbered_ ? count_ : place_[count_]);
        }
      }
    }
  }

  // Compares the listed elements of `count` windows: the first one's lie at these offsets, and each
  // other's one further on. Vectors are whole; none begins after `last`.
  void compare(const Element* base, int64_t count, int64_t last) {
    in_vectors([=, this]() MAXUNPOOL_INLINE {
      for (int64_t i = 0; i < count; i += kLanes) {
        const int64_t at = std::min(i, last);
        Elements value, next;
        std::memcpy(&value, base + offset_[0] + at, kVector);
        Elements key = Order::key(value);
        Marks won = Marks{} + mark_[0];
        for (int64_t e = 1; e < count_; ++e) {
          std::memcpy(&next, base + offset_[e] + at, kVector);
          const Elements next_key = Order::key(next);
          const auto takes = Order::takes(next_key, key);
          value = takes ? next : value;
          key = takes ? next_key : key;
          won = takes ? Marks{} + mark_[e] : won;
        }
        std::memcpy(best_ + at, &value, kVector);
        std::memcpy(marks_ + at, &won, kVector);
      }
    });
  }

  // Pools the channels of a cell, in pieces of the window that can be listed.
  void channels(const Element* slab, const Span& z, const Span& y, const Span& x, int64_t to) {
    const int64_t start = begin(z, y, x), count = std::min(kBlock, inner_);
    const int64_t width = std::min(kMost, x.end - x.begin);
    const int64_t height = std::min(kMost / width, y.end - y.begin);
    const int64_t depth = std::min(kMost / width / height, z.end - z.begin);
    bool begins = true;
    for (int64_t k = z.begin; k < z.end; k += depth) {
      for (int64_t j = y.begin; j < y.end; j += height) {
        for (int64_t i = x.begin; i < x.end; i += width, begins = false) {
          const Element* base = slab + (start + position(k, j, i)) * inner_;
          const int64_t columns = std::min(width, x.end - i);
          list(
              std::min(depth, z.end - k), std::min(height, y.end - j), columns, 0,
              [&](int64_t k, int64_t j, int64_t i) { return position(k, j, i) * inner_; });
          prefetch(base, columns);
          for (int64_t b = 0; b < inner_; b += kBlock) { // the last are done twice, not in part
            const int64_t c = std::min(b, inner_ - count);
            compare(base + c, count, std::max<int64_t>(0, count - kLanes));
            put(count, start, 0, place(k, j, i), to + c, begins);
          }
        }
      }
    }
  }

  // Asks for what windows to come read first.
  void prefetch(const Element* base, int64_t columns) const {
    for (int64_t row = 0; row < count_; row += columns) {
      for (int64_t i = std::max<int64_t>(0, columns - width_.stride); i < columns; ++i) {
        for (int64_t c = 0; c < inner_; c += kLine) {
          MAXUNPOOL_PREFETCH(base + offset_[row + i] + c + kAhead);
        }
      }
    }
  }

  // Pools `count` windows of a row of a contiguous tensor, from window x on.
  void windows(
      const Element* plane, const Span& z, const Span& y, int64_t x, int64_t count, int64_t to) {
    const Span first(width_, call_.dilation[2], x);
    const int64_t compared = divide_up(count, kLanes) * kLanes, start = begin(z, y, first);
    const int64_t more = (extent_ - 1) / width_.stride, room = compared + more; // of a phase
    Element* staged = staged_;
    for (int64_t k = z.begin; k < z.end; ++k) {
      for (int64_t j = y.begin; j < y.end; ++j, staged += room * width_.stride) {
        const Element* row = plane + (start - first.start + position(k, j, 0));
        [&]<int64_t... kSteps>(std::integer_sequence<int64_t, kSteps...>) {
          ((width_.stride == kSteps &&
            (stage<kSteps>(row, first.start, count + more, room, staged), true)) ||
           ...);
        }(std::integer_sequence<int64_t, 1, 2, 3, kMostStep>{});
      }
    }
    const int64_t height = y.end - y.begin;
    list(z.end - z.begin, height, width_.kernel, room, [&](int64_t k, int64_t j, int64_t i) {
      const int64_t row = k * height + j, at = i * step_[2];
      return (row * width_.stride + at % width_.stride) * room + at / width_.stride;
    });
    compare(staged_, compared, compared);
    put(count, start, width_.stride, place(z.begin, y.begin, 0), to, true);
    // Windows that begin in the padding may have found nothing above it.
    for (int64_t i = 0; i < count && first.start + i * width_.stride < 0; ++i) {
      if (Order::key(best_[i]) == Order::key(Order::kLowest)) {
        window(plane, z, y, Span(width_, call_.dilation[2], x + i), to + i);
      }
    }
  }

  // Puts a row from coordinate `begin` on into kStep phases of `count` elements, `room` apart: what
  // windows find at one place of theirs then lies side by side. Outside of the row is the lowest
  // number.
  template <int64_t kStep>
  void stage(
      const Element* row, int64_t begin, int64_t count, int64_t room, Element* phases) const {
    const int64_t left = std::min(count, divide_up(std::max<int64_t>(0, -begin), kStep));
    const int64_t right = std::clamp(divide_down(width_.out - begin, kStep), left, count);
    const auto copy = [&](int64_t from, int64_t to) {
      for (int64_t i = from * kStep; i < to * kStep; ++i) {
        const bool inside = Range{0, width_.out}.holds(begin + i);
        phases[i % kStep * room + i / kStep] = inside ? row[begin + i] : Order::kLowest;
      }
    };
    copy(0, left);
    in_vectors([=]() MAXUNPOOL_INLINE {
      const int64_t whole = right - left, apart = room; // not captured: bytes may alias captures
      const Element* from = row + begin + left * kStep;
      Element* __restrict to = phases + left;
      for (int64_t i = 0; i < whole; ++i) {
        for (int64_t k = 0; k < kStep; ++k) {
          to[k * apart + i] = from[i * kStep + k];
        }
      }
    });
    copy(right, count);
  }

  // Writes what was compared: of windows, the first of which begins at `start`, and each other one
  // `shift` further on, elements from `from` on. Unless they begin a window, the best so far stays
  // where they do not exceed it.
  void put(int64_t count, int64_t start, int64_t shift, int64_t from, int64_t to, bool begins) {
    Element* values = values_ + to;
    Index* indices = indices_ + to;
    const int64_t origin = from + (kOffsets ? 0 : start), step = kOffsets ? 0 : shift;
    for (int64_t i = 0; (numbered_ || !begins) && i < count; ++i) {
      if (begins || Order::takes(Order::key(best_[i]), Order::key(values[i]))) {
        values[i] = best_[i];
        indices[i] =
            static_cast<Index>(origin + i * step + (numbered_ ? place_[marks_[i]] : marks_[i]));
      }
    }
    if (begins && !numbered_) {
      std::copy_n(best_, count, values);
      for (int64_t i = 0; i < count; ++i) {
        indices[i] = static_cast<Index>(marks_[i]) + static_cast<Index>(origin + i * step);
      }
    }
  }

  // How many elements, in whole vectors, are below `value`.
  static int64_t losers(const Element* elements, int64_t count, Element value) {
    return in_vectors([=]() MAXUNPOOL_INLINE {
      const Elements best = Order::key(Elements{} + value);
      int64_t i = 0;
      for (uint64_t any[4] = {}; i + kLanes <= count; i += kLanes) {
        Elements next;
        std::memcpy(&next, elements + i, kVector);
        const auto takes = Order::takes(Order::key(next), best);
        std::memcpy(any, &takes, kVector);
        if ((any[0] | any[1] | any[2] | any[3]) != 0) {
          break;
        }
      }
      return i;
    });
  }

  // Pools one window of a plane, given its first element. It may have no element in the input.
  void window(const Element* plane, const Span& z, const Span& y, const Span& x, int64_t to) {
    const int64_t start = begin(z, y, x), step = step_[2] * inner_;
    Element value = Order::kLowest;
    int64_t won = place(z.begin, y.begin, x.begin);
    for (int64_t k = z.begin; k < z.end; ++k) {
      for (int64_t j = y.begin; j < y.end; ++j) {
        const Element* row = plane + (start + position(k, j, 0)) * inner_;
        for (int64_t i = x.begin; i < x.end;) {
          i += step == 1 && x.end - i >= kLanes ? losers(row + i, x.end - i, value) : 0;
          for (const int64_t end = std::min(i + kLanes, x.end); i < end; ++i) {
            if (Order::takes(Order::key(row[i * step]), Order::key(value))) {
              value = row[i * step];
              won = place(k, j, i);
            }
          }
        }
      }
    }
    values_[to] = value;
    indices_[to] = static_cast<Index>(won + (kOffsets ? 0 : start));
  }

  const PoolCall& call_;
  const Geometry<int64_t>& geometry_ = call_.geometry;
  const Axis<int64_t>&depth_ = geometry_.axis[0], &height_ = geometry_.axis[1],
        &width_ = geometry_.axis[2];
  const int64_t inner_ = geometry_.inner;
  const Element* const end_ =
      static_cast<const Element*>(call_.input) + geometry_.outer * geometry_.out_slab();
  Element* const values_ = static_cast<Element*>(call_.values);
  Index* const indices_ = static_cast<Index*>(call_.indices);
  // Positions from one element of a window to the next, and of a window along a row.
  const int64_t step_[3] = {
      call_.dilation[0] * height_.out * width_.out, call_.dilation[1] * width_.out,
      call_.dilation[2]};
  const int64_t extent_ = step_[2] * (width_.kernel - 1) + 1;
  int64_t block_ = 0;     // windows of a row that are compared at once
  bool numbered_ = false; // marks count the listed elements; else they are places
  int64_t box_[4] = {}, count_ = 0, offset_[kMost], place_[kMost]; // what is listed
  Mark mark_[kMost], marks_[kBlock];                               // listed; that have won
  Element best_[kBlock], staged_[kStaged];
};

template <class Order, class Index>
void pool_rows(const PoolCall& call) {
  constexpr double kGrain = 1 << 15;        // compared elements that are worth a thread
  constexpr int64_t kMostWindows = 1 << 13; // of a row, in a task
  const Geometry<int64_t>& geometry = call.geometry;
  const auto& [depth, height, width] = geometry.axis;
  const int64_t windows = std::min(width.in, kMostWindows), tasks = divide_up(width.in, windows);
  double work = static_cast<double>(windows * geometry.inner);
  for (const Axis<int64_t>& axis : geometry.axis) {
    work *= static_cast<double>(std::min(axis.kernel, axis.out));
  }
  const auto grain = static_cast<int64_t>(kGrain / std::min(kGrain, work));
  const int64_t total = geometry.outer * depth.in * height.in * tasks;
  at::parallel_for(0, total, grain, [&](int64_t begin, int64_t end) {
    Pool<Order, Index> pool(call);
    int64_t task = begin % tasks, row = begin / tasks;
    int64_t y = row % height.in, z = row / height.in % depth.in, outer = row / height.in / depth.in;
    // Counting is cheaper than dividing, which short rows would notice.
    const auto carries = [](int64_t& digit, int64_t base) {
      digit = digit + 1 == base ? 0 : digit + 1;
      return digit == 0;
    };
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = task * windows;
      pool.row(outer, z, y, first, std::min(width.in, first + windows));
      outer += carries(task, tasks) && carries(y, height.in) && carries(z, depth.in) ? 1 : 0;
    }
  });
}

void pool(const PoolCall& call, c10::Device) {
  const size_t pooled = call.geometry.outer * call.geometry.in_slab();
  use_huge_pages(call.values, pooled * c10::elementSize(call.type));
  use_huge_pages(call.indices, pooled * c10::elementSize(call.index_type));
  with_ordered_type(call.type, [&]<class T>(std::type_identity<T>) {
    with_index_type(call.index_type, [&]<class Index>(std::type_identity<Index>) {
      pool_rows<OrderOf<T>, Index>(call);
    });
  });
}

} // namespace

TORCH_LIBRARY_IMPL(maxunpool_cuda, CPU, m) {
  m.impl("max_pool", run_pool<int64_t, pool>);
}

} // namespace maxunpool_cuda
