// Division by a number that is known before the launch.
#pragma once

#include "../geometry.h"

#include <cstdint>

namespace maxunpool_cuda {

template <class Offset>
class Divider;

// Division by multiplication with a rounded-up reciprocal, of numbers below 2^31. The method, with
// its proof, is that of Granlund and Montgomery, "Division by invariant integers using
// multiplication", PLDI 1994.
template <>
class Divider<uint32_t> {
 public:
  Divider() = default;
  explicit Divider(int64_t divisor) : divisor_(static_cast<uint32_t>(divisor)) {
    while ((uint64_t{1} << shift_) < divisor_) {
      ++shift_;
    }
    const uint64_t power = uint64_t{1} << shift_;
    reciprocal_ = static_cast<uint32_t>(((power - divisor_) << 32) / divisor_ + 1);
  }

  MAXUNPOOL_HOST_DEVICE uint32_t divide(uint32_t n) const {
#ifdef __CUDA_ARCH__
    const uint32_t high = __umulhi(n, reciprocal_);
#else
    const auto high = static_cast<uint32_t>(uint64_t{n} * reciprocal_ >> 32);
#endif
    return (high + n) >> shift_;
  }
  MAXUNPOOL_HOST_DEVICE uint32_t divisor() const { return divisor_; }

 private:
  uint32_t divisor_ = 1;
  uint32_t reciprocal_ = 1;
  uint32_t shift_ = 0;
};

// Division of any numbers; that of numbers below 2^31 is as fast as above.
template <>
class Divider<uint64_t> {
 public:
  Divider() = default;
  explicit Divider(int64_t divisor)
      : divisor_(static_cast<uint64_t>(divisor)), narrow_(divisor_ < kNarrow ? divisor : 1) {}

  MAXUNPOOL_HOST_DEVICE uint64_t divide(uint64_t n) const {
    return (n | divisor_) < kNarrow ? narrow_.divide(static_cast<uint32_t>(n)) : n / divisor_;
  }
  MAXUNPOOL_HOST_DEVICE uint64_t divisor() const { return divisor_; }

 private:
  static constexpr uint64_t kNarrow = uint64_t{1} << 31;

  uint64_t divisor_ = 1;
  Divider<uint32_t> narrow_;
};

// Splits `n` into a quotient, returned, and a remainder, left in `n`.
template <class Offset>
MAXUNPOOL_HOST_DEVICE inline Offset split(Offset& n, const Divider<Offset>& by) {
  const Offset quotient = by.divide(n);
  n -= quotient * by.divisor();
  return quotient;
}

} // namespace maxunpool_cuda
