// SPDX-License-Identifier: BSD-3-Clause
// Max pooling: the validation, and from tensors to a backend's PoolCall.
#pragma once

#include "calls.h"
#include "checks.h"
#include "dtypes.h"
#include "layout.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace maxunpool_cuda {

// Checks that index_dtype can hold the positions of the plane, or count the elements of a window.
template <class Size>
void check_index_dtype(
    const Window<Size>& window, c10::ArrayRef<Size> spatial, c10::ScalarType index_dtype) {
  TORCH_CHECK_VALUE(
      with_index_type(index_dtype, kNothing),
      window.name(),
      ": expected index_dtype to be int64, int32 or uint8 but got ",
      index_dtype);
  if (index_dtype == c10::ScalarType::Byte) {
    check_fits_uint8(window);
  } else if (index_dtype == c10::ScalarType::Int) {
    Size plane = 1;
    for (const Size& size : spatial) {
      plane = plane * size;
    }
    TORCH_CHECK_VALUE(
        holds(c10::sym_lt(plane, Size(int64_t{1} << 31))),
        window.name(),
        ": expected a plane of fewer than 2^31 positions for int32 indices but got spatial sizes ",
        spatial,
        "; use int64");
  }
}

// Checks that every window holds an element of the input. One that begins in the left padding holds
// none if the dilation steps over all of the input; its value has no source then.
template <class Size>
void check_no_empty_window(const Window<Size>& window, c10::ArrayRef<Size> spatial) {
  for (size_t d = 0; d < window.rank(); ++d) {
    const Size &step = window.dilation[d], &padding = window.padding[d];
    if (step == 1 || holds(c10::sym_ge(spatial[d], step))) {
      continue;
    }
    for (Size start = padding; start > 0; start = start - window.stride[d]) { // left of the input
      const Size first = (step - start % step) % step;
      TORCH_CHECK_NOT_IMPLEMENTED(
          first < spatial[d],
          window.name(),
          ": expected every window to hold an element of the input, for its derivative, but got "
          "spatial sizes ",
          spatial,
          ", ",
          window);
    }
  }
}

inline int64_t smaller(int64_t a, int64_t b) {
  return std::min(a, b);
}
inline c10::SymInt smaller(const c10::SymInt& a, const c10::SymInt& b) {
  return a.min(b); // torch.export refuses the guard that a comparison would add
}

// Checks all arguments, and returns the sizes of the pooled tensor. Element k of window p lies at
// the input coordinate p * stride - padding + k * dilation.
template <class Size>
std::vector<Size> pooled_sizes(
    const at::Tensor& input,
    const Window<Size>& window,
    bool ceil_mode,
    c10::ScalarType index_dtype) {
  const size_t rank = window.rank();
  TORCH_CHECK(
      window.has_one_length() && window.dilation.size() == rank,
      window.name(),
      ": expected kernel_size, stride, padding and dilation of one length, 1, 2 or 3, but got ",
      window);
  check_window(window);
  for (size_t d = 0; d < rank; ++d) {
    TORCH_CHECK(
        window.padding[d] <= window.kernel_size[d] / 2,
        window.name(),
        ": expected padding of at most half of kernel_size (pad should be at most half of "
        "effective kernel size) but got ",
        window);
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      with_ordered_type(input.scalar_type(), kNothing),
      window.name(),
      ": expected a dtype whose elements compare but got ",
      input.scalar_type());
  const c10::ArrayRef<Size> shape = sizes_of<Size>(input);
  check_shape(window, "input", shape);
  check_overflow<Size>(window, shape, shape);
  const c10::ArrayRef<Size> spatial = shape.slice(shape.size() - rank);
  check_index_dtype(window, spatial, index_dtype);
  std::vector<Size> pooled = shape.vec();
  for (size_t d = 0; d < rank; ++d) {
    const Size& stride = window.stride[d];
    // Most that the last window's begin may be from the first one's.
    Size room =
        spatial[d] + window.padding[d] * 2 - window.dilation[d] * (window.kernel_size[d] - 1) - 1;
    if (ceil_mode) {
      room = room + stride - 1;
    }
    TORCH_CHECK(
        holds(c10::sym_ge(room, Size(0))),
        window.name(),
        ": expected windows that fit the padded input (Output size is too small) but got input of "
        "shape ",
        shape,
        ", ",
        window);
    Size last = room / stride;
    // Every window begins in the input or its left padding. In ceil mode the last window of `room`
    // may begin beyond them, unless the window is long enough.
    if (ceil_mode &&
        window.padding[d] + stride - 1 > window.dilation[d] * (window.kernel_size[d] - 1)) {
      last = smaller(last, (spatial[d] + window.padding[d] - 1) / stride);
    }
    pooled[shape.size() - rank + d] = last + 1;
  }
  return pooled;
}

// Body of the operator. A backend gives a kernel, void(const PoolCall&, c10::Device), which fills
// the results unless they are empty. Tensors that have no data need no kernel.
template <class Size, auto kernel = nullptr>
std::tuple<at::Tensor, at::Tensor> run_pool(
    const at::Tensor& input,
    c10::ArrayRef<Size> kernel_size,
    c10::ArrayRef<Size> stride,
    c10::ArrayRef<Size> padding,
    c10::ArrayRef<Size> dilation,
    bool ceil_mode,
    c10::ScalarType index_dtype) {
  const Window<Size> window{"max_pool", kernel_size, stride, padding, dilation};
  const std::vector<Size> pooled = pooled_sizes(input, window, ceil_mode, index_dtype);
  const at::MemoryFormat layout = layout_of(input, input, window.rank());
  at::Tensor values = empty_in_layout<Size>(pooled, input.options(), layout);
  at::Tensor indices = empty_in_layout<Size>(pooled, input.options().dtype(index_dtype), layout);
  if constexpr (!std::is_null_pointer_v<decltype(kernel)>) {
    if (values.numel() > 0) {
      const auto dense_input = in_layout(input, layout);
      PoolCall call{
          make_geometry(window, pooled, input.sizes(), layout),
          {1, 1, 1},
          input.scalar_type(),
          index_dtype,
          dense_input->const_data_ptr(),
          values.mutable_data_ptr(),
          indices.mutable_data_ptr()};
      std::copy(dilation.begin(), dilation.end(), std::end(call.dilation) - dilation.size());
      kernel(call, input.device());
    }
  }
  return {std::move(values), std::move(indices)};
}

} // namespace maxunpool_cuda
