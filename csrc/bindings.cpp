// Python bindings: facts about the build, and the operators for eager calls. A call through these
// costs less than one through torch.ops; both go through the dispatcher.
#include "cuda/limits.h"
#include "errors.h"
#include "handles.h"

#include <ATen/core/DimVector.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/extension.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace maxunpool_cuda {
namespace {

pybind11::dict build_info() {
  pybind11::dict info;
#ifdef WITH_CUDA
  info["cuda"] = true;
  info["cuda_version"] = CUDA_VERSION_STRING;
  info["arch_list"] = ARCH_LIST;
#else
  info["cuda"] = false;
  info["cuda_version"] = pybind11::none();
  info["arch_list"] = "";
#endif
#if defined(__clang__)
  info["compiler"] = "clang " __clang_version__;
#else
  info["compiler"] = "gcc " __VERSION__;
#endif
  info["torch_version"] = TORCH_VERSION;
  return info;
}

// Runs `call` without the GIL and returns its result. If the interpreter has ended meanwhile,
// PyEval_RestoreThread ends a daemon thread by unwinding its stack. Unwinding out of a destructor
// would terminate the process, so no destructor takes the GIL back, as that of
// pybind11::gil_scoped_release would.
template <class Call>
auto without_gil(const Call& call) {
  PyThreadState* const thread = PyEval_SaveThread();
  std::optional<decltype(call())> result;
  std::exception_ptr error;
  try {
    result = call();
  } catch (const std::exception&) {
    error = std::current_exception();
  }
  PyEval_RestoreThread(thread);
  if (error) {
    std::rethrow_exception(error);
  }
  return *std::move(result);
}

// Tensor that Python owns, borrowed for the length of a call. An owning reference would take the
// GIL twice, when it is made and when it is dropped.
const at::Tensor& borrowed(pybind11::handle object) {
  TORCH_CHECK_TYPE(
      THPVariable_Check(object.ptr()), "expected a Tensor but got ",
      Py_TYPE(object.ptr())->tp_name);
  return THPVariable_Unpack(object.ptr());
}

// What Python passes for an argument of an operator. at::IntArrayRef is slow to read: PyTorch first
// asks of each int whether it is a tensor.
template <class Argument>
using Given = std::conditional_t<
    std::is_same_v<Argument, c10::SymIntArrayRef>, std::vector<int64_t>,
    std::conditional_t<std::is_same_v<Argument, c10::string_view>, std::string, Argument>>;

// What a call keeps of it.
template <class T>
T kept(const T& given) {
  return given;
}
c10::SymDimVector kept(const std::vector<int64_t>& given) {
  return {given.begin(), given.end()};
}

// Arguments after the tensors, read from Python once for all calls that have the same ones.
template <class... Arguments>
struct AfterTensors {
  std::tuple<decltype(kept(std::declval<Given<Arguments>>()))...> arguments;

  static void bind(pybind11::module& m, const char* name) {
    pybind11::class_<AfterTensors>(m, name).def(
        pybind11::init(
            [](const Given<Arguments>&... given) { return AfterTensors{{kept(given)...}}; }));
  }
};

template <class Operator>
struct AfterTensorsOf;
template <class Result, class... Arguments>
struct AfterTensorsOf<Result(const at::Tensor&, Arguments...)> {
  using Type = AfterTensors<Arguments...>;
};
template <class Result, class... Arguments>
struct AfterTensorsOf<Result(const at::Tensor&, const at::Tensor&, Arguments...)> {
  using Type = AfterTensors<Arguments...>;
};
using UnpoolArguments = AfterTensorsOf<UnpoolOperator>::Type;
using PoolArguments = AfterTensorsOf<PoolOperator>::Type;

// Calls the operator. Python owns `tensors`.
template <class Handle, class Arguments, class... Tensors>
auto call(const Handle& op, const Arguments& after, const Tensors&... tensors) {
  return without_gil([&] {
    return std::apply(
        [&](const auto&... arguments) { return op.call(tensors..., arguments...); },
        after.arguments);
  });
}

at::Tensor max_unpool(
    pybind11::handle input, pybind11::handle indices, const UnpoolArguments& arguments) {
  return call(unpool_handle<true>(), arguments, borrowed(input), borrowed(indices));
}

// The values, with the indices or without. Python never sees those that it need not: to free them
// it would let go of the GIL, which is no better than to take it (see without_gil).
pybind11::object max_pool(
    pybind11::handle input, const PoolArguments& arguments, bool return_indices) {
  const auto [values, indices] = call(pool_handle(), arguments, borrowed(input));
  return return_indices ? pybind11::make_tuple(values, indices) : pybind11::cast(values);
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("build_info", &build_info);
  UnpoolArguments::bind(m, "UnpoolArguments");
  PoolArguments::bind(m, "PoolArguments");
  m.def("max_unpool", torch::wrap_pybind_function(&max_unpool));
  m.def("max_pool", torch::wrap_pybind_function(&max_pool));
#ifdef WITH_CUDA
  const Limits usual;
  m.def(
      "set_cuda_limits", // for tests; limits that are not named get their defaults
      [](int64_t narrow, int64_t slot_bytes, int64_t shared_bytes, int64_t small_bytes,
         int64_t small_plane) {
        limits() = {narrow, slot_bytes, shared_bytes, small_bytes, small_plane};
      },
      pybind11::kw_only(), pybind11::arg("narrow") = usual.narrow,
      pybind11::arg("slot_bytes") = usual.slot_bytes,
      pybind11::arg("shared_bytes") = usual.shared_bytes,
      pybind11::arg("small_bytes") = usual.small_bytes,
      pybind11::arg("small_plane") = usual.small_plane);
#endif
  m.def("check_errors", &check_errors, pybind11::call_guard<pybind11::gil_scoped_release>());
}

} // namespace maxunpool_cuda
