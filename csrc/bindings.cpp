// SPDX-License-Identifier: BSD-3-Clause
// The module maxunpool_cuda._C: facts about the build, and check_errors() of errors.h. Importing it
// loads the kernels, which register themselves with the operators that maxunpool_cuda/_operators.py
// defines. maxunpool_cuda/_library.py is what imports it and calls these.
#include "errors.h"

#include <torch/extension.h>

namespace maxunpool_cuda {
namespace {

// setup.py defines WITH_CUDA, CUDA_VERSION_STRING, NVCC_VERSION_STRING, ARCH_LIST and BUILD_NOTE.
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

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("build_info", &build_info);
  m.def("check_errors",
        torch::wrap_pybind_function_no_gil(check_errors)); // it may wait for a GPU
}

} // namespace maxunpool_cuda
