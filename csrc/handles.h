// SPDX-License-Identifier: BSD-3-Clause
// Calls of the operators through PyTorch's dispatcher, for autograd.cpp and bindings.cpp. The
// dispatcher chooses the kernel by the tensors: autograd first if a gradient may be needed, then
// CPU, CUDA or Meta. Takes the operators' signatures from max_unpool.h and max_pool.h.
//
// Example: unpool_handle<true>().call(input, indices, output_size, kernel_size, stride, padding,
// "last") is torch.ops.maxunpool_cuda.max_unpool(...) of Python.
#pragma once

#include "max_pool.h"
#include "max_unpool.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/SymInt.h>

namespace maxunpool_cuda {

// The handle of the operator of that name, looked up in the dispatcher. Signature has to be that of
// the operator's schema (schemas.cpp), or this raises an error.
template <class Signature>
c10::TypedOperatorHandle<Signature> handle_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// max_unpool if kForward, else max_unpool_backward. They have one signature: that of their body
// run() for symbolic sizes. The handle is looked up once.
template <bool kForward>
const auto& unpool_handle() {
  using Signature = decltype(run<c10::SymInt, kForward>);
  static const auto handle = handle_of<Signature>(
      kForward ? "maxunpool_cuda::max_unpool" : "maxunpool_cuda::max_unpool_backward");
  return handle;
}

inline const auto& pool_handle() {
  using Signature = decltype(run_pool<c10::SymInt>);
  static const auto handle = handle_of<Signature>("maxunpool_cuda::max_pool");
  return handle;
}

} // namespace maxunpool_cuda
