// Max pooling on the CPU. A row of windows at a time: what neighbouring windows have in the same
// cell lies at equal distances, so cell by cell all of them are compared at once.
#include "../geometry.h"
#include "../pool.h"
#include "huge_pages.h"
#include "runs.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/library.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace maxunpool_cuda {
namespace {

constexpr int64_t kGrain = 1 << 15; // compared elements worth a task of their own
constexpr int kMostCells = 256;     // of a window that a list has room for
constexpr int64_t kMostLanes = 512; // windows that are compared at once
constexpr int64_t kFewest = 4;      // that are worth it

// How elements compare: the larger key wins, a NaN over all that came before it. Marks, of which an
// element has one, are as wide as keys, for the sake of vectors.
template <class T>
struct Numbers {
  using Element = T;
  using Key = T;
  using Mark = std::conditional_t<
      sizeof(T) == 1,
      uint8_t,
      std::conditional_t<
          sizeof(T) == 2,
          int16_t,
          std::conditional_t<sizeof(T) == 4, int32_t, int64_t>>>;

  static constexpr T kLowest = std::is_integral_v<T> ? std::numeric_limits<T>::lowest()
                                                     : -std::numeric_limits<T>::infinity();

  MAXUNPOOL_INLINE static Key key(Element value) { return value; }
  MAXUNPOOL_INLINE static bool takes(Key key, Key best) {
    if constexpr (std::is_integral_v<T>) {
      return key > best;
    } else {
      return (key > best) | (key != key);
    }
  }
};

// Numbers of 16 bits, given the bits of infinity: their keys are integers of the same order, of
// which both zeros have the same and all NaNs the largest.
template <int16_t kInfinity>
struct HalfNumbers {
  using Element = int16_t;
  using Key = int16_t;
  using Mark = int16_t;

  static constexpr int16_t kNaN = std::numeric_limits<int16_t>::max();
  static constexpr int16_t kLowest = kInfinity | std::numeric_limits<int16_t>::min();

  MAXUNPOOL_INLINE static Key key(Element bits) {
    const auto magnitude = static_cast<int16_t>(bits & kNaN);
    const auto sign = static_cast<int16_t>(bits >> 15); // -1: negative
    const auto number = static_cast<int16_t>((magnitude ^ sign) - sign);
    return magnitude > kInfinity ? kNaN : number;
  }
  MAXUNPOOL_INLINE static bool takes(Key key, Key best) { return (key > best) | (key == kNaN); }
};

template <class T>
struct OrderOf {
  using type = Numbers<T>;
};
template <>
struct OrderOf<c10::Half> {
  using type = HalfNumbers<0x7c00>;
};
template <>
struct OrderOf<c10::BFloat16> {
  using type = HalfNumbers<0x7f80>;
};

// Cells that windows have in common, in row-major order: where the first window has them, and what
// stands for them.
template <class Order, class Mark>
struct Cells {
  static constexpr int kFused = 4; // room to fill up with repetitions

  int count = 0;
  const typename Order::Element* from[kMostCells + kFused];
  Mark mark[kMostCells + kFused];

