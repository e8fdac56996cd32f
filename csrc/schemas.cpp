// SPDX-License-Identifier: BSD-3-Clause
// The schemas of the three operators, and their kernels for Meta tensors, which have a shape but no
// data: those check the arguments and return empty results of the right shape. Takes the bodies of
// the operators from max_unpool.h and max_pool.h.
//
// Other files register the other kernels: csrc/cpu/max_unpool.cpp and max_pool.cpp for the CPU,
// csrc/cuda/operators.cu for CUDA, autograd.cpp for the derivatives. Devices that are left have
// kernels in Python (maxunpool_cuda/_fallback.py).
//
// Example, in Python:
//
//   values, indices = torch.ops.maxunpool_cuda.max_pool(
//       x, kernel_size=[2, 2], stride=[2, 2], padding=[0, 0], dilation=[1, 1], ceil_mode=False,
//       index_dtype=torch.uint8)
//   torch.ops.maxunpool_cuda.max_unpool(
//       values, indices, output_size=[8, 8], kernel_size=[2, 2], stride=[2, 2], padding=[0, 0],
//       reduce="last")
#include "max_pool.h"
#include "max_unpool.h"

#include <c10/core/SymInt.h>
#include <torch/library.h>

namespace maxunpool_cuda {

// - Each list has a number for each spatial axis; `output_size` has the spatial sizes alone.
// - max_unpool_backward is the gradient of max_unpool, with the same indices and numbers.
// - max_pool returns values and indices. int64 and int32 ones are flat positions in the input
//   plane, uint8 ones are window offsets. Its gradient is max_unpool with "sum".
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
