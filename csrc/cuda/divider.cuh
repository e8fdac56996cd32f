// Division by a number that is known before the launch.
#pragma once

#include "../geometry.h"

#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

// Division by multiplication with a rounded-up reciprocal, of numbers below half of Offset's range.
// The method, with its proof, is that of Granlund and Montgomery, "Division by invariant integers
// using multiplication", PLDI 1994.
template <class Offset>
class Divider {
  using Product = std::conditional_t<sizeof(Offset) == 4, uint64_t, unsigned __int128>;
  static constexpr int kBits = sizeof(Offset) * 8;

 public:
  Divider() = default;
  explicit Divider(Offset divisor) : divisor_(divisor) {
    while ((Offset{1} << shift_) < divisor) {
      ++shift_;
    }
    const Product power = Product{1} << shift_;
    reciprocal_ = static_cast<Offset>(((power - divisor) << kBits) / divisor + 1);
  }

  MAXUNPOOL_HOST_DEVICE Offset divide(Offset n) const {
    return (high_product(n, reciprocal_) + n) >> shift_;
  }
  MAXUNPOOL_HOST_DEVICE Offset divisor() const { return divisor_; }

  MAXUNPOOL_HOST_DEVICE static Offset high_product(Offset a, Offset b) {
#ifdef __CUDA_ARCH__
    if constexpr (sizeof(Offset) == 4) {
      return __umulhi(a, b);
    }
#endif
    return static_cast<Offset>((static_cast<Product>(a) * b) >> kBits);
  }

 private:
  Offset divisor_ = 1;
  Offset reciprocal_ = 1;
  uint32_t shift_ = 0;
};

// Divider by a number that fits Offset.
template <class Offset = uint32_t>
Divider<Offset> divider(int64_t by) {
  return Divider<Offset>(static_cast<Offset>(by));
}

// Splits `n` into a quotient, returned, and a remainder, left in `n`.
template <class Offset>
MAXUNPOOL_HOST_DEVICE inline Offset split(Offset& n, const Divider<Offset>& by) {
  const Offset quotient = by.divide(n);
  n -= quotient * by.divisor();
  return quotient;
}

// Division by multiplication with a rounded-up reciprocal, where n * divisor < 2^31, or n is far
// below the divisor.
class ShortDivider {
 public:
  ShortDivider() = default;
  explicit ShortDivider(int64_t divisor)
      : reciprocal_(static_cast<uint32_t>((int64_t{1} << 31) / divisor + 1)) {}

  MAXUNPOOL_HOST_DEVICE uint32_t divide(uint32_t n) const {
    return Divider<uint32_t>::high_product(2 * n, reciprocal_);
  }

 private:
  uint32_t reciprocal_ = 0;
};

} // namespace maxunpool_cuda
