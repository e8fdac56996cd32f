// Comparison of neighbours in memory at once: of each window one element, then the next.
#pragma once

#include "../dtypes.h"
#include "pool_plan.h"
#include "processor.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <limits>
#include <type_traits>

namespace maxunpool_cuda {
namespace { // of one file: GCC inlines more of what no other can call

// Order of elements: the larger key wins, and a NaN over all that came before. A mark says which
// element of a window has won. Marks are as wide as keys, so that vectors hold as many of both.
template <class T>
struct Numbers {
  using Element = T;
  using Key = T;
  using Mark = std::conditional_t<sizeof(T) == 1, uint8_t, std::make_signed_t<Bytes<sizeof(T)>>>;

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

// Order of 16-bit floating-point numbers, given the bits of infinity. Keys are integers in the same
// order: both zeros have one key, and all NaNs the largest.
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

// Elements of windows, in row-major order: the address of the first neighbour's, and its mark.
template <class Order, class Mark>
struct CellList {
  static constexpr int kFused = 4; // room to repeat the last one

  int count = 0;
  const typename Order::Element* from[kMostCells + kFused];
  Mark mark[kMostCells + kFused];

  void add(const typename Order::Element* where, Mark what) {
    from[count] = where;
    mark[count++] = what;
  }
};

// Best element of each neighbour so far, and its mark.
template <class Order, class Mark>
struct Winners {
  int64_t count;
  typename Order::Element* values;
  Mark* marks;
};

// Compares kFused elements of each window. kFirst: nothing came before.
template <int kFused, bool kFirst, class Order, class Mark>
MAXUNPOOL_INLINE inline void compare_fused(
    const Winners<Order, Mark>& winners, const typename Order::Element* const* cells,
    const Mark* marks) {
  using Element = typename Order::Element;
  const Element* from[kFused] = {};
  Mark mark[kFused] = {};
  for (int f = 0; f < kFused; ++f) {
    from[f] = cells[f];
    mark[f] = marks[f];
  }
  Element* __restrict best = winners.values;
  Mark* __restrict winner = winners.marks;
  for (int64_t i = 0; i < winners.count; ++i) {
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
    const Winners<Order, Mark>& winners, CellList<Order, Mark>& cells, bool first) {
  while (cells.count % kFused != 0) { // to compare an element twice changes nothing
    cells.add(cells.from[cells.count - 1], cells.mark[cells.count - 1]);
  }
  if (first) {
    compare_fused<kFused, true>(winners, cells.from, cells.mark);
  }
  for (int i = first ? kFused : 0; i < cells.count; i += kFused) {
    compare_fused<kFused, false>(winners, cells.from + i, cells.mark + i);
  }
}

template <class Order, class Mark>
MAXUNPOOL_INLINE inline void compare_any(
    const Winners<Order, Mark>& winners, CellList<Order, Mark>& cells, bool first) {
  if (cells.count <= 2) {
    compare_by<2>(winners, cells, first);
  } else if (cells.count % 3 == 0) {
    compare_by<3>(winners, cells, first);
  } else {
    compare_by<4>(winners, cells, first);
  }
}

// Compares the listed elements with the winners so far, or among themselves if they are the first,
// and empties the list.
template <class Order, class Mark>
void compare(const Winners<Order, Mark>& winners, CellList<Order, Mark>& cells, bool first) {
  in_vectors([&]() MAXUNPOOL_INLINE { compare_any(winners, cells, first); });
  cells.count = 0;
}

} // namespace
} // namespace maxunpool_cuda
