// SPDX-License-Identifier: BSD-3-Clause
// Handles of the operators in the dispatcher, for C++ that calls them.
#pragma once

#include "max_pool.h"
#include "max_unpool.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/SymInt.h>

namespace maxunpool_cuda {

template <class Operator>
c10::TypedOperatorHandle<Operator> handle_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Operator>();
}

// max_unpool, or max_unpool_backward.
template <bool kForward>
const auto& unpool_handle() {
  static const auto handle = handle_of<decltype(run<c10::SymInt, true>)>(
      kForward ? "maxunpool_cuda::max_unpool" : "maxunpool_cuda::max_unpool_backward");
  return handle;
}

inline const auto& pool_handle() {
  static const auto handle = handle_of<decltype(run_pool<c10::SymInt>)>("maxunpool_cuda::max_pool");
  return handle;
}

} // namespace maxunpool_cuda
