// The Python face of the library: facts about the build, and short ways to the operators,
// which go through the dispatcher like any call of them.
#include "cuda/limits.h"
#include "errors.h"
#include "plain_call.h"

#include <torch/extension.h>

#include <cstdint>
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

// The tensor, or None where the call is not a plain one.
pybind11::object unpool(
    int64_t dims,
    pybind11::handle input,
    pybind11::handle indices,
    pybind11::handle kernel_size,
    pybind11::handle stride,
    pybind11::handle padding,
    pybind11::handle output_size,
    pybind11::handle reduce) {
  return pybind11::cast(max_unpool_if_plain(
      {dims, input.ptr(), indices.ptr(), kernel_size.ptr(), stride.ptr(), padding.ptr(),
       output_size.ptr(), reduce.ptr()}));
}

// The values, with the indices or without, or None.
pybind11::object pool(
    int64_t dims,
    pybind11::handle input,
    pybind11::handle kernel_size,
    pybind11::handle stride,
    pybind11::handle padding,
    pybind11::handle dilation,
    pybind11::handle ceil_mode,
    pybind11::handle return_indices,
    pybind11::handle index_dtype) {
  const auto results = max_pool_if_plain(
      {dims, input.ptr(), kernel_size.ptr(), stride.ptr(), padding.ptr(), dilation.ptr(),
       ceil_mode.ptr(), return_indices.ptr(), index_dtype.ptr()});
  if (!results) {
    return pybind11::none();
  }
  const auto& [values, indices] = *results;
  return return_indices.ptr() == Py_True ? pybind11::make_tuple(values, indices)
                                         : pybind11::cast(values);
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("build_info", &build_info);
  m.def("max_unpool_if_plain", torch::wrap_pybind_function(&unpool));
  m.def("max_pool_if_plain", torch::wrap_pybind_function(&pool));
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