  void add(const typename Order::Element* where, Mark what) {
    from[count] = where;
    mark[count++] = what;
  }
};

// Windows, and the best of each so far: its element, and the mark of its cell.
template <class Order, class Mark>
struct Lanes {
  int64_t count;
  int64_t step; // elements from one window to the next
  typename Order::Element* best;
  Mark* winner;
};

// Compares kFused cells. kStep: the step, where it is known. kFirst: nothing came before.
template <int kStep, int kFused, bool kFirst, class Order, class Mark>
MAXUNPOOL_INLINE inline void compare(
    const Lanes<Order, Mark>& lanes,
    const typename Order::Element* const* cells,
    const Mark* marks) {
  using Element = typename Order::Element;
  const Element* from[kFused] = {};
  Mark mark[kFused] = {};
  for (int f = 0; f < kFused; ++f) {
    from[f] = cells[f];
    mark[f] = marks[f];
  }
  const int64_t step = kStep == 0 ? lanes.step : kStep;
  Element* __restrict best = lanes.best;
  Mark* __restrict winner = lanes.winner;
  for (int64_t i = 0; i < lanes.count; ++i) {
    Element value = kFirst ? from[0][i * step] : best[i];
    Mark won = kFirst ? mark[0] : winner[i];
    auto key = Order::key(value);
    for (int f = kFirst ? 1 : 0; f < kFused; ++f) {
      const Element next = from[f][i * step];
      const auto next_key = Order::key(next);
      const bool takes = Order::takes(next_key, key);
      value = takes ? next : value;
      key = takes ? next_key : key;
      won = takes ? mark[f] : won;
    }
    best[i] = value;
    winner[i] = won;
  }
}

template <int kStep, int kFused, class Order, class Mark>
MAXUNPOOL_INLINE inline void compare_all(
    const Lanes<Order, Mark>& lanes, Cells<Order, Mark>& cells, bool first) {
  while (cells.count % kFused != 0) { // to see a cell twice changes nothing
    cells.add(cells.from[cells.count - 1], cells.mark[cells.count - 1]);
  }
  if (first) {
    compare<kStep, kFused, true>(lanes, cells.from, cells.mark);
  }
  for (int i = first ? kFused : 0; i < cells.count; i += kFused) {
    compare<kStep, kFused, false>(lanes, cells.from + i, cells.mark + i);
  }
}

template <int kStep, class Order, class Mark>
MAXUNPOOL_INLINE inline void compare_by(
    const Lanes<Order, Mark>& lanes, Cells<Order, Mark>& cells, bool first) {
  if (cells.count <= 2) {
    compare_all<kStep, 2>(lanes, cells, first);
  } else if (cells.count % 3 == 0) {
    compare_all<kStep, 3>(lanes, cells, first);
  } else {
    compare_all<kStep, 4>(lanes, cells, first);
  }
}

template <class Order, class Mark>
MAXUNPOOL_INLINE inline void compare_any(
    const Lanes<Order, Mark>& lanes, Cells<Order, Mark>& cells, bool first) {
  if constexpr (std::is_same_v<Mark, typename Order::Mark>) {
    switch (lanes.step) {
      case 1:
        return compare_by<1>(lanes, cells, first);
      case 2:
        return compare_by<2>(lanes, cells, first);
      case 3:
        return compare_by<3>(lanes, cells, first);
      case 4:
        return compare_by<4>(lanes, cells, first);
      default:
        break;
    }
  }
  compare_by<0>(lanes, cells, first);
}

// Templates would ignore the target. Integers, which are rarely pooled, do without.
#if defined(MAXUNPOOL_AVX2)
template <class Order>
using SmallLanes = Lanes<Order, typename Order::Mark>;
template <class Order>
using SmallCells = Cells<Order, typename Order::Mark>;
template <class T>
using OrderOfT = typename OrderOf<T>::type;

MAXUNPOOL_AVX2 void compare_avx2(
    const SmallLanes<OrderOfT<float>>& lanes, SmallCells<OrderOfT<float>>& cells, bool first) {
  compare_any(lanes, cells, first);
}
MAXUNPOOL_AVX2 void compare_avx2(
    const SmallLanes<OrderOfT<double>>& lanes, SmallCells<OrderOfT<double>>& cells, bool first) {
  compare_any(lanes, cells, first);
}
MAXUNPOOL_AVX2 void compare_avx2(
    const SmallLanes<OrderOfT<c10::Half>>& lanes,
    SmallCells<OrderOfT<c10::Half>>& cells,
    bool first) {
  compare_any(lanes, cells, first);
}
MAXUNPOOL_AVX2 void compare_avx2(
    const SmallLanes<OrderOfT<c10::BFloat16>>& lanes,
    SmallCells<OrderOfT<c10::BFloat16>>& cells,
    bool first) {
  compare_any(lanes, cells, first);
}
#endif

// Goes on with the windows of `lanes`, or begins with them, and uses up the list.
template <class Order, class Mark>
void compare(const Lanes<Order, Mark>& lanes, Cells<Order, Mark>& cells, bool first) {
#if defined(MAXUNPOOL_AVX2)
  if constexpr (requires { compare_avx2(lanes, cells, first); }) {
    static const bool avx2 = __builtin_cpu_supports("avx2");
    if (avx2) {
      compare_avx2(lanes, cells, first);
      cells.count = 0;
      return;
    }
  }
#endif
  compare_any(lanes, cells, first);
  cells.count = 0;
}

// What a window covers along an axis: the cells [first, end), of which number 0 would lie at
// `start`.
struct Span {
  int64_t start, first, end;

  Span(const Axis<int64_t>& axis, int64_t dilation, int64_t p)
      : start(p * axis.stride - axis.padding),
        first(start < 0 ? (dilation - 1 - start) / dilation : 0),
        end(start < axis.out ? std::min(axis.kernel, (axis.out - 1 - start) / dilation + 1) : 0) {}

