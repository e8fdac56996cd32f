// SPDX-License-Identifier: BSD-3-Clause
// Schemas of the operators, and what they do with tensors that have no data: check the arguments.
#include "max_pool.h"
#include "max_unpool.h"

#include <c10/core/SymInt.h>
#include <torch/library.h>

namespace maxunpool_cuda {

// `output_size` holds the spatial sizes alone. The first two operators check their arguments alike,
// and for given indices and sizes each is the transpose of the other. max_pool returns the values
// and the indices: int64 and int32 ones are flat positions in the input plane, uint8 ones window
// offsets, padding included. Its backward is max_unpool with "sum".
constexpr const char* kSchemas[] = {
    "max_unpool(Tensor input, Tensor indices, SymInt[] output_size, SymInt[] kernel_size, "
    "SymInt[] stride, SymInt[] padding, str reduce) -> Tensor",
    "max_unpool_backward(Tensor grad_output, Tensor indices, SymInt[] output_size, "
    "SymInt[] kernel_size, SymInt[] stride, SymInt[] padding, str reduce) -> Tensor",
    "max_pool(Tensor input, SymInt[] kernel_size, SymInt[] stride, SymInt[] padding, "
    "SymInt[] dilation, bool ceil_mode, ScalarType index_dtype) -> (Tensor, Tensor)"};

TORCH_LIBRARY(maxunpool_cuda, m) {
  for (const char* schema : kSchemas) {
    m.def(schema, {at::Tag::pt2_compliant_tag});
  }
}

TORCH_LIBRARY_IMPL(maxunpool_cuda, Meta, m) {
  m.impl("max_unpool", run<c10::SymInt, true>);
  m.impl("max_unpool_backward", run<c10::SymInt, false>);
  m.impl("max_pool", run_pool<c10::SymInt>);
}

} // namespace maxunpool_cuda
