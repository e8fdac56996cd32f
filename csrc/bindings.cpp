// SPDX-License-Identifier: BSD-3-Clause
// The module maxunpool_cuda._C has facts about the build, loads the libraries of kernels, and calls
// check_errors() in that of CUDA. It is compiled for one Python, and takes nothing of PyTorch;
// those libraries take nothing of Python. maxunpool_cuda/_library.py imports this module.
#include <pybind11/pybind11.h>

#include <dlfcn.h>

#include <string>

namespace {

// Points into the library of CUDA kernels (csrc/cuda/operators.cu). Null until that is loaded.
void (*check_errors_on_cuda)() = nullptr;

// Loads a library, whose kernels register themselves with the operators of _operators.py.
void load(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw pybind11::import_error(dlerror());
  }
  if (void* found = dlsym(library, "maxunpool_cuda_check_errors")) {
    check_errors_on_cuda = reinterpret_cast<void (*)()>(found);
  }
}

void check_errors() {
  if (check_errors_on_cuda != nullptr) {
    check_errors_on_cuda();
  }
}

// setup.py defines VERSION, TORCH_VERSION_STRING and BUILD_NOTE, and where there are CUDA kernels
// CUDA_VERSION_STRING, NVCC_VERSION_STRING and ARCH_LIST.
pybind11::dict build_info() {
  pybind11::dict info;
#ifdef CUDA_VERSION_STRING
  info["kernels"] = "cpu and cuda";
  info["cuda"] = true;
  info["cuda_version"] = CUDA_VERSION_STRING; // of the toolkit, such as 13.0
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
  info["torch_version"] = TORCH_VERSION_STRING; // whose headers it was built with
  info["note"] = BUILD_NOTE;
  return info;
}

} // namespace

PYBIND11_MODULE(_C, m) {
  m.attr("version") = VERSION;
  m.def("build_info", &build_info);
  const pybind11::call_guard<pybind11::gil_scoped_release> without_gil;
  m.def("load", &load, without_gil);                 // it registers kernels with PyTorch
  m.def("check_errors", &check_errors, without_gil); // it may wait for a GPU
}
