// SPDX-License-Identifier: BSD-3-Clause
// The derivatives of the operators, backward and forward mode. Takes calls of the operators from
// handles.h, and what differs between releases of PyTorch from node.h.
//
// For given indices, max_unpool is a linear map of its input, and max_unpool_backward is the
// transpose of that map. So each is the other's gradient, and each is its own derivative in forward
// mode. max_pool picks elements of its input. Near that input it picks the same ones, so there it
// is linear, too: values = max_unpool_backward(input, indices, "sum").
//
// Example: input {1, 2}, indices {3, 3}, a plane of 4 outputs, "last". Autograd gets a Transpose
// node that keeps the indices {3, 3}. In the backward, grad_output {a, b, c, d} becomes
// max_unpool_backward(grad_output, {3, 3}) = {0, d}. As that is an operator with a node of its own,
// the gradient has a gradient.
//
// The nodes are written as those are that PyTorch generates for its own operators. docs/design.md
// says why they are no torch::autograd::Function.
#include "checks.h"
#include "handles.h"
#include "max_pool.h"
#include "max_unpool.h"
#include "node.h"
#include "window.h"

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

// The backward of an operator: its gradient with respect to its values, by the other operator.
//
// `grads` has one tensor, the gradient of the result, which is undefined if nothing depends on it.
// `window` holds output_size, kernel_size, stride and padding one after the other, as one list
// costs less to keep than four: {8, 8, 3, 3, 2, 2, 1, 1} in 2d.
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
  const auto list = [&](size_t i) { return c10::SymIntArrayRef(window).slice(i * rank, rank); };
  return {unpool_handle<!kForward>().call(
      grads[0], indices, list(0), list(1), list(2), list(3), reduce)};
}

// The node that one call of max_unpool (kForward), max_unpool_backward or max_pool (both not
// kForward) leaves in the graph. Autograd calls these members:
//
//   apply              in a backward: the gradients, by transposed()
//   release_variables  after a backward, unless retain_graph=True
//   compiled_args      in compiled autograd: what a compiled graph depends on
//   apply_with_saved   in compiled autograd: puts a call of transposed() into the graph
//
// Two threads may run a backward through one graph at once, and one may release the indices while
// the other unpacks them. Node::mutex_ guards them, as in PyTorch's own nodes.
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
    for (const c10::SymIntArrayRef list : {output_size, kernel_size, stride, padding}) {
      window_.insert(window_.end(), list.begin(), list.end());
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
    saved.before(indices_); // becomes symbolic, until after()
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

  const char* name_;                       // as result.grad_fn.name() shows it
  torch::autograd::SavedVariable indices_; // raises an error if they were changed in place
  std::vector<c10::SymInt> window_;        // four lists in one: see transposed()
  std::string reduce_;
};

// Gives `result`, just computed from `values`, its derivatives: a node if a gradient may be asked
// for, and a tangent if `values` has one (forward mode). The result is linear in the values:
// unpool_handle<kForward>() with these indices and arguments is what maps one to the other.
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
    const at::Tensor result_tangent =
        unpool_handle<kForward>().call(tangent, indices, arguments...);
    result._set_fw_grad(result_tangent, /*level=*/0, /*is_inplace_op=*/false);
  }
}

// Whether a number is symbolic or below -2^62; c10::SymInt keeps both on the heap. PyTorch refuses
// to convert such a number for a kernel of int64_t, in words of its own, so the caller checks
// first.
template <class... Lists>
bool has_unusual(const Lists&... lists) {
  const auto any = [](c10::SymIntArrayRef list) {
    return std::any_of(list.begin(), list.end(), [](const c10::SymInt& number) {
      return number.is_heap_allocated();
    });
  };
  return (any(lists) || ...);
}

// The kernel of max_unpool (kForward) and max_unpool_backward for the key Autograd: it has the
// backend compute the result, and then gives it its derivatives. `keys` are what the dispatcher
// still has to do for this call; those after autograd lead to the backend.
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
    const Window<c10::SymInt> window{
        .op = "max_unpool",
        .kernel_size = kernel_size,
        .stride = stride,
        .padding = padding,
        .dilation = {}};
    check_window(window);
    check_output_size(window, output_size);
  }
  at::Tensor result = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard; // calls in here skip autograd
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

// The kernel of max_pool for the key Autograd. Its derivatives are those of max_unpool_backward
// with "sum", whose "output" is the pooled input. A dilated window has the extent of its outermost
// elements there: 5 for 3 elements with dilation 2.
std::tuple<at::Tensor, at::Tensor> differentiable_pool(
    c10::DispatchKeySet keys,
    const at::Tensor& input,
    c10::SymIntArrayRef kernel_size,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation,
    bool ceil_mode,
    c10::ScalarType index_dtype) {
  const Window<c10::SymInt> window{
      .op = "max_pool",
      .kernel_size = kernel_size,
      .stride = stride,
      .padding = padding,
      .dilation = dilation};
  if (has_unusual(kernel_size, stride, padding, dilation)) {
    check_window(window);
  }
  auto results = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
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
  const c10::SymIntArrayRef spatial = input.sym_sizes().slice(input.dim() - kernel_size.size());
  check_no_empty_window(window, spatial);
  std::vector<c10::SymInt> extent;
  for (size_t d = 0; d < kernel_size.size(); ++d) {
    extent.push_back(dilation[d] * (kernel_size[d] - 1) + 1);
  }
  differentiate<false>(
      "MaxPoolBackward", input, values, indices, spatial, extent, stride, padding, "sum");
  return results;
}

} // namespace

TORCH_LIBRARY_IMPL(maxunpool_cuda, Autograd, m) {
  m.impl("max_unpool", differentiable<true>);
  m.impl("max_unpool_backward", differentiable<false>);
  m.impl("max_pool", differentiable_pool);
}

} // namespace maxunpool_cuda
