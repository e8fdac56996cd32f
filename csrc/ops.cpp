// The schemas, and the kernels of tensors without data.
#include "checks.h"
#include "operator.h"
#include "pool.h"

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <tuple>

namespace maxunpool_cuda {
namespace {

template <bool kForward>
at::Tensor meta(
    const at::Tensor& values,
    const at::Tensor& indices,
    c10::SymIntArrayRef output_size,
    c10::SymIntArrayRef kernel_size,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::string_view reduce) {
  const Window<c10::SymInt> window{output_size, kernel_size, stride, padding};
  check_window(window);
  const Reduce parsed = parse_reduce(window.name(), reduce);
  const auto unpooled = check(values, indices, window, parsed, kForward);
  return empty_in_layout(
      kForward ? unpooled : indices.sym_sizes().vec(), values.options(),
      layout_of(values, indices, window.rank()));
}

std::tuple<at::Tensor, at::Tensor> meta_pool(
    const at::Tensor& input,
    c10::SymIntArrayRef kernel_size,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation,
    bool ceil_mode,
    c10::ScalarType index_dtype) {
  const PoolWindow<c10::SymInt> window{kernel_size, stride,    padding,
                                       dilation,    ceil_mode, index_dtype};
  const auto pooled = pooled_sizes(input, window);
  const at::MemoryFormat layout = layout_of(input, input, window.rank());
  return {
      empty_in_layout(pooled, input.options(), layout),
      empty_in_layout(pooled, input.options().dtype(index_dtype), layout)};
}

#ifndef WITH_CUDA
constexpr const char* kNoCuda =
    "d: expected CPU tensors but got CUDA tensors: this build of maxunpool_cuda has no CUDA "
    "kernels. Install a CUDA toolkit and a CUDA build of PyTorch, then rebuild with "
    "FORCE_CUDA=1 pip install --no-build-isolation .";

at::Tensor no_cuda(
    const at::Tensor&,
    const at::Tensor&,
    at::IntArrayRef,
    at::IntArrayRef kernel_size,
    at::IntArrayRef,
    at::IntArrayRef,
    c10::string_view) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "max_unpool", kernel_size.size(), kNoCuda);
}

std::tuple<at::Tensor, at::Tensor> no_cuda_pool(
    const at::Tensor&,
    at::IntArrayRef kernel_size,
    at::IntArrayRef,
    at::IntArrayRef,
    at::IntArrayRef,
    bool,
    c10::ScalarType) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "max_pool", kernel_size.size(), kNoCuda);
}
#endif

} // namespace

// `output_size` holds the spatial sizes alone. The first two operators check their arguments alike,
// and for given indices and sizes each is the transpose of the other.
TORCH_LIBRARY(maxunpool_cuda, m) {
  m.def(
      "max_unpool(Tensor input, Tensor indices, SymInt[] output_size, SymInt[] kernel_size, "
      "SymInt[] stride, SymInt[] padding, str reduce) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "max_unpool_backward(Tensor grad_output, Tensor indices, SymInt[] output_size, "
      "SymInt[] kernel_size, SymInt[] stride, SymInt[] padding, str reduce) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  // The values and the indices: int64 and int32 ones are flat positions in the input plane, uint8
  // ones row-major offsets in the window, padding included. The backward is max_unpool's "sum".
  m.def(
      "max_pool(Tensor input, SymInt[] kernel_size, SymInt[] stride, SymInt[] padding, "
      "SymInt[] dilation, bool ceil_mode, ScalarType index_dtype) -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(maxunpool_cuda, Meta, m) {
  m.impl("max_unpool", meta<true>);
  m.impl("max_unpool_backward", meta<false>);
  m.impl("max_pool", meta_pool);
}

#ifndef WITH_CUDA
TORCH_LIBRARY_IMPL(maxunpool_cuda, CUDA, m) {
  m.impl("max_unpool", no_cuda);
  m.impl("max_unpool_backward", no_cuda);
  m.impl("max_pool", no_cuda_pool);
}
#endif

} // namespace maxunpool_cuda
