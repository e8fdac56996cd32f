// SPDX-License-Identifier: BSD-3-Clause
// Checks that pooling and unpooling share, on every backend. Takes Window from window.h.
//
// An eager call checks int64_t, a traced call c10::SymInt, and both run the code below: `Size` is
// one of the two. So an error has one message and one type for all callers, and the types are those
// of torch.nn. A message names the values seen. The words in parentheses are PyTorch's own, as its
// tests look for them.
//
// Examples, for an input x of shape [2, 5, 8, 8]:
//
//   max_pool2d(x, 0)             max_pool2d: expected kernel_size greater than zero but got
//                                kernel_size=[0, 0], stride=[0, 0], padding=[0, 0], ...
//   max_pool2d(x[0, 0], 2)       max_pool2d: expected input of 3 or 4 dimensions, of which only a
//                                batch may be empty (...), but got shape [8, 8]
//   max_pool2d(x, 17, index_dtype=torch.uint8, return_indices=True)
//                                max_pool2d: expected kernel_size of at most 256 elements, and no
//                                dilation, for uint8 indices, ...; use int32
#pragma once

#include "geometry.h"
#include "window.h"

#include <ATen/core/Tensor.h>
#include <c10/core/SymBool.h>
#include <c10/core/SymInt.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

// The sizes of a tensor, as Size: int64_t or c10::SymInt.
template <class Size>
c10::ArrayRef<Size> sizes_of(const at::Tensor& tensor) {
  if constexpr (std::is_same_v<Size, int64_t>) {
    return tensor.sizes();
  } else {
    return tensor.sym_sizes();
  }
}

// Whether a condition on sizes is met. If a trace leaves a size open, conditions on it count as
// met: the compiled program calls the operator with a number, which is checked then.
template <class Condition>
bool holds(const Condition& condition) {
  return TORCH_GUARD_OR_TRUE(condition);
}

// Checks that all numbers of a list are at least `least`.
template <class Size>
void check_at_least(
    int64_t least, c10::ArrayRef<Size> numbers, const Window<Size>& window, const char* wanted) {
  const auto is_valid = [&](const Size& number) { return number >= least; };
  TORCH_CHECK(
      std::all_of(numbers.begin(), numbers.end(), is_valid),
      window.name(),
      ": expected ",
      wanted,
      " but got ",
      window);
}

// Checks that all numbers of a list are below kWindowLimit. Symbolic ones pass.
template <class Size>
void check_below_limit(c10::ArrayRef<Size> numbers, const Window<Size>& window) {
  const auto is_valid = [](const Size& number) {
    return c10::SymInt(number).maybe_as_int().value_or(0) < kWindowLimit;
  };
  TORCH_CHECK(
      std::all_of(numbers.begin(), numbers.end(), is_valid),
      window.name(),
      ": expected sizes that do not overflow but got ",
      window);
}

// Checks each number of a window by itself. To be called before computing with the numbers, and
// before PyTorch's dispatcher gets them: that refuses numbers below -2^62 in its own words.
template <class Size>
void check_window(const Window<Size>& window) {
  check_at_least(1, window.kernel_size, window, "kernel_size greater than zero");
  check_at_least(
      1,
      window.stride,
      window,
      "stride greater than zero (strides should be greater than zero, stride should not be zero)");
  check_at_least(1, window.dilation, window, "dilation greater than zero");
  check_at_least(0, window.padding, window, "no negative padding (pad must be non-negative)");
  check_below_limit(window.kernel_size, window);
  check_below_limit(window.stride, window);
  check_below_limit(window.padding, window);
  check_below_limit(window.dilation, window);
}

// Checks the shape of a tensor: [batch, channels, spatial sizes...], or the same without a batch.
// Only the batch may be 0.
template <class Size>
void check_shape(const Window<Size>& window, const char* tensor, c10::ArrayRef<Size> shape) {
  const size_t least = window.rank() + 1;
  const size_t dims = shape.size();
  bool is_valid = dims == least || dims == least + 1;
  for (size_t d = dims - least; is_valid && d < dims; ++d) {
    is_valid = holds(c10::sym_gt(shape[d], Size(0)));
  }
  const bool unpools = window.dilation.empty();
  TORCH_CHECK(
      is_valid,
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

// Checks that uint8 indices, which are window offsets, can count the positions of a window.
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

// Checks that no number overflows that is computed from these, here or in a kernel: the bytes of
// the unpooled tensor, and where a window begins and ends. The estimates are generous and of type
// double, which does not overflow. A symbolic size counts as 1: the later call checks it.
//
// `cells` and `unpooled` are shapes of whole tensors. `cells` has pooled sizes, or numbers that are
// at most one less, which does not matter here.
template <class Size>
void check_overflow(
    const Window<Size>& window, c10::ArrayRef<Size> cells, c10::ArrayRef<Size> unpooled) {
  const auto number = [](const Size& size) {
    return static_cast<double>(c10::SymInt(size).maybe_as_int().value_or(1));
  };
  const size_t leading = unpooled.size() - window.rank(); // batch and channels
  double bytes = 16;                                      // of the largest element
  double plane = 1;                                       // positions
  for (size_t d = 0; d < unpooled.size(); ++d) {
    bytes *= std::max(number(unpooled[d]), 1.0) + 1;
    plane *= d < leading ? 1 : number(unpooled[d]);
  }
  bool fits = bytes < 4 * kWindowLimit;
  for (size_t d = 0; d < window.rank(); ++d) {
    // The distance of two elements of a window in memory, at most.
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
