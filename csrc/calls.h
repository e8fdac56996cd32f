// SPDX-License-Identifier: BSD-3-Clause
// UnpoolCall and PoolCall: a call as the kernels of every backend get it. It has been checked, and
// is numbers, dtypes and addresses, without tensors. geometry.h describes the arrays, reduction.h
// says what "last" and "sum" are.
//
// Example: max_unpool of a float32 input [2, 5, 4, 4] and int64 indices to [2, 5, 8, 8] is
//
//   {.geometry = ...,               // as in the example of geometry.h
//    .reduce = Reduce::last,
//    .forward = true,
//    .type = Float, .index_type = Long,
//    .element_size = 4,
//    .values = 160 floats, .indices = 160 int64_t, .result = room for 640 floats}
//
// The gradient of that call has .forward = false. Its .values are the 640 floats of grad_output,
// and its .result is room for the 160 floats of grad_input.
#pragma once

#include "geometry.h"
#include "reduction.h"
#include "torch.h"

#include <cstddef>
#include <cstdint>

namespace maxunpool_cuda {

// One call of max_unpool (forward) or max_unpool_backward (not forward). All arrays are dense, and
// have the layout of the geometry. A kernel writes every element of `result`, which starts out
// undefined and has at least one element.
struct UnpoolCall {
  Geometry<int64_t> geometry;
  Reduce reduce;
  bool forward;
  ScalarType type; // of the values and the result
  ScalarType index_type;
  size_t element_size; // bytes of one value
  const void* values;  // forward: the pooled input; else the unpooled grad_output
  const void* indices; // pooled
  void* result;        // forward: the unpooled output; else the pooled grad_input
};

// One call of max_pool. All arrays are dense, and have the layout of the geometry, whose unpooled
// side is the input. A kernel writes every element of `values` and `indices`, which start out
// undefined and have at least one element.
struct PoolCall {
  Geometry<int64_t> geometry;
  // For each axis, the distance of neighbouring elements of a window. An element `k` of the window
  // of pooled coordinate `p` is at the input coordinate p * stride - padding + k * dilation.
  int64_t dilation[Geometry<int64_t>::kAxes];
  ScalarType type; // of the input and the values
  ScalarType index_type;
  const void* input; // unpooled
  void* values;      // pooled
  void* indices;     // pooled
};

} // namespace maxunpool_cuda
