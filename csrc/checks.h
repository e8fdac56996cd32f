// SPDX-License-Identifier: BSD-3-Clause
// Checks that both operators share, on every backend. Eager calls check sizes (int64_t), traced
// calls symbolic sizes (c10::SymInt), with the same messages and exceptions: those of torch.nn. A
// message names the values seen; it has a phrase of PyTorch's where PyTorch's tests look for that.
#pragma once

#include "geometry.h"

#include <ATen/core/Tensor.h>
#include <c10/core/SymBool.h>
#include <c10/core/SymInt.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <ostream>
#include <string>
#include <type_traits>

namespace maxunpool_cuda {

template <class Size>
c10::ArrayRef<Size> sizes_of(const at::Tensor& tensor) {
  if constexpr (std::is_same_v<Size, int64_t>) {
    return tensor.sizes();
  } else {
    return tensor.sym_sizes();
  }
}

// Whether a condition on sizes is met. A condition on a size that a trace leaves open counts as
// met; the call itself checks it again.
template <class Condition>
bool holds(const Condition& condition) {
  return TORCH_GUARD_OR_TRUE(condition);
}

// The arguments that say where windows lie, with a number for each spatial axis.
template <class Size>
struct Window {
  const char* op; // without its rank
  c10::ArrayRef<Size> kernel_size;
  c10::ArrayRef<Size> stride;
  c10::ArrayRef<Size> padding;
  c10::ArrayRef<Size> dilation; // of max pooling; empty: max unpooling has none

  // Of the arguments, padding has the right length most likely: callers often leave it out.
  size_t rank() const { return padding.size(); }
  std::string name() const { return op + std::to_string(rank()) + "d"; }

  bool has_one_length() const {
    const auto fits = [&](const auto& numbers) { return numbers.size() == rank(); };
    return rank() >= 1 && rank() <= Geometry<Size>::kAxes && fits(kernel_size) && fits(stride);
  }

  // Whether uint8 can count the positions of a window.
  bool fits_uint8() const {
    Size volume = 1;
    for (const Size& size : kernel_size) {
      // Positive sizes: a product that exceeds the limit once need not be exact afterwards.
      volume =
          size > kMostOffsets || volume > kMostOffsets ? Size(kMostOffsets + 1) : volume * size;
    }
    const auto undilated = [](const Size& step) { return step == 1; };
    return volume <= kMostOffsets && std::all_of(dilation.begin(), dilation.end(), undilated);
  }

  friend std::ostream& operator<<(std::ostream& to, const Window& window) {
    to << "kernel_size=" << window.kernel_size << ", stride=" << window.stride
       << ", padding=" << window.padding;
    return window.dilation.empty() ? to : to << ", dilation=" << window.dilation;
  }
};

// Bound for numbers of a window: a sum of a few such numbers does not overflow.
constexpr int64_t kWindowLimit = int64_t{1} << 60;

// Checks each number of a window by itself. Callers of an operator may do so before they compute
// with the numbers, or before PyTorch refuses, in its own words, those below -2^62.
template <class Size>
void check_window(const Window<Size>& window) {
  const auto check = [&](int64_t least, c10::ArrayRef<Size> numbers, const char* wanted) {
    const auto fits = [&](const Size& number) { return number >= least; };
    TORCH_CHECK(
        std::all_of(numbers.begin(), numbers.end(), fits),
        window.name(),
        ": expected ",
        wanted,
        " but got ",
        window);
  };
  check(1, window.kernel_size, "kernel_size greater than zero");
  check(
      1,
      window.stride,
      "stride greater than zero (strides should be greater than zero, stride should not be zero)");
  check(1, window.dilation, "dilation greater than zero");
  check(0, window.padding, "no negative padding (pad must be non-negative)");
  const auto check_limit = [&](c10::ArrayRef<Size> numbers) {
    const auto fits = [&](const Size& number) {
      return c10::SymInt(number).maybe_as_int().value_or(0) < kWindowLimit;
    };
    TORCH_CHECK(
        std::all_of(numbers.begin(), numbers.end(), fits),
        window.name(),
        ": expected sizes that do not overflow but got ",
        window);
  };
  check_limit(window.kernel_size);
  check_limit(window.stride);
  check_limit(window.padding);
  check_limit(window.dilation);
}

// Checks the shape of a tensor: a batch, or none, then channels and spatial sizes.
template <class Size>
void check_shape(const Window<Size>& window, const char* tensor, c10::ArrayRef<Size> shape) {
  const size_t least = window.rank() + 1, dims = shape.size();
  bool sane = dims == least || dims == least + 1;
  for (size_t d = dims - least; sane && d < dims; ++d) {
    sane = holds(c10::sym_gt(shape[d], Size(0)));
  }
  const bool unpools = window.dilation.empty();
  TORCH_CHECK(
      sane,
      window.name(),
      ": expected ",
      tensor,
      " of ",
      least,
      " or ",
      least + 1,
      " dimensions, of which only a batch may be empty (",
      unpools ? c10::str("Input to max_unpooling", least - 1, "d should be a ", least, "d or ")
              : c10::str("Expected ", least, "D or "),
      least + 1,
      unpools ? "d Tensor" : "D (batch mode) tensor with optional 0 dim batch size for input",
      "), but got shape ",
      shape);
}

template <class Size>
void check_fits_uint8(const Window<Size>& window) {
  TORCH_CHECK_VALUE(
      window.fits_uint8(),
      window.name(),
      ": expected kernel_size of at most ",
      kMostOffsets,
      " elements, and no dilation, for uint8 indices, which are offsets in the window, but got ",
      window,
      "; use int32");
}

// Checks that nothing computed from these numbers overflows, here or in a kernel. The call itself
// checks sizes that a trace leaves open. A pooled size is at most one larger than `cells` says.
template <class Size>
void check_overflow(
    const Window<Size>& window, c10::ArrayRef<Size> cells, c10::ArrayRef<Size> unpooled) {
  const auto number = [](const Size& size) {
    return static_cast<double>(c10::SymInt(size).maybe_as_int().value_or(1));
  };
  const size_t leading = unpooled.size() - window.rank();
  double bytes = 16, plane = 1; // bytes of the largest element, and to spare
  for (size_t d = 0; d < unpooled.size(); ++d) {
    bytes *= std::max(number(unpooled[d]), 1.0) + 1;
    plane *= d < leading ? 1 : number(unpooled[d]);
  }
  bool fits = bytes < 4 * kWindowLimit;
  for (size_t d = 0; d < window.rank(); ++d) {
    const double apart = window.dilation.empty() ? 1 : number(window.dilation[d]) * plane;
    fits = fits && number(window.kernel_size[d]) * apart < kWindowLimit &&
           number(window.stride[d]) * number(cells[leading + d]) < kWindowLimit &&
           number(window.padding[d]) < kWindowLimit;
  }
  TORCH_CHECK(
      fits,
      window.name(),
      ": expected sizes that do not overflow but got an unpooled shape ",
      unpooled,
      ", ",
      window);
}

} // namespace maxunpool_cuda
