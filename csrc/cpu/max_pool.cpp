// SPDX-License-Identifier: BSD-3-Clause
// Max pooling on the CPU.
//
// It takes the call from ../max_pool.h, which has checked it. In the geometry, as for unpooling,
// `in` is the pooled side, the result here, and `out` is the input. The elements of a window are
// listed, and compared in vectors (comparison.h) of what lies side by side in memory. There are
// three cases:
//   channels_last              the channels of a cell
//   contiguous                 the windows of a row, whose elements a stage (stage.h) puts side by
//                              side
//   contiguous, large windows  neighbouring columns of one window, whose results are merged then
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
#include "order.h"
#include "pool_window.h"
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

// Pools rows of windows, with the memory of one thread.
template <class T, class Index>
class Pool {
  using Comparison = maxunpool_cuda::Comparison<T>;
  using Order = maxunpool_cuda::Order<T>;
  using Element = typename Comparison::Element;

 public:
  explicit Pool(const PoolCall& call)
      : call_(call),
        positions_(call),
        values_(static_cast<Element*>(call.values)),
        indices_(static_cast<Index*>(call.indices)),
        stage_(call, Order::lowest(), Comparison::kLanes, suits_stage(call) ? kMostWindows : 0),
        comparison_(input() + call.geometry.outer * call.geometry.out_image()) {
    const int64_t channels = std::min(kMostWindows, call.geometry.inner);
    if (channels > 1) {
      most_listed_ = std::clamp(kPart / channels, kFewestListed, most_listed_);
    }
  }

  // Pools windows [first, end) of row (z, y) of pooled image `outer`.
  void row(int64_t outer, int64_t z, int64_t y, int64_t first, int64_t end) {
    const auto& [depth, height, width] = call_.geometry.axis;
    // One object for the row: a copy of what was just written waits for the stores before it.
    PoolWindow window{
        Span(depth, call_.dilation[0], z),
        Span(height, call_.dilation[1], y),
        Span(width, call_.dilation[2], first)};
    const int64_t row_result = ((outer * depth.in + z) * height.in + y) * width.in;
    const Element* image = input() + outer * call_.geometry.out_image();
    const bool staged = stage_.windows() > 0 && window.z.size() * window.y.size() > 0;
    for (int64_t x = first; x < end; x += staged ? stage_.windows() : 1) {
      if (staged) {
        window.x = Span::unclipped(width, x); // the padding is put on the stage, too
        windows(image, window, x, std::min(stage_.windows(), end - x), row_result + x);
      } else {
        window.x = Span(width, call_.dilation[2], x);
        cell(image, window, (row_result + x) * call_.geometry.inner);
      }
    }
  }

 private:
  static constexpr int64_t kMostWindows = Comparison::kMostWindows;
  // Elements of 128 KiB: a quarter of the smallest second caches. A part of a large window stays
  // there while its channels are compared, some vectors at a time: 56x56 windows of 512 channels
  // take a third of the time that they take as a whole (measured on an Intel Xeon).
  static constexpr int64_t kPart = (128 << 10) / sizeof(Element);
  // Elements of a part, at least, so that the merging of parts costs little.
  static constexpr int64_t kFewestListed = 64;

  const Element* input() const { return static_cast<const Element*>(call_.input); }

  // Where a row has fewer windows than a window has columns, the columns fill the vectors better,
  // if they lie side by side.
  static bool suits_stage(const PoolCall& call) {
    const Axis<int64_t>& width = call.geometry.axis[2];
    return call.geometry.inner == 1 && (width.in >= width.kernel || call.dilation[2] > 1);
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
    const int64_t channels = std::min(kMostWindows, inner);
    for (int64_t i = 0; i < inner; i += kMostWindows) {
      const int64_t channel = std::min(i, inner - channels); // the last are done twice, not in part
      compare(base + channel, channels, window, columns, result + channel);
    }
  }

  // Pools `count` windows of a row of a contiguous tensor, from `window`, number x, on.
  MAXUNPOOL_INLINE void windows(
      const Element* plane, const PoolWindow& window, int64_t x, int64_t count, int64_t result) {
    const Axis<int64_t>& width = call_.geometry.axis[2];
    const int64_t start = window.x.start;
    const Element* first_row = plane + (positions_.begin(window) - start);
    int64_t staged_row = 0;
    for (int64_t z = window.z.begin; z < window.z.end; ++z) {
      for (int64_t y = window.y.begin; y < window.y.end; ++y, ++staged_row) {
        stage_.put(staged_row, first_row + positions_.position(z, y, 0), start, count);
      }
    }
    compare(stage_.begin(), count, window, 1, result);
    // Windows that begin in the padding may have found nothing above it.
    for (int64_t i = 0; i < count && start + i * width.stride < 0; ++i) {
      if (Order::comparable(values_[result + i]) == Order::comparable(Order::lowest())) {
        PoolWindow clipped = window;
        clipped.x = Span(width, call_.dilation[2], x + i);
        indices_[result + i] = static_cast<Index>(positions_.first_index(clipped));
      }
    }
  }

