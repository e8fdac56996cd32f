// SPDX-License-Identifier: BSD-3-Clause
// Max pooling on the CPU. Vectors compare what lies side by side in memory: channels of a cell,
// windows of a row, whose elements are first put side by side, or columns of one window.
#include "../max_pool.h"
#include "../dtypes.h"
#include "machine.h"
#include "order.h"

#include <ATen/Parallel.h>
#include <c10/core/Device.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <type_traits>

namespace maxunpool_cuda {
namespace {

// Elements [begin, end) of a window that lie in the input, along an axis. Element 0 would have
// coordinate `start`.
struct Span {
  int64_t start, begin, end;

  Span(const Axis<int64_t>& axis, int64_t dilation, int64_t p)
      : start(p * axis.stride - axis.padding), begin(0), end(axis.kernel) {
    if (start < 0) { // divisions cost as much as short rows
      begin = divide_up(-start, dilation);
    }
    if (start + dilation * (axis.kernel - 1) >= axis.out) {
      end = divide_up(axis.out - start, dilation);
    }
  }

  int64_t size() const { return std::max<int64_t>(0, end - begin); }
};

// A window, in the three dimensions.
struct Spans {
  Span z, y, x;
};

// Pools rows of windows, with the memory of one thread.
template <class T, class Index>
class Pool {
  using Order = maxunpool_cuda::Order<T>;
  using Element = typename Order::Element;
  using Mark = typename Order::Mark;

 public:
  explicit Pool(const PoolCall& call) : call_(call) {
    // Where a row has fewer windows than a window has columns, columns fill the vectors better.
    if (inner_ == 1 && (width_.in >= width_.kernel || step_[2] > 1)) {
      const int64_t more = step_[2] * (width_.kernel - 1) / stride_; // of a phase
      const int64_t room = kStaged / depth_.kernel / height_.kernel / stride_ - more;
      block_ = std::min({kBlock, room, divide_up(width_.in, kLanes) * kLanes}) / kLanes * kLanes;
      room_ = block_ + more;
      std::fill_n(staged_, kStaged, Element{}); // vectors are compared whole, beyond what is staged
    }
  }

  // Pools windows [first, end) of row (z, y) of pooled image `outer`.
  void row(int64_t outer, int64_t z, int64_t y, int64_t first, int64_t end) {
    const Span zs(depth_, call_.dilation[0], z), ys(height_, call_.dilation[1], y);
    const int64_t to = ((outer * depth_.in + z) * height_.in + y) * width_.in;
    const Element* image = static_cast<const Element*>(call_.input) + outer * geometry_.out_image();
    const bool staged = block_ > 0 && zs.size() * ys.size() > 0;
    for (int64_t x = first; x < end; x += staged ? block_ : 1) {
      const Spans window{zs, ys, Span(width_, call_.dilation[2], x)};
      if (staged) {
        windows(image, window, x, std::min(block_, end - x), to + x);
      } else {
        cell(image, window, (to + x) * inner_);
      }
    }
  }

 private:
  static constexpr bool kOffsets = kIsWindowOffset<Index>;
  static constexpr int64_t kMost = 1 << 12; // elements of a window that are listed
  static constexpr int64_t kBlock = 512;    // windows or channels that are compared at once
  static constexpr int64_t kVector = 32, kLanes = kVector / sizeof(Element); // bytes, elements
  static constexpr int kMany = 4; // vectors that are compared together, which registers hold
  static constexpr int64_t kLine = 64 / sizeof(Element), kAhead = 8 * kLine; // of the cache
  // 128 KiB of elements: a quarter of the smallest L2 caches. In channels_last, 56x56 windows of
  // 512 channels take a third of the time that they take as a whole, measured on an Intel Xeon.
  static constexpr int64_t kPiece = (128 << 10) / sizeof(Element);
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
  // Position where a window begins, before it is clipped, and index of its first element after.
  int64_t begin(const Spans& window) const {
    return (window.z.start * height_.out + window.y.start) * width_.out + window.x.start;
  }
  int64_t first_index(const Spans& window) const {
    const int64_t first = place(window.z.begin, window.y.begin, window.x.begin);
    return first + (kOffsets ? 0 : begin(window));
  }

