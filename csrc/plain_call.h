// The short ways from Python calls to the operators.
#pragma once

#include <ATen/core/Tensor.h>

#include <Python.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace maxunpool_cuda {

// These call an operator, if the call is a plain one: of ordinary tensors, ints and tuples of ints,
// in eager mode. Else they return nothing: then Python, which takes every other argument there is,
// says what is wrong. Holding the GIL; what the operator raises is raised.

// The arguments of maxunpool_cuda.functional.max_unpool1d/2d/3d, borrowed; any may be any object.
struct PythonUnpoolCall {
  int64_t dims;
  PyObject* input;
  PyObject* indices;
  PyObject* kernel_size;
  PyObject* stride;
  PyObject* padding;
  PyObject* output_size;
  PyObject* reduce;
};

// Plain output sizes are those that the rules of maxunpool_cuda/_geometry.py allow.
std::optional<at::Tensor> max_unpool_if_plain(const PythonUnpoolCall& call);

// Those of max_pool1d/2d/3d. Where nobody will see the indices, a call is plain if bytes will do.
struct PythonPoolCall {
  int64_t dims;
  PyObject* input;
  PyObject* kernel_size;
  PyObject* stride;
  PyObject* padding;
  PyObject* dilation;
  PyObject* ceil_mode;
  PyObject* return_indices;
  PyObject* index_dtype;
};

std::optional<std::tuple<at::Tensor, at::Tensor>> max_pool_if_plain(const PythonPoolCall& call);

} // namespace maxunpool_cuda
