// SPDX-License-Identifier: BSD-3-Clause
// Derivatives of the operators, backward and forward. For given indices max_unpool and
// max_unpool_backward are linear maps, each the transpose of the other. Near its input, max_pool is
// max_unpool_backward with "sum", for the indices that max_pool finds. Nodes are written as
// PyTorch's own operators have theirs; docs/design.md says why not as torch::autograd::Function.
#include "handles.h"
#include "max_pool.h"
#include "node.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

namespace maxunpool_cuda {
namespace {

// Gradient of an operator's values, given the gradient of its result. `window` holds output_size,
// kernel_size, stride and padding, of one length.
template <bool kForward>
variable_list transposed(
    const variable_list& grads,
    const at::Tensor& indices,
    const std::vector<c10::SymInt>& window,
    const std::string& reduce) {
  if (!grads[0].defined()) {
    return {at::Tensor()};
  }
  const size_t rank = window.size() / 4;
  const auto argument = [&](size_t i) { return c10::SymIntArrayRef(window).slice(i * rank, rank); };
  return {unpool_handle<!kForward>().call(
      grads[0], indices, argument(0), argument(1), argument(2), argument(3), reduce)};
}

// Node of an operator that is linear in its values.
template <bool kForward>
class Transpose : public Node {
 public:
  Transpose(
      const char* name,
      const at::Tensor& indices,
      c10::SymIntArrayRef output_size,
      c10::SymIntArrayRef kernel_size,
      c10::SymIntArrayRef stride,
      c10::SymIntArrayRef padding,
      c10::string_view reduce)
      : name_(name), indices_(indices, /*is_output=*/false), reduce_(reduce) {
    // One list costs less than four.
    for (const c10::SymIntArrayRef numbers : {output_size, kernel_size, stride, padding}) {
      window_.insert(window_.end(), numbers.begin(), numbers.end());
    }
  }

  variable_list apply(variable_list&& grads) override {
    return transposed<kForward>(grads, indices(), window_, reduce_);
  }
  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    indices_.reset_data();
  }
  std::string name() const override { return name_; }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(indices_, /*is_output=*/false);
    args.collect(window_);
    args.collect(reduce_);
  }
  variable_list apply_with_saved(
      const variable_list& grads, torch::dynamo::autograd::SwapSavedVariables& saved) override {
    saved.before(indices_);
    saved.before(window_);
    const variable_list result = InGraph<transposed<kForward>>::call(
        kForward ? "max_unpool_backward" : "max_unpool",
        *this,
        saved,
        grads,
        indices(),
        window_,
        reduce_);
    saved.after(indices_);
    saved.after(window_);
    return result;
  }

 private:
  at::Tensor indices() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return indices_.unpack();
  }

  const char* name_; // as graphs show it
  torch::autograd::SavedVariable indices_;
  std::vector<c10::SymInt> window_;
  std::string reduce_;
};

// Gives `result` its derivatives. Near `values` the result is linear in them: it is what
// unpool_handle<kForward>() computes for these indices and arguments.
template <bool kForward, class... Arguments>
void differentiate(
    const char* node_name,
    const at::Tensor& values,
    const at::Tensor& result,
    const at::Tensor& indices,
    const Arguments&... arguments) {
  if (torch::autograd::compute_requires_grad(values)) {
    const auto node = make_node<Transpose<kForward>>(node_name, indices, arguments...);
    node->set_next_edges(torch::autograd::collect_next_edges(values));
    torch::autograd::set_history(result, node);
  }
  const at::Tensor& tangent = values._fw_grad(/*level=*/0);
  if (tangent.defined()) {
    const at::Tensor of_result = unpool_handle<kForward>().call(tangent, indices, arguments...);
    result._set_fw_grad(of_result, /*level=*/0, /*is_inplace_op=*/false);
  }
}

// Whether a number is symbolic or below -2^62. PyTorch hands no such number to a kernel: an
// operator checks it before, since PyTorch's error would have its own words.
template <class... Numbers>
bool has_unusual(const Numbers&... numbers) {
  const auto any = [](c10::SymIntArrayRef list) {
    return std::any_of(list.begin(), list.end(), [](const c10::SymInt& number) {
      return number.is_heap_allocated();
    });
  };
  return (any(numbers) || ...);
}

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
  if (has_unusual(output_size, kernel_size, stride, padding)) {
    const Window<c10::SymInt> window{"max_unpool", kernel_size, stride, padding, {}};
    check_window(window);
    check_output_size(window, output_size);
  }
  at::Tensor result = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return unpool_handle<kForward>().redispatch(
        keys & c10::after_autograd_keyset,
        values,
        indices,
        output_size,
        kernel_size,
        stride,
        padding,
        reduce);
  }();
  differentiate<kForward>(
      kForward ? "MaxUnpoolBackward" : "MaxUnpoolBackwardBackward",
      values,
      result,
      indices,
      output_size,
      kernel_size,
      stride,
      padding,
      reduce);
  return result;
}

std::tuple<at::Tensor, at::Tensor> differentiable_pool(
    c10::DispatchKeySet keys,
    const at::Tensor& input,
    c10::SymIntArrayRef kernel_size,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation,
    bool ceil_mode,
    c10::ScalarType index_dtype) {
  const Window<c10::SymInt> window{"max_pool", kernel_size, stride, padding, dilation};
  if (has_unusual(kernel_size, stride, padding, dilation)) {
    check_window(window);
  }
  auto results = [&] {
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
  }();
  if (!torch::autograd::compute_requires_grad(input) && !input._fw_grad(/*level=*/0).defined()) {
    return results;
  }
  const auto& [values, indices] = results;
  const c10::SymIntArrayRef sizes = input.sym_sizes().slice(input.dim() - kernel_size.size());
  check_no_empty_window(window, sizes);
  std::vector<c10::SymInt> extent; // of a dilated window
  for (size_t d = 0; d < kernel_size.size(); ++d) {
    extent.push_back(dilation[d] * (kernel_size[d] - 1) + 1);
  }
  differentiate<false>(
      "MaxPoolBackward", input, values, indices, sizes, extent, stride, padding, "sum");
  return results;
}

} // namespace

TORCH_LIBRARY_IMPL(maxunpool_cuda, Autograd, m) {
  m.impl("max_unpool", differentiable<true>);
  m.impl("max_unpool_backward", differentiable<false>);
  m.impl("max_pool", differentiable_pool);
}

} // namespace maxunpool_cuda
