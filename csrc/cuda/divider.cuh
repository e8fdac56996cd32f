// SPDX-License-Identifier: BSD-3-Clause
// Division by a number that is known before the launch.
#pragma once

#include "../geometry.h"

#include <bit>
#include <cstdint>

namespace maxunpool_cuda {

// Upper half of a product.
MAXUNPOOL_HOST_DEVICE inline uint64_t multiply_high(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}
MAXUNPOOL_HOST_DEVICE inline uint32_t multiply_high(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  return __umulhi(a, b); // takes fewer registers
#else
  return static_cast<uint32_t>(uint64_t{a} * b >> 32);
#endif
}

// Division by multiplication with a rounded-up reciprocal, of numbers below half of what Offset,
// uint32_t or uint64_t, holds. The method, with its proof, is that of Granlund and Montgomery,
// "Division by invariant integers using multiplication", PLDI 1994.
template <class Offset>
class Divider {
 public:
  Divider() = default;
  explicit Divider(int64_t divisor)
      : divisor_(static_cast<Offset>(divisor)), shift_(std::bit_width(divisor_ - 1u)) {
    constexpr int kBits = 8 * sizeof(Offset);
    const auto power = static_cast<unsigned __int128>(1) << shift_;
    reciprocal_ = static_cast<Offset>(((power - divisor_) << kBits) / divisor_ + 1);
  }

  MAXUNPOOL_HOST_DEVICE Offset divide(Offset n) const {
    return (multiply_high(n, reciprocal_) + n) >> shift_;
  }
  MAXUNPOOL_HOST_DEVICE Offset divisor() const { return divisor_; }

 private:
  Offset divisor_ = 1, reciprocal_ = 1;
  int shift_ = 0;
};

// Splits `n` into a quotient, returned, and a remainder, left in `n`.
template <class Offset>
MAXUNPOOL_HOST_DEVICE inline Offset split(Offset& n, const Divider<Offset>& by) {
  const Offset quotient = by.divide(n);
  n -= quotient * by.divisor();
  return quotient;
}

} // namespace maxunpool_cuda
