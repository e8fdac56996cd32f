// SPDX-License-Identifier: BSD-3-Clause
// The module maxunpool_cuda._C: facts about the build, the operators max_unpool and max_pool, and
// checks. Takes calls of the operators from handles.h, check_window() from checks.h and
// check_errors() from errors.h. maxunpool_cuda/_ops.py is what calls this module.
//
// A call through it costs half as much as one through torch.ops, as it converts Python's arguments
// by itself. Both go through the dispatcher. Example, in Python:
//
//   from maxunpool_cuda import _C
//   values, indices = _C.max_pool(x, (2, 2), (2, 2), (0, 0), (1, 1), False, torch.uint8, True)
//   _C.max_unpool(values, indices, (8, 8), (2, 2), (2, 2), (0, 0), "last")
//
// An argument that is no Tensor, no dense tensor or no 64-bit int raises an error here. All other
// checks are the operators'.
#include "checks.h"
#include "errors.h"
#include "handles.h"
#include "window.h"

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

// setup.py defines the names in capitals.
pybind11::dict build_info() {
  pybind11::dict info;
#ifdef WITH_CUDA
  info["kernels"] = "cpu and cuda";
  info["cuda"] = true;
  info["cuda_version"] = CUDA_VERSION_STRING; // the release that PyTorch was built with
  info["nvcc_version"] = NVCC_VERSION_STRING;
  info["arch_list"] = ARCH_LIST;
#else
  info["kernels"] = "cpu";
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

// Runs `call` without the GIL, takes it back, and returns the result or raises what `call` raised.
//
// pybind11::gil_scoped_release, the usual way, takes the GIL back in its destructor. Let a daemon
// thread be in `call` while the interpreter ends. When it asks for the GIL, Python ends the thread
// by unwinding its stack. Unwinding out of a destructor would end the whole process with an error,
// so PyEval_RestoreThread is called here, outside of any destructor.
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

// How messages name an argument: {"max_pool", "input"}.
struct Argument {
  const char* op; // without its rank
  const char* name;
};

// A word for the kind of a tensor that is not dense: "sparse_coo" for the layout torch.sparse_coo.
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

// The tensor in a Python object; raises an error if there is none, or one that is not dense. It is
// borrowed: the object keeps it alive during the call, and an owning reference would take the GIL
// when it is made and again when it is dropped. `rank` is for messages.
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

// A tuple of ints; if a call is traced, some may be symbolic. Sets `is_usual` to false if a number
// is negative or too large for a window; callers then find out what is wrong. In that case a number
// of more than 64 bits is -1 in the result. PyTorch's own conversion is slower, as it first asks
// whether each int is a tensor.
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

// Raises the error of a window whose numbers no call can have, in the numbers that the caller gave.
// It is called before PyTorch would refuse them in its own words, and before an output size that
// was computed from them would be blamed. `dilation` is empty for unpooling.
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
  const c10::SymDimVector kernel_sizes = ints(kernel_size, ignored);
  const c10::SymDimVector strides = ints(stride, ignored);
  const c10::SymDimVector paddings = ints(padding, ignored);
  const c10::SymDimVector dilations = ints(dilation, ignored);
  check_window(
      Window<c10::SymInt>{
          .op = op.c_str(),
          .kernel_size = kernel_sizes,
          .stride = strides,
          .padding = paddings,
          .dilation = dilations});
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
  const c10::SymDimVector output_sizes = ints(output_size, is_usual);
  const c10::SymDimVector kernel_sizes = ints(kernel_size, is_usual);
  const c10::SymDimVector strides = ints(stride, is_usual);
  const c10::SymDimVector paddings = ints(padding, is_usual);
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
    return unpool_handle<true>().call(
        values, positions, output_sizes, kernel_sizes, strides, paddings, reduce);
  });
}

// Returns (values, indices), or values alone if not return_indices. In that case Python never owns
// the indices, and this function frees them while it holds the GIL. Python would let go of the GIL
// to free them, and taking it back ends the process if the interpreter has ended: see
// without_gil().
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
  const c10::SymDimVector kernel_sizes = ints(kernel_size, is_usual);
  const c10::SymDimVector strides = ints(stride, is_usual);
  const c10::SymDimVector paddings = ints(padding, is_usual);
  const c10::SymDimVector dilations = ints(dilation, is_usual);
  if (!is_usual) {
    check_window_of(op, kernel_size, stride, padding, dilation);
  }
  TORCH_CHECK_TYPE(
      THPDtype_Check(index_dtype.ptr()),
      op,
      ": expected index_dtype to be a torch.dtype but got ",
      Py_TYPE(index_dtype.ptr())->tp_name);
  const c10::ScalarType type = index_dtype.cast<c10::ScalarType>();
  const auto [values, indices] = without_gil([&] {
    return pool_handle().call(
        unpooled, kernel_sizes, strides, paddings, dilations, ceil_mode, type);
  });
  return return_indices ? pybind11::make_tuple(values, indices) : pybind11::cast(values);
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("build_info", &build_info);
  m.def("max_unpool", torch::wrap_pybind_function(&max_unpool));
  m.def("max_pool", torch::wrap_pybind_function(&max_pool));
  m.def("check_window", torch::wrap_pybind_function(&check_window_of));
  m.def("check_errors", torch::wrap_pybind_function([] {
          without_gil([] {
            check_errors();
            return true; // without_gil() returns what is called returned
          });
        }));
}

} // namespace maxunpool_cuda
