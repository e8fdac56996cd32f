// SPDX-License-Identifier: BSD-3-Clause
// The guard decides whether a kernel may run a call. It asks for all that a kernel relies on, so
// that none reads or writes outside of its arrays, whoever calls the operators. It has no words. A
// call that it refuses goes to Python, by refuse(): maxunpool_cuda/_checks.py asks the same
// questions, and says in words which one has the wrong answer.
//
// Example: of max_pool with padding={2} and kernel_size={3}, may_pool() is false, as padding is
// more than half of the kernel. Then refuse() calls maxunpool_cuda::_explain_max_pool, a kernel in
// Python, which returns "max_pool1d: expected padding of at most half of kernel_size ...".
#pragma once

#include "dtypes.h"
#include "errors.h"
#include "geometry.h"
#include "reduction.h"
#include "torch.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

namespace maxunpool_cuda {

// The arguments of a call that say where its windows lie. Each list has a number for each spatial
// axis, and is borrowed from the caller.
struct Window {
  IntArrayRef kernel_size;
  IntArrayRef stride;
  IntArrayRef padding;
  IntArrayRef dilation; // {} for max unpooling, which has none

  size_t rank() const { return padding.size(); } // the number of spatial axes
};

// Numbers of a window are below this, so that sums of a few of them stay below 2^63.
constexpr int64_t kWindowLimit = int64_t{1} << 60;

inline bool are_from(int64_t least, IntArrayRef numbers) {
  return std::all_of(numbers.begin(), numbers.end(), [&](int64_t number) {
    return least <= number && number < kWindowLimit;
  });
}

// Whether the lists, apart from the dilation, have one length of 1, 2 or 3, and each number may be
// one of a window.
inline bool is_window(const Window& window) {
  const size_t rank = window.rank();
  return 1 <= rank && rank <= Geometry<int64_t>::kAxes && window.kernel_size.size() == rank &&
         window.stride.size() == rank && are_from(1, window.kernel_size) &&
         are_from(1, window.stride) && are_from(0, window.padding) && are_from(1, window.dilation);
}

// Whether a tensor is [batch, channels, spatial sizes...], or the same without a batch, and nothing
// but the batch is 0.
inline bool has_shape(IntArrayRef sizes, size_t rank) {
  return (sizes.size() == rank + 1 || sizes.size() == rank + 2) &&
         are_from(1, sizes.slice(sizes.size() - rank - 1));
}

// Whether indices of this dtype can count the positions of a window, if they are window offsets.
// Dilated windows do not fit: unpooling knows only their extent, and would read other offsets.
inline bool can_count(ScalarType index_type, const Window& window) {
  if (index_type != ScalarType::Byte) {
    return true;
  }
  int64_t positions = 1; // stays below 2^9 before each product, so that none overflows
  for (const int64_t size : window.kernel_size) {
    positions *= std::min<int64_t>(size, kMostOffsets + 1);
    if (positions > kMostOffsets) {
      return false;
    }
  }
  const auto is_one = [](int64_t step) { return step == 1; };
  return std::all_of(window.dilation.begin(), window.dilation.end(), is_one);
}

// Whether no number overflows that a kernel computes from these: the bytes of the unpooled tensor,
// and where a window begins and ends. The estimates are generous and of type double, which does not
// overflow.
//
// `pooled` and `unpooled` are shapes of whole tensors. Of a pool both are the input's: a pooled
// size is at most one more, which does not matter here.
inline bool fits_64_bits(const Window& window, IntArrayRef pooled, IntArrayRef unpooled) {
  const auto number = [](int64_t size) { return static_cast<double>(size); };
  const size_t leading = unpooled.size() - window.rank(); // batch and channels
  double bytes = 16;                                      // of the largest element
  double image = 1;                                       // positions of all channels
  for (size_t d = 0; d < unpooled.size(); ++d) {
    bytes *= std::max(number(unpooled[d]), 1.0) + 1;
    image *= d + 1 < leading ? 1 : number(unpooled[d]);
  }
  bool fits = bytes < 4 * number(kWindowLimit);
  for (size_t d = 0; d < window.rank(); ++d) {
    // The distance of two elements of a window in memory, at most, in any layout.
    const double apart = window.dilation.empty() ? 1 : number(window.dilation[d]) * image;
    fits = fits && number(window.kernel_size[d]) * apart < kWindowLimit &&
           number(window.stride[d]) * number(pooled[leading + d]) < kWindowLimit &&
           number(window.padding[d]) < kWindowLimit;
  }
  return fits;
}

// The shape of the unpooled tensor: batch and channels of the indices, then output_size.
inline std::vector<int64_t> unpooled_sizes(IntArrayRef pooled, IntArrayRef output_size) {
  std::vector<int64_t> unpooled = pooled.vec();
  std::copy(output_size.begin(), output_size.end(), unpooled.end() - output_size.size());
  return unpooled;
}

// Whether all elements of a tensor lie in its storage. They do not if somebody has freed that, as
// FSDP and offloading do. The tensor's address is then null, or as far from null as its first
// element is from the begin of the storage.
inline bool is_allocated(const Tensor& tensor) {
  const IntArrayRef sizes = tensor.sizes();
  int64_t end = tensor.storage_offset() + 1; // of the elements, counted in the storage
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 0) {
      return true;
    }
    end += (sizes[d] - 1) * tensor.strides()[d];
  }
  return end * static_cast<int64_t>(element_size(type_of(tensor))) <= storage_bytes(tensor);
}

