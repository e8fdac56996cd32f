// Comparison of windows that lie side by side in memory: of each one element, then the next.
#pragma once

#include "../dtypes.h"
#include "processor.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <limits>
#include <type_traits>

namespace maxunpool_cuda {
namespace { // Internal linkage: GCC inlines these more readily.

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
using OrderOf = std::conditional_t<
    std::is_same_v<T, c10::Half>, HalfNumbers<0x7c00>,
    std::conditional_t<std::is_same_v<T, c10::BFloat16>, HalfNumbers<0x7f80>, Numbers<T>>>;

// Comparison of `count` windows whose elements lie side by side: finds the best element of each,
// and its mark. Elements are listed first, in row-major order of the window.
template <class Order>
class Comparison {
  using Element = typename Order::Element;
  using Mark = typename Order::Mark;

 public:
  Comparison(int64_t count, Element* values, Mark* marks)
      : count_(count), values_(values), marks_(marks) {}

  // Lists an element of each window: the first window's address, and their mark.
  void add(const Element* from, Mark mark) {
    if (listed_ == kMostListed) {
      compare();
    }
    list(from, mark);
  }

  // Compares the listed elements with the best so far, and empties the list.
  void compare() {
    in_vectors([&]() MAXUNPOOL_INLINE {
      if (listed_ <= 2) {
        compare_by<2>();
      } else if (listed_ % 3 == 0) {
        compare_by<3>();
      } else {
        compare_by<4>();
      }
    });
    listed_ = 0;
    first_ = false;
  }

 private:
  static constexpr int kMostListed = 256, kMostFused = 4;

  MAXUNPOOL_INLINE void list(const Element* from, Mark mark) {
    from_[listed_] = from;
    mark_[listed_++] = mark;
  }

  template <int kFused>
  MAXUNPOOL_INLINE void compare_by() {
    while (listed_ % kFused != 0) { // to compare an element twice changes nothing
      list(from_[listed_ - 1], mark_[listed_ - 1]);
    }
    if (first_) {
      compare_fused<kFused, true>(0);
    }
    for (int i = first_ ? kFused : 0; i < listed_; i += kFused) {
      compare_fused<kFused, false>(i);
    }
  }

  // Compares kFused elements of each window. kFirst: nothing came before.
  template <int kFused, bool kFirst>
  MAXUNPOOL_INLINE void compare_fused(int listed) {
    const Element* from[kFused] = {};
    Mark mark[kFused] = {};
    for (int f = 0; f < kFused; ++f) {
      from[f] = from_[listed + f];
      mark[f] = mark_[listed + f];
    }
    const int64_t count = count_;
    Element* __restrict best = values_;
    Mark* __restrict winner = marks_;
    for (int64_t i = 0; i < count; ++i) {
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

  const int64_t count_;
  Element* const values_;
  Mark* const marks_;
  bool first_ = true;
  int listed_ = 0;
  const Element* from_[kMostListed + kMostFused]; // with room to repeat the last one
  Mark mark_[kMostListed + kMostFused];
};

} // namespace
} // namespace maxunpool_cuda
