// Max unpooling and its transpose: the validation, and from tensors to a backend's UnpoolCall.
#pragma once

#include "calls.h"
#include "checks.h"
#include "dtypes.h"
#include "geometry.h"
#include "layout.h"
#include "reduction.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/string_view.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace maxunpool_cuda {

// Arguments after the tensors.
template <class Size>
struct UnpoolWindow : Window<Size> {
  c10::ArrayRef<Size> output_size; // spatial sizes
  std::string_view reduce;

  Reduce parsed_reduce() const {
    if (reduce == "last") {
      return Reduce::last;
    }
    TORCH_CHECK_VALUE(
        reduce == "sum", this->name(), ": expected reduce to be 'last' or 'sum' but got '", reduce,
        "'");
    return Reduce::sum;
  }
};

template <class Size>
void check_unpool_window(const UnpoolWindow<Size>& window) {
  check_rank(window);
  const size_t rank = window.rank();
  TORCH_CHECK_VALUE(
      window.stride.size() == rank && window.padding.size() == rank, window.name(),
      ": expected stride and padding of ", rank,
      " elements, as kernel_size has, but got stride=", window.stride,
      ", padding=", window.padding);
  check_numbers<Size>(window, "strides should be greater than zero");
}

// Sizes of the unpooled tensor: `pooled` with output_size for its spatial sizes. Any positive
// output_size is accepted: an index beyond it is bad.
template <class Size>
std::vector<Size> unpooled_sizes(const UnpoolWindow<Size>& window, c10::ArrayRef<Size> pooled) {
  const std::string name = window.name();
  const size_t rank = window.rank(), leading = pooled.size() - rank;
  TORCH_CHECK_VALUE(
      window.output_size.size() == rank, name, ": expected output_size of ", rank,
      " spatial sizes but got ", window.output_size);
  std::vector<Size> sizes = pooled.vec();
  for (size_t d = 0; d < rank; ++d) {
    TORCH_CHECK_VALUE(
        holds(c10::sym_gt(window.output_size[d], Size(0))), name,
        ": expected output_size to contain positive spatial dimensions but got ",
        window.output_size);
    sizes[leading + d] = window.output_size[d];
  }
  if constexpr (std::is_same_v<Size, int64_t>) { // the kernels compute with these
    double bytes = 16;                           // of the largest element
    bool fits = true;
    for (size_t d = 0; d < rank; ++d) {
      fits = fits && window.kernel_size[d] <= kMostSize && window.padding[d] <= kMostSize &&
             window.stride[d] <= kMostSize / pooled[leading + d];
    }
    for (const int64_t size : sizes) {
      bytes *= static_cast<double>(size);
    }
    TORCH_CHECK(
        fits && bytes < 4 * static_cast<double>(kMostSize), name,
        ": expected an output size that does not overflow but got sizes ",
        c10::ArrayRef<Size>(sizes), ", kernel_size=", window.kernel_size,
        ", stride=", window.stride, ", padding=", window.padding);
  }
  return sizes;
}

template <class Size>
bool same_sizes(c10::ArrayRef<Size> a, c10::ArrayRef<Size> b) {
  const auto same = [](const Size& x, const Size& y) { return holds(c10::sym_eq(x, y)); };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), same);
}

