// SPDX-License-Identifier: BSD-3-Clause
// Max unpooling and its gradient: the body run() of the operators max_unpool and
// max_unpool_backward, alike on every backend. It checks the arguments, allocates the result, and
// hands a backend's kernel an UnpoolCall (calls.h) in place of tensors. Takes Window from window.h,
// shared checks from checks.h, and the choice of memory formats from layout.h.
//
// Example: max_unpool(input, indices, output_size=[8, 8], kernel_size=[3, 3], stride=[2, 2],
// padding=[1, 1], reduce="last") of contiguous CPU tensors [2, 5, 4, 4] calls
// run<int64_t, true, unpool>. It checks the call, allocates a contiguous [2, 5, 8, 8], and calls
// csrc/cpu/max_unpool.cpp's unpool(call, device) with the Geometry of geometry.h's example.
#pragma once

#include "calls.h"
#include "checks.h"
#include "dtypes.h"
#include "layout.h"
#include "reduction.h"
#include "window.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/string_view.h>

#include <algorithm>
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
bool same_sizes(c10::ArrayRef<Size> sizes, c10::ArrayRef<Size> others) {
  const auto same = [](const Size& size, const Size& other) {
    return holds(c10::sym_eq(size, other));
  };
  return std::equal(sizes.begin(), sizes.end(), others.begin(), others.end(), same);
}

// Checks that every size is positive.
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

// Checks devices and dtypes.
template <class Size>
void check_tensors(
    const at::Tensor& values,
    const at::Tensor& indices,
    const Window<Size>& window,
    Reduce reduce) {
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
}

// Checks all shapes, and returns that of the unpooled tensor: batch and channels of the indices,
// then output_size. Any positive output_size is accepted. An index beyond it is out of bounds, and
// the kernel finds that.
template <class Size>
std::vector<Size> unpooled_sizes(
    const at::Tensor& values,
    const at::Tensor& indices,
    c10::ArrayRef<Size> output_size,
    const Window<Size>& window,
    bool forward) {
  const c10::ArrayRef<Size> given = sizes_of<Size>(values);
  const c10::ArrayRef<Size> pooled = sizes_of<Size>(indices);
  check_shape(window, forward ? "input" : "indices", forward ? given : pooled);
  TORCH_CHECK(
      !forward || same_sizes(given, pooled),
      window.name(),
      ": expected indices of the input's shape, ",
      given,
      " (Expected shape of indices to be same as that of the input tensor), but got ",
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

// Checks all that can be told without reading the indices, and returns the unpooled shape. `values`
// is the input of max_unpool if `forward`, else the grad_output of max_unpool_backward.
template <class Size>
std::vector<Size> check_unpooling(
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
  check_tensors(values, indices, window, reduce);
  return unpooled_sizes(values, indices, output_size, window, forward);
}

// What a backend provides: fills call.result, which is on that device and not empty. It checks each
// index; out-of-bounds ones are an error (errors.h).
using UnpoolKernel = void (*)(const UnpoolCall& call, c10::Device device);

// The body of an operator, with the signature of its schema (schemas.cpp). A file registers it with
// the dispatcher once for each operator and backend:
//
//   run<int64_t, true, unpool>    max_unpool on the CPU (unpool() of csrc/cpu/max_unpool.cpp)
//   run<int64_t, false, unpool>   max_unpool_backward on the CPU
//   run<c10::SymInt, true>        max_unpool of Meta tensors, which have shapes but no data: it
//                                 checks and allocates, and needs no kernel (schemas.cpp)
//
// Size      int64_t, or c10::SymInt if sizes may be symbolic (window.h). With a kernel: int64_t.
// kForward  true for max_unpool: `values` is the pooled input, the result the unpooled output.
//           False for max_unpool_backward: `values` is the unpooled grad_output, the result the
//           pooled grad_input. The indices are pooled in both.
// kernel    fills the result of a backend; it is called unless the result is empty.
template <class Size, bool kForward, UnpoolKernel kernel = nullptr>
at::Tensor run(
    const at::Tensor& values,
    const at::Tensor& indices,
    c10::ArrayRef<Size> output_size,
    c10::ArrayRef<Size> kernel_size,
    c10::ArrayRef<Size> stride,
    c10::ArrayRef<Size> padding,
    c10::string_view reduce_name) {
  const Window<Size> window{
      .op = "max_unpool",
      .kernel_size = kernel_size,
      .stride = stride,
      .padding = padding,
      .dilation = {}};
  const Reduce reduce = reduction_of(window, reduce_name);
  const std::vector<Size> unpooled =
      check_unpooling(values, indices, output_size, window, reduce, kForward);
  const c10::ArrayRef<Size> pooled = sizes_of<Size>(indices);
  const at::MemoryFormat layout = layout_of(values, indices, window.rank());
  at::Tensor result = empty_in_layout<Size>(kForward ? unpooled : pooled, values.options(), layout);
  if constexpr (kernel != nullptr) {
    if (result.numel() > 0) {
      const auto dense_values = in_layout(values, layout);
      const auto dense_indices = in_layout(indices, layout);
      const UnpoolCall call{
          .geometry = make_geometry(window, pooled, unpooled, layout),
          .reduce = reduce,
          .forward = kForward,
          .type = values.scalar_type(),
          .index_type = indices.scalar_type(),
          .element_size = static_cast<size_t>(values.element_size()),
          .values = dense_values->const_data_ptr(),
          .indices = dense_indices->const_data_ptr(),
          .result = result.mutable_data_ptr()};
      kernel(call, values.device());
    }
  }
  return result;
}

} // namespace maxunpool_cuda
