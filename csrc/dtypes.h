// SPDX-License-Identifier: BSD-3-Clause
// Dispatch from run-time dtypes to template arguments, for the CPU and CUDA alike.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

// An element that is only moved, by "last" and by the gradient of "sum", is its bytes.
struct SixteenBytes {
  uint64_t low, high;
};
template <size_t kSize>
using Bytes = std::conditional_t<
    kSize <= 2,
    std::conditional_t<kSize == 1, uint8_t, uint16_t>,
    std::conditional_t<
        kSize == 4,
        uint32_t,
        std::conditional_t<kSize == 8, uint64_t, SixteenBytes>>>;

// Calls f with std::integral_constant of the value. False: it is not one of kValues.
template <int64_t... kValues, class F>
bool with_one_of(int64_t value, F&& f) {
  return ((value == kValues && (f(std::integral_constant<int64_t, kValues>{}), true)) || ...);
}

// Calls f with std::type_identity of Bytes<size>.
template <class F>
void with_bytes(size_t size, F&& f) {
  const bool known = with_one_of<1, 2, 4, 8, 16>(
      static_cast<int64_t>(size), [&](auto bytes) { f(std::type_identity<Bytes<bytes>>{}); });
  TORCH_CHECK(known, "max_unpool: expected elements of 1, 2, 4, 8 or 16 bytes but got ", size);
}

// Calls f with std::type_identity of the C++ type. False: `type` is not one of kTypes.
template <c10::ScalarType... kTypes, class F>
bool with_type_of(c10::ScalarType type, F&& f) {
  return (
      (type == kTypes &&
       (f(std::type_identity<c10::impl::ScalarTypeToCPPTypeT<kTypes>>{}), true)) ||
      ...);
}

template <class F>
bool with_index_type(c10::ScalarType type, F&& f) {
  using enum c10::ScalarType;
  return with_type_of<Byte, Int, Long>(type, f);
}

// Types that add up.
template <class F>
bool with_arithmetic_type(c10::ScalarType type, F&& f) {
  using enum c10::ScalarType;
  return with_type_of<
      Byte,
      Char,
      Short,
      Int,
      Long,
      Half,
      BFloat16,
      Float,
      Double,
      ComplexFloat,
      ComplexDouble>(type, f);
}

// Types whose elements compare.
template <class F>
bool with_ordered_type(c10::ScalarType type, F&& f) {
  using enum c10::ScalarType;
  return with_type_of<Byte, Char, Short, Int, Long, Half, BFloat16, Float, Double>(type, f);
}

// For calls that only ask whether the type is one of those.
constexpr auto kNothing = [](auto) {};

} // namespace maxunpool_cuda
