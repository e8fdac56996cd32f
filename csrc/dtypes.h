// SPDX-License-Identifier: BSD-3-Clause
// From numbers and dtypes that only the running program knows to template arguments, for the CPU
// and CUDA alike.
//
// Each function takes a generic lambda, and calls it with an empty object whose type is the answer.
// Example: a call has index_type == ScalarType::Int. Then
//
//   with_index_type(call.index_type, [&]<class Index>(std::type_identity<Index>) {
//     const auto* indices = static_cast<const Index*>(call.indices);
//   });
//
// compiles the lambda three times, for uint8_t, int32_t and int64_t, calls it with Index = int32_t,
// and returns true. For ScalarType::Short it calls nothing and returns false.
#pragma once

#include "errors.h"
#include "torch.h"

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

// Bytes<size>: the type by which an element of that many bytes is moved. "last" and the gradient of
// "sum" only move elements, so one kernel serves all dtypes of a size.
struct SixteenBytes {
  uint64_t low;
  uint64_t high;
};
template <size_t kSize>
struct BytesOf;
template <>
struct BytesOf<1> : std::type_identity<uint8_t> {};
template <>
struct BytesOf<2> : std::type_identity<uint16_t> {};
template <>
struct BytesOf<4> : std::type_identity<uint32_t> {};
template <>
struct BytesOf<8> : std::type_identity<uint64_t> {};
template <>
struct BytesOf<16> : std::type_identity<SixteenBytes> {};
template <size_t kSize>
using Bytes = typename BytesOf<kSize>::type;

// If `value` is one of kValues, calls f with that value as a std::integral_constant, which is known
// at compile time, and returns true. Else returns false. with_one_of<2, 3>(n, f) stands for
//
//   switch (n) {
//     case 2: f(std::integral_constant<int64_t, 2>{}); return true;
//     case 3: f(std::integral_constant<int64_t, 3>{}); return true;
//     default: return false;
//   }
//
// C++ has no `case` for each element of a parameter pack, so `||` tries them one after the other,
// and stops at the one that fits.
template <int64_t... kValues, class F>
bool with_one_of(int64_t value, F&& f) {
  const auto call_if_equal = [&](auto constant) {
    if (value != constant) {
      return false;
    }
    f(constant);
    return true;
  };
  return (call_if_equal(std::integral_constant<int64_t, kValues>{}) || ...);
}

// Calls f with std::type_identity of Bytes<size>.
template <class F>
void with_bytes(size_t size, F&& f) {
  const bool known = with_one_of<1, 2, 4, 8, 16>(
      static_cast<int64_t>(size), [&](auto bytes) { f(std::type_identity<Bytes<bytes>>{}); });
  if (!known) {
    fail("max_unpool: expected elements of 1, 2, 4, 8 or 16 bytes but got ", size);
  }
}

// If `type` is one of kTypes, calls f with std::type_identity of its C++ type, such as
// BFloat16 for BFloat16, and returns true. Else returns false.
template <ScalarType... kTypes, class F>
bool with_type_of(ScalarType type, F&& f) {
  return with_one_of<static_cast<int64_t>(kTypes)...>(static_cast<int64_t>(type), [&](auto number) {
    constexpr auto kType = static_cast<ScalarType>(number());
    f(std::type_identity<torch::headeronly::impl::ScalarTypeToCPPTypeT<kType>>{});
  });
}

// The dtypes of indices.
template <class F>
bool with_index_type(ScalarType type, F&& f) {
  using enum ScalarType;
  return with_type_of<Byte, Int, Long>(type, f);
}

// The dtypes whose elements add up, which "sum" needs. bool and the rest of PyTorch's do not.
template <class F>
bool with_arithmetic_type(ScalarType type, F&& f) {
  using enum ScalarType;
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

// The dtypes whose elements compare, which pooling needs.
template <class F>
bool with_ordered_type(ScalarType type, F&& f) {
  using enum ScalarType;
  return with_type_of<Byte, Char, Short, Int, Long, Half, BFloat16, Float, Double>(type, f);
}

// For callers that only ask whether the dtype is one of those: with_index_type(type, kNothing).
constexpr auto kNothing = [](auto) {};

} // namespace maxunpool_cuda
