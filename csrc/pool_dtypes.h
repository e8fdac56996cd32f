// From run-time dtypes to max pooling's template arguments; see dtypes.h.
#pragma once

#include "dtypes.h"
#include "reduction.h"

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

// The types that have a largest of several: all that add up but the complex ones. As
// with_arithmetic_type.
template <class F>
bool with_pooled_type(c10::ScalarType type, F&& f) {
  return !c10::isComplexType(type) &&
         with_arithmetic_type(type, [&]<class T>(std::type_identity<T>) {
           if constexpr (std::is_integral_v<T> || std::is_floating_point_v<Accumulator<T>>) {
             f(std::type_identity<T>{});
           }
         });
}

// Calls f with std::type_identity of the type of max_pool's indices.
template <class F>
void with_pool_index_type(c10::ScalarType type, F&& f) {
  return type == c10::ScalarType::Byte ? f(std::type_identity<uint8_t>{})
                                       : with_index_type(type, f);
}

} // namespace maxunpool_cuda