  // Pools the channels of a cell, or the one window of a contiguous tensor.
  void cell(const Element* image, const Spans& window, int64_t to) {
    const auto& [z, y, x] = window;
    const int64_t columns = inner_ * step_[2] > 1 ? 1 : kLanes; // that are compared at once
    if (z.size() * y.size() * x.size() == 0) {
      std::fill_n(values_ + to, inner_, Order::kLowest);
      std::fill_n(indices_ + to, inner_, static_cast<Index>(first_index(window)));
      return;
    }
    const Element* base = image + (begin(window) + position(z.begin, y.begin, x.begin)) * inner_;
    const int64_t channels = std::min(kBlock, inner_);
    for (int64_t b = 0; b < inner_; b += kBlock) {
      const int64_t c = std::min(b, inner_ - channels); // the last are done twice, not in part
      compare(base + c, channels, window, std::min(columns, x.size()), to + c);
    }
  }

  // Pools `count` windows of a row of a contiguous tensor, from `window`, number x, on.
  void windows(const Element* plane, Spans window, int64_t x, int64_t count, int64_t to) {
    const int64_t start = window.x.start, staged = count + room_ - block_; // of a phase
    window.x.begin = 0, window.x.end = width_.kernel; // the padding is staged too
    Element* phases = staged_;
    for (int64_t k = window.z.begin; k < window.z.end; ++k) {
      for (int64_t j = window.y.begin; j < window.y.end; ++j, phases += room_ * stride_) {
        stage(plane + (begin(window) - start + position(k, j, 0)), start, staged, phases);
      }
    }
    compare(staged_, count, window, 1, to);
    // Windows that begin in the padding may have found nothing above it.
    for (int64_t i = 0; i < count && start + i * stride_ < 0; ++i) {
      if (Order::key(values_[to + i]) == Order::key(Order::kLowest)) {
        window.x = Span(width_, call_.dilation[2], x + i);
        indices_[to + i] = static_cast<Index>(first_index(window));
      }
    }
  }

  // Puts elements of a row, from coordinate `begin` on, into phases of `count`, as many as the
  // stride: what windows find at one place of theirs then lies side by side. Outside of the row is
  // the lowest number.
  void stage(const Element* row, int64_t begin, int64_t count, Element* phases) {
    const int64_t length = count * stride_, left = std::clamp<int64_t>(-begin, 0, length);
    const int64_t right = std::clamp(width_.out - begin, left, length);
    const Element* from = row + begin;
    if (stride_ == 1 || right - left < length) {
      Element* padded = stride_ == 1 ? phases : padded_;
      std::fill(padded, padded + left, Order::kLowest);
      std::copy(from + left, from + right, padded + left);
      std::fill(padded + right, padded + length, Order::kLowest);
      from = padded;
    }
    const auto split = [=, room = room_](auto steps) {
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t k = 0; k < steps; ++k) {
          phases[k * room + i] = from[i * steps + k];
        }
      }
    };
    if (stride_ > 1 && !with_one_of<2, 3, 4>(stride_, split)) { // known to the compiler
      split(stride_);
    }
  }

  // Offset of an element from the first one that is compared, in the input or where it is staged.
  int64_t offset(int64_t z, int64_t y, int64_t x) const {
    const int64_t row = z * box_[1] + y, column = x * step_[2];
    return block_ > 0 ? (row * stride_ + column % stride_) * room_ + column / stride_
                      : position(z, y, x) * inner_;
  }

  // Compares the elements of `count` windows, `columns` columns at a time: those of the first,
  // which is `window`, lie at their offsets from `base`, and those of each other one further on. A
  // window may have to be compared in pieces. The list of a whole one serves all that are clipped
  // alike.
  void compare(
      const Element* base, int64_t count, const Spans& window, int64_t columns, int64_t to) {
    const int64_t whole = divide_up(count, kLanes) * kLanes; // vectors
    const int64_t lanes = block_ > 0 ? whole : std::max(count, columns);
    const int64_t box[] = {window.z.size(), window.y.size(), window.x.size()};
    int64_t piece = 0; // where it begins
    const auto compare_piece = [&] {
      compare_listed(base, lanes);
      if (columns > 1) {
        put_columns(columns, first_index(window) + piece, to, piece > 0);
      } else {
        put(count, first_index(window) + piece, to, piece > 0);
      }
    };
    if (!std::equal(std::begin(box), std::end(box), box_)) {
      std::copy(std::begin(box), std::end(box), box_);
      listed_ = 0;
      for (int64_t k = 0; k < box[0]; ++k) {
        for (int64_t j = 0; j < box[1]; ++j) {
          for (int64_t i = 0; i < box[2]; i += columns) {
            const int64_t column = std::min(i, box[2] - columns), at = place(k, j, column);
            if (listed_ == most_ || at - piece > std::numeric_limits<Mark>::max()) {
              compare_piece();
              piece = at;
              listed_ = box_[0] = 0; // what is listed is no whole window
            }
            offset_[listed_] = offset(k, j, column);
            mark_[listed_++] = static_cast<Mark>(at - piece);
          }
        }
      }
    }
    compare_piece();
  }

