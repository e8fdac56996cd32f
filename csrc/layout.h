// SPDX-License-Identifier: BSD-3-Clause
// Layouts: which one a call has, tensors in that layout, and the Geometry of a call. A layout is a
// PyTorch memory format: contiguous, channels_last (2d) or channels_last_3d. Takes Window from
// guard.h and Geometry from geometry.h.
//
// A call has one layout, and its result gets it. layout_of() chooses it as a user of torch.nn
// expects:
//
//   values                               indices         layout of the call
//   [2, 5, 4, 4], contiguous             any             contiguous
//   [2, 5, 4, 4], channels_last          any             channels_last
//   a slice [:, :3] of the latter        any             channels_last
//   [2, 5, 4, 4], strides [0, 0, 0, 0]   channels_last   channels_last, that of the indices
//   [2, 1, 4, 4], strides [16, 16, 4, 1] channels_last   channels_last, that of the indices
//
// The strides of the last two do not tell. The first has gaps in every layout, as the gradient of
// sum(): one number, expanded. The second has one channel, and is dense in both layouts.
#pragma once

#include "geometry.h"
#include "guard.h"

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/TensorOptions.h>
#include <c10/util/MaybeOwned.h>

#include <cstdint>

namespace maxunpool_cuda {

// Whether a tensor for windows of this rank has batch and channels. Others have channels alone.
inline bool has_batch(const at::Tensor& tensor, size_t rank) {
  return tensor.dim() == static_cast<int64_t>(rank) + 2;
}

// The layout that a tensor's strides suggest; it need not be dense. Without a batch a tensor is
// contiguous, except for a volume [channels, depth, height, width] that is channels_last_3d if a
// batch of 1 is put before it. PyTorch's pooling has that exception, too.
inline at::MemoryFormat suggested_layout(const at::Tensor& tensor, size_t rank) {
  if (rank >= 2 && has_batch(tensor, rank)) {
    return tensor.suggest_memory_format();
  }
  const auto volume = at::MemoryFormat::ChannelsLast3d;
  const bool is_volume = rank == 3 && tensor.dim() == 4 && !tensor.is_contiguous() &&
                         tensor.unsqueeze(0).is_contiguous(volume);
  return is_volume ? volume : at::MemoryFormat::Contiguous;
}

// Whether a tensor's strides tell its layout. They do not if they suggest contiguous, and
// - the tensor is not dense, such as an expanded gradient;
// - or it is dense in channels_last as well: it has one channel, or planes of one position.
inline bool tells_layout(const at::Tensor& tensor, size_t rank) {
  if (suggested_layout(tensor, rank) != at::MemoryFormat::Contiguous) {
    return true;
  }
  const auto channels_last =
      rank == 2 ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::ChannelsLast3d;
  const bool may_be_channels_last = rank >= 2 && has_batch(tensor, rank);
  return tensor.is_contiguous() && !(may_be_channels_last && tensor.is_contiguous(channels_last));
}

// The layout of a call, and so of its result: that of the values if their strides tell it, else the
// one that the strides of the indices suggest.
inline at::MemoryFormat layout_of(
    const at::Tensor& values, const at::Tensor& indices, size_t rank) {
  return suggested_layout(tells_layout(values, rank) ? values : indices, rank);
}

// Whether a tensor of so many dimensions is a volume without a batch, in channels_last_3d. PyTorch
// knows that memory format for 5 dimensions alone, so a batch of 1 is put before it for a while.
inline bool is_volume_without_batch(int64_t dims, at::MemoryFormat layout) {
  return dims == 4 && layout == at::MemoryFormat::ChannelsLast3d;
}

// The tensor, dense in the layout. If it already is, it is borrowed, and must outlive the result:
// an owning reference to a tensor that Python knows would take the GIL twice. Else it is a copy.
inline c10::MaybeOwned<at::Tensor> in_layout(const at::Tensor& tensor, at::MemoryFormat layout) {
  if (!is_volume_without_batch(tensor.dim(), layout)) {
    return tensor.expect_contiguous(layout);
  }
  const at::Tensor batch = tensor.unsqueeze(0);
  if (batch.is_contiguous(layout)) {
    return c10::MaybeOwned<at::Tensor>::borrowed(tensor);
  }
  return c10::MaybeOwned<at::Tensor>::owned(batch.contiguous(layout).squeeze(0));
}

// An undefined tensor of these sizes, dense in the layout.
inline at::Tensor empty_in_layout(
    at::IntArrayRef sizes, const at::TensorOptions& options, at::MemoryFormat layout) {
  if (is_volume_without_batch(static_cast<int64_t>(sizes.size()), layout)) {
    const int64_t row = sizes[3] * sizes[0];
    return at::empty_strided(sizes, {1, sizes[2] * row, row, sizes[0]}, options);
  }
  return at::empty(sizes, options, layout);
}

// The Geometry of a call; geometry.h has an example. `pooled` and `unpooled` are the shapes of
// whole tensors, [batch, channels, spatial sizes...] or without the batch.
inline Geometry<int64_t> make_geometry(
    const Window& window,
    at::IntArrayRef pooled,
    at::IntArrayRef unpooled,
    at::MemoryFormat layout) {
  const size_t rank = window.rank();
  const size_t leading = pooled.size() - rank; // 2, or 1 without a batch
  const int64_t batch = leading == 2 ? pooled[0] : 1;
  const int64_t channels = pooled[leading - 1];
  const bool is_contiguous = layout == at::MemoryFormat::Contiguous;
  Geometry<int64_t> geometry{
      .outer = is_contiguous ? batch * channels : batch,
      .inner = is_contiguous ? 1 : channels,
      .axis = {},
      .rank = static_cast<int>(rank)};
  const size_t first = Geometry<int64_t>::kAxes - rank; // axes before it keep their defaults
  for (size_t d = 0; d < rank; ++d) {
    geometry.axis[first + d] = {
        .in = pooled[leading + d],
        .out = unpooled[leading + d],
        .kernel = window.kernel_size[d],
        .stride = window.stride[d],
        .padding = window.padding[d]};
  }
  return geometry;
}

} // namespace maxunpool_cuda
