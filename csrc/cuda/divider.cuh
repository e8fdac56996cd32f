// SPDX-License-Identifier: BSD-3-Clause
// Division by a number that is known before the launch: a multiplication and a shift, where a
// division would take a GPU some twenty instructions. Needs nothing of the other files but
// MAXUNPOOL_HOST_DEVICE.
//
// Example: Divider<uint32_t>(7) has the shift 3, as 8 is the next power of two, and the reciprocal
// 613,566,757, which is 2^32 * (8 - 7) / 7, rounded up. For n = 37 the upper half of
// 37 * 613,566,757 is 5, and (5 + 37) >> 3 is 5: the quotient. split() also leaves the
// remainder, 2.
#pragma once

#include "../geometry.h"

#include <bit>
#include <cstdint>

namespace maxunpool_cuda {

// Upper half of a product.
__device__ inline uint64_t multiply_high(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}
__device__ inline uint32_t multiply_high(uint32_t a, uint32_t b) {
  return __umulhi(a, b); // takes fewer registers than the shift of a 64-bit product
}

// Division of numbers below half of what Offset, uint32_t or uint64_t, holds. With B bits in an
// Offset, and 2^shift the least power of two that is not below the divisor,
//
//   reciprocal = floor(2^B * (2^shift - divisor) / divisor) + 1
//   n / divisor = (n * reciprocal / 2^B + n) / 2^shift, each rounded down
//
// The method, with its proof, is that of Granlund and Montgomery, "Division by invariant integers
// using multiplication", PLDI 1994.
template <class Offset>
class Divider {
 public:
  Divider() = default; // by 1
  explicit Divider(int64_t divisor)
      : divisor_(static_cast<Offset>(divisor)), shift_(std::bit_width(divisor_ - 1u)) {
    constexpr int kBits = 8 * sizeof(Offset);
    const auto power = static_cast<unsigned __int128>(1) << shift_;
    reciprocal_ = static_cast<Offset>(((power - divisor_) << kBits) / divisor_ + 1);
  }

  __device__ Offset divide(Offset n) const { return (multiply_high(n, reciprocal_) + n) >> shift_; }
  MAXUNPOOL_HOST_DEVICE Offset divisor() const { return divisor_; }

 private:
  Offset divisor_ = 1;
  Offset reciprocal_ = 1;
  int shift_ = 0;
};

// Splits `n` into a quotient, returned, and a remainder, left in `n`.
template <class Offset>
__device__ inline Offset split(Offset& n, const Divider<Offset>& divider) {
  const Offset quotient = divider.divide(n);
  n -= quotient * divider.divisor();
  return quotient;
}

} // namespace maxunpool_cuda
