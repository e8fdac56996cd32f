// From checked tensors to what a kernel needs: the part of both operators that backends share.
#pragma once

#include "checks.h"
#include "geometry.h"
#include "reduction.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/TensorOptions.h>
#include <c10/util/string_view.h>

#include <cstdint>
#include <string_view>
#include <type_traits>
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

// The layout in which a call is computed, and of its result: the one that the values' strides suggest,
// dense or not; where these tell nothing (an expanded gradient), the indices'; else contiguous. As for
// PyTorch's pooling, a channels-last layout takes a batch, or a volume, which counts as a batch of one.
inline at::MemoryFormat layout_of(
    const at::Tensor& values, const at::Tensor& indices, size_t rank) {
  const auto dims = static_cast<int64_t>(rank) + 2;
  if (rank >= 2 && values.dim() >= (rank == 3 ? dims - 1 : dims)) {
    for (const at::Tensor* tensor : {&values, &indices}) {
      const at::MemoryFormat format =
          (tensor->dim() == dims ? *tensor : tensor->unsqueeze(0)).suggest_memory_format();
      if (format != at::MemoryFormat::Contiguous || tensor->is_contiguous_or_false(format)) {
        return format;
      }
    }
  }
  return at::MemoryFormat::Contiguous;
}

// An unbatched volume in channels-last, which PyTorch has no word for.
inline bool lacks_batch(int64_t dims, at::MemoryFormat layout) {
  return dims == 4 && layout == at::MemoryFormat::ChannelsLast3d;
}

inline at::Tensor in_layout(const at::Tensor& tensor, at::MemoryFormat layout) {
  return lacks_batch(tensor.dim(), layout) ? tensor.unsqueeze(0).contiguous(layout).squeeze(0)
                                           : tensor.contiguous(layout);
}

template <class Size>
at::Tensor empty_in_layout(
    const std::vector<Size>& sizes, const at::TensorOptions& options, at::MemoryFormat layout) {
  if (lacks_batch(static_cast<int64_t>(sizes.size()), layout)) {
    std::vector<Size> batch{1};
    batch.insert(batch.end(), sizes.begin(), sizes.end());
    return empty_in_layout(batch, options, layout).squeeze(0);
  }
  if constexpr (std::is_same_v<Size, int64_t>) {
    return at::empty(sizes, options, layout);
  } else {
    return at::empty_symint(sizes, options, layout);
  }
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
      in_layout(values, layout),
      in_layout(indices, layout),
      empty_in_layout(kForward ? unpooled : pooled.vec(), values.options(), layout)};
  if (call.result.numel() > 0) {
    kernel(call);
  }
  return call.result;
}

} // namespace maxunpool_cuda
