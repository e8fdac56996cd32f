// SPDX-License-Identifier: BSD-3-Clause
// Runs a kernel of the emulation with the arguments of a launch by nvcc's host code: pointers to
// each. runtime.cpp gets them, and knows the kernel by its symbol alone. kernel_table.inc has a row
// for each kernel, KERNEL(symbol, function), which tells the types of its parameters.
//
// Example: for the symbol of a kernel void(int, float*), and pointers a and b, kernel(*a, *b) runs.
#include "cuda/backward.cuh"
#include "cuda/forward.cuh"
#include "cuda/forward_strips.cuh"
#include "cuda/pool.cuh"
#include "cuda/pool_lanes.cuh"
#include "cuda/slots.cuh"
#include "dtypes.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <utility>

namespace {

struct Grid {
  unsigned blocks;
  unsigned threads; // of a block
  size_t shared_bytes;
};

template <class Kernel>
struct Invoke;
template <class... Parameters>
struct Invoke<void(Parameters...)> {
  template <size_t... I>
  static void call(void* kernel, void** arguments, std::index_sequence<I...>) {
    const auto function = reinterpret_cast<void (*)(Parameters...)>(kernel);
    function(*static_cast<std::remove_cv_t<Parameters>*>(arguments[I])...);
  }
  static void run(void* kernel, const Grid& grid, void** arguments) {
    shim::run_grid(kernel, grid.blocks, grid.threads, grid.shared_bytes, [&] {
      call(kernel, arguments, std::index_sequence_for<Parameters...>());
    });
  }
};

using Run = void (*)(void* kernel, const Grid& grid, void** arguments);
#define KERNEL(symbol, ...) {symbol, Invoke<decltype(__VA_ARGS__)>::run},
const std::map<std::string, Run> runs = {
#include "kernel_table.inc"
};

} // namespace

extern "C" void run_kernel(
    const char* symbol, unsigned blocks, unsigned threads, size_t shared_bytes, void** arguments) {
  // The name of the namespace, of 14 letters, is another one in the emulation.
  std::string emulated = symbol;
  const std::string package = "14maxunpool_cuda";
  for (size_t at; (at = emulated.find(package)) != std::string::npos;) {
    emulated.replace(at, package.size(), "8emulated");
  }
  void* const kernel = dlsym(RTLD_DEFAULT, emulated.c_str());
  const auto found = runs.find(emulated);
  if (kernel == nullptr || found == runs.end()) {
    std::fprintf(stderr, "The emulation has no kernel %s\n", symbol);
    std::abort();
  }
  found->second(kernel, {blocks, threads, shared_bytes}, arguments);
}
