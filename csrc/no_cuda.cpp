// SPDX-License-Identifier: BSD-3-Clause
// Error of a build without CUDA for CUDA tensors. setup.py's BUILD_NOTE begins with "no CUDA
// kernels" and tells why.
#ifndef WITH_CUDA
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

namespace maxunpool_cuda {
namespace {

void no_cuda(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      op.schema().name(),
      ": expected CPU tensors but got CUDA tensors: this build of maxunpool_cuda has " BUILD_NOTE
      ". `pip install \"cuda-toolkit[nvcc,cccl]\"` installs nvcc for a CUDA 13 build of PyTorch; "
      "`FORCE_CUDA=1 pip install --no-build-isolation .` in the source tree builds again");
}

} // namespace

TORCH_LIBRARY_IMPL(maxunpool_cuda, CUDA, m) {
  for (const char* name : {"max_unpool", "max_unpool_backward", "max_pool"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<no_cuda>());
  }
}

} // namespace maxunpool_cuda
#endif
