// SPDX-License-Identifier: BSD-3-Clause
// In a build without CUDA kernels, the operators' kernel for CUDA tensors: it raises an error that
// says why there are none and what to do. It takes BUILD_NOTE from setup.py, which begins with "no
// CUDA kernels" and tells the reason. A build with CUDA kernels compiles nothing of this file.
//
// Example: with BUILD_NOTE "no CUDA kernels, as FORCE_CPU=1 says", max_pool of a CUDA tensor raises
//
//   maxunpool_cuda::max_pool: expected CPU tensors but got CUDA tensors: this build of
//   maxunpool_cuda has no CUDA kernels, as FORCE_CPU=1 says. `pip install ...` installs nvcc ...
#ifndef WITH_CUDA
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

namespace maxunpool_cuda {
namespace {

// A boxed kernel: it fits operators of every signature.
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
