// The derivatives of the operators where they are called through the dispatcher, as eager and
// traced code does: for given indices each is a linear map, and its backward is the other. What
// this cannot do, forward mode and torch.func, goes through maxunpool_cuda/_autograd.py.
#include "handles.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <string>
#include <string_view>
#include <tuple>
#include <vector>

namespace maxunpool_cuda {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The operator as it is below autograd.
template <bool kForward, class... Arguments>
at::Tensor redispatch(c10::DispatchKeySet keys, const Arguments&... arguments) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return operator_handle<kForward>().redispatch(keys & c10::after_autograd_keyset, arguments...);
}

template <bool kForward>
class Unpool : public torch::autograd::Function<Unpool<kForward>> {
 public:
  static at::Tensor forward(
      AutogradContext* ctx,
      c10::DispatchKeySet keys,
      const at::Tensor& values,
      const at::Tensor& indices,
      c10::SymIntArrayRef output_size,
      c10::SymIntArrayRef kernel_size,
      c10::SymIntArrayRef stride,
      c10::SymIntArrayRef padding,
      c10::string_view reduce) {
    ctx->save_for_backward({indices});
    std::vector<c10::SymInt> window; // one list costs less than four
    for (const c10::SymIntArrayRef part : {output_size, kernel_size, stride, padding}) {
      window.insert(window.end(), part.begin(), part.end());
    }
    ctx->saved_data["window"] = c10::SymIntArrayRef(window);
    ctx->saved_data["reduce"] = std::string(reduce);
    return redispatch<kForward>(
        keys, values, indices, output_size, kernel_size, stride, padding, reduce);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const std::vector<c10::SymInt> window = ctx->saved_data["window"].toSymIntVector();
    const size_t rank = window.size() / 4;
    const auto part = [&](size_t i) { return c10::SymIntArrayRef(&window[i * rank], rank); };
    const at::Tensor grad = operator_handle<!kForward>().call(
        grads[0],
        ctx->get_saved_variables()[0],
        part(0),
        part(1),
        part(2),
        part(3),
        ctx->saved_data["reduce"].toStringView());
    return {{}, grad, {}, {}, {}, {}, {}, {}};
  }
};

template <bool kForward>
at::Tensor differentiable(
    c10::DispatchKeySet keys,
    const at::Tensor& values,
    const at::Tensor& indices,
    c10::SymIntArrayRef output_size,
    c10::SymIntArrayRef kernel_size,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::string_view reduce) {
  const bool wanted = (values.requires_grad() && at::GradMode::is_enabled()) ||
                      values._fw_grad(0).defined(); // which a Function refuses, rather than lose it
  if (wanted) {
    return Unpool<kForward>::apply(
        keys, values, indices, output_size, kernel_size, stride, padding, reduce);
  }
  return redispatch<kForward>(
      keys, values, indices, output_size, kernel_size, stride, padding, reduce);
}

std::tuple<at::Tensor, at::Tensor> redispatch_pool(
    c10::DispatchKeySet keys,
    const at::Tensor& input,
    c10::SymIntArrayRef kernel_size,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation,
    bool ceil_mode,
    c10::ScalarType index_dtype) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return pool_handle().redispatch(
      keys & c10::after_autograd_keyset,
      input,
      kernel_size,
      stride,
      padding,
      dilation,
      ceil_mode,
      index_dtype);
}

// Max pooling gathers, for the indices it finds; unpooling with "sum" is the transpose of that.
class Pool : public torch::autograd::Function<Pool> {
 public:
  static variable_list forward(
      AutogradContext* ctx,
      c10::DispatchKeySet keys,
      const at::Tensor& input,
      c10::SymIntArrayRef kernel_size,
      c10::SymIntArrayRef stride,
      c10::SymIntArrayRef padding,
      c10::SymIntArrayRef dilation,
      bool ceil_mode,
      c10::ScalarType index_dtype) {
    auto [values, indices] = redispatch_pool(
        keys, input, kernel_size, stride, padding, dilation, ceil_mode, index_dtype);
    ctx->mark_non_differentiable({indices});
    ctx->save_for_backward({indices});
    const c10::SymIntArrayRef spatial =
        input.sym_sizes().slice(input.dim() - static_cast<int64_t>(kernel_size.size()));
    std::vector<c10::SymInt> window;
    for (const c10::SymIntArrayRef part : {spatial, kernel_size, stride, padding}) {
      window.insert(window.end(), part.begin(), part.end());
    }
    ctx->saved_data["window"] = c10::SymIntArrayRef(window);
    return {values, indices};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const std::vector<c10::SymInt> window = ctx->saved_data["window"].toSymIntVector();
    const size_t rank = window.size() / 4;
    const auto part = [&](size_t i) { return c10::SymIntArrayRef(&window[i * rank], rank); };
    const at::Tensor grad = operator_handle<true>().call(
        grads[0], ctx->get_saved_variables()[0], part(0), part(1), part(2), part(3), "sum");
    return {{}, grad, {}, {}, {}, {}, {}, {}};
  }
};

std::tuple<at::Tensor, at::Tensor> differentiable_pool(
    c10::DispatchKeySet keys,
    const at::Tensor& input,
    c10::SymIntArrayRef kernel_size,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation,
    bool ceil_mode,
    c10::ScalarType index_dtype) {
  if ((input.requires_grad() && at::GradMode::is_enabled()) || input._fw_grad(0).defined()) {
    const variable_list results =
        Pool::apply(keys, input, kernel_size, stride, padding, dilation, ceil_mode, index_dtype);
    return {results[0], results[1]};
  }
  return redispatch_pool(
      keys, input, kernel_size, stride, padding, dilation, ceil_mode, index_dtype);
}

} // namespace

TORCH_LIBRARY_IMPL(maxunpool_cuda, Autograd, m) {
  m.impl("max_unpool", differentiable<true>);
  m.impl("max_unpool_backward", differentiable<false>);
  m.impl("max_pool", differentiable_pool);
}

} // namespace maxunpool_cuda
