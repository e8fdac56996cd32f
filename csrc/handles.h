// Handles of the operators in the dispatcher, for C++ that calls them.
#pragma once

#include "max_pool.h"
#include "max_unpool.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/SymInt.h>

namespace maxunpool_cuda {

using UnpoolOperator = decltype(run<c10::SymInt, true>);
using PoolOperator = decltype(run_pool<c10::SymInt>);

// max_unpool, or max_unpool_backward.
template <bool kForward>
const c10::TypedOperatorHandle<UnpoolOperator>& unpool_handle() {
  static const auto handle =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow(
              kForward ? "maxunpool_cuda::max_unpool" : "maxunpool_cuda::max_unpool_backward", "")
          .typed<UnpoolOperator>();
  return handle;
}

inline const c10::TypedOperatorHandle<PoolOperator>& pool_handle() {
  static const auto handle = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("maxunpool_cuda::max_pool", "")
                                 .typed<PoolOperator>();
  return handle;
}

} // namespace maxunpool_cuda
