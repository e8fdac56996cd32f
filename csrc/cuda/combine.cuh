// SPDX-License-Identifier: BSD-3-Clause
// How the owner of an output combines the pooled elements whose indices name it: the last one stays
// (CombineLast), or all add up (CombineSum). The owner goes through them in row-major order of the
// pooled plane, so a result has the same bits in every run.
//
// Example: the elements 5, 7 and 2 name one output, in this order.
//
//   CombineLast<uint32_t>   0 -> 5 -> 7 -> 2       the last one stays
//   CombineSum<float>       0 -> 5 -> 12 -> 14     they add up
//
// If no index names an output, its result is the 0 that both start from.
//
// From reduction.h come plus() and the type that sums of a dtype are accumulated in.
#pragma once

#include "../reduction.h"

#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

// What the elements whose indices name one output do with it.
enum class Order {
  last,     // the last one is stored
  sum,      // all are added, in row-major order
  gradient, // the last one gets its gradient, the others 0
};

// In both, Element is the type in memory, Register the type of an element that was loaded, and
// add_if(match, value) combines with a further element, if its index matches the output.

// The last element. T is a type of unsigned bytes, as elements are only moved. An element that is
// smaller than a register lies in its low bits, and the bits above are arbitrary.
template <class T>
struct CombineLast {
  using Element = T;
  using Register = std::conditional_t<sizeof(T) < sizeof(uint32_t), uint32_t, T>;

  Register value{};

  __device__ __forceinline__ void add_if(bool match, Register element) {
    value = match ? element : value;
  }
};

// The sum, which starts from +0.
template <class T>
struct CombineSum {
  using Element = T;
  using Register = Accumulator<T>;

  Register value{};

  __device__ __forceinline__ void add(Register element) { value = plus<Register>(value, element); }
  __device__ __forceinline__ void add_if(bool match, Register element) {
    if (match) {
      add(element);
    }
  }
  __device__ __forceinline__ T result() const { return static_cast<T>(value); }
};

// Returns 0 + value for a value whose type CombineLast only moves: the sum of a single element. It
// differs from the value only for -0, since 0 + -0 is +0. `negative_zero` holds the bits of -0 if
// the elements are floating-point numbers that should be added, else 0: then nothing changes.
template <class T, class Register>
__device__ __forceinline__ Register added_to_zero(Register value, T negative_zero) {
  return negative_zero != T{} && static_cast<T>(value) == negative_zero ? Register{} : value;
}

} // namespace maxunpool_cuda
