// SPDX-License-Identifier: BSD-3-Clause
// Reductions: what becomes of several pooled elements whose indices name one output.
#pragma once

#include "geometry.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

enum class Reduce : int8_t {
  last, // the last in row-major order of the pooled plane is kept
  sum,
};

// Type that sums of T are accumulated in; integers wrap in it.
template <class T>
using Accumulator = std::conditional_t<
    std::is_integral_v<T>,
    int64_t,
    std::conditional_t<std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16>, float, T>>;

template <class T>
MAXUNPOOL_HOST_DEVICE inline Accumulator<T> plus(Accumulator<T> sum, T value) {
  if constexpr (std::is_integral_v<T>) { // wraps
    return static_cast<int64_t>(static_cast<uint64_t>(sum) + static_cast<uint64_t>(value));
  } else {
    return sum + static_cast<Accumulator<T>>(value);
  }
}

} // namespace maxunpool_cuda
