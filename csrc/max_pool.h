// SPDX-License-Identifier: BSD-3-Clause
// Max pooling: the body run_pool() of the operator max_pool, alike on every backend. It asks the
// guard, computes the pooled shape, allocates values and indices, and hands a backend's kernel a
// PoolCall (calls.h) in place of tensors. Takes the guard from guard.h, and the choice of memory
// formats from layout.h.
//
// Example: max_pool(input, kernel_size=[3, 3], stride=[2, 2], padding=[1, 1], dilation=[1, 1],
// ceil_mode=False, index_dtype=int64) of a contiguous float32 CPU tensor [2, 5, 8, 8] calls
// run_pool<pool, ..>. It allocates float32 values and int64 indices [2, 5, 4, 4], and calls
// csrc/cpu/max_pool.cpp's pool(call, device) with the Geometry of geometry.h's example.
#pragma once

#include "calls.h"
#include "guard.h"
#include "layout.h"
#include "torch.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <tuple>
#include <vector>

namespace maxunpool_cuda {

// The number of windows along spatial axis d of this size, as torch.nn counts them; 0 if none fits
// the padded input. Windows begin at multiples of stride after the first one.
//
// In the example at the top the first window begins at -1. A last window that begins 7 after it
// still ends in the padded input (8 + 2 - 2 - 1), so windows begin at 0, 2, 4 and 6 after it: 4.
// With ceil_mode there is a fifth, 8 after it, which ends one position behind the padded input.
inline int64_t pooled_size(const Window& window, int64_t size, size_t d, bool ceil_mode) {
  const int64_t stride = window.stride[d];
  const int64_t padding = window.padding[d];
  const int64_t extent = window.dilation[d] * (window.kernel_size[d] - 1); // of a window, less 1
  // Where the last window may begin at most, counted from the first one's begin.
  int64_t farthest = size + padding * 2 - extent - 1;
  if (ceil_mode) {
    farthest += stride - 1; // rounds the quotient below up
  }
  if (farthest < 0) {
    return 0;
  }
  int64_t last = farthest / stride; // its number
  // A window has to begin in the left padding or the input, at most size + padding - 1 from the
  // first one's begin. In ceil mode `farthest` exceeds that if this condition holds.
  if (ceil_mode && padding + stride - 1 > extent) {
    last = std::min(last, (size + padding - 1) / stride);
  }
  return last + 1;
}

// The pooled shape: batch and channels of the input, then the numbers of windows. None if along an
// axis no window fits.
inline std::optional<std::vector<int64_t>> pooled_sizes(
    IntArrayRef shape, const Window& window, bool ceil_mode) {
  std::vector<int64_t> pooled = shape.vec();
  const size_t leading = shape.size() - window.rank();
  for (size_t d = 0; d < window.rank(); ++d) {
    pooled[leading + d] = pooled_size(window, shape[leading + d], d, ceil_mode);
    if (pooled[leading + d] == 0) {
      return std::nullopt;
    }
  }
  return pooled;
}

// What a backend provides: fills call.values and call.indices, which are on the device of that
// number and not empty.
using PoolKernel = void (*)(const PoolCall& call, int32_t device);

// The body of the operator max_pool, with the signature of its schema
// (maxunpool_cuda/_operators.py). Returns values and indices. A file registers it with the
// dispatcher for each backend, as run() in max_unpool.h is: run_pool<pool, ..> on the CPU.
template <PoolKernel kernel, DeviceTypeFunction backend>
std::tuple<Tensor, Tensor> run_pool(
    const Tensor& input,
    IntArrayRef kernel_size,
    IntArrayRef stride,
    IntArrayRef padding,
    IntArrayRef dilation,
    bool ceil_mode,
    ScalarType index_dtype) {
  const Window window{
      .kernel_size = kernel_size, .stride = stride, .padding = padding, .dilation = dilation};
  const std::optional<std::vector<int64_t>> pooled =
      may_pool(input, window, index_dtype) ? pooled_sizes(input.sizes(), window, ceil_mode)
                                           : std::nullopt;
  if (!pooled || device_type(input) != backend()) {
    refuse("max_pool", input, kernel_size, stride, padding, dilation, ceil_mode, index_dtype);
  }
  const Layout layout = layout_of(input, input, window.rank());
  const ScalarType type = type_of(input);
  const Tensor values = empty_in_layout(*pooled, window.rank(), layout, type, input);
  const Tensor indices = empty_in_layout(*pooled, window.rank(), layout, index_dtype, input);
  if (values.numel() > 0) {
    const Tensor dense_input = in_layout(input, window.rank(), layout);
    PoolCall call{
        .geometry = make_geometry(window, *pooled, input.sizes(), layout),
        .dilation = {1, 1, 1},
        .type = type,
        .index_type = index_dtype,
        .input = dense_input.const_data_ptr(),
        .values = values.mutable_data_ptr(),
        .indices = indices.mutable_data_ptr()};
    // Into the last axes: those that the caller does not have come first.
    std::copy(dilation.begin(), dilation.end(), std::end(call.dilation) - dilation.size());
    kernel(call, input.get_device_index());
  }
  return {values, indices};
}

// The same with one list, as in max_unpool.h: kernel_size, stride, padding and dilation.
template <PoolKernel kernel, DeviceTypeFunction backend>
std::tuple<Tensor, Tensor> run_pool_short(
    const Tensor& input, IntArrayRef numbers, bool ceil_mode, ScalarType index_dtype) {
  const auto [kernel_size, stride, padding, dilation] = four_lists(numbers);
  return run_pool<kernel, backend>(
      input, kernel_size, stride, padding, dilation, ceil_mode, index_dtype);
}

} // namespace maxunpool_cuda
