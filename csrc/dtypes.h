// From run-time dtypes to template arguments, for the CPU and CUDA alike.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>
#include <c10/util/complex.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

// "last" and the plain gather only move data: an element is its bytes.
template <size_t Size>
struct BytesOf;
template <>
struct BytesOf<1> {
  using type = uint8_t;
};
template <>
struct BytesOf<2> {
  using type = uint16_t;
};
template <>
struct BytesOf<4> {
  using type = uint32_t;
};
template <>
struct BytesOf<8> {
  using type = uint64_t;
};
template <>
struct BytesOf<16> {
  struct type {
    uint64_t low, high;
  };
};
template <size_t Size>
using Bytes = typename BytesOf<Size>::type;

// Each of these calls f with std::type_identity of the chosen type.
template <class F>
void with_bytes(size_t size, F&& f) {
  switch (size) {
    case 1:
      return f(std::type_identity<Bytes<1>>{});
    case 2:
      return f(std::type_identity<Bytes<2>>{});
    case 4:
      return f(std::type_identity<Bytes<4>>{});
    case 8:
      return f(std::type_identity<Bytes<8>>{});
    case 16:
      return f(std::type_identity<Bytes<16>>{});
    default:
      TORCH_CHECK(false, "max_unpool: expected elements of 1, 2, 4, 8 or 16 bytes but got ", size);
  }
}

inline bool is_index_type(c10::ScalarType type) {
  return type == c10::ScalarType::Long || type == c10::ScalarType::Int ||
         type == c10::ScalarType::Byte;
}

template <class F>
void with_index_type(c10::ScalarType type, F&& f) {
  switch (type) {
    case c10::ScalarType::Byte:
      return f(std::type_identity<uint8_t>{});
    case c10::ScalarType::Int:
      return f(std::type_identity<int32_t>{});
    default:
      return f(std::type_identity<int64_t>{});
  }
}

// Calls f for the types that add up, and says whether `type` is one of them.
template <class F>
bool with_arithmetic_type(c10::ScalarType type, F&& f) {
  using c10::ScalarType;
  switch (type) {
    case ScalarType::Byte:
      return f(std::type_identity<uint8_t>{}), true;
    case ScalarType::Char:
      return f(std::type_identity<int8_t>{}), true;
    case ScalarType::Short:
      return f(std::type_identity<int16_t>{}), true;
    case ScalarType::Int:
      return f(std::type_identity<int32_t>{}), true;
    case ScalarType::Long:
      return f(std::type_identity<int64_t>{}), true;
    case ScalarType::Half:
      return f(std::type_identity<c10::Half>{}), true;
    case ScalarType::BFloat16:
      return f(std::type_identity<c10::BFloat16>{}), true;
    case ScalarType::Float:
      return f(std::type_identity<float>{}), true;
    case ScalarType::Double:
      return f(std::type_identity<double>{}), true;
    case ScalarType::ComplexFloat:
      return f(std::type_identity<c10::complex<float>>{}), true;
    case ScalarType::ComplexDouble:
      return f(std::type_identity<c10::complex<double>>{}), true;
    default:
      return false;
  }
}

// As with_arithmetic_type, for the types of which several have a largest.
template <class F>
bool with_ordered_type(c10::ScalarType type, F&& f) {
  return !c10::isComplexType(type) &&
         with_arithmetic_type(type, [&]<class T>(std::type_identity<T> chosen) {
           if constexpr (!c10::is_complex<T>::value) {
             f(chosen);
           }
         });
}

inline bool is_arithmetic_type(c10::ScalarType type) {
  return with_arithmetic_type(type, [](auto) {});
}

} // namespace maxunpool_cuda
