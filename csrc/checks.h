// The one validation of unpooling and its transpose, on every backend: eager calls check sizes
// (int64_t), traced ones symbolic sizes (c10::SymInt), with the same words and the same exception
// types.
#pragma once

#include "dtypes.h"
#include "geometry.h"
#include "reduction.h"

#include <ATen/core/Tensor.h>
#include <c10/core/SymBool.h>
#include <c10/core/SymInt.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace maxunpool_cuda {

template <class Size>
c10::ArrayRef<Size> sizes_of(const at::Tensor& tensor) {
  if constexpr (std::is_same_v<Size, int64_t>) {
    return tensor.sizes();
  } else {
    return tensor.sym_sizes();
  }
}

// Whether a condition on sizes is met. One on a size that a trace leaves open, for only data will
// tell it, is taken to be: the call itself, which has the data, asks again.
template <class Condition>
bool holds(const Condition& condition) {
  return TORCH_GUARD_OR_TRUE(condition);
}

inline int64_t smaller(int64_t a, int64_t b) {
  return std::min(a, b);
}
inline c10::SymInt smaller(const c10::SymInt& a, const c10::SymInt& b) {
  // A comparison says less, in the graph, than the minimum of sizes that it need not name.
  return a.has_hint() && b.has_hint() ? (a <= b ? a : b) : a.min(b);
}

template <class Size>
bool same_sizes(c10::ArrayRef<Size> a, c10::ArrayRef<Size> b) {
  const auto same = [](const Size& x, const Size& y) { return holds(c10::sym_eq(x, y)); };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), same);
}

// The arguments that both operators share, as the schema orders them.
template <class Size>
struct Window {
  c10::ArrayRef<Size> output_size; // spatial sizes
  c10::ArrayRef<Size> kernel_size;
  c10::ArrayRef<Size> stride;
  c10::ArrayRef<Size> padding;

  size_t rank() const { return kernel_size.size(); }
  std::string name() const { return "max_unpool" + std::to_string(rank()) + "d"; }
};

inline Reduce parse_reduce(std::string_view name, std::string_view reduce) {
  if (reduce == "last") {
    return Reduce::last;
  }
  if (reduce == "sum") {
    return Reduce::sum;
  }
  TORCH_CHECK_VALUE(
      reduce == "mean", name, ": expected reduce to be 'last', 'sum' or 'mean' but got '", reduce,
      "'");
  return Reduce::mean;
}

template <class Size>
void check_window(const Window<Size>& window) {
  const size_t rank = window.rank();
  TORCH_CHECK_VALUE(
      rank >= 1 && rank <= 3, "max_unpool: expected kernel_size of 1, 2 or 3 elements but got ",
      window.kernel_size);
  const std::string name = window.name();
  TORCH_CHECK_VALUE(
      window.stride.size() == rank && window.padding.size() == rank, name,
      ": expected stride and padding of ", rank,
      " elements, as kernel_size has, but got stride=", window.stride,
      ", padding=", window.padding);
  for (size_t d = 0; d < rank; ++d) {
    TORCH_CHECK(
        window.kernel_size[d] > 0, name,
        ": expected kernel_size greater than zero but got kernel_size=", window.kernel_size);
    TORCH_CHECK(
        window.stride[d] > 0, name,
        ": expected stride greater than zero (strides should be greater than zero) but got stride=",
        window.stride);
    TORCH_CHECK(
        window.padding[d] >= 0, name,
        ": expected padding that is non-negative but got padding=", window.padding);
  }
}

// Whether a byte can tell the positions in a window apart.
template <class Size>
bool fits_byte(c10::ArrayRef<Size> kernel_size) {
  Size volume = 1;
  for (const Size& size : kernel_size) {
    // Sizes are positive; where one alone is too large, the product need not be right.
    volume = size > kMostOffsets || volume > kMostOffsets ? Size(kMostOffsets + 1) : volume * size;
  }
  return volume <= kMostOffsets;
}

// The sizes of the unpooled tensor: `pooled` with output_size for its spatial sizes. Any positive
// sizes do, for they only say which indices are valid.
template <class Size>
std::vector<Size> unpooled_sizes(const Window<Size>& window, c10::ArrayRef<Size> pooled) {
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
    constexpr int64_t kLimit = int64_t{1} << 60;
    double bytes = 16; // of the largest element
    bool fits = true;
    for (size_t d = 0; d < rank; ++d) {
      fits = fits && window.kernel_size[d] <= kLimit && window.padding[d] <= kLimit &&
             window.stride[d] <= kLimit / pooled[leading + d];
    }
    for (const int64_t size : sizes) {
      bytes *= static_cast<double>(size);
    }
    TORCH_CHECK(
        fits && bytes < 4 * static_cast<double>(kLimit), name,
        ": expected an output size that does not overflow but got sizes ",
        c10::ArrayRef<Size>(sizes), ", kernel_size=", window.kernel_size,
        ", stride=", window.stride, ", padding=", window.padding);
  }
  return sizes;
}

// Checks all that can be told without reading the indices, and returns the unpooled sizes.
// `values` is what is scattered (input) or gathered from (grad_output): forward says which.
template <class Size>
std::vector<Size> check(
    const at::Tensor& values,
    const at::Tensor& indices,
    const Window<Size>& window,
    Reduce reduce,
    bool forward) {
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
      indices.scalar_type() != c10::ScalarType::Byte || fits_byte(window.kernel_size), name,
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
      ": expected a dtype that adds up for reduce='sum' and 'mean' but got a dtype it is not "
      "implemented for: ",
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
        same_sizes(c10::ArrayRef<Size>(unpooled), sizes_of<Size>(values)), name,
        ": expected grad_output of shape ", c10::ArrayRef<Size>(unpooled), " but got ",
        sizes_of<Size>(values));
  }
  return unpooled;
}

// The words for an index outside its output plane. `position` counts in the pooled plane, `plane`
// in batch * channels; `out` holds the sizes of three axes, of which the caller named the last
// `rank`; in_window: the index is an offset in its window.
inline std::string invalid_index(
    int rank,
    const int64_t (&out)[3],
    bool in_window,
    int64_t index,
    int64_t position,
    int64_t plane) {
  std::string volume;
  for (int a = 3 - rank; a < 3; ++a) {
    volume += (volume.empty() ? "" : "x") + std::to_string(out[a]);
  }
  return c10::str(
      "max_unpool", rank,
      "d: expected indices in the output plane but got: Found an invalid max index: ", index,
      in_window ? " (an offset in its window)" : "", " (output volumes are of size ", volume,
      ") at position ", position, " of plane ", plane);
}

} // namespace maxunpool_cuda
