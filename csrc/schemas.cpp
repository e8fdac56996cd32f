// Schemas of the operators.
#include <torch/library.h>

namespace maxunpool_cuda {

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
  // Returns the values and the indices: int64 and int32 ones are flat positions in the input plane,
  // uint8 ones window offsets, padding included. The backward is max_unpool with "sum".
  m.def(
      "max_pool(Tensor input, SymInt[] kernel_size, SymInt[] stride, SymInt[] padding, "
      "SymInt[] dilation, bool ceil_mode, ScalarType index_dtype) -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

} // namespace maxunpool_cuda