  bool empty() const { return first >= end; }
};

int64_t cells_of(const Geometry<int64_t>& geometry) {
  double cells = 1;
  for (const Axis<int64_t>& axis : geometry.axis) {
    cells *= static_cast<double>(axis.kernel);
  }
  return static_cast<int64_t>(std::min(cells, 0x1p60));
}

// Pools rows of windows. A mark is the number of a cell in a small window, and so as narrow as an
// element; in one of more than kMostCells how far the cell's position is from the window's begin.
template <class Order, class Index, bool kSmall>
class Pool {
  using Element = typename Order::Element;
  using Mark = std::conditional_t<kSmall, typename Order::Mark, int64_t>;
  static constexpr bool kOffsets = std::is_same_v<Index, uint8_t>;

 public:
  explicit Pool(const PoolCall& call)
      : geometry_(call.geometry),
        input_(static_cast<const Element*>(call.input.const_data_ptr())),
        values_(static_cast<Element*>(call.values.mutable_data_ptr())),
        indices_(static_cast<Index*>(call.indices.mutable_data_ptr())) {
    const Axis<int64_t>* axis = geometry_.axis;
    const int64_t steps[] = {axis[1].out * axis[2].out, axis[2].out, 1};
    for (int a = 0; a < 3; ++a) {
      dilation_[a] = call.dilation[a];
      step_[a] = steps[a];
    }
    for (int64_t i = 0; kSmall && i < cells_of(geometry_); ++i) {
      const int64_t row = i / axis[2].kernel;
      positions_[i] = position(row / axis[1].kernel, row % axis[1].kernel, i % axis[2].kernel);
    }
  }

  // Row (z, y) of pooled slab `outer`.
  void row(int64_t outer, int64_t z, int64_t y) {
    const auto& [depth, height, width] = geometry_.axis;
    const Span zs(depth, dilation_[0], z), ys(height, dilation_[1], y);
    const int64_t inner = geometry_.inner;
    const int64_t to = ((outer * depth.in + z) * height.in + y) * width.in * inner;
    const Element* slab = input_ + outer * geometry_.out_slab();
    if (inner > 1) {
      for (int64_t x = 0; x < width.in; ++x) {
        const Span xs(width, dilation_[2], x);
        for (int64_t c = 0; c < inner; c += kMostLanes) {
          const int64_t count = std::min(kMostLanes, inner - c);
          if (zs.empty() || ys.empty() || xs.empty()) {
            for (int64_t i = 0; i < count; ++i) {
              put(to + x * inner + c + i, Order::kLowest, index_of_first(zs, ys, xs));
            }
          } else {
            together(slab + c, zs, ys, xs, {count, 1, 0, to + x * inner + c});
          }
        }
      }
      return;
    }
    // The windows [left, right) lie within the width of the input.
    const int64_t room = width.out + width.padding - dilation_[2] * (width.kernel - 1) - 1;
    int64_t left = (width.padding + width.stride - 1) / width.stride;
    int64_t right = room < 0 ? 0 : std::min(width.in, room / width.stride + 1);
    if (zs.empty() || ys.empty() || right - left < kFewest) {
      left = right = width.in;
    }
    for (int64_t x = 0; x < left; ++x) {
      alone(slab, zs, ys, Span(width, dilation_[2], x), to + x);
    }
    for (int64_t x = left; x < right; x += kMostLanes) {
      const int64_t count = std::min(kMostLanes, right - x);
      together(
          slab, zs, ys, Span(width, dilation_[2], x), {count, width.stride, width.stride, to + x});
    }
    for (int64_t x = right; x < width.in; ++x) {
      alone(slab, zs, ys, Span(width, dilation_[2], x), to + x);
    }
  }

 private:
  int64_t position(int64_t z, int64_t y, int64_t x) const {
    return z * dilation_[0] * step_[0] + y * dilation_[1] * step_[1] + x * dilation_[2];
  }
  int64_t number(int64_t z, int64_t y, int64_t x) const {
    return (z * geometry_.axis[1].kernel + y) * geometry_.axis[2].kernel + x;
  }
  int64_t begin(const Span& z, const Span& y, const Span& x) const {
    return z.start * step_[0] + y.start * step_[1] + x.start;
  }
  Index index_of_first(const Span& z, const Span& y, const Span& x) const {
    return static_cast<Index>(
        kOffsets ? number(z.first, y.first, x.first)
                 : begin(z, y, x) + position(z.first, y.first, x.first));
  }
  void put(int64_t to, Element value, Index index) {
    values_[to] = value;
    indices_[to] = index;
  }

