// SPDX-License-Identifier: BSD-3-Clause
// The order of elements that max pooling compares: of numbers, and of vectors of numbers.
#pragma once

#include "../dtypes.h"
#include "machine.h"

#include <c10/util/Half.h>

#include <cstdint>
#include <limits>
#include <type_traits>

#pragma GCC diagnostic ignored "-Wpsabi" // vectors are returned: all functions are inlined

namespace maxunpool_cuda {

// The element with the larger key wins, and a NaN over all that came before. A mark says which
// element of a window has won; it is as wide as a key, so that vectors hold as many of both.
template <class T>
struct Order {
  static constexpr bool kHalf = sizeof(T) == 2 && !std::is_integral_v<T>;
  static constexpr int16_t kInfinity = std::is_same_v<T, c10::Half> ? 0x7c00 : 0x7f80;
  static constexpr int16_t kNaN = std::numeric_limits<int16_t>::max();

  using Element = std::conditional_t<kHalf, int16_t, T>; // of halves, the bits
  using Mark = std::conditional_t<sizeof(T) == 1, uint8_t, std::make_signed_t<Bytes<sizeof(T)>>>;

  static constexpr Element kLowest =
      kHalf ? Element(kInfinity | std::numeric_limits<int16_t>::min())
      : std::numeric_limits<Element>::has_infinity ? -std::numeric_limits<Element>::infinity()
                                                   : std::numeric_limits<Element>::lowest();

  // Keys of halves are integers in the same order: both zeros have one, and all NaNs the largest.
  template <class V>
  MAXUNPOOL_INLINE static V key(const V& value) {
    if constexpr (kHalf) {
      const V magnitude = value & kNaN, sign = value >> 15; // -1: negative
      const V number = (magnitude ^ sign) - sign;
      return magnitude > kInfinity ? V{} + kNaN : number;
    } else {
      return value;
    }
  }
  template <class V>
  MAXUNPOOL_INLINE static auto takes(const V& key, const V& best) {
    if constexpr (std::is_integral_v<T>) {
      return key > best;
    } else if constexpr (kHalf) {
      return (key > best) | (key == kNaN);
    } else {
      return (key > best) | (key != key);
    }
  }
};

} // namespace maxunpool_cuda
