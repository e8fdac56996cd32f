// SPDX-License-Identifier: BSD-3-Clause
// Reductions: what becomes of several pooled elements whose indices name one output. Takes
// MAXUNPOOL_HOST_DEVICE from geometry.h.
//
// Example: input {1, 2, 4} with indices {3, 3, 0} is unpooled to a plane of 4 outputs.
//   "last": {4, 0, 0, 2}; the gradient of input[0] is 0, as output[3] is input[1]
//   "sum":  {4, 0, 0, 3}; the gradients of input[0] and input[1] are both that of output[3]
#pragma once

#include "geometry.h"
#include "torch.h"

#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

enum class Reduce : int8_t {
  last, // the last in row-major order of the pooled plane stays
  sum,  // all add up, in row-major order of the pooled plane
};

// Type in which values of type T are summed up: int64_t for integers, which wrap around in it;
// float for float16 and bfloat16; else T.
template <class T>
using Accumulator = std::conditional_t<
    std::is_integral_v<T>,
    int64_t,
    std::conditional_t<std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>, float, T>>;

// sum + value. Integers are added as unsigned ones, for which C++ defines that they wrap around.
template <class T>
MAXUNPOOL_HOST_DEVICE inline Accumulator<T> plus(Accumulator<T> sum, T value) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<int64_t>(static_cast<uint64_t>(sum) + static_cast<uint64_t>(value));
  } else {
    return sum + static_cast<Accumulator<T>>(value);
  }
}

} // namespace maxunpool_cuda
