// Operators on tensors without data: they check arguments and give results without data.
#include "max_pool.h"
#include "max_unpool.h"

#include <c10/core/SymInt.h>
#include <torch/library.h>

namespace maxunpool_cuda {

TORCH_LIBRARY_IMPL(maxunpool_cuda, Meta, m) {
  m.impl("max_unpool", run<c10::SymInt, true>);
  m.impl("max_unpool_backward", run<c10::SymInt, false>);
  m.impl("max_pool", run_pool<c10::SymInt>);
}

} // namespace maxunpool_cuda