  void compare_listed(const Element* base, int64_t count) {
    in_vectors([=, this]() MAXUNPOOL_INLINE {
      if (count >= kMany * kLanes) {
        compare_vectors<kMany>(base, count);
      } else if (count >= kLanes || base + offset_[listed_ - 1] + kLanes <= end_) {
        compare_vectors<1>(base, count);
      } else {
        compare_vectors<1, true>(base, count);
      }
    });
  }

  // Compares kVectors at a time: registers hold the best of four, and each waits for its own last.
  template <int kVectors, bool kAtEnd = false>
  MAXUNPOOL_INLINE void compare_vectors(const Element* base, int64_t count) {
    for (int64_t i = 0; i < count; i += kVectors * kLanes) { // the last overlap those before
      const int64_t at = std::min(i, std::max<int64_t>(0, count - kVectors * kLanes));
      Elements value[kVectors], key[kVectors];
      Marks won[kVectors] = {};
      for (int v = 0; v < kVectors; ++v) {
        value[v] = load<kAtEnd>(base + offset_[0] + at + v * kLanes);
        key[v] = Order::key(value[v]);
        won[v] += mark_[0];
      }
      for (int64_t e = 1; e < listed_; ++e) {
        const Element* from = base + offset_[e] + at;
        if (kVectors > 1) { // channels of cells ahead may lie in another page
          MAXUNPOOL_PREFETCH(from + kAhead);
          MAXUNPOOL_PREFETCH(from + kAhead + kLine);
        }
        for (int v = 0; v < kVectors; ++v) {
          const Elements next = load<kAtEnd>(from + v * kLanes);
          const Elements next_key = Order::key(next);
          const auto takes = Order::takes(next_key, key[v]);
          value[v] = takes ? next : value[v];
          key[v] = takes ? next_key : key[v];
          won[v] = takes ? Marks{} + mark_[e] : won[v];
        }
      }
      for (int v = 0; v < kVectors; ++v) {
        std::memcpy(best_ + at + v * kLanes, &value[v], kVector);
        std::memcpy(marks_ + at + v * kLanes, &won[v], kVector);
      }
    }
  }

  // A function, because GCC does not keep an array in registers that a call gets the address of.
  template <bool kAtEnd>
  MAXUNPOOL_INLINE Elements load(const Element* from) const {
    Elements vector = {};
    const auto left = static_cast<int64_t>((end_ - from) * sizeof(Element));
    std::memcpy(&vector, from, kAtEnd ? std::min(kVector, left) : kVector);
    return vector;
  }

  // Writes what `count` windows found in a piece, which begins at this index in the first one. A
  // later piece has to exceed the earlier ones.
  void put(int64_t count, int64_t index, int64_t to, bool later) {
    const int64_t shift = block_ > 0 && !kOffsets ? stride_ : 0; // from one window to the next
    Index* indices = indices_ + to;
    if (later) {
      for (int64_t i = 0; i < count; ++i) {
        take(to + i, best_[i], index + i * shift + marks_[i]);
      }
      return;
    }
    std::copy_n(best_, count, values_ + to);
    for (int64_t i = 0; i < count; ++i) {
      indices[i] = static_cast<Index>(index) + static_cast<Index>(marks_[i]);
      index += shift;
    }
  }

  // Writes what columns found of a piece of one window, which begins at this index.
  void put_columns(int64_t columns, int64_t index, int64_t to, bool later) {
    Element value = best_[0];
    int64_t at = marks_[0];
    for (int64_t i = 1; i < columns; ++i) {
      const int64_t next = marks_[i] + i;
      if (comes_first(best_[i], next, value, at)) {
        value = best_[i];
        at = next;
      }
    }
    if (later) {
      take(to, value, index + at);
    } else {
      values_[to] = value;
      indices_[to] = static_cast<Index>(index + at);
    }
  }

