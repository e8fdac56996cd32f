// SPDX-License-Identifier: BSD-3-Clause
// Layouts: which one a call has, tensors in that layout, and the Geometry of a call. Takes Window
// from guard.h and Geometry from geometry.h. maxunpool_cuda/_layout.py chooses the layout of the
// results of a call that is traced, by the same rules.
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
// The strides of the last two rows leave the layout open. In the fourth, all elements are one
// number, expanded, as in the gradient of sum(). The fifth has one channel, and is dense in both
// layouts.
#pragma once

#include "errors.h"
#include "geometry.h"
#include "guard.h"
#include "torch.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace maxunpool_cuda {

// A memory format of PyTorch.
enum class Layout : int8_t {
  contiguous,
  channels_last, // of volumes, too, which PyTorch calls channels_last_3d
};

// Whether a tensor for windows of this rank has batch and channels. Others have channels alone.
inline bool has_batch(const Tensor& tensor, size_t rank) {
  return tensor.sizes().size() == rank + 2;
}

// The dimension, of so many, with the i-th smallest stride: for i = 0, 1, 2, 3 those of [batch,
// channels, height, width] are 3, 2, 1, 0 if contiguous, and 1, 3, 2, 0 in channels_last.
inline size_t inner_to_outer(size_t i, size_t dims, size_t rank, Layout layout) {
  const size_t contiguous = dims - 1 - i;
  if (layout == Layout::contiguous || i > rank) {
    return contiguous;
  }
  return i == 0 ? contiguous - rank : contiguous + 1;
}

// Whether the tensor has no gaps, and its elements are in the order of the layout.
inline bool is_dense(const Tensor& tensor, size_t rank, Layout layout) {
  const IntArrayRef sizes = tensor.sizes();
  const IntArrayRef strides = tensor.strides();
  if (std::count(sizes.begin(), sizes.end(), 0) > 0) {
    return true;
  }
  int64_t expected = 1;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const size_t dim = inner_to_outer(i, sizes.size(), rank, layout);
    if (sizes[dim] != 1 && strides[dim] != expected) {
      return false;
    }
    expected *= sizes[dim];
  }
  return true;
}

// PyTorch's rule, c10::is_channels_last_strides_2d and _3d, for the memory format of a tensor with
// a batch. Strides grow from the channels over the columns to the batch. If the strides fit both
// formats, as where all other sizes are 1, it is contiguous.
inline bool suggests_channels_last(const Tensor& tensor, size_t rank) {
  const IntArrayRef sizes = tensor.sizes();
  const IntArrayRef strides = tensor.strides();
  const int64_t of_channels = strides[1];
  if (of_channels == 0) {
    return false;
  }
  int64_t smallest = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const size_t dim = inner_to_outer(i, sizes.size(), rank, Layout::channels_last);
    const bool is_open = dim == 0 && smallest == of_channels;
    if (sizes[dim] == 0 || strides[dim] < smallest || is_open) {
      return false;
    }
    smallest = strides[dim] * sizes[dim];
  }
  return true;
}

// The layout that a tensor's strides suggest; it need not be dense. Without a batch a tensor is
// contiguous, except for a volume [channels, depth, height, width] that is channels_last_3d if a
// batch of 1 is put before it. PyTorch's pooling has that exception, too.
inline Layout suggested_layout(const Tensor& tensor, size_t rank) {
  const bool is_channels_last = has_batch(tensor, rank)
                                    ? rank >= 2 && suggests_channels_last(tensor, rank)
                                    : rank == 3 && !is_dense(tensor, rank, Layout::contiguous) &&
                                          is_dense(tensor, rank, Layout::channels_last);
  return is_channels_last ? Layout::channels_last : Layout::contiguous;
}

// Whether a tensor's strides tell its layout. They do not if they suggest contiguous, and
// - the tensor is not dense, such as an expanded gradient;
// - or it is dense in channels_last as well: it has one channel, or planes of one position.
inline bool tells_layout(const Tensor& tensor, size_t rank) {
  if (suggested_layout(tensor, rank) == Layout::channels_last) {
    return true;
  }
  const bool may_be_channels_last = rank >= 2 && has_batch(tensor, rank);
  return is_dense(tensor, rank, Layout::contiguous) &&
         !(may_be_channels_last && is_dense(tensor, rank, Layout::channels_last));
}

// The layout of a call, and so of its result: that of the values if their strides tell it, else the
// one that the strides of the indices suggest.
inline Layout layout_of(const Tensor& values, const Tensor& indices, size_t rank) {
  return suggested_layout(tells_layout(values, rank) ? values : indices, rank);
}

// Raises PyTorch's error of too little memory, for a tensor of these sizes on the device of `like`.
[[noreturn]] inline void raise_out_of_memory(
    IntArrayRef sizes, ScalarType type, const Tensor& like) {
  const auto bytes = static_cast<int64_t>(element_size(type));
  fail(words_of("maxunpool_cuda::_explain_empty", like, sizes, bytes));
}

// A tensor of these sizes, dense in the layout, on the device of `like`. Nothing has written to it,
// not even deterministic mode: the kernels write every element.
inline Tensor empty_in_layout(
    IntArrayRef sizes, size_t rank, Layout layout, ScalarType type, const Tensor& like) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const size_t dim = inner_to_outer(i, sizes.size(), rank, layout);
    strides[dim] = stride;
    stride *= std::max<int64_t>(sizes[dim], 1);
  }
  const std::optional<Tensor> tensor =
      try_empty(sizes, strides, type, device_type(like), like.get_device_index());
  if (!tensor) {
    raise_out_of_memory(sizes, type, like);
  }
  return *tensor;
}

// The tensor, dense in the layout: itself if it already is, else a copy.
inline Tensor in_layout(const Tensor& tensor, size_t rank, Layout layout) {
  if (is_dense(tensor, rank, layout)) {
    return tensor;
  }
  const Tensor dense = empty_in_layout(tensor.sizes(), rank, layout, type_of(tensor), tensor);
  copy(dense, tensor);
  return dense;
}

// The Geometry of a call; geometry.h has an example. `pooled` and `unpooled` are the shapes of
// whole tensors, [batch, channels, spatial sizes...] or without the batch.
inline Geometry<int64_t> make_geometry(
    const Window& window, IntArrayRef pooled, IntArrayRef unpooled, Layout layout) {
  const size_t rank = window.rank();
  const size_t leading = pooled.size() - rank; // 2, or 1 without a batch
  const int64_t batch = leading == 2 ? pooled[0] : 1;
  const int64_t channels = pooled[leading - 1];
  const bool is_contiguous = layout == Layout::contiguous;
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