  // Offset of an element of a window from the first one that is compared, in the input or on the
  // stage. The window is clipped to `box`.
  int64_t offset(const Box& box, int64_t z, int64_t y, int64_t x) const {
    return stage_.windows() > 0 ? stage_.offset(z * box.y + y, x)
                                : positions_.position(z, y, x) * call_.geometry.inner;
  }

  // Compares the elements of `count` windows, `columns` columns at a time, and writes the results.
  // Inlined, as rows are often short.
  // Element e of window i is at base[offset(e) + i]. `window` is the first one. Several columns are
  // compared only of one window.
  MAXUNPOOL_INLINE void compare(
      const Element* base,
      int64_t count,
      const PoolWindow& window,
      int64_t columns,
      int64_t result) {
    const int64_t first_index = positions_.first_index(window);
    const int64_t whole = divide_up(count, Comparison::kLanes) * Comparison::kLanes; // vectors
    const int64_t lanes = stage_.windows() > 0 ? whole : std::max(count, columns);
    const auto compare_list = [&] {
      comparison_.run(base, list_, lanes);
      const int64_t index = first_index + list_.first_index;
      const bool merge = list_.first_index > 0; // with the results of the parts before
      if (columns > 1) {
        write_columns(columns, index, result, merge);
      } else {
        write(count, index, result, merge);
      }
    };
    const Box box = window.box();
    if (listed_box_ != box) { // else the list of the window before serves this one, too
      list(box, columns, compare_list);
    }
    compare_list();
  }

  // Lists the elements of a window that is clipped to `box`, of every row the columns 0, `columns`,
  // 2 * `columns`, ...; the last of these overlap those before. If the list is full, calls
  // compare_list() and begins the list of the window's next part.
  template <class CompareList>
  void list(const Box& box, int64_t columns, const CompareList& compare_list) {
    list_.restart(0);
    listed_box_ = box;
    for (int64_t z = 0; z < box.z; ++z) {
      for (int64_t y = 0; y < box.y; ++y) {
        for (int64_t x = 0; x < box.x; x += columns) {
          const int64_t column = std::min(x, box.x - columns);
          const int64_t index = positions_.index(z, y, column);
          if (!list_.has_room_for(index, most_listed_)) {
            compare_list();
            list_.restart(index);
            listed_box_ = {}; // the list has a part of a window
          }
          list_.append(offset(box, z, y, column), index);
        }
      }
    }
  }

  // Writes the results of `count` windows. `index`: of the list's first element in the first
  // window. `merge`: with what is written there already.
  void write(int64_t count, int64_t index, int64_t result, bool merge) {
    const Element* best = comparison_.values();
    const auto* best_index = comparison_.indices();
    const bool moves = stage_.windows() > 0 && !kIsWindowOffset<Index>;
    const int64_t shift = moves ? call_.geometry.axis[2].stride : 0; // from a window to the next
    if (merge) {
      for (int64_t i = 0; i < count; ++i) {
        merge_one({best[i], index + i * shift + best_index[i]}, result + i);
      }
      return;
    }
    std::copy_n(best, count, values_ + result);
    Index* indices = indices_ + result;
    for (int64_t i = 0; i < count; ++i) {
      indices[i] = static_cast<Index>(index) + static_cast<Index>(best_index[i]);
      index += shift;
    }
  }

  // Writes the result of one window, of which every lane has the best of its columns.
  void write_columns(int64_t columns, int64_t index, int64_t result, bool merge) {
    const Element* best = comparison_.values();
    const auto* best_index = comparison_.indices();
    Candidate<Element> window_best{best[0], index + best_index[0]};
    for (int64_t i = 1; i < columns; ++i) {
      const Candidate<Element> candidate{best[i], index + best_index[i] + i};
      if (wins(candidate, window_best)) {
        window_best = candidate;
      }
    }
    if (merge) {
      merge_one(window_best, result);
    } else {
      values_[result] = window_best.value;
      indices_[result] = static_cast<Index>(window_best.index);
    }
  }

