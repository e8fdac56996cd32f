// The short way from a Python call to the operator.
#pragma once

#include <ATen/core/Tensor.h>

#include <Python.h>

#include <cstdint>
#include <optional>

namespace maxunpool_cuda {

// The arguments of maxunpool_cuda.functional.max_unpool1d/2d/3d, borrowed; any may be any object.
struct PythonCall {
  int64_t dims;
  PyObject* input;
  PyObject* indices;
  PyObject* kernel_size;
  PyObject* stride;
  PyObject* padding;
  PyObject* output_size;
  PyObject* reduce;
};

// Calls max_unpool, if the call is a plain one: of ordinary tensors, ints and tuples of ints, in
// eager mode, with sizes that the rules of maxunpool_cuda/_geometry.py allow. Else nothing: those
// rules are the ones that say what is wrong. Holding the GIL; what the operator raises is raised.
std::optional<at::Tensor> call_if_plain(const PythonCall& call);

} // namespace maxunpool_cuda
