// SPDX-License-Identifier: BSD-3-Clause
// Max pooling on the CPU.
//
// It takes the call from ../max_pool.h, which has checked it. In the geometry, as for unpooling,
// `in` is the pooled side, the result here, and `out` is the input. The elements of a window are
// listed, and compared in vectors (comparison.h) of what lies side by side in memory:
// 1. channels_last: the channels of a cell;
// 2. contiguous: windows, whose elements a stage (stage.h) puts side by side;
// 3. contiguous, where the window is wider than a row of windows, or too large for a stage:
//    neighbouring columns of one window, whose results are merged then (one column, if dilated).
//
// Example of the third case: one window of 1x7 elements, vectors of 4. The list has two entries,
// columns 0 to 3 and columns 3 to 6. For the elements 1 9 2 3 8 9 5 the vector's results are
//   the larger of 1 and 3 (3, column 3), 9 and 8 (9, column 1), 2 and 9 (9, column 5), 3 and 5 (5)
// and of these the first of the largest is 9 in column 1.
#include "../max_pool.h"
#include "../dtypes.h"
#include "../torch.h"
#include "comparison.h"
#include "machine.h"
#include "stage.h"

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {
namespace {

// Where the elements of windows are, as positions in the input plane and as indices of the result.
template <class Index>
struct PoolPositions {
  const Geometry<int64_t>& geometry;
  // Positions from one element of a window to the next, along each axis.
  int64_t step_z;
  int64_t step_y;
  int64_t step_x;

  explicit PoolPositions(const PoolCall& call)
      : geometry(call.geometry),
        step_z(call.dilation[0] * geometry.axis[1].out * geometry.axis[2].out),
        step_y(call.dilation[1] * geometry.axis[2].out),
        step_x(call.dilation[2]) {}

  // From one element of a window to another one that is so many elements away.
  int64_t position(int64_t z, int64_t y, int64_t x) const {
    return z * step_z + y * step_y + x * step_x;
  }
  int64_t index(int64_t z, int64_t y, int64_t x) const {
    if constexpr (kIsWindowOffset<Index>) {
      return (z * geometry.axis[1].kernel + y) * geometry.axis[2].kernel + x;
    } else {
      return position(z, y, x);
    }
  }

  // Position where a window begins, before it is clipped.
  int64_t begin(const PoolWindow& window) const {
    const auto& [depth, height, width] = geometry.axis;
    return (window.z.start * height.out + window.y.start) * width.out + window.x.start;
  }
  // Position and index of a window's first element that lies in the input.
  int64_t first_position(const PoolWindow& window) const {
    return begin(window) + position(window.z.begin, window.y.begin, window.x.begin);
  }
  int64_t first_index(const PoolWindow& window) const {
    const int64_t first = index(window.z.begin, window.y.begin, window.x.begin);
    return first + (kIsWindowOffset<Index> ? 0 : begin(window));
  }
};

// An element of a window that may be its result.
template <class Element>
struct Candidate {
  Element value;
  int64_t index;
};

// Pools batches, with the memory of one thread.
template <class T, class Index>
class Pool {
  using Comparison = maxunpool_cuda::Comparison<T>;
  using Order = maxunpool_cuda::Order<T>;
  using Element = typename Comparison::Element;

 public:
  static PoolPlan plan_of(const PoolCall& call) {
    return {call, Stage<Element>::kRoom, Comparison::kMostWindows, Comparison::kLanes};
  }

  Pool(const PoolCall& call, const PoolPlan& plan)
      : call_(call),
        plan_(plan),
        positions_(call),
        values_(static_cast<Element*>(call.values)),
        indices_(static_cast<Index*>(call.indices)),
        stage_(call, plan, Order::lowest()),
        comparison_(input() + call.geometry.outer * call.geometry.out_image(), ahead()) {
    const int64_t channels = std::min(Comparison::kMostWindows, call.geometry.inner);
    if (channels > 1) {
      most_listed_ = std::clamp(kPart / channels, kFewestListed, most_listed_);
    }
  }

  void pool(const Batch& batch) {
    if (plan_.staged()) {
      on_stage(batch);
      return;
    }
    for (int64_t slice = batch.slice; slice < batch.slice + batch.slices; ++slice) {
      for (int64_t y = batch.y; y < batch.y + batch.rows; ++y) {
        row(slice, y, batch.x, batch.columns);
      }
    }
  }

 private:
  // Elements of 128 KiB: a quarter of a second cache of 512 KiB. A part of a large window stays
  // there while its channels are compared, some vectors at a time: 56x56 windows of 512 channels
  // take a third of the time that they take as a whole (measured on an Intel Xeon).
  static constexpr int64_t kPart = (128 << 10) / sizeof(Element);
  // Elements of a part, at least, so that the merging of parts costs little.
  static constexpr int64_t kFewestListed = 64;

  const Element* input() const { return static_cast<const Element*>(call_.input); }

  // How far ahead elements are prefetched.
  uint64_t ahead() const {
    const Geometry<int64_t>& geometry = call_.geometry;
    const uint64_t step = static_cast<uint64_t>(geometry.axis[2].stride) * geometry.inner;
    return plan_.staged() ? 0 : Comparison::ahead_of(geometry.inner, plan_.window_size(), step);
  }

  PoolWindow window_of(int64_t slice, int64_t y, int64_t x) const {
    const auto& [depth, height, width] = call_.geometry.axis;
    return {
        Span(depth, call_.dilation[0], slice % depth.in),
        Span(height, call_.dilation[1], y),
        Span(width, call_.dilation[2], x)};
  }

  // The number of a cell among all cells.
  int64_t number_of(int64_t slice, int64_t y, int64_t x) const {
    return (slice * call_.geometry.axis[1].in + y) * call_.geometry.axis[2].in + x;
  }

  // Pools cells one after the other: `count` of a row, from (y, x) on.
  void row(int64_t slice, int64_t y, int64_t x, int64_t count) {
    const auto& [depth, height, width] = call_.geometry.axis;
    const Element* image = input() + slice / depth.in * call_.geometry.out_image();
    const int64_t first = number_of(slice, y, x);
    // One object for the row: a copy of what was just written waits for the stores before it.
    PoolWindow window = window_of(slice, y, x);
    for (int64_t i = 0; i < count; ++i) {
      window.x = Span(width, call_.dilation[2], x + i);
      cell(image, window, (first + i) * call_.geometry.inner);
    }
  }

  // Pools the channels of a cell, or the one window of a contiguous tensor. `result`: the first
  // element of the result that is written.
  void cell(const Element* image, const PoolWindow& window, int64_t result) {
    const int64_t inner = call_.geometry.inner;
    const int64_t first_index = positions_.first_index(window);
    if (window.empty()) {
      std::fill_n(values_ + result, inner, Order::lowest());
      std::fill_n(indices_ + result, inner, static_cast<Index>(first_index));
      return;
    }
    const bool side_by_side = inner * positions_.step_x == 1;
    const int64_t columns = side_by_side ? std::min(Comparison::kLanes, window.x.size()) : 1;
    const Element* base = image + positions_.first_position(window) * inner;
    const int64_t channels = std::min(Comparison::kMostWindows, inner);
    for (int64_t i = 0; i < inner; i += Comparison::kMostWindows) {
      const int64_t channel = std::min(i, inner - channels); // the last are done twice, not in part
      const int64_t count = std::max(channels, columns);
      compare(base + channel, count, window.box(), columns, [=, this]() MAXUNPOOL_INLINE {
        if (columns > 1) {
          write_columns(columns, first_index, result);
        } else {
          write(0, channels, first_index, 0, result + channel);
        }
      });
    }
  }

  // Pools the windows of a batch, whose elements the stage puts side by side.
  void on_stage(const Batch& batch) {
    stage_.put(batch);
    const auto& [depth, height, width] = call_.geometry.axis;
    const Box whole{depth.kernel, height.kernel, width.kernel}; // the padding is there, too
    const int64_t places = plan_.places(batch.slices, batch.rows, batch.columns);
    const int64_t vectors = divide_up(places, Comparison::kLanes);
    compare(stage_.begin(), vectors * Comparison::kLanes, whole, 1, [&]() MAXUNPOOL_INLINE {
      for (int64_t slice = 0; slice < batch.slices; ++slice) {
        write_rows(batch, slice);
      }
    });
    correct_padding(batch);
  }

  // Offset of an element of a window from the first one that is compared, in the input or on the
  // stage. The window is clipped to `box`.
  int64_t offset(int64_t z, int64_t y, int64_t x) const {
    return plan_.staged() ? plan_.offset(z, y, x)
                          : positions_.position(z, y, x) * call_.geometry.inner;
  }

  // Compares the elements of `count` windows that are clipped to `box`, `columns` columns at a
  // time, and calls write(). Element e of window i is at base[offset(e) + i]. A large window has
  // several parts, each with a list and a write(). Several columns are compared only of one window.
  template <class Write>
  void compare(
      const Element* base, int64_t count, const Box& box, int64_t columns, const Write& write) {
    bool all = listed_box_ == box; // then the list of the windows before serves these, too
    Box next;                      // where in the window the next part begins
    do {
      if (!all) {
        all = list(box, columns, next);
      }
      in_vectors([&]() MAXUNPOOL_INLINE {
        comparison_.run(base, list_, count);
        write();
      });
    } while (!all);
    listed_box_ = is_part() ? Box{} : box;
  }

  // Lists the elements of a window that is clipped to `box` from `next` on, of every row the
  // columns 0, `columns`, 2 * `columns`, ...; the last of these overlap those before. False if the
  // list has no room for all: then `next` is the first that is not in it.
  bool list(const Box& box, int64_t columns, Box& next) {
    // Where a group of columns begins. The last group is moved left, to end with the row.
    const auto column = [&] { return std::min(next.x, box.x - columns); };
    list_.restart(positions_.index(next.z, next.y, column()));
    for (; next.z < box.z; ++next.z, next.y = 0) {
      for (; next.y < box.y; ++next.y, next.x = 0) {
        for (; next.x < box.x; next.x += columns) {
          const int64_t index = positions_.index(next.z, next.y, column());
          if (!list_.has_room_for(index, most_listed_)) {
            return false;
          }
          list_.append(offset(next.z, next.y, column()), index);
        }
      }
    }
    return true;
  }

  // Whether the list has a later part of a window, whose results are merged with those before.
  bool is_part() const { return list_.first_index > 0; }

  // Writes the results of a slice of a batch.
  MAXUNPOOL_INLINE void write_rows(const Batch& batch, int64_t slice) {
    const auto& [depth, height, width] = call_.geometry.axis;
    const PoolWindow window = window_of(batch.slice + slice, batch.y, batch.x);
    // Flat indices are shifted from a window to the next, and from a row to the next.
    constexpr bool kIsFlat = !kIsWindowOffset<Index>;
    const int64_t index = kIsFlat ? positions_.begin(window) : 0;
    const int64_t shift = kIsFlat ? width.stride : 0;
    const int64_t row_shift = kIsFlat && batch.rows > 1 ? height.stride * width.out : 0;
    const int64_t result = number_of(batch.slice + slice, batch.y, batch.x);
    for (int64_t row = 0; row < batch.rows; ++row) {
      const int64_t place = plan_.place(slice, row);
      write(place, batch.columns, index + row * row_shift, shift, result + row * width.in);
    }
  }

  // Writes the results of `count` windows. `index`: what index 0 of a list means for the first of
  // them. For each next window it is `shift` more.
  MAXUNPOOL_INLINE void write(
      int64_t place, int64_t count, int64_t index, int64_t shift, int64_t result) {
    const Element* best = comparison_.values() + place;
    const auto* best_index = comparison_.indices() + place;
    index += list_.first_index;
    if (is_part()) {
      for (int64_t i = 0; i < count; ++i) {
        merge({best[i], index + i * shift + best_index[i]}, result + i);
      }
      return;
    }
    std::copy_n(best, count, values_ + result);
    using Bits = std::make_unsigned_t<Index>; // as wide as Index, so that vectors are full
    Index* __restrict indices = indices_ + result;
    auto first = static_cast<Bits>(index);
    for (int64_t i = 0; i < count; ++i) {
      indices[i] = static_cast<Index>(first + static_cast<Bits>(best_index[i]));
      first += static_cast<Bits>(shift);
    }
  }

  // Writes the result of one window, of which every lane has the best of its columns.
  void write_columns(int64_t columns, int64_t index, int64_t result) {
    const Element* best = comparison_.values();
    const auto* best_index = comparison_.indices();
    index += list_.first_index;
    Candidate<Element> window_best{best[0], index + best_index[0]};
    for (int64_t i = 1; i < columns; ++i) {
      const Candidate<Element> candidate{best[i], index + best_index[i] + i};
      if (wins_in_order(candidate, window_best)) {
        window_best = candidate;
      }
    }
    if (is_part()) {
      merge(window_best, result);
    } else {
      values_[result] = window_best.value;
      indices_[result] = static_cast<Index>(window_best.index);
    }
  }

  // Writes a candidate if it wins over what is written already.
  void merge(const Candidate<Element>& candidate, int64_t result) {
    if (wins_in_order(candidate, {values_[result], static_cast<int64_t>(indices_[result])})) {
      values_[result] = candidate.value;
      indices_[result] = static_cast<Index>(candidate.index);
    }
  }

  // Whether a candidate wins over another one of its window, as if the two were compared in the
  // order of their indices.
  static bool wins_in_order(const Candidate<Element>& candidate, const Candidate<Element>& other) {
    const Element comparable = Order::comparable(candidate.value);
    const Element other_comparable = Order::comparable(other.value);
    return candidate.index > other.index ? Order::wins(comparable, other_comparable)
                                         : !Order::wins(other_comparable, comparable);
  }

  // Where all elements of a window equal the padding, which is the lowest number, and the window
  // begins in the padding, the padding has won. Then the index becomes that of the first element in
  // the input.
  void correct_padding(const Batch& batch) {
    const auto& [depth, height, width] = call_.geometry.axis;
    if (depth.padding + height.padding + width.padding == 0) {
      return;
    }
    for (int64_t slice = batch.slice; slice < batch.slice + batch.slices; ++slice) {
      for (int64_t y = batch.y; y < batch.y + batch.rows; ++y) {
        PoolWindow window = window_of(slice, y, batch.x);
        const int64_t first = number_of(slice, y, batch.x);
        for (int64_t i = 0; i < batch.columns && window.begins_in_padding(); ++i) {
          if (Order::comparable(values_[first + i]) == Order::comparable(Order::lowest())) {
            indices_[first + i] = static_cast<Index>(positions_.first_index(window));
          }
          window.x = Span(width, call_.dilation[2], batch.x + i + 1);
        }
      }
    }
  }

  const PoolCall& call_;
  const PoolPlan& plan_;
  const PoolPositions<Index> positions_;
  Element* const values_;
  Index* const indices_;
  int64_t most_listed_ = Comparison::List::kMost;
  Stage<Element> stage_;
  typename Comparison::List list_;
  Box listed_box_{}; // what windows are clipped to whose elements are all in the list
  Comparison comparison_;
};

template <class T, class Index>
void pool_batches(const PoolCall& call) {
  const PoolPlan plan = Pool<T, Index>::plan_of(call);
  parallel_for(0, plan.batches(), plan.grain(), [&](int64_t begin, int64_t end) {
    Pool<T, Index> pool(call, plan);
    for (int64_t i = begin; i < end; ++i) {
      pool.pool(plan.batch(i));
    }
  });
}

void pool(const PoolCall& call, int32_t) {
  const size_t pooled = call.geometry.outer * call.geometry.in_image();
  use_huge_pages(call.values, pooled * element_size(call.type));
  use_huge_pages(call.indices, pooled * element_size(call.index_type));
  with_ordered_type(call.type, [&]<class T>(std::type_identity<T>) {
    with_index_type(call.index_type, [&]<class Index>(std::type_identity<Index>) {
      pool_batches<T, Index>(call);
    });
  });
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(maxunpool_cuda, CPU, m) {
  m.impl("max_pool", TORCH_BOX((&run_pool<pool, aoti_torch_device_type_cpu>)));
  m.impl("_max_pool", TORCH_BOX((&run_pool_short<pool, aoti_torch_device_type_cpu>)));
}

} // namespace maxunpool_cuda
