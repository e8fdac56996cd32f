// The order of elements that max pooling compares: of numbers, and of vectors of numbers.
#pragma once

#include "../dtypes.h"
#include "machine.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <limits>
#include <type_traits>

#pragma GCC diagnostic ignored "-Wpsabi" // vectors are returned: all functions are inlined

namespace maxunpool_cuda {

// The element with the larger key wins, and a NaN over all that came before. A mark says which
// element of a window has won; it is as wide as a key, so that vectors hold as many of both.
template <class T>
struct Numbers {
  using Element = T;
  using Mark = std::conditional_t<sizeof(T) == 1, uint8_t, std::make_signed_t<Bytes<sizeof(T)>>>;

  static constexpr T kLowest = std::is_integral_v<T> ? std::numeric_limits<T>::lowest()
                                                     : -std::numeric_limits<T>::infinity();

  template <class V>
  MAXUNPOOL_INLINE static V key(const V& value) {
    return value;
  }
  template <class V>
  MAXUNPOOL_INLINE static auto takes(const V& key, const V& best) {
    if constexpr (std::is_integral_v<T>) {
      return key > best;
    } else {
      return (key > best) | (key != key);
    }
  }
};

// 16-bit floating-point numbers, given the bits of infinity. Keys are integers in the same order:
// both zeros have one key, and all NaNs the largest.
template <int16_t kInfinity>
struct HalfNumbers {
  using Element = int16_t;
  using Mark = int16_t;

  static constexpr int16_t kNaN = std::numeric_limits<int16_t>::max();
  static constexpr int16_t kLowest = kInfinity | std::numeric_limits<int16_t>::min();

  template <class V>
  MAXUNPOOL_INLINE static V key(const V& bits) {
    const V magnitude = bits & kNaN, sign = bits >> 15; // -1: negative
    const V number = (magnitude ^ sign) - sign;
    return magnitude > kInfinity ? V{} + kNaN : number;
  }
  template <class V>
  MAXUNPOOL_INLINE static auto takes(const V& key, const V& best) {
    return (key > best) | (key == kNaN);
  }
};

template <class T>
using OrderOf = std::conditional_t<
    std::is_same_v<T, c10::Half>, HalfNumbers<0x7c00>,
    std::conditional_t<std::is_same_v<T, c10::BFloat16>, HalfNumbers<0x7f80>, Numbers<T>>>;

} // namespace maxunpool_cuda