  // Whether an element wins over another one of its window, given their indices.
  static bool comes_first(Element value, int64_t index, Element other, int64_t other_index) {
    const Element key = Order::key(value);
    const Element other_key = Order::key(other);
    return index > other_index ? Order::takes(key, other_key) : !Order::takes(other_key, key);
  }

  // Compares one more element of a window, as if they came in the order of their indices.
  void take(int64_t to, Element value, int64_t index) {
    if (comes_first(value, index, values_[to], indices_[to])) {
      values_[to] = value;
      indices_[to] = static_cast<Index>(index);
    }
  }

  const PoolCall& call_;
  const Geometry<int64_t>& geometry_ = call_.geometry;
  const Axis<int64_t>&depth_ = geometry_.axis[0], &height_ = geometry_.axis[1],
        &width_ = geometry_.axis[2];
  const int64_t inner_ = geometry_.inner, stride_ = width_.stride;
  const Element* const end_ =
      static_cast<const Element*>(call_.input) + geometry_.outer * geometry_.out_image();
  Element* const values_ = static_cast<Element*>(call_.values);
  Index* const indices_ = static_cast<Index*>(call_.indices);
  // Positions from one element of a window to the next.
  const int64_t step_[3] = {
      call_.dilation[0] * height_.out * width_.out,
      call_.dilation[1] * width_.out,
      call_.dilation[2]};
  // Elements of a window that are listed at once. A piece of a large window stays in the cache
  // while its channels are compared, some vectors at a time.
  const int64_t most_ =
      inner_ == 1 ? kMost : std::clamp<int64_t>(kPiece / std::min(kBlock, inner_), 64, kMost);
  int64_t block_ = 0, room_ = 0; // windows of a row that are staged at once; elements of a phase
  int64_t box_[3] = {}, listed_ = 0, offset_[kMost]; // what is listed
  Mark mark_[kMost], marks_[kBlock];                 // listed; that have won
  Element best_[kBlock], padded_[kStaged], staged_[kStaged];
};

template <class T, class Index>
void pool_rows(const PoolCall& call) {
  constexpr double kGrain = 1 << 15;        // compared elements that are worth a thread
  constexpr int64_t kMostWindows = 1 << 13; // of a row, in a task
  const Geometry<int64_t>& geometry = call.geometry;
  const auto& [depth, height, width] = geometry.axis;
  const int64_t parts = divide_up(width.in, kMostWindows), tasks = height.in * parts; // of a slice
  double work = static_cast<double>(std::min(width.in, kMostWindows) * geometry.inner);
  for (const Axis<int64_t>& axis : geometry.axis) {
    work *= static_cast<double>(std::min(axis.kernel, axis.out));
  }
  const auto grain = static_cast<int64_t>(kGrain / std::min(kGrain, work));
  at::parallel_for(0, geometry.outer * depth.in * tasks, grain, [&](int64_t begin, int64_t end) {
    Pool<T, Index> pool(call);
    for (int64_t i = begin; i < end;) {
      const int64_t slice = i / tasks, outer = slice / depth.in, z = slice % depth.in;
      for (int64_t task = i % tasks; task < tasks && i < end; ++task, ++i) {
        const int64_t first = task % parts * kMostWindows;
        pool.row(outer, z, task / parts, first, std::min(width.in, first + kMostWindows));
      }
    }
  });
}

void pool(const PoolCall& call, c10::Device) {
  const size_t pooled = call.geometry.outer * call.geometry.in_image();
  use_huge_pages(call.values, pooled * c10::elementSize(call.type));
  use_huge_pages(call.indices, pooled * c10::elementSize(call.index_type));
  with_ordered_type(call.type, [&]<class T>(std::type_identity<T>) {
    with_index_type(call.index_type, [&]<class Index>(std::type_identity<Index>) {
      pool_rows<T, Index>(call);
    });
  });
}

} // namespace

TORCH_LIBRARY_IMPL(maxunpool_cuda, CPU, m) {
  m.impl("max_pool", run_pool<int64_t, pool>);
}

} // namespace maxunpool_cuda
