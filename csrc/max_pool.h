// Max pooling: the validation, and from tensors to a backend's PoolCall.
#pragma once

#include "calls.h"
#include "checks.h"
#include "dtypes.h"
#include "geometry.h"
#include "layout.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace maxunpool_cuda {

// Arguments after the tensor. Element k of window p lies at the input coordinate p * stride -
// padding + k * dilation.
template <class Size>
struct PoolWindow : Window<Size> {
  c10::ArrayRef<Size> dilation;
  bool ceil_mode;
  c10::ScalarType index_dtype;
};

template <class Size>
void check_pool_window(const PoolWindow<Size>& window) {
  check_rank(window);
  const size_t rank = window.rank();
  TORCH_CHECK_VALUE(
      window.stride.size() == rank && window.padding.size() == rank &&
          window.dilation.size() == rank,
      window.name(), ": expected stride, padding and dilation of ", rank,
      " elements, as kernel_size has, but got stride=", window.stride, ", padding=", window.padding,
      ", dilation=", window.dilation);
  check_numbers<Size>(window, "stride should not be zero: stride should be greater than zero");
  check_positive<Size>(window, "dilation", window.dilation, "dilation should be greater than zero");
  for (size_t d = 0; d < rank; ++d) {
    TORCH_CHECK(
        window.padding[d] <= window.kernel_size[d] / 2, window.name(),
        ": expected padding of at most half of kernel_size (pad should be at most half of "
        "effective kernel size, pad should be smaller than or equal to half of kernel size) but "
        "got padding=",
        window.padding, ", kernel_size=", window.kernel_size, ", dilation=", window.dilation);
  }
}

// Checks that index_dtype can hold the positions of the plane, or count the elements of a window.
template <class Size>
void check_index_dtype(const PoolWindow<Size>& window, c10::ArrayRef<Size> spatial) {
  const std::string name = window.name();
  TORCH_CHECK_VALUE(
      is_index_type(window.index_dtype), name,
      ": expected index_dtype to be int64, int32 or uint8 but got ",
      c10::toString(window.index_dtype));
  if (window.index_dtype == c10::ScalarType::Byte) {
    TORCH_CHECK_VALUE(
        fits_uint8(window.kernel_size, window.dilation), name, ": expected a window of at most ",
        kMostOffsets,
        " elements and dilation 1 for index_dtype uint8, which counts them, but got kernel_size=",
        window.kernel_size, ", dilation=", window.dilation, "; use int32");
  } else if (window.index_dtype == c10::ScalarType::Int) {
    Size plane = 1;
    for (const Size& size : spatial) {
      plane = plane * size;
    }
    TORCH_CHECK_VALUE(
        holds(c10::sym_lt(plane, Size(int64_t{1} << 31))), name,
        ": expected a plane of fewer than 2^31 positions for index_dtype int32 but got spatial "
        "sizes ",
        spatial, "; use int64");
  }
}

// Checks that nothing computed from these sizes overflows, here or in a kernel. Symbolic input
// sizes may be open; the call itself checks those.
template <class Size>
void check_overflow(const PoolWindow<Size>& window, c10::ArrayRef<Size> input) {
  bool fits = true;
  for (size_t d = 0; d < window.rank(); ++d) {
    fits = fits && window.stride[d] <= kMostSize && window.kernel_size[d] <= kMostSize &&
           window.dilation[d] <= Size(kMostSize) / window.kernel_size[d];
  }
  if constexpr (std::is_same_v<Size, int64_t>) {
    double bytes = 16; // of the largest element, and to spare
    double plane = 1;
    for (const int64_t size : input) {
      bytes *= static_cast<double>(std::max<int64_t>(size, 1)) + 1; // no pooled size is larger
    }
    for (const int64_t size : input.slice(input.size() - window.rank())) {
      plane *= static_cast<double>(size);
    }
    for (size_t d = 0; d < window.rank(); ++d) {
      const auto extent =
          static_cast<double>(window.kernel_size[d]) * static_cast<double>(window.dilation[d]);
      fits = fits && extent * plane < static_cast<double>(kMostSize);
    }
    fits = fits && bytes < 4 * static_cast<double>(kMostSize);
  }
  TORCH_CHECK(
      fits, window.name(), ": expected sizes that do not overflow but got input of shape ", input,
      ", kernel_size=", window.kernel_size, ", stride=", window.stride,
      ", dilation=", window.dilation);
}

