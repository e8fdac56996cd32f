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

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <type_traits>
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
  using Arguments = std::tuple<std::remove_cv_t<Parameters>...>;

  template <size_t... I>
  static Arguments copied(void** arguments, std::index_sequence<I...>) {
    return {*static_cast<std::remove_cv_t<Parameters>*>(arguments[I])...};
  }
  static std::function<void()> work(void* kernel, const Grid& grid, void** arguments) {
    const auto function = reinterpret_cast<void (*)(Parameters...)>(kernel);
    const Arguments held = copied(arguments, std::index_sequence_for<Parameters...>());
    return [=] {
      shim::run_grid(kernel, grid.blocks, grid.threads, grid.shared_bytes, [&] {
        std::apply(function, held);
      });
    };
  }
};

using Work = std::function<void()> (*)(void* kernel, const Grid& grid, void** arguments);
#define KERNEL(symbol, ...) {symbol, Invoke<decltype(__VA_ARGS__)>::work},
const std::map<std::string, Work> works = {
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
  const auto found = works.find(emulated);
  if (kernel == nullptr || found == works.end()) {
    std::fprintf(stderr, "The emulation has no kernel %s\n", symbol);
    std::abort();
  }
  return found->second(kernel, {blocks, threads, shared_bytes}, arguments);
}
