// What a call of max unpooling is, and what its plans ask of its geometry.
#pragma once

#include "../calls.h"
#include "../geometry.h"
#include "divider.cuh"
#include "limits.h"
#include "report.cuh"
#include "tiling.cuh"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>

namespace maxunpool_cuda {

struct Arguments : UnpoolCall {
  bool deterministic; // also in the last bits of sums
  ErrorRecord* error;
  Limits limits{};
  int64_t threads = kThreads; // of a block
  int64_t blocks = 256;       // of a kernel with slots in global memory, at most
};

// What a kernel with slots has to do.
struct SharedShape {
  int64_t pieces; // at most so many blocks have work, or slots
  int64_t slots;  // of a piece
  int64_t bytes;  // of shared memory, for each block
  bool likely;    // that the pieces need anything done
};

inline Divider<uint32_t> divider(int64_t by) {
  return Divider<uint32_t>(static_cast<uint32_t>(by));
}

template <class Offset>
Geometry<Offset> narrow(const Geometry<int64_t>& from) {
  Geometry<Offset> to;
  to.outer = static_cast<Offset>(from.outer);
  to.inner = static_cast<Offset>(from.inner);
  to.rank = from.rank;
  for (int a = 0; a < 3; ++a) {
    const Axis<int64_t>& axis = from.axis[a];
    to.axis[a] = {
        static_cast<Offset>(axis.in), static_cast<Offset>(axis.out),
        static_cast<Offset>(axis.kernel), static_cast<Offset>(axis.stride),
        static_cast<Offset>(axis.padding)};
  }
  return to;
}

// Whether windows begin elsewhere than at multiples of the stride.
inline bool is_padded(const Geometry<int64_t>& geometry) {
  const auto padded = [](const Axis<int64_t>& axis) { return axis.padding != 0; };
  return std::any_of(std::begin(geometry.axis), std::end(geometry.axis), padded);
}

// There is no such dimension, or none to speak of.
inline bool is_trivial(const Axis<int64_t>& axis) {
  return axis.in == 1 && axis.out == 1 && axis.kernel == 1 && axis.padding == 0;
}

// Do windows share nothing in depth, and does that of every cell hold the output at its number
// times the stride?
inline bool is_simple_in_depth(const Axis<int64_t>& depth) {
  return depth.kernel <= depth.stride && depth.padding < depth.kernel &&
         (depth.in - 1) * depth.stride < depth.out;
}

} // namespace maxunpool_cuda
