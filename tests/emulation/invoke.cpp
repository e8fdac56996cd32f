// SPDX-License-Identifier: BSD-3-Clause
// Makes the work of a launch: a kernel of the emulation, with the arguments that nvcc's host code
// has pointers to. runtime.cpp gets these, and knows the kernel by its symbol alone.
// kernel_table.inc has a row for each kernel, KERNEL(symbol, function), which tells the types of
// its parameters.
//
// Example: for the symbol of a kernel void(int, float*), and pointers a and b, it is kernel(*a,
// *b), with the values that *a and *b have now.
#include "cuda/backward.cuh"
#include "cuda/forward.cuh"
#include "cuda/forward_strips.cuh"
#include "cuda/pool.cuh"
#include "cuda/pool_lanes.cuh"
#include "cuda/slots.cuh"
#include "dtypes.h"

#include <dlfcn.h>

#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

namespace {

// What a thread does: it calls the kernel.
using Thread = std::function<void()>;

// The thread of a kernel with the values that the arguments point to now.
template <class... Parameters, size_t... I>
Thread thread_of(void (*kernel)(Parameters...), void** arguments, std::index_sequence<I...>) {
  const std::tuple<std::remove_cv_t<Parameters>...> held = {
      *static_cast<std::remove_cv_t<Parameters>*>(arguments[I])...};
  return [=] { std::apply(kernel, held); };
}

template <class Kernel>
struct MakerOf;
template <class... Parameters>
struct MakerOf<void(Parameters...)> {
  static Thread make(void* kernel, void** arguments) {
    const auto function = reinterpret_cast<void (*)(Parameters...)>(kernel);
    return thread_of(function, arguments, std::index_sequence_for<Parameters...>());
  }
};

#define KERNEL(symbol, ...) {symbol, MakerOf<decltype(__VA_ARGS__)>::make},
const std::map<std::string, Thread (*)(void* kernel, void** arguments)> makers = {
#include "kernel_table.inc"
};

} // namespace

extern "C" std::function<void()> work_of_launch(
    const char* symbol, unsigned blocks, unsigned threads, size_t shared_bytes, void** arguments) {
  // The name of the namespace, of 14 letters, is another one in the emulation.
  std::string emulated = symbol;
  const std::string package = "14maxunpool_cuda";
  for (size_t at; (at = emulated.find(package)) != std::string::npos;) {
    emulated.replace(at, package.size(), "8emulated");
  }
  void* const kernel = dlsym(RTLD_DEFAULT, emulated.c_str());
  const Thread thread = makers.at(emulated)(kernel, arguments);
  return [=] { shim::run_grid(kernel, blocks, threads, shared_bytes, thread); };
}
