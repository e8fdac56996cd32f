// The derivatives of the operators, backward and forward: for given indices max_unpool and
// max_unpool_backward are linear maps, each the transpose of the other. max_pool, near its input,
// is the latter with "sum", for the indices that it finds. Written as PyTorch's own operators have
// theirs, rather than as a torch::autograd::Function, which neither forward mode nor torch.func
// takes.
#include "handles.h"
#include "pool.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

namespace maxunpool_cuda {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

// A std::shared_ptr in some releases of PyTorch, a c10::intrusive_ptr in others.
template <class T>
using Pointer = std::conditional_t<
    std::is_same_v<decltype(torch::autograd::Edge::function), std::shared_ptr<Node>>,
    std::shared_ptr<T>,
    c10::intrusive_ptr<T>>;

template <class T, class... Arguments>
Pointer<T> make(const Arguments&... arguments) {
  if constexpr (std::is_same_v<Pointer<T>, std::shared_ptr<T>>) {
    return std::make_shared<T>(arguments...);
  } else {
    return c10::make_intrusive<T>(arguments...);
  }
}

// What turns the gradient of an operator's result into that of its values.
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
      : name_(name),
        indices_(indices, /*is_output=*/false),
        rank_(kernel_size.size()),
        reduce_(reduce) {
    for (const c10::SymIntArrayRef part : {output_size, kernel_size, stride, padding}) {
      window_.insert(window_.end(), part.begin(), part.end()); // one list costs less than four
    }
  }

  variable_list apply(variable_list&& grads) override {
    if (!grads[0].defined()) {
      return {at::Tensor()};
    }
    const auto part = [&](size_t i) { return c10::SymIntArrayRef(&window_[i * rank_], rank_); };
    return {operator_handle<!kForward>().call(
        grads[0], indices_.unpack(), part(0), part(1), part(2), part(3), reduce_)};
  }
  void release_variables() override { indices_.reset_data(); }
  std::string name() const override { return name_; }

 private:
  const char* name_; // as graphs show it
  torch::autograd::SavedVariable indices_;
  size_t rank_;
  std::vector<c10::SymInt> window_;
  std::string reduce_;
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
  const auto& op = operator_handle<kForward>();
  Pointer<Transpose<kForward>> node;
  if (torch::autograd::compute_requires_grad(values)) {
    node = make<Transpose<kForward>>(
        kForward ? "MaxUnpoolBackward" : "MaxUnpoolBackwardBackward",
        indices,
        output_size,
        kernel_size,
        stride,
        padding,
        reduce);
    node->set_next_edges(torch::autograd::collect_next_edges(values));
  }
  at::Tensor result = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return op.redispatch(
        keys & c10::after_autograd_keyset,
        values,
        indices,
        output_size,
        kernel_size,
        stride,
        padding,
        reduce);
  }();
  if (node) {
    torch::autograd::set_history(result, node);
  }
  const at::Tensor& tangent = values._fw_grad(/*level=*/0);
  if (tangent.defined()) {
    result._set_fw_grad(
        op.call(tangent, indices, output_size, kernel_size, stride, padding, reduce),
        /*level=*/0,
        /*is_inplace_op=*/false);
  }
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
  const at::Tensor& tangent = input._fw_grad(/*level=*/0);
  const bool backward = torch::autograd::compute_requires_grad(input);
  if (!backward && !tangent.defined()) {
    return results;
  }
  auto& [values, indices] = results;
  const c10::SymIntArrayRef sizes = input.sym_sizes().slice(input.dim() - kernel_size.size());
  check_no_empty_window<c10::SymInt>(
      {kernel_size, stride, padding, dilation, ceil_mode, index_dtype}, sizes);
  std::vector<c10::SymInt> extent; // the cells of a window lie within it
  for (size_t d = 0; d < kernel_size.size(); ++d) {
    extent.push_back(dilation[d] * (kernel_size[d] - 1) + 1);
  }
  if (backward) {
    const auto node =
        make<Transpose<false>>("MaxPoolBackward", indices, sizes, extent, stride, padding, "sum");
    node->set_next_edges(torch::autograd::collect_next_edges(input));
    torch::autograd::set_history(values, node);
  }
  if (tangent.defined()) {
    values._set_fw_grad(
        operator_handle<false>().call(tangent, indices, sizes, extent, stride, padding, "sum"),
        /*level=*/0,
        /*is_inplace_op=*/false);
  }
  return results;
}

} // namespace

TORCH_LIBRARY_IMPL(maxunpool_cuda, Autograd, m) {
  m.impl("max_unpool", differentiable<true>);
  m.impl("max_unpool_backward", differentiable<false>);
  m.impl("max_pool", differentiable_pool);
}

} // namespace maxunpool_cuda
