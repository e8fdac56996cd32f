// SPDX-License-Identifier: BSD-3-Clause
// The order of elements that max pooling compares: of numbers, and of vectors of numbers.
//
// It takes nothing from other files but types. The larger number wins, and of equal ones the first.
// A NaN wins over all elements before it, so of several NaNs the last one wins, as in PyTorch.
//
// Example, float16: -1.5 and -2 have the bits 0xbe00 and 0xc000. As int16 they are -16896 and
// -16384, in the wrong order. comparable() makes them -15872 and -16384, and 1.5 stays 15872.
#pragma once

#include "../dtypes.h"
#include "../torch.h"
#include "machine.h"

#include <cstdint>
#include <limits>
#include <type_traits>

#pragma GCC diagnostic ignored "-Wpsabi" // vectors are returned: all functions are inlined

namespace maxunpool_cuda {

// The order of elements of type T. V below is an Element or a vector of them.
template <class T>
struct Order {
  // float16 or bfloat16, which processors do not compare: see comparable().
  static constexpr bool kHalf = sizeof(T) == 2 && !std::is_integral_v<T>;
  static constexpr int16_t kInfinity = std::is_same_v<T, Half> ? 0x7c00 : 0x7f80; // its bits
  static constexpr int16_t kNaN = std::numeric_limits<int16_t>::max(); // what NaNs compare as
  static constexpr int16_t kMagnitude = kNaN;                          // all bits but the sign

  using Element = std::conditional_t<kHalf, int16_t, T>; // of 16-bit floats the bits
  // An integer as wide as an element, so that vectors have as many of both. Of one byte unsigned,
  // so that a list may have 256 indices.
  using SameWidth =
      std::conditional_t<sizeof(T) == 1, uint8_t, std::make_signed_t<Bytes<sizeof(T)>>>;

  // The element that no other is below.
  static constexpr Element lowest() {
    if constexpr (kHalf) {
      return Element(kInfinity | std::numeric_limits<int16_t>::min()); // with the bit of the sign
    } else if constexpr (std::numeric_limits<Element>::has_infinity) {
      return -std::numeric_limits<Element>::infinity();
    } else {
      return std::numeric_limits<Element>::lowest();
    }
  }

  // What stands for an element in wins(). Of 16-bit floats an integer: the integers are in the
  // order of the numbers, that of both zeros is 0, and that of every NaN is the largest.
  template <class V>
  MAXUNPOOL_INLINE static V comparable(const V& element) {
    if constexpr (kHalf) {
      const V magnitude = element & kMagnitude;
      const V sign = element >> 15; // -1: negative
      const V number = (magnitude ^ sign) - sign;
      return magnitude > kInfinity ? V{} + kNaN : number;
    } else {
      return element;
    }
  }

  // Whether an element wins over the best of those before it. Both are comparable().
  template <class V>
  MAXUNPOOL_INLINE static auto wins(const V& element, const V& best) {
    if constexpr (std::is_integral_v<T>) {
      return element > best;
    } else if constexpr (kHalf) {
      return (element > best) | (element == kNaN);
    } else {
      return (element > best) | (element != element);
    }
  }
};

} // namespace maxunpool_cuda
