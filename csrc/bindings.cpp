// Python bindings: facts about the build, and the operators with their schemas' arguments. A call
// through these costs half as much as one through torch.ops; both go through the dispatcher.
#include "errors.h"
#include "handles.h"

#include <ATen/core/DimVector.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/extension.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <utility>

namespace maxunpool_cuda {
namespace {

pybind11::dict build_info() {
  pybind11::dict info;
#ifdef WITH_CUDA
  info["cuda"] = true;
  info["cuda_version"] = CUDA_VERSION_STRING; // PyTorch's
  info["nvcc_version"] = NVCC_VERSION_STRING;
  info["arch_list"] = ARCH_LIST;
#else
  info["cuda"] = false;
  info["cuda_version"] = pybind11::none();
  info["nvcc_version"] = pybind11::none();
  info["arch_list"] = "";
#endif
#ifdef __clang__
  info["compiler"] = "clang " __clang_version__;
#else
  info["compiler"] = "gcc " __VERSION__;
#endif
  info["torch_version"] = TORCH_VERSION;
  info["note"] = BUILD_NOTE;
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
const at::Tensor& borrowed(const char* op, pybind11::handle object) {
  TORCH_CHECK_TYPE(
      THPVariable_Check(object.ptr()), op, ": expected a Tensor but got ",
      Py_TYPE(object.ptr())->tp_name);
  return THPVariable_Unpack(object.ptr());
}

// A tuple of ints, of which tracing may have made some symbolic. PyTorch's own conversion first
// asks of each int whether it is a tensor.
c10::SymDimVector ints(const char* op, const pybind11::tuple& numbers) {
  c10::SymDimVector result;
  for (const pybind11::handle number : numbers) {
    if (!PyLong_Check(number.ptr())) {
      result.push_back(number.cast<c10::SymInt>());
      continue;
    }
    int overflow = 0;
    result.emplace_back(PyLong_AsLongLongAndOverflow(number.ptr(), &overflow));
    TORCH_CHECK_TYPE(
        overflow == 0, op, ": expected 64-bit ints but got ",
        pybind11::str(number).cast<std::string>());
  }
  return result;
}

at::Tensor max_unpool(
    pybind11::handle input, pybind11::handle indices, const pybind11::tuple& output_size,
    const pybind11::tuple& kernel_size, const pybind11::tuple& stride,
    const pybind11::tuple& padding, const std::string& reduce) {
  constexpr const char* op = "max_unpool";
  const at::Tensor &values = borrowed(op, input), &positions = borrowed(op, indices);
  const auto sizes = ints(op, output_size), kernel = ints(op, kernel_size),
             steps = ints(op, stride), pads = ints(op, padding);
  return without_gil([&] {
    return unpool_handle<true>().call(values, positions, sizes, kernel, steps, pads, reduce);
  });
}

// The values, with the indices or without. Python never sees indices that it need not: to free them
// it would let go of the GIL, and taking it back aborts a daemon thread at exit (see without_gil).
pybind11::object max_pool(
    pybind11::handle input, const pybind11::tuple& kernel_size, const pybind11::tuple& stride,
    const pybind11::tuple& padding, const pybind11::tuple& dilation, bool ceil_mode,
    pybind11::handle index_dtype, bool return_indices) {
  constexpr const char* op = "max_pool";
  const at::Tensor& unpooled = borrowed(op, input);
  const auto kernel = ints(op, kernel_size), steps = ints(op, stride), pads = ints(op, padding),
             spread = ints(op, dilation);
  TORCH_CHECK_TYPE(
      THPDtype_Check(index_dtype.ptr()), op, ": expected index_dtype to be a torch.dtype but got ",
      Py_TYPE(index_dtype.ptr())->tp_name);
  const c10::ScalarType type = index_dtype.cast<c10::ScalarType>();
  const auto [values, indices] = without_gil(
      [&] { return pool_handle().call(unpooled, kernel, steps, pads, spread, ceil_mode, type); });
  return return_indices ? pybind11::make_tuple(values, indices) : pybind11::cast(values);
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("build_info", &build_info);
  m.def("max_unpool", torch::wrap_pybind_function(&max_unpool));
  m.def("max_pool", torch::wrap_pybind_function(&max_pool));
  m.def("check_errors", &check_errors, pybind11::call_guard<pybind11::gil_scoped_release>());
}

} // namespace maxunpool_cuda