// Checks all that can be told without reading the indices, and returns the unpooled sizes. `values`
// is the input if `forward`, else grad_output.
template <class Size>
std::vector<Size> check(
    const at::Tensor& values, const at::Tensor& indices, const UnpoolWindow<Size>& window,
    bool forward) {
  check_unpool_window(window);
  const Reduce reduce = window.parsed_reduce();
  const std::string name = window.name();
  const char* values_name = forward ? "input" : "grad_output";
  const auto pooled = sizes_of<Size>(indices);
  const auto rank = static_cast<int64_t>(window.rank()), named = std::max<int64_t>(rank, 2);
  TORCH_CHECK(
      values.device() == indices.device(), name, ": expected ", values_name,
      " and indices on the same device but got ", values.device(), " and ", indices.device());
  TORCH_CHECK(
      is_index_type(indices.scalar_type()), name,
      ": expected elements in indices of type int64, int32 or uint8 (elements in indices should be "
      "type int64) but got: ",
      c10::toString(indices.scalar_type()));
  TORCH_CHECK_VALUE(
      indices.scalar_type() != c10::ScalarType::Byte || fits_uint8(window.kernel_size), name,
      ": expected kernel_size of at most ", kMostOffsets,
      " elements for uint8 indices, which are offsets in the window (int32 ones are not), but got "
      "kernel_size=",
      window.kernel_size);
  TORCH_CHECK(
      values.dim() == rank + 1 || values.dim() == rank + 2, name, ": expected ", values_name,
      " of ", rank + 1, " or ", rank + 2, " dimensions but got ", values.dim(),
      " (in PyTorch's words, where 1d is 2d: Input to max_unpooling", named, "d should be a ",
      named + 1, "d or ", named + 2, "d Tensor)");
  TORCH_CHECK_NOT_IMPLEMENTED(
      reduce == Reduce::last || is_arithmetic_type(values.scalar_type()), name,
      ": expected a dtype that adds up for reduce='sum' but got a dtype it is not implemented "
      "for: ",
      c10::toString(values.scalar_type()));
  if (forward) {
    TORCH_CHECK(
        same_sizes(pooled, sizes_of<Size>(values)), name,
        ": Expected shape of indices to be same as that of the input tensor (",
        sizes_of<Size>(values), ") but got indices tensor with shape: ", pooled);
  } else {
    TORCH_CHECK(
        indices.dim() == values.dim(), name,
        ": expected grad_output and indices with as many dimensions but got shapes ",
        sizes_of<Size>(values), " and ", pooled);
  }
  for (int64_t d = indices.dim() - rank - 1; d < indices.dim(); ++d) {
    TORCH_CHECK(
        holds(c10::sym_gt(pooled[d], Size(0))), name,
        ": Expected input to have non-zero size for non-batch dimensions, but got ", pooled,
        " with dimension ", d, " being empty");
  }
  std::vector<Size> unpooled = unpooled_sizes(window, pooled);
  if (!forward) {
    TORCH_CHECK(
        same_sizes<Size>(unpooled, sizes_of<Size>(values)), name,
        ": expected grad_output of shape ", c10::ArrayRef<Size>(unpooled), " but got ",
        sizes_of<Size>(values));
  }
  return unpooled;
}

// Body of an operator. A backend gives a kernel, void(const UnpoolCall&, c10::Device), which fills
// the result unless that is empty. Tensors that have no data need no kernel.
template <class Size, bool kForward, auto kernel = nullptr>
at::Tensor run(
    const at::Tensor& values, const at::Tensor& indices, c10::ArrayRef<Size> output_size,
    c10::ArrayRef<Size> kernel_size, c10::ArrayRef<Size> stride, c10::ArrayRef<Size> padding,
    c10::string_view reduce) {
  const UnpoolWindow<Size> window{
      {"max_unpool", kernel_size, stride, padding}, output_size, reduce};
  const std::vector<Size> unpooled = check(values, indices, window, kForward);
  const c10::ArrayRef<Size> pooled = sizes_of<Size>(indices), made = kForward ? unpooled : pooled;
  const at::MemoryFormat layout = layout_of(values, indices, window.rank());
  at::Tensor result = empty_in_layout(made, values.options(), layout);
  if constexpr (!std::is_null_pointer_v<decltype(kernel)>) {
    if (result.numel() > 0) {
      const auto dense_values = in_layout(values, layout);
      const auto dense_indices = in_layout(indices, layout);
      const UnpoolCall call{
          make_geometry(kernel_size, stride, padding, pooled, unpooled, layout),
          window.parsed_reduce(),
          kForward,
          values.scalar_type(),
          indices.scalar_type(),
          static_cast<size_t>(values.element_size()),
          dense_values->const_data_ptr(),
          dense_indices->const_data_ptr(),
          result.mutable_data_ptr()};
      kernel(call, values.device());
    }
  }
  return result;
}

} // namespace maxunpool_cuda
