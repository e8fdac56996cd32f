// SPDX-License-Identifier: BSD-3-Clause
// Calls, as the kernels of every backend get them: numbers, dtypes and addresses, no tensors.
#pragma once

#include "geometry.h"
#include "reduction.h"

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>

namespace maxunpool_cuda {

// One call of max_unpool (forward) or max_unpool_backward, on dense arrays of one layout. A kernel
// writes every element of `result`, which starts out undefined and is not empty.
struct UnpoolCall {
  Geometry<int64_t> geometry;
  Reduce reduce;
  bool forward;
  c10::ScalarType type; // of the values
  c10::ScalarType index_type;
  size_t element_size;
  const void* values; // input, or grad_output
  const void* indices;
  void* result; // output, or grad_input
};

// One call of max_pool, on dense arrays of one layout. A kernel reads the unpooled side of the
// geometry and makes the pooled side. `dilation` is the step between elements of a window, axis by
// axis. A kernel writes every element of `values` and `indices`, which start out undefined and are
// not empty.
struct PoolCall {
  Geometry<int64_t> geometry;
  int64_t dilation[Geometry<int64_t>::kAxes];
  c10::ScalarType type;
  c10::ScalarType index_type;
  const void* input;
  void* values;
  void* indices;
};

} // namespace maxunpool_cuda