// Checks that every window holds an element of the input. One that begins in the left padding holds
// none if the dilation steps over all of the input; its value has no source then.
template <class Size>
void check_no_empty_window(const PoolWindow<Size>& window, c10::ArrayRef<Size> spatial) {
  for (size_t d = 0; d < window.rank(); ++d) {
    const Size &step = window.dilation[d], &padding = window.padding[d];
    if (step == 1 || holds(c10::sym_ge(spatial[d], step))) {
      continue;
    }
    for (Size start = padding; start > 0; start = start - window.stride[d]) { // left of the input
      const Size first = (step - start % step) % step;
      TORCH_CHECK_NOT_IMPLEMENTED(
          first < spatial[d], window.name(),
          ": expected every window to hold an element of the input, for its derivative, but got "
          "spatial sizes ",
          spatial, ", padding=", window.padding, ", dilation=", window.dilation);
    }
  }
}

inline int64_t smaller(int64_t a, int64_t b) {
  return std::min(a, b);
}
inline c10::SymInt smaller(const c10::SymInt& a, const c10::SymInt& b) {
  // Where sizes have hints, a comparison adds a guard and keeps the minimum out of the graph.
  return a.has_hint() && b.has_hint() ? (a <= b ? a : b) : a.min(b);
}

// Checks all arguments, and returns the sizes of the pooled tensor.
template <class Size>
std::vector<Size> pooled_sizes(const at::Tensor& input, const PoolWindow<Size>& window) {
  check_pool_window(window);
  const std::string name = window.name();
  const auto rank = static_cast<int64_t>(window.rank());
  const c10::ArrayRef<Size> shape = sizes_of<Size>(input);
  TORCH_CHECK_NOT_IMPLEMENTED(
      is_ordered_type(input.scalar_type()), name,
      ": expected a dtype whose elements compare but got one it is not implemented for (\"", name,
      "\" not implemented for '", c10::toString(input.scalar_type()), "')");
  // PyTorch's messages differ between ranks and between errors: this one contains them all.
  bool sane = input.dim() == rank + 1 || input.dim() == rank + 2;
  const bool batched = input.dim() == rank + 2;
  for (int64_t d = batched ? 1 : 0; sane && d < input.dim(); ++d) {
    sane = holds(c10::sym_gt(shape[d], Size(0)));
  }
  TORCH_CHECK(
      sane, name, ": expected input of ", rank + 1, " or ", rank + 2,
      " dimensions, of which only a batch may be empty (Expected ", rank + 1, "D or ", rank + 2,
      "D (batch mode) tensor with optional 0 dim batch size for input; non-empty ", rank + 1,
      "D or ", rank + 2, "D (batch mode) tensor expected for input) but got:", shape);
  check_overflow(window, shape);
  const c10::ArrayRef<Size> spatial = shape.slice(input.dim() - rank);
  check_index_dtype(window, spatial);
  std::vector<Size> pooled = shape.vec();
  for (int64_t d = 0; d < rank; ++d) {
    const Size& stride = window.stride[d];
    // Most that the last window's begin may be from the first one's.
    Size room =
        spatial[d] + window.padding[d] * 2 - window.dilation[d] * (window.kernel_size[d] - 1) - 1;
    if (window.ceil_mode) {
      room = room + stride - 1;
    }
    TORCH_CHECK(
        holds(c10::sym_ge(room, Size(0))), name,
        ": expected windows that fit the padded input but got an output size below one: Output "
        "size is too small for input of shape ",
        shape, ", kernel_size=", window.kernel_size, ", padding=", window.padding,
        ", dilation=", window.dilation);
    Size last = room / stride;
    if (window.ceil_mode) { // every window begins in the input or its left padding
      last = smaller(last, (spatial[d] + window.padding[d] - 1) / stride);
    }
    pooled[input.dim() - rank + d] = last + 1;
  }
  return pooled;
}

// Body of the operator. A backend gives a kernel, void(const PoolCall&, c10::Device), which fills
// the results unless they are empty. Tensors that have no data need no kernel.
template <class Size, auto kernel = nullptr>
std::tuple<at::Tensor, at::Tensor> run_pool(
    const at::Tensor& input, c10::ArrayRef<Size> kernel_size, c10::ArrayRef<Size> stride,
    c10::ArrayRef<Size> padding, c10::ArrayRef<Size> dilation, bool ceil_mode,
    c10::ScalarType index_dtype) {
  const PoolWindow<Size> window{
      {"max_pool", kernel_size, stride, padding}, dilation, ceil_mode, index_dtype};
  const std::vector<Size> pooled = pooled_sizes(input, window);
  const at::MemoryFormat layout = layout_of(input, input, window.rank());
  at::Tensor values = empty_in_layout<Size>(pooled, input.options(), layout);
  at::Tensor indices = empty_in_layout<Size>(pooled, input.options().dtype(index_dtype), layout);
  if constexpr (!std::is_null_pointer_v<decltype(kernel)>) {
    if (values.numel() > 0) {
      const auto dense_input = in_layout(input, layout);
      PoolCall call{
          make_geometry(kernel_size, stride, padding, pooled, input.sizes(), layout),
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
