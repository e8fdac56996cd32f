// SPDX-License-Identifier: BSD-3-Clause
// Memory formats: the format of a call, tensors in that format, and their Geometry.
#pragma once

#include "checks.h"
#include "geometry.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/TensorOptions.h>
#include <c10/util/MaybeOwned.h>

#include <cstdint>
#include <type_traits>
#include <vector>

namespace maxunpool_cuda {

// Whether the tensor is dense in the layout; false where a symbolic size leaves that open. PyTorch
// 2.8 cannot leave it open, and raises an error there.
template <class Tensor>
bool is_dense(const Tensor& tensor, at::MemoryFormat layout = at::MemoryFormat::Contiguous) {
  if constexpr (requires { tensor.is_contiguous_or_false(layout); }) {
    return tensor.is_contiguous_or_false(layout);
  } else {
    return tensor.is_contiguous(layout);
  }
}

// Layout that a tensor's strides suggest, dense or not. Of unbatched tensors only a volume may be
// channels-last, if it is dense as a batch of one: as in PyTorch's pooling.
inline at::MemoryFormat suggested_layout(const at::Tensor& tensor, size_t rank) {
  if (rank >= 2 && tensor.dim() == static_cast<int64_t>(rank) + 2) {
    return tensor.suggest_memory_format();
  }
  const auto volume = at::MemoryFormat::ChannelsLast3d;
  const bool is_volume =
      rank == 3 && tensor.dim() == 4 && !is_dense(tensor) && is_dense(tensor.unsqueeze(0), volume);
  return is_volume ? volume : at::MemoryFormat::Contiguous;
}

// Whether a tensor's strides tell its layout. Those of an expanded gradient do not, nor those of a
// dense one of one channel, or of planes of one position.
inline bool tells_layout(const at::Tensor& tensor, size_t rank) {
  if (suggested_layout(tensor, rank) != at::MemoryFormat::Contiguous) {
    return true;
  }
  const auto other = rank == 2 ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::ChannelsLast3d;
  const bool has_other = rank >= 2 && tensor.dim() == static_cast<int64_t>(rank) + 2;
  return is_dense(tensor) && !(has_other && is_dense(tensor, other));
}

// Layout of a call and of its result: that of the values; where their strides do not tell, that of
// the indices; else contiguous.
inline at::MemoryFormat layout_of(
    const at::Tensor& values, const at::Tensor& indices, size_t rank) {
  return suggested_layout(tells_layout(values, rank) ? values : indices, rank);
}

// Whether this is an unbatched volume in channels-last, which no PyTorch memory format describes.
inline bool lacks_batch(int64_t dims, at::MemoryFormat layout) {
  return dims == 4 && layout == at::MemoryFormat::ChannelsLast3d;
}

// The tensor in the layout: borrowed where it is dense there already, since an owning reference to
// a tensor that Python knows takes the GIL twice.
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
    c10::ArrayRef<Size> sizes, const at::TensorOptions& options, at::MemoryFormat layout) {
  if (lacks_batch(static_cast<int64_t>(sizes.size()), layout)) {
    std::vector<Size> batch{1};
    batch.insert(batch.end(), sizes.begin(), sizes.end());
    return empty_in_layout<Size>(batch, options, layout).squeeze(0);
  }
  if constexpr (std::is_same_v<Size, int64_t>) {
    return at::empty(sizes, options, layout);
  } else {
    return at::empty_symint(sizes, options, layout);
  }
}

// Geometry of a call. `pooled` and `unpooled` are sizes of whole tensors.
inline Geometry<int64_t> make_geometry(
    const Window<int64_t>& window,
    at::IntArrayRef pooled,
    at::IntArrayRef unpooled,
    at::MemoryFormat layout) {
  const size_t rank = window.rank(), leading = pooled.size() - rank;
  const size_t added = Geometry<int64_t>::kAxes - rank;
  const int64_t batch = leading == 2 ? pooled[0] : 1, channels = pooled[leading - 1];
  const bool contiguous = layout == at::MemoryFormat::Contiguous;
  Geometry<int64_t> geometry{
      contiguous ? batch * channels : batch, contiguous ? 1 : channels, {}, static_cast<int>(rank)};
  for (size_t d = 0; d < rank; ++d) {
    geometry.axis[added + d] = {
        pooled[leading + d],
        unpooled[leading + d],
        window.kernel_size[d],
        window.stride[d],
        window.padding[d]};
  }
  return geometry;
}

} // namespace maxunpool_cuda
