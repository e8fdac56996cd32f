// SPDX-License-Identifier: BSD-3-Clause
// What differs between releases of PyTorch in nodes of the autograd graph: the pointer that owns a
// node, and the call that compiled autograd makes in place of running it. Takes nothing from the
// other files; autograd.cpp has the nodes. docs/design.md lists the names of PyTorch that this file
// uses though they are no public interface.
//
// Example: PyTorch 2.8 owns a node by std::shared_ptr, PyTorch 2.13 by c10::intrusive_ptr.
// make_node<Transpose<true>>(...) makes whichever the headers of this PyTorch ask for.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

namespace maxunpool_cuda {

using torch::autograd::Node;
using torch::autograd::variable_list;

// The pointer that owns a node of class T: of the kind that PyTorch's own Edge has.
template <class T>
using NodePointer = std::conditional_t<
    std::is_same_v<decltype(torch::autograd::Edge::function), std::shared_ptr<Node>>,
    std::shared_ptr<T>,
    c10::intrusive_ptr<T>>;

// A new node T(arguments...).
template <class T, class... Arguments>
NodePointer<T> make_node(const Arguments&... arguments) {
  if constexpr (std::is_same_v<NodePointer<T>, std::shared_ptr<T>>) {
    return std::make_shared<T>(arguments...);
  } else {
    return c10::make_intrusive<T>(arguments...);
  }
}

// InGraph<function>::call() is what a node's apply_with_saved() returns.
//
// Compiled autograd does not run a node's apply(). It calls apply_with_saved() once, with symbolic
// tensors in place of the saved ones, to trace the backward pass into a graph that torch.compile
// compiles. The node has to answer with a call of a plain function in that graph, whose arguments
// are all that the node knows.
//
//   function   variable_list function(const variable_list& grads, const Arguments&... arguments)
//              computes the gradients; it runs later, with the real tensors
//   Arguments  what it takes after the gradients, such as at::Tensor, std::vector<c10::SymInt> and
//              std::string; PyTorch packs each into a c10::IValue, which the graph can hold
template <auto function>
struct InGraph;

// The specialization takes Arguments out of the function's type.
template <class... Arguments, variable_list (*function)(const variable_list&, const Arguments&...)>
struct InGraph<function> {
  // Puts the call into the graph. `name` is what the graph calls the function. Returns symbolic
  // gradients.
  static variable_list call(
      const char* name,
      Node& node,
      torch::dynamo::autograd::SwapSavedVariables& saved,
      const variable_list& grads,
      const Arguments&... arguments) {
    using namespace torch::dynamo::autograd;
    const auto& interface = getPyCompilerInterface();
    // Tells PyTorch about the function, once: its name, its address, the types of its arguments.
    static const std::string bound = interface->bind_function(
        saved.get_py_compiler(), name, unpacked, {IValuePacker<Arguments>::packed_type()...});
    PackedArgs packed;
    (packed.pack(arguments), ...);
    return interface->call_function(
        saved.get_py_compiler(),
        "apply_functional",
        bound,
        grads,
        packed.vec(),
        IValuePacker<std::vector<std::optional<InputMetadata>>>::pack(
            get_input_metadata(node.next_edges())));
  }

 private:
  // Calls the function with the arguments that call() packed.
  static variable_list unpacked(
      const variable_list& grads, const std::vector<c10::IValue>& values) {
    torch::dynamo::autograd::PackedArgs packed(values);
    // Braces, as they evaluate their elements in order, and unpack() gives the next at each call.
    const std::tuple<Arguments...> arguments{packed.template unpack<Arguments>()...};
    return std::apply(
        [&](const Arguments&... each) { return function(grads, each...); }, arguments);
  }
};

} // namespace maxunpool_cuda
