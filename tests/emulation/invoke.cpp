// SPDX-License-Identifier: BSD-3-Clause
// Makes the work of a launch: a kernel of the emulation, with the arguments that nvcc's host code
// has pointers to. runtime.cpp gets these, and knows the kernel by its symbol alone.
// kernel_table.inc has a row for each kernel, which tells the types of its parameters.
//
// Example: for the symbol of a kernel void(int, float*), and pointers a and b, it is kernel(*a,
// *b), with the values that *a and *b have now.
#include "cuda/backward.cuh"
#include "cuda/forward.cuh"
#include "cuda/ordered.cuh"
#include "cuda/pool.cuh"
#include "cuda/pool_lanes.cuh"
#include "cuda/slots.cuh"
#include "dtypes.h"

#include <dlfcn.h>

#include <functional>
#include <map>
#include <regex>
#include <string>
#include <tuple>

namespace {

// What a thread does: it calls the kernel.
using Thread = std::function<void()>;

// The thread of a kernel with the values that the arguments point to now. Within braces these are
// read from the first to the last.
template <class... Parameters>
Thread thread_of(void (*kernel)(Parameters...), void** arguments) {
  const std::tuple<Parameters...> held = {*static_cast<Parameters*>(*arguments++)...};
  return [=] { std::apply(kernel, held); };
}

template <class Kernel>
Thread thread_at(void* kernel, void** arguments) {
  return thread_of(reinterpret_cast<Kernel*>(kernel), arguments);
}

const std::map<std::string, Thread (*)(void* kernel, void** arguments)> threads_at = {
#include "kernel_table.inc"
};

} // namespace

extern "C" std::function<void()> work_of_launch(
    const char* symbol, unsigned blocks, unsigned threads, size_t shared_bytes, void** arguments) {
  // A symbol has the name of the namespace, of 14 letters. In the emulation it is another.
  const std::regex package("14maxunpool_cuda");
  const std::string emulated = std::regex_replace(symbol, package, "8emulated");
  void* const kernel = dlsym(RTLD_DEFAULT, emulated.c_str());
  const Thread thread = threads_at.at(emulated)(kernel, arguments);
  return [=] { shim::run_grid(kernel, blocks, threads, shared_bytes, thread); };
}
