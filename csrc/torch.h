// SPDX-License-Identifier: BSD-3-Clause
// All that csrc takes of PyTorch, through its stable ABI: functions in C that keep their meaning in
// later releases, and headers without a library. So one binary serves PyTorch 2.10 and later, and
// no other file includes a header of PyTorch's.
// https://docs.pytorch.org/docs/main/notes/libtorch_stable_abi.html
//
// setup.py defines TORCH_TARGET_VERSION as 2.10: headers of a later release then hide what 2.10
// lacks.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/HeaderOnlyArrayRef.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#ifdef USE_CUDA
#include <torch/csrc/stable/macros.h>

#include <cuda_runtime_api.h>

#include <atomic>
#endif

namespace maxunpool_cuda {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;
using torch::stable::get_num_threads;
using torch::stable::parallel_for;
using torch::stable::Tensor;
// Numbers that are borrowed, such as the sizes of a tensor.
using IntArrayRef = torch::headeronly::IntHeaderOnlyArrayRef;

// The dtype of a tensor, whichever it is: Tensor::scalar_type() does not know all of them. Files
// store the numbers of dtypes, so these never change.
inline ScalarType type_of(const Tensor& tensor) {
  int32_t type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &type));
  return static_cast<ScalarType>(type);
}

// Bytes of an element.
inline size_t element_size(ScalarType type) {
  return aoti_torch_dtype_element_size(static_cast<int32_t>(type));
}

// Returns PyTorch's number for a kind of device: aoti_torch_device_type_cpu or
// aoti_torch_device_type_cuda.
using DeviceTypeFunction = int32_t (*)();

// The kind of device that a tensor is on.
inline int32_t device_type(const Tensor& tensor) {
  int32_t type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  return type;
}

// Bytes of the storage that a tensor's elements are in.
inline int64_t storage_bytes(const Tensor& tensor) {
  int64_t bytes = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &bytes));
  return bytes;
}

// A string that an operator is called with, or that it returns; the handle is used up. A parameter
// of type std::string would do, but the headers of PyTorch up to 2.13 leak such a string in every
// call: https://github.com/pytorch/pytorch/issues/191340
inline std::string take_string(StringHandle handle) {
  size_t length = 0;
  const char* begin = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
  TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &begin));
  std::string text(begin, length);
  TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
  return text;
}

// Calls an operator that is written in Python, and returns its string.
template <class... Arguments>
std::string words_of(const std::string& op, const Arguments&... arguments) {
  StableIValue stack[] = {torch::stable::detail::from(arguments)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op.c_str(), "", stack, TORCH_ABI_VERSION));
  return take_string(torch::stable::detail::to<StringHandle>(stack[0]));
}

// at::empty_strided() on device number `device` of a kind. None if it fails: most often there is
// not enough memory.
inline std::optional<Tensor> try_empty_strided(
    IntArrayRef sizes, IntArrayRef strides, ScalarType type, int32_t device_type, int32_t device) {
  AtenTensorHandle handle = nullptr;
  const AOTITorchError error = aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()),
      sizes.data(),
      strides.data(),
      static_cast<int32_t>(type),
      device_type,
      device,
      &handle);
  return error == AOTI_TORCH_SUCCESS ? std::optional<Tensor>(Tensor(handle)) : std::nullopt;
}

#ifdef USE_CUDA

// Gives the storage of a tensor without elements this many bytes. Returns whether PyTorch could.
inline bool try_grow(const Tensor& tensor, int64_t bytes) {
  StableIValue stack[] = {torch::stable::detail::from(tensor), torch::stable::detail::from(bytes)};
  const char* const op = "inductor::resize_storage_bytes_";
  return torch_call_dispatcher(op, "", stack, TORCH_ABI_VERSION) == AOTI_TORCH_SUCCESS;
}

#endif

// A tensor that nothing has written to, whose strides are dense. None if PyTorch cannot make it. On
// the CPU try_empty_strided() makes it. On CUDA deterministic mode fills every new tensor, but not
// a storage that grows, so an empty tensor's storage does. In a release without the operator of
// try_grow(), which PyTorch does not document, the tensor would be filled.
inline std::optional<Tensor> try_empty(
    IntArrayRef sizes, IntArrayRef strides, ScalarType type, int32_t device_type, int32_t device) {
#ifdef USE_CUDA
  const std::optional<Tensor> storage = try_empty_strided({0}, {1}, type, device_type, device);
  if (!storage) {
    return std::nullopt;
  }
  // Only a yes is remembered. To grow by no byte cannot fail for want of memory, but a first call
  // may fail for another reason.
  static std::atomic<bool> has_operator = false;
  has_operator = has_operator || try_grow(*storage, 0);
  if (has_operator) {
    int64_t bytes = static_cast<int64_t>(element_size(type));
    for (const int64_t size : sizes) {
      bytes *= size;
    }
    if (!try_grow(*storage, bytes)) {
      return std::nullopt;
    }
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch__alloc_from_pool(
        storage->get(),
        /*offset_bytes=*/0,
        static_cast<int32_t>(type),
        static_cast<int64_t>(sizes.size()),
        sizes.data(),
        strides.data(),
        &handle));
    return Tensor(handle);
  }
#endif
  return try_empty_strided(sizes, strides, type, device_type, device);
}

// Copies the elements, from any strides to any strides.
inline void copy(const Tensor& to, const Tensor& from) {
  TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(to.get(), from.get(), /*non_blocking=*/0));
}

// What CUDA needs, in the library of CUDA kernels: setup.py defines USE_CUDA, and PyTorch's headers
// ask for it, too. Their STD_CUDA_CHECK(code) raises the error of a code of CUDA's runtime, in
// PyTorch's words, and STD_CUDA_KERNEL_LAUNCH_CHECK() that of a launch.
#ifdef USE_CUDA

// The stream of a GPU that is PyTorch's current one in this thread.
inline cudaStream_t current_stream(int32_t device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

// Makes a GPU the current device of this thread. The destructor restores the previous one.
class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t device) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_create_cuda_guard(device, &guard_));
  }
  ~DeviceGuard() { aoti_torch_delete_cuda_guard(guard_); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  CUDAGuardHandle guard_ = nullptr;
};

#endif

} // namespace maxunpool_cuda
