// SPDX-License-Identifier: BSD-3-Clause
// Indices: how kernels read them, and which output an index names. Division comes from divider.cuh,
// vectors from vector.cuh, and the words cell, plane, window offset, out of window and out of
// bounds from geometry.h.
//
// Example: an output plane of 4 rows of 5 columns, and windows of 2x2, 2 apart. The window of cell
// (1, 1) begins at row 2, column 2.
//
//   flat index 17 of cell (1, 1)      17 = 3 * 5 + 2: row 3, column 2, which is in the window
//   flat index 15 of cell (1, 1)      row 3, column 0: in the plane, but out of window
//   flat index 20 of any cell         out of bounds: the plane has 20 positions, 0 to 19
//   window offset 2 of cell (1, 1)    row 2 + 1, column 2 + 0: output 17 again
//   window offset 4 of any cell       out of bounds: the window has 4 elements
#pragma once

#include "../geometry.h"
#include "divider.cuh"
#include "vector.cuh"

#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

// Indices whose type is known when the kernel runs: window offsets, if of one byte.
struct AnyIndices {
  const void* data;
  int bytes; // of one

  __device__ bool are_offsets() const { return bytes == sizeof(uint8_t); }
  // An index as it lies in memory, without a conversion, which would wait for it. As int32 is not
  // extended by its sign, -1 becomes 2^32 - 1.
  __device__ uint64_t raw(uint64_t i) const {
    switch (bytes) {
      case sizeof(int64_t):
        return static_cast<const uint64_t*>(data)[i];
      case sizeof(int32_t):
        return static_cast<const uint32_t*>(data)[i];
      default:
        return static_cast<const uint8_t*>(data)[i];
    }
  }
  __device__ int64_t operator[](uint64_t i) const {
    const uint64_t index = raw(i);
    return bytes == sizeof(int32_t) ? static_cast<int32_t>(index) : static_cast<int64_t>(index);
  }
};

// Loads the indices of N neighbours, the first of which has the number `element`: an aligned
// vector. Sets `index` to their lower 32 bits, and returns the upper halves of int64, or-ed. int32
// is not extended by its sign: -1 becomes 2^32 - 1.
//
// Planes of kernels with 32-bit offsets have fewer than 2^31 positions. So an index whose upper
// half is not 0 is beyond the plane, but its lower half may name a position all the same. The
// thread that owns the cell looks at the upper half, and has the fix-up kernel mend what others
// took of it.
template <bool kOffsets, int N>
__device__ __forceinline__ uint32_t
load_indices(const AnyIndices& indices, int64_t element, uint32_t (&index)[N]) {
  uint32_t upper_halves = 0;
  if constexpr (kOffsets) {
    load_registers(static_cast<const uint8_t*>(indices.data) + element, index);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      index[n] &= 0xffu;
    }
  } else if (indices.bytes == sizeof(int64_t)) {
    const auto halves = load<2 * N>(static_cast<const uint32_t*>(indices.data) + 2 * element);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      index[n] = halves[2 * n];
      upper_halves |= halves[2 * n + 1];
    }
  } else {
    load_registers(static_cast<const uint32_t*>(indices.data) + element, index);
  }
  return upper_halves;
}

// The smallest 32-bit number that is no index: planes of kernels with 32-bit offsets are smaller.
constexpr uint32_t kNowhere = 0x80000000u;

// Returns the index as an Offset. If that has 32 bits, a larger index becomes kNowhere: 2^32 + 1
// may not become 1.
template <class Offset>
__device__ inline Offset index_as(uint64_t index) {
  if constexpr (sizeof(Offset) == sizeof(index)) {
    return static_cast<Offset>(index);
  } else {
    return static_cast<Offset>(index < kNowhere ? index : kNowhere);
  }
}

// Coordinates in depth, height and width.
template <class Offset>
struct Position {
  Offset at[3];

  __device__ Offset& operator[](int a) { return at[a]; }
  __device__ const Offset& operator[](int a) const { return at[a]; }
};

// Decoder of indices: a geometry, and dividers by its sizes. Offset is uint32_t where every
// intermediate value stays below 2^31 (see fits_32bit), else uint64_t.
template <class Offset>
struct Decoder {
  Geometry<Offset> geometry;
  Offset in_plane;  // cells of a plane
  Offset out_plane; // outputs of a plane
  bool deep;        // depth is not trivial; else it is not computed with
  Divider<Offset> out_height;
  Divider<Offset> out_width;
  Divider<Offset> kernel_height;
  Divider<Offset> kernel_width;

