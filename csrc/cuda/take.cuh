// What an owner makes of the pooled elements that name its output, in row-major order. Held is how
// a pooled element lies in registers.
#pragma once

#include "../reduction.h"

#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

template <class T>
struct TakeLast {
  using Element = T;
  using Held = std::conditional_t<sizeof(T) < sizeof(uint32_t), uint32_t, T>;

  Held value{};

  __device__ void add(Held pooled) { value = pooled; }
  __device__ T result() const { return static_cast<T>(value); }
};

template <class T>
struct TakeSum {
  using Element = T;
  using Held = Accumulator<T>;

  Held sum{};

  __device__ void add(Held pooled) {
    if constexpr (std::is_integral_v<T>) { // wraps
      sum = static_cast<int64_t>(static_cast<uint64_t>(sum) + static_cast<uint64_t>(pooled));
    } else {
      sum += pooled;
    }
  }
  __device__ T result() const { return static_cast<T>(sum); }
};

template <class T>
struct TakeMean {
  using Element = T;
  using Held = T;

  Sum<T> sum{};

  __device__ void add(Held pooled) { sum.add(pooled); }
  __device__ T result() const { return sum.result(Reduce::mean); }
};

} // namespace maxunpool_cuda
