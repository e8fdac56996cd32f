// Division by a number that is known before the launch.
#pragma once

#include "../geometry.h"

#include <cstdint>

namespace maxunpool_cuda {

template <class Offset>
class Divider;

// Multiplies by a rounded-up reciprocal; for dividends and divisors below 2^31. The method, with
// its proof, is that of Granlund and Montgomery, "Division by invariant integers using
// multiplication", PLDI 1994.
template <>
class Divider<uint32_t> {
 public:
  Divider() = default;
  explicit Divider(uint32_t divisor) : divisor_(divisor) {
    while ((uint64_t{1} << shift_) < divisor) {
      ++shift_;
    }
    const uint64_t power = uint64_t{1} << shift_;
    reciprocal_ = static_cast<uint32_t>(((power - divisor) << 32) / divisor + 1);
  }

  MAXUNPOOL_HOST_DEVICE uint32_t divide(uint32_t n) const {
    const auto high = static_cast<uint32_t>((static_cast<uint64_t>(n) * reciprocal_) >> 32);
    return (high + n) >> shift_;
  }
  MAXUNPOOL_HOST_DEVICE uint32_t divisor() const { return divisor_; }

 private:
  uint32_t divisor_ = 1;
  uint32_t reciprocal_ = 1;
  uint32_t shift_ = 0;
};

template <>
class Divider<uint64_t> {
 public:
  Divider() = default;
  explicit Divider(uint64_t divisor) : divisor_(divisor) {}

  MAXUNPOOL_HOST_DEVICE uint64_t divide(uint64_t n) const { return n / divisor_; }
  MAXUNPOOL_HOST_DEVICE uint64_t divisor() const { return divisor_; }

 private:
  uint64_t divisor_ = 1;
};

// Splits `n` into a quotient, returned, and a remainder, left in `n`.
template <class Offset>
MAXUNPOOL_HOST_DEVICE inline Offset split(Offset& n, const Divider<Offset>& by) {
  const Offset quotient = by.divide(n);
  n -= quotient * by.divisor();
  return quotient;
}

} // namespace maxunpool_cuda
