// Registers kernels when replace_cpu_kernels asks for it, in place of the CPU's, and not when the
// library is loaded.
#pragma once

#include <torch/library.h>

#include <vector>

namespace shim {

using Implement = void (*)(torch::Library&);
inline std::vector<Implement>& implementations() {
  static std::vector<Implement> all;
  return all;
}

} // namespace shim

#undef TORCH_LIBRARY_IMPL
#define TORCH_LIBRARY_IMPL(name, key, m)                     \
  static void implement_##key(torch::Library&);              \
  [[maybe_unused]] static const auto& implements_##key =     \
      shim::implementations().emplace_back(implement_##key); \
  static void implement_##key(torch::Library& m)
