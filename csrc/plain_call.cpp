#include "plain_call.h"

#include "handles.h"
#include "max_pool.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/Layout.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ArrayRef.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <array>
#include <cstdlib>
#include <exception>
#include <optional>
#include <string_view>
#include <tuple>

namespace maxunpool_cuda {
namespace {

constexpr int64_t kMostDims = 3;
constexpr int64_t kLimit = int64_t{1} << 31; // for each number, so that no formula overflows

// Up to kMostDims ints, or nothing at all (size == 0).
struct Ints {
  std::array<int64_t, kMostDims> at{};
  int64_t size = 0;

  c10::SymIntArrayRef view() const {
    return c10::fromIntArrayRefKnownNonNegative({at.data(), at.data() + size});
  }
};

// A number from 0 on, or -1.
int64_t plain_int(PyObject* object) {
  if (!PyLong_CheckExact(object)) {
    return -1;
  }
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow == 0 && value >= 0 && value < kLimit ? value : -1;
}

// The last `count` ints of a tuple that has as many.
Ints plain_ints(PyObject* object, int64_t count) {
  Ints ints;
  const int64_t skipped = PyTuple_Check(object) ? PyTuple_GET_SIZE(object) - count : -1;
  if (skipped < 0) {
    return ints;
  }
  for (int64_t i = 0; i < count; ++i) {
    ints.at[i] = plain_int(PyTuple_GET_ITEM(object, skipped + i));
    if (ints.at[i] < 0) {
      return {};
    }
  }
  ints.size = count;
  return ints;
}

// One int per dimension, from a tuple of them or one int for all.
Ints plain_per_dim(PyObject* object, int64_t dims) {
  if (!PyLong_CheckExact(object)) {
    return PyTuple_Check(object) && PyTuple_GET_SIZE(object) == dims ? plain_ints(object, dims)
                                                                     : Ints{};
  }
  Ints ints;
  ints.at.fill(plain_int(object));
  ints.size = ints.at[0] < 0 ? 0 : dims;
  return ints;
}

// A tensor that only the dispatcher has a say in, and that our kernels can read.
const at::Tensor* plain_tensor(PyObject* object) {
  if (!THPVariable_CheckExact(object)) {
    return nullptr;
  }
  const at::Tensor& tensor = THPVariable_Unpack(object);
  const bool plain =
      tensor.defined() && tensor.layout() == c10::kStrided && !tensor.is_quantized() &&
      !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && !tensor._fw_grad(0).defined();
  return plain ? &tensor : nullptr;
}

bool eager() {
  const c10::DispatchKeySet included = c10::impl::tls_local_dispatch_key_set().included_;
  return !at::impl::torch_function_mode_enabled() && !torch::jit::tracer::isTracing() &&
         !included.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) &&
         !included.has(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}

std::string_view plain_string(PyObject* object) {
  Py_ssize_t size = 0;
  const char* text = PyUnicode_CheckExact(object) ? PyUnicode_AsUTF8AndSize(object, &size) : "";
  if (text == nullptr) {
    PyErr_Clear();
    return {};
  }
  return {text, static_cast<size_t>(size)};
}

// The spatial sizes of the output, where _geometry.spatial_output_size would return some.
Ints plain_output_size(
    c10::IntArrayRef shape,
    const Ints& kernel,
    const Ints& stride,
    const Ints& padding,
    PyObject* output_size) {
  const int64_t dims = kernel.size, leading = static_cast<int64_t>(shape.size()) - dims;
  Ints given;
  if (output_size != Py_None) {
    const Py_ssize_t size = PyTuple_Check(output_size) ? PyTuple_GET_SIZE(output_size) : 0;
    given = plain_ints(output_size, dims);
    // Leading sizes are not looked at.
    if (given.size == 0 || (size != dims && size != dims + 2 && size != dims + leading)) {
      return {};
    }
  }
  Ints sizes;
  for (int64_t d = 0; d < dims; ++d) {
    if (shape[leading + d] <= 0 || shape[leading + d] >= kLimit || kernel.at[d] == 0 ||
        stride.at[d] == 0) {
      return {};
    }
    const int64_t middle =
        (shape[leading + d] - 1) * stride.at[d] - 2 * padding.at[d] + kernel.at[d];
    sizes.at[d] = given.size == 0 ? middle : given.at[d];
    if (sizes.at[d] <= 0 || std::abs(sizes.at[d] - middle) >= stride.at[d]) {
      return {};
    }
  }
  sizes.size = dims;
  return sizes;
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
  return result;
}

} // namespace

std::optional<at::Tensor> max_unpool_if_plain(const PythonUnpoolCall& call) {
  const int64_t dims = call.dims;
  const at::Tensor* input = plain_tensor(call.input);
  const at::Tensor* indices = plain_tensor(call.indices);
  const std::string_view reduce = plain_string(call.reduce);
  if (input == nullptr || indices == nullptr || !eager() ||
      (reduce != "last" && reduce != "sum" && reduce != "mean") ||
      (input->dim() != dims + 1 && input->dim() != dims + 2)) {
    return std::nullopt;
  }
  const Ints kernel = plain_per_dim(call.kernel_size, dims);
  const Ints stride = call.stride == Py_None ? kernel : plain_per_dim(call.stride, dims);
  const Ints padding = plain_per_dim(call.padding, dims);
  if (kernel.size == 0 || stride.size == 0 || padding.size == 0) {
    return std::nullopt;
  }
  const Ints sizes = plain_output_size(input->sizes(), kernel, stride, padding, call.output_size);
  if (sizes.size == 0) {
    return std::nullopt;
  }
  return without_gil([&] {
    return operator_handle<true>().call(
        *input, *indices, sizes.view(), kernel.view(), stride.view(), padding.view(), reduce);
  });
}

std::optional<std::tuple<at::Tensor, at::Tensor>> max_pool_if_plain(const PythonPoolCall& call) {
  const int64_t dims = call.dims;
  const at::Tensor* input = plain_tensor(call.input);
  if (input == nullptr || !eager() || !PyBool_Check(call.ceil_mode) ||
      !PyBool_Check(call.return_indices) || !THPDtype_Check(call.index_dtype)) {
    return std::nullopt;
  }
  const Ints kernel = plain_per_dim(call.kernel_size, dims);
  const Ints stride = call.stride == Py_None ? kernel : plain_per_dim(call.stride, dims);
  const Ints padding = plain_per_dim(call.padding, dims);
  const Ints dilation = plain_per_dim(call.dilation, dims);
  const bool seen = call.return_indices == Py_True;
  const c10::ScalarType asked = reinterpret_cast<THPDtype*>(call.index_dtype)->scalar_type;
  if (kernel.size == 0 || stride.size == 0 || padding.size == 0 || dilation.size == 0 ||
      !is_index_type(asked) || (!seen && !fits_uint8(kernel.view(), dilation.view()))) {
    return std::nullopt;
  }
  return without_gil([&] {
    return pool_handle().call(
        *input, kernel.view(), stride.view(), padding.view(), dilation.view(),
        call.ceil_mode == Py_True, seen ? asked : c10::ScalarType::Byte);
  });
}

} // namespace maxunpool_cuda
