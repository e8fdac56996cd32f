// Max pooling on the CPU. Neighbours in memory, which are windows of a row or channels of a window,
// are compared at once, cell by cell: the same cell of each lies side by side, once a strided row
// is dealt out.
#include "../geometry.h"
#include "../pool.h"
#include "huge_pages.h"
#include "processor.h"

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
#include <utility>

namespace maxunpool_cuda {
namespace {

constexpr int64_t kGrain = 1 << 15; // compared elements worth a task of their own
constexpr int kMostCells = 256;     // of a window that a list has room for
constexpr int64_t kMostLanes = 512; // neighbours that are compared at once,
constexpr int64_t kFewest = 4;      // and that are worth it
constexpr int64_t kBlock = 16;      // a multiple of what is compared at once by one instruction
constexpr int64_t kMostStep = 4;    // from window to window in a row that is dealt out
constexpr int64_t kMostWindows = 1 << 13; // of a row, in a task

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

// CellList that neighbours have in common, in row-major order: where they begin, and what stands
// for each.
template <class Order, class Mark>
struct CellList {
  static constexpr int kFused = 4; // room to fill up with repetitions

  int count = 0;
  const typename Order::Element* from[kMostCells + kFused];
  Mark mark[kMostCells + kFused];

  void add(const typename Order::Element* where, Mark what) {
    from[count] = where;
    mark[count++] = what;
  }
};

// The best of each neighbour so far: its element, and the mark of its cell.
template <class Order, class Mark>
struct Lanes {
  int64_t count;
  typename Order::Element* best;
  Mark* winner;
};

// Compares kFused cells. kFirst: nothing came before.
template <int kFused, bool kFirst, class Order, class Mark>
MAXUNPOOL_INLINE inline void compare_fused(
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
  Element* __restrict best = lanes.best;
  Mark* __restrict winner = lanes.winner;
  for (int64_t i = 0; i < lanes.count; ++i) {
    Element value = kFirst ? from[0][i] : best[i];
    Mark won = kFirst ? mark[0] : winner[i];
    auto key = Order::key(value);
    for (int f = kFirst ? 1 : 0; f < kFused; ++f) {
      const Element next = from[f][i];
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

template <int kFused, class Order, class Mark>
MAXUNPOOL_INLINE inline void compare_by(
    const Lanes<Order, Mark>& lanes, CellList<Order, Mark>& cells, bool first) {
  while (cells.count % kFused != 0) { // to see a cell twice changes nothing
    cells.add(cells.from[cells.count - 1], cells.mark[cells.count - 1]);
  }
  if (first) {
    compare_fused<kFused, true>(lanes, cells.from, cells.mark);
  }
  for (int i = first ? kFused : 0; i < cells.count; i += kFused) {
    compare_fused<kFused, false>(lanes, cells.from + i, cells.mark + i);
  }
}

template <class Order, class Mark>
MAXUNPOOL_INLINE inline void compare_any(
    const Lanes<Order, Mark>& lanes, CellList<Order, Mark>& cells, bool first) {
  if (cells.count <= 2) {
    compare_by<2>(lanes, cells, first);
  } else if (cells.count % 3 == 0) {
    compare_by<3>(lanes, cells, first);
  } else {
    compare_by<4>(lanes, cells, first);
  }
}

#if defined(MAXUNPOOL_AVX2)
template <class T>
using LanesOf = Lanes<typename OrderOf<T>::type, typename OrderOf<T>::type::Mark>;
template <class T>
using CellsOf = CellList<typename OrderOf<T>::type, typename OrderOf<T>::type::Mark>;

// Templates would ignore the target. Integers, which are rarely pooled, do without.
MAXUNPOOL_AVX2 void compare_avx2(const LanesOf<float>& lanes, CellsOf<float>& cells, bool first) {
  compare_any(lanes, cells, first);
}
MAXUNPOOL_AVX2 void compare_avx2(const LanesOf<double>& lanes, CellsOf<double>& cells, bool first) {
  compare_any(lanes, cells, first);
}
MAXUNPOOL_AVX2 void compare_avx2(
    const LanesOf<c10::Half>& lanes, CellsOf<c10::Half>& cells, bool first) {
  compare_any(lanes, cells, first);
}
MAXUNPOOL_AVX2 void compare_avx2(
    const LanesOf<c10::BFloat16>& lanes, CellsOf<c10::BFloat16>& cells, bool first) {
  compare_any(lanes, cells, first);
}
#endif

// Goes on with `lanes`, or begins with them, and uses up the list.
template <class Order, class Mark>
void compare(const Lanes<Order, Mark>& lanes, CellList<Order, Mark>& cells, bool first) {
  const auto run = [&] {
#if defined(MAXUNPOOL_AVX2)
    if constexpr (requires { compare_avx2(lanes, cells, first); }) {
      if (has_avx2()) {
        return compare_avx2(lanes, cells, first);
      }
    }
#endif
    compare_any(lanes, cells, first);
  };
  run();
  cells.count = 0;
}

// Deals `count` elements of a row of `width`, from coordinate `begin` on, out to kStep piles, each
// with room for `room`: element i becomes number i / kStep of pile i % kStep. Where the row has
// none, `padding` stands for it.
template <int kStep, class Element>
void deal(
    const Element* row,
    int64_t width,
    int64_t begin,
    int64_t count,
    Element padding,
    Element* __restrict piles,
    int64_t room) {
  const auto pile = [&](int64_t i) -> Element& { return piles[i % kStep * room + i / kStep]; };
  const int64_t end = std::min(count, width - begin);
  int64_t i = 0;
  for (; i < count && begin + i < 0; ++i) {
    pile(i) = padding;
  }
  for (; i < end && i % kStep != 0; ++i) {
    pile(i) = row[begin + i];
  }
  const int64_t rounds = i < end ? (end - i) / kStep : 0;
  const Element* from = row + (rounds > 0 ? begin + i : 0);
  Element* to = piles + i / kStep;
  for (int64_t j = 0; j < rounds; ++j) {
    for (int k = 0; k < kStep; ++k) {
      to[k * room + j] = from[j * kStep + k];
    }
  }
  for (i += rounds * kStep; i < end; ++i) {
    pile(i) = row[begin + i];
  }
  for (; i < count; ++i) {
    pile(i) = padding;
  }
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

// How far the last cell of a window lies from its begin, in positions.
double farthest(const PoolCall& call) {
  const Axis<int64_t>* axis = call.geometry.axis;
  double position = 0;
  for (int a = 0; a < 3; ++a) {
    position = position * static_cast<double>(axis[a].out) +
               static_cast<double>(axis[a].kernel - 1) * static_cast<double>(call.dilation[a]);
  }
  return position;
}

// Pools rows of windows. What marks a cell is how far its position is from its window's begin, or,
// where a narrow mark has no room for that, its number, of which a small window has few.
template <class Order, class Index, bool kNarrow>
class Pool {
  using Element = typename Order::Element;
  using Mark = std::conditional_t<kNarrow, typename Order::Mark, int64_t>;
  static constexpr bool kOffsets = kIsWindowOffset<Index>;

 public:
  explicit Pool(const PoolCall& call)
      : geometry_(call.geometry),
        input_(static_cast<const Element*>(call.input.const_data_ptr())),
        values_(static_cast<Element*>(call.values.mutable_data_ptr())),
        indices_(static_cast<Index*>(call.indices.mutable_data_ptr())),
        step_{geometry_.axis[1].out * geometry_.axis[2].out, geometry_.axis[2].out, 1} {
    const auto& [depth, height, width] = geometry_.axis;
    std::copy_n(call.dilation, 3, dilation_);
    numbers_ = kOffsets || farthest(call) > static_cast<double>(std::numeric_limits<Mark>::max());
    for (int64_t i = 0; kNarrow && numbers_ && i < cells_of(geometry_); ++i) {
      const int64_t row = i / width.kernel;
      positions_[i] = position(row / height.kernel, row % height.kernel, i % width.kernel);
    }
    // Rows whose windows are far apart, or wide, are not dealt out.
    const int64_t reach = dilation_[2] * (width.kernel - 1) + 1;
    lanes_ = width.stride > kMostStep || reach >= kMostDealt / 2
                 ? 0
                 : std::min(kMostLanes, (kMostDealt - reach) / width.stride / kBlock * kBlock);
    if (lanes_ > 0) { // neighbours beyond those there are compare anything, but something
      const int64_t most = (std::min(lanes_, width.in) + kBlock - 1) / kBlock * kBlock;
      const int64_t rows = std::min(depth.kernel, kMostDealt) * std::min(height.kernel, kMostDealt);
      const int64_t dealt = (most + reach / width.stride) * width.stride * rows;
      std::fill_n(dealt_, std::min(kMostDealt, dealt), Element{});
    }
  }

  // Windows [first, end) of row (z, y) of pooled slab `outer`.
  void row(int64_t outer, int64_t z, int64_t y, int64_t first, int64_t end) {
    const auto& [depth, height, width] = geometry_.axis;
    const Span zs(depth, dilation_[0], z), ys(height, dilation_[1], y);
    const int64_t inner = geometry_.inner;
    const int64_t to = ((outer * depth.in + z) * height.in + y) * width.in * inner;
    const Element* slab = input_ + outer * geometry_.out_slab();
    if (inner > 1) {
      for (int64_t x = first; x < end; ++x) {
        channels(slab, zs, ys, Span(width, dilation_[2], x), to + x * inner);
      }
    } else if (zs.empty() || ys.empty() || width.in < kFewest || lanes_ == 0) {
      for (int64_t x = first; x < end; ++x) {
        alone(slab, zs, ys, Span(width, dilation_[2], x), to + x);
      }
    } else {
      for (int64_t x = first; x < end; x += lanes_) {
        windows(slab, zs, ys, x, std::min(lanes_, end - x), to + x);
      }
    }
  }

 private:
  static constexpr int64_t kMostDealt = 4096; // elements, in all

  int64_t position(int64_t z, int64_t y, int64_t x) const {
    return z * dilation_[0] * step_[0] + y * dilation_[1] * step_[1] + x * dilation_[2];
  }
  int64_t number(int64_t z, int64_t y, int64_t x) const {
    return (z * geometry_.axis[1].kernel + y) * geometry_.axis[2].kernel + x;
  }
  int64_t begin(const Span& z, const Span& y, const Span& x) const {
    return z.start * step_[0] + y.start * step_[1] + x.start;
  }
  Mark mark(int64_t z, int64_t y, int64_t x) const {
    return static_cast<Mark>(kNarrow && numbers_ ? number(z, y, x) : position(z, y, x));
  }
  Index index_of_first(const Span& z, const Span& y, const Span& x) const {
    return static_cast<Index>(
        kOffsets ? number(z.first, y.first, x.first)
                 : begin(z, y, x) + position(z.first, y.first, x.first));
  }

  // The channels of one window.
  void channels(const Element* slab, const Span& zs, const Span& ys, const Span& xs, int64_t to) {
    const Axis<int64_t>& width = geometry_.axis[2];
    const int64_t inner = geometry_.inner, start = begin(zs, ys, xs);
    constexpr int64_t kAhead = 2048 / sizeof(Element), kLine = 64 / sizeof(Element);
    if (zs.empty() || ys.empty() || xs.empty()) {
      std::fill_n(values_ + to, inner, Order::kLowest);
      std::fill_n(indices_ + to, inner, index_of_first(zs, ys, xs));
      return;
    }
    for (int64_t c = 0; c < inner; c += kMostLanes) {
      const Lanes<Order, Mark> lanes{std::min(kMostLanes, inner - c), values_ + to + c, winner_};
      bool first = true;
      for (int64_t z = zs.first; z < zs.end; ++z) {
        for (int64_t y = ys.first; y < ys.end; ++y) {
          for (int64_t x = xs.first; x < xs.end; ++x) {
            if (cells_.count == kMostCells) {
              compare(lanes, cells_, std::exchange(first, false));
            }
            const Element* from = slab + (start + position(z, y, x)) * inner + c;
            cells_.add(from, mark(z, y, x));
            // The processor sees by itself where one row goes on, but not soon enough for all of a
            // window: so what no window to the left has.
            for (int64_t i = 0; x + width.stride >= xs.end && i < lanes.count; i += kLine) {
              prefetch(from, kAhead + i);
            }
          }
        }
      }
      compare(lanes, cells_, first);
      put_indices(lanes.count, start, 0, to + c);
    }
  }

  // `count` windows of a row of a contiguous tensor, from the x-th on.
  void windows(
      const Element* slab, const Span& zs, const Span& ys, int64_t x, int64_t count, int64_t to) {
    const Axis<int64_t>& width = geometry_.axis[2];
    const Lanes<Order, Mark> lanes{(count + kBlock - 1) / kBlock * kBlock, best_, winner_};
    const Span xs(width, dilation_[2], x); // of the first
    const int64_t reach = dilation_[2] * (width.kernel - 1);
    const int64_t room = lanes.count + reach / width.stride;
    bool first = true;
    int64_t dealt = 0;
    for (int64_t z = zs.first; z < zs.end; ++z) {
      for (int64_t y = ys.first; y < ys.end; ++y) {
        if (dealt + room * width.stride > kMostDealt) {
          compare(lanes, cells_, std::exchange(first, false));
          dealt = 0;
        }
        const int64_t row =
            (zs.start + z * dilation_[0]) * step_[0] + (ys.start + y * dilation_[1]) * step_[1];
        Element* piles = dealt_ + dealt;
        deal_row(slab + row, xs.start, (count - 1) * width.stride + reach + 1, piles, room);
        dealt += room * width.stride;
        for (int64_t k = 0; k < width.kernel; ++k) {
          if (cells_.count == kMostCells) {
            compare(lanes, cells_, std::exchange(first, false));
          }
          const int64_t at = k * dilation_[2];
          cells_.add(piles + at % width.stride * room + at / width.stride, mark(z, y, k));
        }
      }
    }
    compare(lanes, cells_, first);
    std::copy_n(best_, count, values_ + to);
    put_indices(count, begin(zs, ys, xs), width.stride, to);
    // One that found nothing above the padding may have taken that, unless it lies in the row.
    const int64_t left = (width.padding + width.stride - 1) / width.stride;
    const int64_t rest = width.out + width.padding - reach - 1;
    const int64_t right = rest < 0 ? 0 : rest / width.stride + 1;
    for (int64_t i = 0; i < count; ++i) {
      if (x + i >= left && x + i < right) {
        i = right - x - 1;
      } else if (Order::key(best_[i]) == Order::key(Order::kLowest)) {
        alone(slab, zs, ys, Span(width, dilation_[2], x + i), to + i);
      }
    }
  }

  void deal_row(
      const Element* row, int64_t begin, int64_t count, Element* piles, int64_t room) const {
    const auto run = [&]<int kStep>(std::integral_constant<int, kStep>) {
      deal<kStep>(row, geometry_.axis[2].out, begin, count, Order::kLowest, piles, room);
    };
    switch (geometry_.axis[2].stride) {
      case 1:
        return run(std::integral_constant<int, 1>{});
      case 2:
        return run(std::integral_constant<int, 2>{});
      case 3:
        return run(std::integral_constant<int, 3>{});
      default:
        return run(std::integral_constant<int, kMostStep>{});
    }
  }

  // Of windows that begin at position `start`, and each `shift` behind the one before.
  void put_indices(int64_t count, int64_t start, int64_t shift, int64_t to) {
    Index* indices = indices_ + to;
    if constexpr (kOffsets) {
      std::copy_n(winner_, count, indices);
    } else if (kNarrow && numbers_) {
      for (int64_t i = 0; i < count; ++i) {
        indices[i] = static_cast<Index>(positions_[winner_[i]] + (start + i * shift));
      }
    } else {
      for (int64_t i = 0; i < count; ++i) {
        indices[i] = static_cast<Index>(winner_[i]) + static_cast<Index>(start + i * shift);
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
    values_[to] = value;
    indices_[to] = index;
  }

  const Geometry<int64_t>& geometry_;
  const Element* input_;
  Element* values_;
  Index* indices_;
  const int64_t step_[3]; // positions
  int64_t dilation_[3], lanes_;
  bool numbers_ = false;          // mark cells
  int64_t positions_[kMostCells]; // of the cells of a small window, from its begin on
  CellList<Order, Mark> cells_;
  Mark winner_[kMostLanes];
  Element best_[kMostLanes];
  Element dealt_[kMostDealt];
};

template <class T, class Index, bool kNarrow>
void pool_rows(const PoolCall& call) {
  const Geometry<int64_t>& geometry = call.geometry;
  const auto& [depth, height, width] = geometry.axis;
  const int64_t cells = std::min(cells_of(geometry), geometry.out_plane());
  const int64_t pieces = (width.in - 1) / kMostWindows + 1;
  const int64_t piece = std::min(kGrain, std::min(width.in, kMostWindows) * geometry.inner);
  at::parallel_for(
      0, geometry.outer * depth.in * height.in * pieces,
      kGrain / std::min(kGrain, piece * std::min(kGrain, cells)), [&](int64_t begin, int64_t end) {
        Pool<typename OrderOf<T>::type, Index, kNarrow> pool(call);
        const int64_t slice = begin / pieces / height.in;
        int64_t y = begin / pieces % height.in;
        int64_t outer = slice / depth.in, z = slice % depth.in, x = begin % pieces * kMostWindows;
        for (int64_t i = begin; i < end; ++i) {
          pool.row(outer, z, y, x, std::min(width.in, x + kMostWindows));
          x += kMostWindows;
          if (x >= width.in) {
            x = 0;
            if (++y == height.in) {
              y = 0;
              if (++z == depth.in) {
                z = 0;
                ++outer;
              }
            }
          }
        }
      });
}

void pool(const PoolCall& call) {
  use_huge_pages(call.values);
  use_huge_pages(call.indices);
  with_ordered_type(call.input.scalar_type(), [&]<class T>(std::type_identity<T>) {
    with_index_type(call.indices.scalar_type(), [&]<class Index>(std::type_identity<Index>) {
      using Mark = typename OrderOf<T>::type::Mark;
      const bool narrow = cells_of(call.geometry) <= kMostCells ||
                          farthest(call) <= static_cast<double>(std::numeric_limits<Mark>::max());
      if constexpr (!kIsWindowOffset<Index>) { // whose windows are small
        if (!narrow) {
          pool_rows<T, Index, false>(call);
          return;
        }
      }
      pool_rows<T, Index, true>(call);
    });
  });
}

} // namespace

TORCH_LIBRARY_IMPL(maxunpool_cuda, CPU, m) {
  m.impl("max_pool", run_pool<pool>);
}

} // namespace maxunpool_cuda
