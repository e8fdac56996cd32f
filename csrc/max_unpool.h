// SPDX-License-Identifier: BSD-3-Clause
// Max unpooling and its gradient: the body run() of the operators max_unpool and
// max_unpool_backward, alike on every backend. It asks the guard, allocates the result, and hands a
// backend's kernel an UnpoolCall (calls.h) in place of tensors. Takes the guard from guard.h, and
// the choice of memory formats from layout.h.
//
// Example: max_unpool(input, indices, output_size=[8, 8], kernel_size=[3, 3], stride=[2, 2],
// padding=[1, 1], reduce="last") of contiguous CPU tensors [2, 5, 4, 4] calls run<true, unpool,
// ..>. It allocates a contiguous [2, 5, 8, 8], and calls csrc/cpu/max_unpool.cpp's unpool(call,
// device) with the Geometry of geometry.h's example.
#pragma once

#include "calls.h"
#include "guard.h"
#include "layout.h"
#include "reduction.h"
#include "torch.h"

#include <cstdint>
#include <string>
#include <vector>

namespace maxunpool_cuda {

// What a backend provides: fills call.result, which is not empty and is on device number `device`.
// It checks each index; out-of-bounds ones are an error (errors.h).
using UnpoolKernel = void (*)(const UnpoolCall& call, int32_t device);

template <bool kForward>
constexpr const char* kOp = kForward ? "max_unpool" : "max_unpool_backward";

// The body of an operator, with the signature of its schema (maxunpool_cuda/_operators.py). A file
// registers it with the dispatcher once for each operator and backend: run<true, unpool,
// aoti_torch_device_type_cpu> is max_unpool on the CPU, with false it is max_unpool_backward.
//
// kForward  true for max_unpool: `values` is the pooled input, the result the unpooled output.
//           False for max_unpool_backward: `values` is the unpooled grad_output, the result the
//           pooled grad_input. The indices are pooled in both.
// kernel    fills the result; it is called unless the result is empty.
// backend   where the kernel runs. A redispatched call may have tensors of another device.
template <bool kForward, UnpoolKernel kernel, DeviceTypeFunction backend>
Tensor run(
    const Tensor& values,
    const Tensor& indices,
    IntArrayRef output_size,
    IntArrayRef kernel_size,
    IntArrayRef stride,
    IntArrayRef padding,
    StringHandle reduce_handle) {
  const Window window{
      .kernel_size = kernel_size, .stride = stride, .padding = padding, .dilation = {}};
  const std::string reduce_name = take_string(reduce_handle);
  const bool is_known = reduce_name == "last" || reduce_name == "sum";
  const Reduce reduce = reduce_name == "last" ? Reduce::last : Reduce::sum;
  if (!is_known || !may_unpool(values, indices, output_size, window, reduce, kForward) ||
      device_type(values) != backend()) {
    refuse(kOp<kForward>, values, indices, output_size, kernel_size, stride, padding, reduce_name);
  }
  const IntArrayRef pooled = indices.sizes();
  const std::vector<int64_t> unpooled = unpooled_sizes(pooled, output_size);
  const Layout layout = layout_of(values, indices, window.rank());
  const ScalarType type = type_of(values);
  const IntArrayRef shape = kForward ? IntArrayRef(unpooled) : pooled;
  const Tensor result = empty_in_layout(shape, window.rank(), layout, type, values);
  if (result.numel() > 0) {
    const Tensor dense_values = in_layout(values, window.rank(), layout);
    const Tensor dense_indices = in_layout(indices, window.rank(), layout);
    const UnpoolCall call{
        .geometry = make_geometry(window, pooled, unpooled, layout),
        .reduce = reduce,
        .forward = kForward,
        .type = type,
        .index_type = type_of(indices),
        .element_size = element_size(type),
        .values = dense_values.const_data_ptr(),
        .indices = dense_indices.const_data_ptr(),
        .result = result.mutable_data_ptr()};
    kernel(call, values.get_device_index());
  }
  return result;
}

// The same with one list, as a list costs a tiny call a microsecond: output_size, kernel_size,
// stride and padding one after the other, {8, 8, 3, 3, 2, 2, 1, 1} in 2d.
template <bool kForward, UnpoolKernel kernel, DeviceTypeFunction backend>
Tensor run_short(
    const Tensor& values, const Tensor& indices, IntArrayRef numbers, StringHandle reduce) {
  const auto [output_size, kernel_size, stride, padding] = four_lists(numbers);
  return run<kForward, kernel, backend>(
      values, indices, output_size, kernel_size, stride, padding, reduce);
}

} // namespace maxunpool_cuda