  void merge_one(const Candidate<Element>& candidate, int64_t result) {
    if (wins(candidate, {values_[result], static_cast<int64_t>(indices_[result])})) {
      values_[result] = candidate.value;
      indices_[result] = static_cast<Index>(candidate.index);
    }
  }

  // Whether a candidate wins over another one of its window, as if the two were compared in the
  // order of their indices.
  static bool wins(const Candidate<Element>& candidate, const Candidate<Element>& other) {
    const Element comparable = Order::comparable(candidate.value);
    const Element other_comparable = Order::comparable(other.value);
    return candidate.index > other.index ? Order::wins(comparable, other_comparable)
                                         : !Order::wins(other_comparable, comparable);
  }

  const PoolCall& call_;
  const PoolPositions<Index> positions_;
  Element* const values_;
  Index* const indices_;
  int64_t most_listed_ = Comparison::List::kMost;
  Stage<Element> stage_;
  typename Comparison::List list_;
  Box listed_box_{}; // what windows are clipped to whose elements are all in the list
  Comparison comparison_;
};

// A task: the windows [first, end()) of row (z, y) of pooled image `outer`.
class PoolTask {
 public:
  static int64_t count(const Geometry<int64_t>& geometry) {
    const auto& [depth, height, width] = geometry.axis;
    return geometry.outer * depth.in * height.in * divide_up(width.in, kWindows);
  }

  // Task `number` of them, in row-major order.
  PoolTask(const Geometry<int64_t>& geometry, int64_t number) : axis_(geometry.axis) {
    const auto& [depth, height, width] = axis_;
    const int64_t row_tasks = divide_up(width.in, kWindows);
    first = number % row_tasks * kWindows;
    y = number / row_tasks % height.in;
    z = number / row_tasks / height.in % depth.in;
    outer = number / row_tasks / height.in / depth.in;
  }

  int64_t end() const { return std::min(axis_[2].in, first + kWindows); }

  // Moves on to the next task. A division would cost as much as a short row.
  void advance() {
    first += kWindows;
    if (first < axis_[2].in) {
      return;
    }
    first = 0;
    if (++y < axis_[1].in) {
      return;
    }
    y = 0;
    if (++z == axis_[0].in) {
      z = 0;
      ++outer;
    }
  }

  // Windows of a task. Longer rows are divided among tasks.
  static constexpr int64_t kWindows = 1 << 13;

  int64_t outer;
  int64_t z;
  int64_t y;
  int64_t first;

 private:
  const Axis<int64_t> (&axis_)[3];
};

template <class T, class Index>
void pool_rows(const PoolCall& call) {
  // Compared elements that are worth a thread: they take about 5 us, as they are compared in
  // vectors, and to wake a thread takes a few us.
  constexpr double kGrain = 1 << 15;
  const Geometry<int64_t>& geometry = call.geometry;
  const int64_t windows = std::min(geometry.axis[2].in, PoolTask::kWindows); // of a task
  double work = static_cast<double>(windows * geometry.inner);
  for (const Axis<int64_t>& axis : geometry.axis) {
    work *= static_cast<double>(std::min(axis.kernel, axis.out));
  }
  const auto grain = static_cast<int64_t>(kGrain / std::min(kGrain, work));
  parallel_for(0, PoolTask::count(geometry), grain, [&](int64_t begin, int64_t end) {
    Pool<T, Index> pool(call);
    PoolTask task(geometry, begin);
    for (int64_t i = begin; i < end; ++i, task.advance()) {
      pool.row(task.outer, task.z, task.y, task.first, task.end());
    }
  });
}

void pool(const PoolCall& call, int32_t) {
  const size_t pooled = call.geometry.outer * call.geometry.in_image();
  use_huge_pages(call.values, pooled * element_size(call.type));
  use_huge_pages(call.indices, pooled * element_size(call.index_type));
  with_ordered_type(call.type, [&]<class T>(std::type_identity<T>) {
    with_index_type(call.index_type, [&]<class Index>(std::type_identity<Index>) {
      pool_rows<T, Index>(call);
    });
  });
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(maxunpool_cuda, CPU, m) {
  m.impl("max_pool", TORCH_BOX((&run_pool<pool, aoti_torch_device_type_cpu>)));
  m.impl("_max_pool", TORCH_BOX((&run_pool_short<pool, aoti_torch_device_type_cpu>)));
}

} // namespace maxunpool_cuda