// Whether a kernel may unpool `values` (`forward`), or else compute the gradient of that from
// `values`, the unpooled grad_output. Any positive output_size is allowed: an index beyond it is
// out of bounds, and the kernel finds that.
inline bool may_unpool(
    const Tensor& values,
    const Tensor& indices,
    IntArrayRef output_size,
    const Window& window,
    Reduce reduce,
    bool forward) {
  if (!values.defined() || !indices.defined()) { // None, in Python
    return false;
  }
  const IntArrayRef pooled = indices.sizes();
  if (!is_window(window) || !window.dilation.empty() || !has_shape(pooled, window.rank()) ||
      output_size.size() != window.rank() || !are_from(1, output_size)) {
    return false;
  }
  const std::vector<int64_t> unpooled = unpooled_sizes(pooled, output_size);
  const ScalarType index_type = type_of(indices);
  return device_type(values) == device_type(indices) &&
         values.get_device_index() == indices.get_device_index() &&
         values.sizes().equals(forward ? pooled : IntArrayRef(unpooled)) &&
         fits_64_bits(window, pooled, unpooled) && with_index_type(index_type, kNothing) &&
         can_count(index_type, window) &&
         (reduce == Reduce::last || with_arithmetic_type(type_of(values), kNothing)) &&
         is_allocated(values) && is_allocated(indices);
}

// Whether a kernel may pool. Only whether windows fit the input is left to pooled_sizes().
inline bool may_pool(const Tensor& input, const Window& window, ScalarType index_type) {
  if (!input.defined()) { // None, in Python
    return false;
  }
  const size_t rank = window.rank();
  const IntArrayRef shape = input.sizes();
  if (!is_window(window) || window.dilation.size() != rank || !has_shape(shape, rank) ||
      !fits_64_bits(window, shape, shape)) {
    return false;
  }
  for (size_t d = 0; d < rank; ++d) {
    if (window.padding[d] > window.kernel_size[d] / 2) {
      return false;
    }
  }
  const int64_t plane =
      std::accumulate(shape.end() - rank, shape.end(), int64_t{1}, std::multiplies<>());
  return with_ordered_type(type_of(input), kNothing) && with_index_type(index_type, kNothing) &&
         can_count(index_type, window) &&
         (index_type != ScalarType::Int || plane < int64_t{1} << 31) && is_allocated(input);
}

// The lists of a short form, which has the numbers of four lists of one length in one.
inline std::array<IntArrayRef, 4> four_lists(IntArrayRef numbers) {
  const size_t rank = numbers.size() / 4;
  return {
      numbers.slice(0, rank),
      numbers.slice(rank, rank),
      numbers.slice(2 * rank, rank),
      numbers.slice(3 * rank)};
}

// Raises the error of a call that the guard refuses. `op` is the operator's name, and the arguments
// are those of its schema. If Python finds nothing wrong, as with tensors of another device in a
// call that was redispatched, the words are general.
template <class... Arguments>
[[noreturn]] void refuse(const std::string& op, const Arguments&... arguments) {
  fail(words_of("maxunpool_cuda::_explain_" + op, arguments...));
}

} // namespace maxunpool_cuda
