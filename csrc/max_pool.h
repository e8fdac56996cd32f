// SPDX-License-Identifier: BSD-3-Clause
// Max pooling: the body run_pool() of the operator max_pool, alike on every backend. It checks the
// arguments, computes the pooled shape, allocates values and indices, and hands a backend's kernel
// a PoolCall (calls.h) in place of tensors. Takes Window from window.h, shared checks from
// checks.h, and the choice of memory formats from layout.h.
//
// Example: max_pool(input, kernel_size=[3, 3], stride=[2, 2], padding=[1, 1], dilation=[1, 1],
// ceil_mode=False, index_dtype=int64) of a contiguous float32 CPU tensor [2, 5, 8, 8] calls
// run_pool<int64_t, pool>. It allocates float32 values and int64 indices [2, 5, 4, 4], and calls
// csrc/cpu/max_pool.cpp's pool(call, device) with the Geometry of geometry.h's example.
#pragma once

#include "calls.h"
#include "checks.h"
#include "dtypes.h"
#include "layout.h"
#include "window.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <tuple>
#include <utility>
#include <vector>

namespace maxunpool_cuda {

// Checks that index_dtype can count the positions of the plane, or for uint8 those of a window.
// `spatial` are the sizes of the plane that is pooled.
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

// Checks that every window holds an element of the input; a derivative needs that, since the value
// of an empty window comes from nowhere. A window is empty if it begins in the left padding and its
// dilation steps over the whole input. If the input has 2 elements, padding is 1 and
// dilation 3, a window of 2 elements has the coordinates -1 and 2, and the input ends before 2.
template <class Size>
void check_no_empty_window(const Window<Size>& window, c10::ArrayRef<Size> spatial) {
  for (size_t d = 0; d < window.rank(); ++d) {
    const Size& dilation = window.dilation[d];
    const Size& padding = window.padding[d];
    if (dilation == 1 || holds(c10::sym_ge(spatial[d], dilation))) {
      continue;
    }
    // For each window that begins before the input, at the coordinate -before.
    for (Size before = padding; before > 0; before = before - window.stride[d]) {
      const Size first_inside = (dilation - before % dilation) % dilation; // coordinate
      TORCH_CHECK_NOT_IMPLEMENTED(
          first_inside < spatial[d],
          window.name(),
          ": expected every window to hold an element of the input, for its derivative, but got "
          "spatial sizes ",
          spatial,
          ", ",
          window);
    }
  }
}

// The smaller of two sizes. torch.export refuses the guard that a comparison of symbolic sizes
// would add, so these have a function of their own.
inline int64_t smaller(int64_t a, int64_t b) {
  return std::min(a, b);
}
inline c10::SymInt smaller(const c10::SymInt& a, const c10::SymInt& b) {
  return a.min(b);
}

// Checks the arguments; only whether windows fit the input is left to pooled_size().
template <class Size>
void check_pooling(
    const at::Tensor& input, const Window<Size>& window, c10::ScalarType index_dtype) {
  TORCH_CHECK(
      window.has_one_length() && window.dilation.size() == window.rank(),
      window.name(),
      ": expected kernel_size, stride, padding and dilation of one length, 1, 2 or 3, but got ",
      window);
  check_window(window);
  for (size_t d = 0; d < window.rank(); ++d) {
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
  check_index_dtype(window, shape.slice(shape.size() - window.rank()), index_dtype);
}

// The number of windows along spatial axis d, as torch.nn counts them. `shape` is the input's.
// Windows begin at multiples of stride after the first one.
//
// In the example at the top the first window begins at -1. A last window that begins 7 after it
// still ends in the padded input (8 + 2 - 2 - 1), so windows begin at 0, 2, 4 and 6 after it: 4.
// With ceil_mode there is a fifth, 8 after it, which ends one position behind the padded input.
template <class Size>
Size pooled_size(const Window<Size>& window, c10::ArrayRef<Size> shape, size_t d, bool ceil_mode) {
  const Size& size = shape[shape.size() - window.rank() + d];
  const Size& stride = window.stride[d];
  const Size& padding = window.padding[d];
  const Size extent = window.dilation[d] * (window.kernel_size[d] - 1); // of a window, less 1
  Size farthest = size + padding * 2 - extent - 1; // begin of the last window, from the first one's
  if (ceil_mode) {
    farthest = farthest + stride - 1; // rounds the quotient below up
  }
  TORCH_CHECK(
      holds(c10::sym_ge(farthest, Size(0))),
      window.name(),
      ": expected windows that fit the padded input (Output size is too small) but got input of "
      "shape ",
      shape,
      ", ",
      window);
  Size last = farthest / stride; // its number
  // A window has to begin in the left padding or the input, at most size + padding - 1 from the
  // first one's begin. In ceil mode `farthest` exceeds that if this condition holds.
  if (ceil_mode && padding + stride - 1 > extent) {
    last = smaller(last, (size + padding - 1) / stride);
  }
  return last + 1;
}

// Checks the arguments, and returns the pooled shape: batch and channels of the input, then the
// numbers of windows.
template <class Size>
std::vector<Size> pooled_sizes(
    const at::Tensor& input,
    const Window<Size>& window,
    bool ceil_mode,
    c10::ScalarType index_dtype) {
  check_pooling(input, window, index_dtype);
  const c10::ArrayRef<Size> shape = sizes_of<Size>(input);
  std::vector<Size> pooled = shape.vec();
  for (size_t d = 0; d < window.rank(); ++d) {
    pooled[shape.size() - window.rank() + d] = pooled_size(window, shape, d, ceil_mode);
  }
  return pooled;
}

// What a backend provides: fills call.values and call.indices, which are on that device and not
// empty.
using PoolKernel = void (*)(const PoolCall& call, c10::Device device);

// The body of the operator max_pool, with the signature of its schema (schemas.cpp). Returns values
// and indices. A file registers it with the dispatcher for each backend, as run() in max_unpool.h
// is: run_pool<int64_t, pool> on the CPU, run_pool<int64_t, pool_on_device> on CUDA, and
// run_pool<c10::SymInt>, which needs no kernel, for Meta tensors.
template <class Size, PoolKernel kernel = nullptr>
std::tuple<at::Tensor, at::Tensor> run_pool(
    const at::Tensor& input,
    c10::ArrayRef<Size> kernel_size,
    c10::ArrayRef<Size> stride,
    c10::ArrayRef<Size> padding,
    c10::ArrayRef<Size> dilation,
    bool ceil_mode,
    c10::ScalarType index_dtype) {
  const Window<Size> window{
      .op = "max_pool",
      .kernel_size = kernel_size,
      .stride = stride,
      .padding = padding,
      .dilation = dilation};
  const std::vector<Size> pooled = pooled_sizes(input, window, ceil_mode, index_dtype);
  const at::MemoryFormat layout = layout_of(input, input, window.rank());
  at::Tensor values = empty_in_layout<Size>(pooled, input.options(), layout);
  at::Tensor indices = empty_in_layout<Size>(pooled, input.options().dtype(index_dtype), layout);
  if constexpr (kernel != nullptr) {
    if (values.numel() > 0) {
      const auto dense_input = in_layout(input, layout);
      PoolCall call{
          .geometry = make_geometry(window, pooled, input.sizes(), layout),
          .dilation = {1, 1, 1},
          .type = input.scalar_type(),
          .index_type = index_dtype,
          .input = dense_input->const_data_ptr(),
          .values = values.mutable_data_ptr(),
          .indices = indices.mutable_data_ptr()};
      // Into the last axes: those that the caller does not have come first.
      std::copy(dilation.begin(), dilation.end(), std::end(call.dilation) - dilation.size());
      kernel(call, input.device());
    }
  }
  return {std::move(values), std::move(indices)};
}

} // namespace maxunpool_cuda
