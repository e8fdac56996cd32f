// The operator that registers the library's kernels, or withdraws them.
#include "registration.h"

#include <optional>

namespace shim {
namespace {

void replace_cpu_kernels(bool replace) {
  static std::optional<torch::Library> registered;
  registered.reset();
  if (replace) {
    registered.emplace(
        torch::Library::IMPL, "maxunpool_cuda", c10::DispatchKey::CPU, __FILE__, __LINE__);
    for (const auto& implement : implementations()) {
      implement(*registered);
    }
  }
}

} // namespace

TORCH_LIBRARY_FRAGMENT(LIBRARY, m) {
  m.def("replace_cpu_kernels", &replace_cpu_kernels);
}

} // namespace shim