  explicit Decoder(const Geometry<int64_t>& from) {
    const auto size = [](int64_t n) { return static_cast<Offset>(n); };
    geometry = {
        .outer = size(from.outer), .inner = size(from.inner), .axis = {}, .rank = from.rank};
    for (int a = 0; a < 3; ++a) {
      const Axis<int64_t>& axis = from.axis[a];
      geometry.axis[a] = {
          .in = size(axis.in),
          .out = size(axis.out),
          .kernel = size(axis.kernel),
          .stride = size(axis.stride),
          .padding = size(axis.padding)};
    }
    in_plane = geometry.in_plane();
    out_plane = geometry.out_plane();
    deep = !from.axis[0].is_trivial();
    out_height = Divider<Offset>(from.axis[1].out);
    out_width = Divider<Offset>(from.axis[2].out);
    kernel_height = Divider<Offset>(from.axis[1].kernel);
    kernel_width = Divider<Offset>(from.axis[2].kernel);
  }

  // Begin of the cell's window. A coordinate below 0, in the padding, wraps around.
  __device__ Position<Offset> window_start(const Position<Offset>& cell) const {
    Position<Offset> start;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      start[a] = cell[a] * geometry.axis[a].stride - geometry.axis[a].padding;
    }
    return start;
  }
};

// What an index of a cell names.
template <class Offset>
struct Decoded {
  Offset target; // in the output plane; if the index is out of bounds, a number beyond all planes
  bool in_plane; // false: the index is out of bounds
  bool in_window;
};

// Decodes a window offset of the cell whose window begins at `start`. An offset that leads into the
// padding is out of bounds. Coordinates in the padding before the plane have wrapped around, so
// `< out` is the only test that they need. Example: a window begins at column -1, which is
// 2^32 - 1. Its column 0 stays there, and is not below width.out; its column 1 is at 0.
template <class Offset>
__device__ inline Decoded<Offset> decoded_offset(
    const Decoder<Offset>& decoder, Offset index, const Position<Offset>& start) {
  const auto& [depth, height, width] = decoder.geometry.axis;
  Offset x = index;
  Offset y = split(x, decoder.kernel_width);
  Offset z = 0;
  bool inside = true;
  if (decoder.deep) {
    z = split(y, decoder.kernel_height);
    inside = z < depth.kernel;
    z += start[0];
    inside &= z < depth.out;
  }
  inside &= y < height.kernel;
  y += start[1];
  x += start[2];
  inside &= (y < height.out) & (x < width.out);
  const Offset target = (z * height.out + y) * width.out + x;
  return {inside ? target : static_cast<Offset>(-1), inside, inside};
}

// Decodes a flat index, likewise.
template <class Offset>
__device__ inline Decoded<Offset> decoded_position(
    const Decoder<Offset>& decoder, Offset index, const Position<Offset>& start) {
  const auto& [depth, height, width] = decoder.geometry.axis;
  const bool in_plane = index < decoder.out_plane;
  bool in_window = in_plane;
  Offset x = index; // if it is out of bounds, the quotients mean nothing
  Offset y = split(x, decoder.out_width);
  if (decoder.deep) {
    const Offset z = split(y, decoder.out_height);
    in_window &= z - start[0] < depth.kernel; // before the window, the difference wraps around
  }
  in_window &= (y - start[1] < height.kernel) & (x - start[2] < width.kernel);
  return {in_plane ? index : static_cast<Offset>(-1), in_plane, in_window};
}

// Decodes an index of either kind.
template <class Offset>
__device__ inline Decoded<Offset> decoded(
    const Decoder<Offset>& decoder, bool is_offset, Offset index, const Position<Offset>& start) {
  return is_offset ? decoded_offset(decoder, index, start)
                   : decoded_position(decoder, index, start);
}

// Decodes an index of the kind that the kernel is compiled for.
template <bool kOffsets, class Offset>
__device__ inline Decoded<Offset> decoded(
    const Decoder<Offset>& decoder, Offset index, const Position<Offset>& start) {
  if constexpr (kOffsets) {
    return decoded_offset(decoder, index, start);
  } else {
    return decoded_position(decoder, index, start);
  }
}

} // namespace maxunpool_cuda
