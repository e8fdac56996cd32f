// From checked tensors to what a kernel needs: the part of both operators that backends share.
#pragma once

#include "checks.h"
#include "geometry.h"
#include "reduction.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/TensorOptions.h>
#include <c10/util/MaybeOwned.h>
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
  const at::Tensor& values; // input, or grad_output
  const at::Tensor& indices;
  at::Tensor result; // output, or grad_input
};

// The layout that a tensor's strides suggest, dense or not. Of unbatched tensors only volumes have
// one, where they are dense as a batch of one: as in PyTorch's pooling.
inline at::MemoryFormat suggested_layout(const at::Tensor& tensor, size_t rank) {
  if (rank >= 2 && tensor.dim() == static_cast<int64_t>(rank) + 2) {
    return tensor.suggest_memory_format();
  }
  const auto volume = at::MemoryFormat::ChannelsLast3d;
  const bool is_volume = rank == 3 && tensor.dim() == 4 && !tensor.is_contiguous_or_false() &&
                         tensor.unsqueeze(0).is_contiguous_or_false(volume);
  return is_volume ? volume : at::MemoryFormat::Contiguous;
}

// The layout in which a call is computed, and of its result: that of the values; where these tell
// nothing (an expanded gradient), that of the indices; else contiguous.
inline at::MemoryFormat layout_of(
    const at::Tensor& values, const at::Tensor& indices, size_t rank) {
  const at::MemoryFormat layout = suggested_layout(values, rank);
  const bool told = layout != at::MemoryFormat::Contiguous || values.is_contiguous_or_false();
  return told ? layout : suggested_layout(indices, rank);
}

// An unbatched volume in channels-last, which PyTorch has no word for.
inline bool lacks_batch(int64_t dims, at::MemoryFormat layout) {
  return dims == 4 && layout == at::MemoryFormat::ChannelsLast3d;
}

// The tensor itself wherever it will do: another owner of a tensor that Python knows takes the GIL,
// to come and to go.
inline c10::MaybeOwned<at::Tensor> in_layout(const at::Tensor& tensor, at::MemoryFormat layout) {
  if (!lacks_batch(tensor.dim(), layout)) {
    return tensor.expect_contiguous(layout);
  }
  const at::Tensor batch = tensor.unsqueeze(0);
  return batch.is_contiguous(layout)
             ? c10::MaybeOwned<at::Tensor>::borrowed(tensor)
             : c10::MaybeOwned<at::Tensor>::owned(batch.contiguous(layout).squeeze(0));
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
                                   pooled[leading + d], unpooled[leading + d],
                                   window.kernel_size[d], window.stride[d], window.padding[d]};
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
  const auto dense_values = in_layout(values, layout), dense_indices = in_layout(indices, layout);
  const Call call{
      make_geometry(window, pooled, unpooled, layout), parsed, *dense_values, *dense_indices,
      empty_in_layout(kForward ? unpooled : pooled.vec(), values.options(), layout)};
  if (call.result.numel() > 0) {
    kernel(call);
  }
  return call.result;
}

} // namespace maxunpool_cuda
