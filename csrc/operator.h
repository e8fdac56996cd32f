// From checked tensors to what a kernel needs: the part of both operators that backends share.
#pragma once

#include "checks.h"
#include "geometry.h"
#include "reduction.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/MemoryFormat.h>
#include <c10/util/string_view.h>

#include <string_view>
#include <vector>

namespace maxunpool_cuda {

// One call of max_unpool (forward) or max_unpool_backward: dense tensors of one layout. A kernel
// writes every element of `result`, which starts out undefined.
struct Call {
  Geometry<int64_t> geometry;
  Reduce reduce;
  at::Tensor values; // input, or grad_output
  at::Tensor indices;
  at::Tensor result; // output, or grad_input
};

// The layout of the result: that of the values where they are dense, else that of the indices, else
// contiguous. Only batched tensors of rank 2 and 3 have a channels-last layout.
inline at::MemoryFormat layout_of(
    const at::Tensor& values, const at::Tensor& indices, size_t rank) {
  if (rank >= 2 && values.dim() == static_cast<int64_t>(rank) + 2) {
    for (const at::Tensor* tensor : {&values, &indices}) {
      const at::MemoryFormat format = tensor->suggest_memory_format();
      if (tensor->is_contiguous(format)) {
        return format;
      }
    }
  }
  return at::MemoryFormat::Contiguous;
}

inline Geometry<int64_t> make_geometry(
    const Window<int64_t>& window,
    at::IntArrayRef pooled,
    at::IntArrayRef unpooled,
    at::MemoryFormat layout) {
  const auto rank = static_cast<int64_t>(window.rank());
  const int64_t leading = static_cast<int64_t>(pooled.size()) - rank;
  const int64_t batch = leading == 2 ? pooled[0] : 1, channels = pooled[leading - 1];
  Geometry<int64_t> geometry{};
  geometry.rank = static_cast<int>(rank);
  geometry.outer = layout == at::MemoryFormat::Contiguous ? batch * channels : batch;
  geometry.inner = layout == at::MemoryFormat::Contiguous ? 1 : channels;
  for (int64_t a = 0; a < Geometry<int64_t>::kAxes; ++a) {
    const int64_t d = a - (Geometry<int64_t>::kAxes - rank);
    geometry.axis[a] = d < 0 ? Axis<int64_t>{1, 1, 1, 1, 0}
                             : Axis<int64_t>{
                                   pooled[leading + d],
                                   unpooled[leading + d],
                                   window.kernel_size[d],
                                   window.stride[d],
                                   window.padding[d]};
  }
  return geometry;
}

// The body of an operator on a backend: `kernel(call)` fills call.result.
template <bool kForward, void (*kernel)(const Call&)>
at::Tensor run(
    const at::Tensor& values,
    const at::Tensor& indices,
    at::IntArrayRef output_size,
    at::IntArrayRef kernel_size,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    c10::string_view reduce) {
  const Window<int64_t> window{output_size, kernel_size, stride, padding};
  check_window(window);
  const Reduce parsed = parse_reduce(window.name(), reduce);
  const std::vector<int64_t> unpooled = check(values, indices, window, parsed, kForward);
  const at::IntArrayRef pooled = indices.sizes();
  const at::MemoryFormat layout = layout_of(values, indices, window.rank());
  const Call call{
      make_geometry(window, pooled, unpooled, layout),
      parsed,
      values.contiguous(layout),
      indices.contiguous(layout),
      at::empty(kForward ? at::IntArrayRef(unpooled) : pooled, values.options(), layout)};
  if (call.result.numel() > 0) {
    kernel(call);
  }
  return call.result;
}

} // namespace maxunpool_cuda
