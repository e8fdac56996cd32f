// The Python face of the library: facts about the build. The operators go through the dispatcher.
#include "errors.h"

#include <torch/extension.h>

#include <string>

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

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("build_info", &build_info);
  m.def("check_errors", &check_errors, pybind11::call_guard<pybind11::gil_scoped_release>());
}

} // namespace maxunpool_cuda