  // Neighbours in memory: how many, how many elements and how many positions from one to the next,
  // and where their results belong.
  struct Neighbours {
    int64_t count, step, shift, to;
  };

  // Windows that have the same cells, the first of which is given.
  void together(
      const Element* slab, const Span& zs, const Span& ys, const Span& xs, const Neighbours& some) {
    const Lanes<Order, Mark> lanes{some.count, some.step, values_ + some.to, winner_};
    const int64_t start = begin(zs, ys, xs), inner = geometry_.inner;
    bool first = true;
    for (int64_t z = zs.first; z < zs.end; ++z) {
      for (int64_t y = ys.first; y < ys.end; ++y) {
        const int64_t row = number(z, y, 0), row_position = position(z, y, 0);
        for (int64_t x = xs.first; x < xs.end; ++x) {
          if (cells_.count == kMostCells) {
            compare(lanes, cells_, first);
            first = false;
          }
          const int64_t offset = row_position + x * dilation_[2];
          cells_.add(slab + (start + offset) * inner, static_cast<Mark>(kSmall ? row + x : offset));
        }
      }
    }
    compare(lanes, cells_, first);
    Index* indices = indices_ + some.to;
    for (int64_t i = 0; i < some.count; ++i) {
      if constexpr (kOffsets) {
        indices[i] = static_cast<Index>(winner_[i]);
      } else if constexpr (kSmall) {
        indices[i] = static_cast<Index>(positions_[winner_[i]] + (start + i * some.shift));
      } else {
        indices[i] = static_cast<Index>(winner_[i] + (start + i * some.shift));
      }
    }
  }

  // One window of a contiguous tensor, which may have no cells.
  void alone(const Element* slab, const Span& zs, const Span& ys, const Span& xs, int64_t to) {
    const int64_t start = begin(zs, ys, xs);
    Element value = Order::kLowest;
    auto best = Order::key(value);
    Index index = index_of_first(zs, ys, xs);
    for (int64_t z = zs.first; z < zs.end; ++z) {
      for (int64_t y = ys.first; y < ys.end; ++y) {
        const int64_t row = start + position(z, y, 0);
        for (int64_t x = xs.first; x < xs.end; ++x) {
          const int64_t at = row + x * dilation_[2];
          const auto key = Order::key(slab[at]);
          if (Order::takes(key, best)) {
            best = key;
            value = slab[at];
            index = static_cast<Index>(kOffsets ? number(z, y, x) : at);
          }
        }
      }
    }
    put(to, value, index);
  }

  const Geometry<int64_t>& geometry_;
  const Element* input_;
  Element* values_;
  Index* indices_;
  int64_t dilation_[3], step_[3];
  int64_t positions_[kMostCells]; // of the cells of a small window, from its begin on
  Cells<Order, Mark> cells_;
  Mark winner_[kMostLanes];
};

template <class T, class Index, bool kSmall>
void pool_rows(const PoolCall& call) {
  const Geometry<int64_t>& geometry = call.geometry;
  const int64_t height = geometry.axis[1].in, plane = geometry.axis[0].in * height;
  const int64_t cells = std::min(cells_of(geometry), geometry.out_plane());
  const int64_t grain = kGrain / std::min(kGrain, geometry.axis[2].in * geometry.inner * cells);
  at::parallel_for(0, geometry.outer * plane, grain, [&](int64_t begin, int64_t end) {
    Pool<typename OrderOf<T>::type, Index, kSmall> pool(call);
    for (int64_t row = begin; row < end; ++row) {
      pool.row(row / plane, row % plane / height, row % height);
    }
  });
}

void pool(const PoolCall& call) {
  use_huge_pages(call.values);
  use_huge_pages(call.indices);
  with_pooled_type(call.input.scalar_type(), [&]<class T>(std::type_identity<T>) {
    with_pool_index_type(call.indices.scalar_type(), [&]<class Index>(std::type_identity<Index>) {
      cells_of(call.geometry) <= kMostCells ? pool_rows<T, Index, true>(call)
                                            : pool_rows<T, Index, false>(call);
    });
  });
}

} // namespace

TORCH_LIBRARY_IMPL(maxunpool_cuda, CPU, m) {
  m.impl("max_pool", run_pool<pool>);
}

} // namespace maxunpool_cuda
