// Call of max unpooling on CUDA, and what its plans ask of a geometry.
#pragma once

#include "../calls.h"
#include "../geometry.h"
#include "limits.h"
#include "report.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <algorithm>
#include <cstdint>
#include <iterator>

namespace maxunpool_cuda {

struct Arguments : UnpoolCall {
  bool deterministic; // sums have the same bits in every run
  ErrorRecord* error;
  Limits limits{};
  int64_t threads = kThreads; // of a block
  int64_t blocks = 256;       // of a second kernel with slots in global memory, at most
};

// Whether all arrays begin where vectors do.
inline bool has_vectors(const Arguments& arguments) {
  return are_aligned({arguments.values, arguments.indices, arguments.result});
}

// Shape of a launch whose blocks have slots.
struct BlockShape {
  int64_t blocks;       // that have work, at most
  int64_t threads;      // of a block, as many as its work is worth
  int64_t shared_bytes; // of a block
  bool all_busy;        // most blocks have work
};

// Whether all intermediate values of all kernels stay below the limit, for so many inner channels,
// windows of that dilation, and `more` rows of windows beyond those of the geometry.
inline bool fits_32bit(
    const Geometry<int64_t>& geometry, int64_t inner, int64_t limit,
    const int64_t (&dilation)[3] = {1, 1, 1}, int64_t more = 0) {
  double elements = static_cast<double>(geometry.outer) * static_cast<double>(inner);
  double kernel_volume = 1, extent = 0;
  for (int a = 0; a < 3; ++a) {
    const Axis<int64_t>& axis = geometry.axis[a];
    const auto size = static_cast<double>(std::max(axis.in + (a == 1 ? more : 0), axis.out));
    const auto kernel = static_cast<double>(axis.kernel), apart = static_cast<double>(dilation[a]);
    elements *= apart == 1 ? size : size + apart;
    kernel_volume *= kernel;
    extent = std::max(
        extent, (size + 1) * static_cast<double>(axis.stride) + size +
                    static_cast<double>(axis.padding) + (kernel + 1) * apart);
  }
  return std::max({elements, extent, kernel_volume}) < static_cast<double>(limit);
}

// Whether windows begin elsewhere than at multiples of the stride.
inline bool is_padded(const Geometry<int64_t>& geometry) {
  const auto padded = [](const Axis<int64_t>& axis) { return axis.padding != 0; };
  return std::any_of(std::begin(geometry.axis), std::end(geometry.axis), padded);
}

// Whether a dimension is of size one, pooled, unpooled and in its windows.
inline bool is_trivial(const Axis<int64_t>& axis) {
  return axis.in == 1 && axis.out == 1 && axis.kernel == 1 && axis.padding == 0;
}

// Whether windows do not overlap in depth, and each covers the output at its cell's number times
// the stride.
inline bool is_simple_in_depth(const Axis<int64_t>& depth) {
  return depth.kernel <= depth.stride && depth.padding < depth.kernel &&
         (depth.in - 1) * depth.stride < depth.out;
}

} // namespace maxunpool_cuda
