// The results of tensors without data.
#include "max_pool.h"
#include "max_unpool.h"

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

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
  const UnpoolWindow<c10::SymInt> window{
      {"max_unpool", kernel_size, stride, padding}, output_size, reduce};
  const std::vector<c10::SymInt> unpooled = check(values, indices, window, kForward);
  const c10::SymIntArrayRef made = kForward ? unpooled : indices.sym_sizes();
  return empty_in_layout(made, values.options(), layout_of(values, indices, window.rank()));
}

std::tuple<at::Tensor, at::Tensor> meta_pool(
    const at::Tensor& input,
    c10::SymIntArrayRef kernel_size,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation,
    bool ceil_mode,
    c10::ScalarType index_dtype) {
  const PoolWindow<c10::SymInt> window{
      {"max_pool", kernel_size, stride, padding}, dilation, ceil_mode, index_dtype};
  const std::vector<c10::SymInt> pooled = pooled_sizes(input, window);
  const at::MemoryFormat layout = layout_of(input, input, window.rank());
  return {
      empty_in_layout<c10::SymInt>(pooled, input.options(), layout),
      empty_in_layout<c10::SymInt>(pooled, input.options().dtype(index_dtype), layout)};
}

} // namespace

TORCH_LIBRARY_IMPL(maxunpool_cuda, Meta, m) {
  m.impl("max_unpool", meta<true>);
  m.impl("max_unpool_backward", meta<false>);
  m.impl("max_pool", meta_pool);
}

} // namespace maxunpool_cuda
