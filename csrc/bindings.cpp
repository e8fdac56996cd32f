// The Python face of the library: facts about the build, and the operators for eager calls, which
// cost less than torch.ops and go through the dispatcher alike.
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

// The result of `call`, which runs without the GIL. Where the interpreter has ended meanwhile,
// taking the GIL again ends a daemon thread by unwinding its stack, which no destructor lets
// through: so none takes it, as pybind11::gil_scoped_release's would, and the process ends in
// peace.
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

// The tensor that Python owns, and keeps for as long as the call runs: another owner would take the
// GIL, to come and to go.
const at::Tensor& borrowed(pybind11::handle object) {
  TORCH_CHECK_TYPE(
      THPVariable_Check(object.ptr()), "expected a Tensor but got ",
      Py_TYPE(object.ptr())->tp_name);
  return THPVariable_Unpack(object.ptr());
}

using Ints = std::vector<int64_t>;

// What max_unpool takes after its tensors, read from Python once for all calls that are alike.
struct UnpoolArguments {
  c10::SymDimVector output_size, kernel_size, stride, padding;
  std::string reduce;
};

// The same of max_pool.
struct PoolArguments {
  c10::SymDimVector kernel_size, stride, padding, dilation;
  bool ceil_mode;
  c10::ScalarType index_dtype;
};

at::Tensor max_unpool(
    pybind11::handle input, pybind11::handle indices, const UnpoolArguments& arguments) {
  const at::Tensor &values = borrowed(input), &where = borrowed(indices);
  return without_gil([&] {
    return operator_handle<true>().call(
        values, where, arguments.output_size, arguments.kernel_size, arguments.stride,
        arguments.padding, arguments.reduce);
  });
}

std::tuple<at::Tensor, at::Tensor> max_pool(
    pybind11::handle input, const PoolArguments& arguments) {
  const at::Tensor& values = borrowed(input);
  return without_gil([&] {
    return pool_handle().call(
        values, arguments.kernel_size, arguments.stride, arguments.padding, arguments.dilation,
        arguments.ceil_mode, arguments.index_dtype);
  });
}

// The class of Arguments for Python, made from the fields in their order.
template <class Arguments, class... Fields>
void bind_arguments(pybind11::module& m, const char* name) {
  const auto field = []<class Field>(const Field& value) {
    if constexpr (std::is_same_v<Field, Ints>) {
      return c10::SymDimVector(value.begin(), value.end());
    } else {
      return value;
    }
  };
  pybind11::class_<Arguments>(m, name).def(
      pybind11::init([=](const Fields&... values) { return Arguments{field(values)...}; }));
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("build_info", &build_info);
  bind_arguments<UnpoolArguments, Ints, Ints, Ints, Ints, std::string>(m, "UnpoolArguments");
  bind_arguments<PoolArguments, Ints, Ints, Ints, Ints, bool, c10::ScalarType>(m, "PoolArguments");
  m.def("max_unpool", torch::wrap_pybind_function(&max_unpool));
  m.def("max_pool", torch::wrap_pybind_function(&max_pool));
#ifdef WITH_CUDA
  const Limits usual;
  m.def(
      "set_cuda_limits", // for tests; those that are not named become what they usually are
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
