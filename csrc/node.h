// SPDX-License-Identifier: BSD-3-Clause
// Nodes, written alike for every release of PyTorch that is supported: who owns a node, and what
// compiled autograd asks of it. A node here guards its saved variables by Node::mutex_, for two
// threads may run backward through one graph: one may release what the other is about to unpack.
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

// Pointer to a node: std::shared_ptr in some releases of PyTorch, c10::intrusive_ptr in others.
template <class T>
using NodePointer = std::conditional_t<
    std::is_same_v<decltype(torch::autograd::Edge::function), std::shared_ptr<Node>>,
    std::shared_ptr<T>,
    c10::intrusive_ptr<T>>;

template <class T, class... Arguments>
NodePointer<T> make_node(const Arguments&... arguments) {
  if constexpr (std::is_same_v<NodePointer<T>, std::shared_ptr<T>>) {
    return std::make_shared<T>(arguments...);
  } else {
    return c10::make_intrusive<T>(arguments...);
  }
}

// Call of `function` in the graph that compiled autograd compiles, in place of running the node.
// `name` is the function's name in the graph, Arguments are what it takes after the gradients.
template <auto function>
struct InGraph;

template <class... Arguments, variable_list (*function)(const variable_list&, const Arguments&...)>
struct InGraph<function> {
  static variable_list call(
      const char* name,
      Node& node,
      torch::dynamo::autograd::SwapSavedVariables& saved,
      const variable_list& grads,
      const Arguments&... arguments) {
    using namespace torch::dynamo::autograd;
    const auto& interface = getPyCompilerInterface();
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
  static variable_list unpacked(
      const variable_list& grads, const std::vector<c10::IValue>& values) {
    torch::dynamo::autograd::PackedArgs packed(values);
    // Braces: arguments are unpacked in order.
    const std::tuple<Arguments...> arguments{packed.template unpack<Arguments>()...};
    return std::apply(
        [&](const Arguments&... each) { return function(grads, each...); }, arguments);
  }
};

} // namespace maxunpool_cuda
