// SPDX-License-Identifier: BSD-3-Clause
// Max unpooling and its transpose: the validation, and from tensors to a backend's UnpoolCall.
#pragma once

#include "calls.h"
#include "checks.h"
#include "dtypes.h"
#include "layout.h"
#include "reduction.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/string_view.h>

#include <algorithm>
#include <type_traits>
#include <vector>

namespace maxunpool_cuda {

template <class Size>
Reduce reduction_of(const Window<Size>& window, c10::string_view reduce) {
  TORCH_CHECK_VALUE(
      reduce == "last" || reduce == "sum",
      window.name(),
      ": expected reduce to be 'last' or 'sum' but got '",
      reduce,
      "'");
  return reduce == "last" ? Reduce::last : Reduce::sum;
}

template <class Size>
bool same_sizes(c10::ArrayRef<Size> a, c10::ArrayRef<Size> b) {
  const auto same = [](const Size& x, const Size& y) { return holds(c10::sym_eq(x, y)); };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), same);
}

template <class Size>
void check_output_size(const Window<Size>& window, c10::ArrayRef<Size> output_size) {
  for (const Size& size : output_size) {
    TORCH_CHECK_VALUE(
        holds(c10::sym_gt(size, Size(0))),
        window.name(),
        ": expected output_size, or its default, to contain positive spatial dimensions but got ",
        output_size,
        " for ",
        window);
  }
}

// Checks all that can be told without reading the indices, and returns the sizes of the unpooled
// tensor. `values` is the input if `forward`, else grad_output. Any positive output_size is
// accepted: an index beyond it is out of bounds.
template <class Size>
std::vector<Size> unpooled_sizes(
    const at::Tensor& values,
    const at::Tensor& indices,
    c10::ArrayRef<Size> output_size,
    const Window<Size>& window,
    Reduce reduce,
    bool forward) {
  TORCH_CHECK_VALUE(
      window.has_one_length(),
      window.name(),
      ": expected kernel_size, stride and padding of one length, 1, 2 or 3, but got ",
      window);
  check_window(window);
  const auto given = sizes_of<Size>(values), pooled = sizes_of<Size>(indices);
  TORCH_CHECK(
      values.device() == indices.device(),
      window.name(),
      ": expected values and indices on the same device but got ",
      values.device(),
      " and ",
      indices.device());
  TORCH_CHECK(
      with_index_type(indices.scalar_type(), kNothing),
      window.name(),
      ": expected indices of type int64, int32 or uint8 (elements in indices should be type int64) "
      "but got ",
      indices.scalar_type());
  if (indices.scalar_type() == c10::ScalarType::Byte) {
    check_fits_uint8(window);
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      reduce == Reduce::last || with_arithmetic_type(values.scalar_type(), kNothing),
      window.name(),
      ": expected a dtype that adds up for reduce='sum' but got ",
      values.scalar_type());
  check_shape(window, forward ? "input" : "indices", forward ? given : pooled);
  TORCH_CHECK(
      !forward || same_sizes(given, pooled),
      window.name(),
      ": Expected shape of indices to be same as that of the input, ",
      given,
      ", but got ",
      pooled);
  TORCH_CHECK_VALUE(
      output_size.size() == window.rank(),
      window.name(),
      ": expected output_size of ",
      window.rank(),
      " spatial sizes but got ",
      output_size);
  std::vector<Size> unpooled = pooled.vec();
  std::copy(output_size.begin(), output_size.end(), unpooled.end() - window.rank());
  check_output_size(window, output_size);
  check_overflow<Size>(window, pooled, unpooled);
  TORCH_CHECK(
      forward || same_sizes<Size>(given, unpooled),
      window.name(),
      ": expected grad_output of shape ",
      c10::ArrayRef<Size>(unpooled),
      " but got ",
      given);
  return unpooled;
}

// Body of an operator. A backend gives a kernel, void(const UnpoolCall&, c10::Device), which fills
// the result unless that is empty. Tensors that have no data need no kernel.
template <class Size, bool kForward, auto kernel = nullptr>
at::Tensor run(
    const at::Tensor& values,
    const at::Tensor& indices,
    c10::ArrayRef<Size> output_size,
    c10::ArrayRef<Size> kernel_size,
    c10::ArrayRef<Size> stride,
    c10::ArrayRef<Size> padding,
    c10::string_view reduce_name) {
  const Window<Size> window{"max_unpool", kernel_size, stride, padding, {}};
  const Reduce reduce = reduction_of(window, reduce_name);
  const std::vector<Size> unpooled =
      unpooled_sizes(values, indices, output_size, window, reduce, kForward);
  const c10::ArrayRef<Size> pooled = sizes_of<Size>(indices), made = kForward ? unpooled : pooled;
  const at::MemoryFormat layout = layout_of(values, indices, window.rank());
  at::Tensor result = empty_in_layout(made, values.options(), layout);
  if constexpr (!std::is_null_pointer_v<decltype(kernel)>) {
    if (result.numel() > 0) {
      const auto dense_values = in_layout(values, layout);
      const auto dense_indices = in_layout(indices, layout);
      const UnpoolCall call{
          make_geometry(window, pooled, unpooled, layout),
          reduce,
          kForward,
          values.scalar_type(),
          indices.scalar_type(),
          static_cast<size_t>(values.element_size()),
          dense_values->const_data_ptr(),
          dense_indices->const_data_ptr(),
          result.mutable_data_ptr()};
      kernel(call, values.device());
    }
  }
  return result;
}

} // namespace maxunpool_cuda
