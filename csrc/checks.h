// Checks that the validations of both operators share, on every backend. Eager calls check sizes
// (int64_t), traced calls symbolic sizes (c10::SymInt), with the same messages and exceptions.
#pragma once

#include "geometry.h"

#include <ATen/core/Tensor.h>
#include <c10/core/SymBool.h>
#include <c10/core/SymInt.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <string>
#include <type_traits>

namespace maxunpool_cuda {

constexpr int64_t kMostSize = int64_t{1} << 60; // sums of a few numbers up to it do not overflow

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

// The arguments that say where windows lie.
template <class Size>
struct Window {
  const char* op; // without its rank
  c10::ArrayRef<Size> kernel_size;
  c10::ArrayRef<Size> stride;
  c10::ArrayRef<Size> padding;

  size_t rank() const { return kernel_size.size(); }
  std::string name() const { return op + std::to_string(rank()) + "d"; }
};

template <class Size>
void check_rank(const Window<Size>& window) {
  TORCH_CHECK_VALUE(
      window.rank() >= 1 && window.rank() <= 3, window.op,
      ": expected kernel_size of 1, 2 or 3 elements but got ", window.kernel_size);
}

// `in_torch`: PyTorch's own message.
template <class Size>
void check_positive(
    const Window<Size>& window, const char* what, c10::ArrayRef<Size> numbers,
    const char* in_torch) {
  for (const Size& number : numbers) {
    TORCH_CHECK(
        number > 0, window.name(), ": expected ", what, " greater than zero but got ", what, "=",
        numbers, " (", in_torch, ")");
  }
}

template <class Size>
void check_numbers(const Window<Size>& window, const char* stride_in_torch) {
  check_positive(
      window, "kernel_size", window.kernel_size, "kernel size should be greater than zero");
  check_positive(window, "stride", window.stride, stride_in_torch);
  for (const Size& size : window.padding) {
    TORCH_CHECK(
        size >= 0, window.name(),
        ": expected no negative padding: pad must be non-negative but got padding=",
        window.padding);
  }
}

// Whether uint8 can count the positions of a window. False for dilated windows.
template <class Size>
bool fits_uint8(c10::ArrayRef<Size> kernel_size, c10::ArrayRef<Size> dilation = {}) {
  for (const Size& step : dilation) {
    if (step != 1) {
      return false;
    }
  }
  Size volume = 1;
  for (const Size& size : kernel_size) {
    // Positive sizes: a product that exceeds the limit once need not be exact afterwards.
    volume = size > kMostOffsets || volume > kMostOffsets ? Size(kMostOffsets + 1) : volume * size;
  }
  return volume <= kMostOffsets;
}

} // namespace maxunpool_cuda
