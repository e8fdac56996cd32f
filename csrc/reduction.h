// Reductions: what becomes of several pooled elements whose indices name one output.
#pragma once

#include "geometry.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/complex.h>

#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

enum class Reduce : int8_t {
  last, // the last in row-major order of the pooled plane is kept
  sum,
  mean, // integers round toward minus infinity, as torch.scatter_reduce does
};

// Type that sums of T are accumulated in; integers wrap in it.
template <class T>
using Accumulator = std::conditional_t<
    std::is_integral_v<T>, int64_t,
    std::conditional_t<std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16>, float, T>>;

template <class T>
MAXUNPOOL_HOST_DEVICE inline T mean_of(Accumulator<T> sum, int64_t count) {
  using A = Accumulator<T>;
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(divide_down(sum, count));
  } else if constexpr (std::is_floating_point_v<A>) {
    return static_cast<T>(sum / static_cast<A>(count));
  } else {
    return sum / static_cast<typename A::value_type>(count);
  }
}

template <class T>
MAXUNPOOL_HOST_DEVICE inline Accumulator<T> plus(Accumulator<T> sum, T value) {
  if constexpr (std::is_integral_v<T>) { // wraps
    return static_cast<int64_t>(static_cast<uint64_t>(sum) + static_cast<uint64_t>(value));
  } else {
    return sum + static_cast<Accumulator<T>>(value);
  }
}

// Sum and number of the pooled elements that name one output.
template <class T>
struct Sum {
  Accumulator<T> sum;
  uint64_t count;

  MAXUNPOOL_HOST_DEVICE void add(T value) {
    sum = plus(sum, value);
    ++count;
  }
  MAXUNPOOL_HOST_DEVICE T result(Reduce reduce) const {
    if (reduce == Reduce::mean && count > 1) {
      return mean_of<T>(sum, static_cast<int64_t>(count));
    }
    return static_cast<T>(sum);
  }
};

} // namespace maxunpool_cuda
