// SPDX-License-Identifier: BSD-3-Clause
// Python bindings: facts about the build, and the operators with their schemas' arguments. A call
// through these costs half as much as one through torch.ops; both go through the dispatcher.
#include "errors.h"
#include "handles.h"

#include <ATen/core/DimVector.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/extension.h>

#include <algorithm>
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

// An argument of a call, for messages: op without its rank, and the argument's name.
struct Argument {
  const char* op;
  const char* name;
};

// One word for how a tensor that is not plain keeps its elements.
std::string kind_of(pybind11::handle object) {
  const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
  if (tensor.is_nested()) {
    return "nested";
  }
  if (tensor.is_quantized()) {
    return "quantized";
  }
  if (tensor.is_mkldnn()) {
    return "mkldnn";
  }
  const std::string layout = pybind11::str(object.attr("layout"));
  return layout.substr(layout.find('.') + 1); // without "torch."
}

// Tensor that Python owns, borrowed for the length of a call. An owning reference would take the
// GIL twice, when it is made and when it is dropped.
const at::Tensor& borrowed(const Argument& argument, size_t rank, pybind11::handle object) {
  TORCH_CHECK_TYPE(
      THPVariable_Check(object.ptr()),
      argument.op,
      rank,
      "d: expected ",
      argument.name,
      " to be a Tensor but got ",
      Py_TYPE(object.ptr())->tp_name);
  const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
  TORCH_CHECK_NOT_IMPLEMENTED(
      tensor.layout() == at::kStrided && !tensor.is_quantized() && !tensor.is_nested(),
      argument.op,
      rank,
      "d: expected ",
      argument.name,
      " to be a dense tensor but got a ",
      kind_of(object),
      " tensor");
  return tensor;
}

// Tuple of ints, of which tracing may have made some symbolic. Sets `is_usual` to false if a number
// is negative or too large for a window; one of more than 64 bits is wrong in the result. PyTorch's
// own conversion first asks of each int whether it is a tensor.
c10::SymDimVector ints(const pybind11::tuple& numbers, bool& is_usual) {
  c10::SymDimVector result;
  for (const pybind11::handle number : numbers) {
    if (!PyLong_Check(number.ptr())) {
      result.push_back(number.cast<c10::SymInt>());
      continue;
    }
    int overflow = 0;
    const int64_t value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
    is_usual &= overflow == 0 && value >= 0 && value < kWindowLimit;
    result.emplace_back(value);
  }
  return result;
}

bool fits_64_bits(const pybind11::tuple& numbers) {
  return std::all_of(numbers.begin(), numbers.end(), [](pybind11::handle number) {
    int overflow = 0;
    if (PyLong_Check(number.ptr())) {
      PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
    }
    return overflow == 0;
  });
}

std::string text_of(const pybind11::tuple& numbers) {
  return pybind11::repr(numbers).cast<std::string>();
}

// Raises the error of a window that is none, in numbers that the caller passed. Called for unusual
// numbers alone: before PyTorch refuses them in its own words, and before an output size that was
// computed from them is blamed.
void check_window_of(
    const std::string& op,
    const pybind11::tuple& kernel_size,
    const pybind11::tuple& stride,
    const pybind11::tuple& padding,
    const pybind11::tuple& dilation) {
  const std::pair<const char*, const pybind11::tuple&> arguments[] = {
      {"kernel_size", kernel_size},
      {"stride", stride},
      {"padding", padding},
      {"dilation", dilation}};
  for (const auto& [name, numbers] : arguments) {
    TORCH_CHECK_TYPE(
        fits_64_bits(numbers),
        op,
        numbers.size(),
        "d: expected ",
        name,
        " to be 64-bit ints but got ",
        text_of(numbers));
  }
  bool ignored = true;
  const c10::SymDimVector kernel = ints(kernel_size, ignored);
  const c10::SymDimVector steps = ints(stride, ignored);
  const c10::SymDimVector pads = ints(padding, ignored);
  const c10::SymDimVector spread = ints(dilation, ignored);
  check_window(Window<c10::SymInt>{op.c_str(), kernel, steps, pads, spread});
}

at::Tensor max_unpool(
    pybind11::handle input,
    pybind11::handle indices,
    const pybind11::tuple& output_size,
    const pybind11::tuple& kernel_size,
    const pybind11::tuple& stride,
    const pybind11::tuple& padding,
    const std::string& reduce) {
  constexpr const char* op = "max_unpool";
  const at::Tensor& values = borrowed({op, "input"}, padding.size(), input);
  const at::Tensor& positions = borrowed({op, "indices"}, padding.size(), indices);
  bool is_usual = true;
  const c10::SymDimVector sizes = ints(output_size, is_usual);
  const c10::SymDimVector kernel = ints(kernel_size, is_usual);
  const c10::SymDimVector steps = ints(stride, is_usual);
  const c10::SymDimVector pads = ints(padding, is_usual);
  if (!is_usual) {
    check_window_of(op, kernel_size, stride, padding, pybind11::tuple());
    TORCH_CHECK(
        fits_64_bits(output_size),
        op,
        padding.size(),
        "d: expected sizes that do not overflow but got output_size=",
        text_of(output_size),
        ", kernel_size=",
        text_of(kernel_size),
        ", stride=",
        text_of(stride),
        ", padding=",
        text_of(padding));
  }
  return without_gil([&] {
    return unpool_handle<true>().call(values, positions, sizes, kernel, steps, pads, reduce);
  });
}

// The values, with the indices or without. Python never sees indices that it need not: to free them
// it would let go of the GIL, and taking it back aborts a daemon thread at exit (see without_gil).
pybind11::object max_pool(
    pybind11::handle input,
    const pybind11::tuple& kernel_size,
    const pybind11::tuple& stride,
    const pybind11::tuple& padding,
    const pybind11::tuple& dilation,
    bool ceil_mode,
    pybind11::handle index_dtype,
    bool return_indices) {
  constexpr const char* op = "max_pool";
  const at::Tensor& unpooled = borrowed({op, "input"}, padding.size(), input);
  bool is_usual = true;
  const c10::SymDimVector kernel = ints(kernel_size, is_usual);
  const c10::SymDimVector steps = ints(stride, is_usual);
  const c10::SymDimVector pads = ints(padding, is_usual);
  const c10::SymDimVector spread = ints(dilation, is_usual);
  if (!is_usual) {
    check_window_of(op, kernel_size, stride, padding, dilation);
  }
  TORCH_CHECK_TYPE(
      THPDtype_Check(index_dtype.ptr()),
      op,
      ": expected index_dtype to be a torch.dtype but got ",
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
  m.def("check_window", torch::wrap_pybind_function(&check_window_of));
  m.def("check_errors", &check_errors, pybind11::call_guard<pybind11::gil_scoped_release>());
}

} // namespace maxunpool_cuda
