// The operators as the dispatcher knows them, for C++ that calls them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/ScalarType.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/string_view.h>

#include <tuple>

namespace maxunpool_cuda {

using Operator = at::Tensor(
    const at::Tensor& values,
    const at::Tensor& indices,
    c10::SymIntArrayRef output_size,
    c10::SymIntArrayRef kernel_size,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::string_view reduce);

// max_unpool, or max_unpool_backward.
template <bool kForward>
const c10::TypedOperatorHandle<Operator>& operator_handle() {
  static const auto handle =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow(
              kForward ? "maxunpool_cuda::max_unpool" : "maxunpool_cuda::max_unpool_backward", "")
          .typed<Operator>();
  return handle;
}

using PoolOperator = std::tuple<at::Tensor, at::Tensor>(
    const at::Tensor& input,
    c10::SymIntArrayRef kernel_size,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation,
    bool ceil_mode,
    c10::ScalarType index_dtype);

inline const c10::TypedOperatorHandle<PoolOperator>& pool_handle() {
  static const auto handle = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("maxunpool_cuda::max_pool", "")
                                 .typed<PoolOperator>();
  return handle;
}

} // namespace maxunpool_cuda
