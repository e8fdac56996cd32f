// SPDX-License-Identifier: BSD-3-Clause
// Indices: how kernels read them, and which output an index names.
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
  __device__ int64_t operator[](uint64_t i) const {
    switch (bytes) {
      case sizeof(int64_t):
        return static_cast<const int64_t*>(data)[i];
      case sizeof(int32_t):
        return static_cast<const int32_t*>(data)[i];
      default:
        return static_cast<const uint8_t*>(data)[i];
    }
  }
};

// An index as it is read, by a kernel that is compiled for window offsets or for flat indices.
template <bool kOffsets>
using RawIndex = std::conditional_t<kOffsets, uint32_t, uint64_t>;

// Loads the N neighbours, an aligned vector, that begin `away` elements from element `i`.
template <bool kOffsets, int N>
__device__ inline Vector<RawIndex<kOffsets>, N> load_indices(
    const AnyIndices& indices, uint32_t i, int away = 0) {
  Vector<RawIndex<kOffsets>, N> raw;
  const auto load_as = [&]<class Index>(Index) {
    const auto vector = load<N>(static_cast<const Index*>(indices.data) + i + away);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      raw[n] = static_cast<std::make_unsigned_t<Index>>(vector[n]);
    }
  };
  if constexpr (kOffsets) {
    load_as(uint8_t{});
  } else if (indices.bytes == sizeof(int64_t)) {
    load_as(int64_t{});
  } else {
    load_as(int32_t{});
  }
  return raw;
}

// Index as an Offset. If that has 32 bits, an index that no plane has becomes kNowhere.
constexpr uint32_t kNowhere = 0x80000000u;

template <class Offset>
__device__ inline Offset index_as(uint64_t index) {
  return sizeof(Offset) == sizeof(index) || index < kNowhere ? static_cast<Offset>(index)
                                                             : static_cast<Offset>(kNowhere);
}

template <class Offset>
struct Position {
  Offset at[3];

  MAXUNPOOL_HOST_DEVICE Offset& operator[](int a) { return at[a]; }
  MAXUNPOOL_HOST_DEVICE const Offset& operator[](int a) const { return at[a]; }
};

// Decoder of indices: a geometry, and dividers by its sizes. Offset is uint32_t where every
// intermediate value stays below 2^31, else uint64_t.
template <class Offset>
struct Decoder {
  Geometry<Offset> geometry;
  Offset in_plane, out_plane;
  Divider<Offset> out_height, out_width, kernel_height, kernel_width;

  Decoder() = default;
  explicit Decoder(const Geometry<int64_t>& from) {
    const auto size = [](int64_t n) { return static_cast<Offset>(n); };
    geometry = {size(from.outer), size(from.inner), {}, from.rank};
    for (int a = 0; a < 3; ++a) {
      const auto& [in, out, kernel, stride, padding] = from.axis[a];
      geometry.axis[a] = {size(in), size(out), size(kernel), size(stride), size(padding)};
    }
    in_plane = geometry.in_plane();
    out_plane = geometry.out_plane();
    out_height = Divider<Offset>(from.axis[1].out);
    out_width = Divider<Offset>(from.axis[2].out);
    kernel_height = Divider<Offset>(from.axis[1].kernel);
    kernel_width = Divider<Offset>(from.axis[2].kernel);
  }

  // Begin of the cell's window; a coordinate below 0 wraps around.
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
  Offset target; // in the output plane, or beyond all planes
  bool in_plane, in_window;
};

// Decodes an index of the cell whose window begins at `start`. Unless `deep`, depth is one
// everywhere.
template <bool kOffsets, class Offset>
__device__ inline Decoded<Offset> decoded(
    const Decoder<Offset>& decoder, Offset index, const Position<Offset>& start, bool deep) {
  const auto& [depth, height, width] = decoder.geometry.axis;
  if constexpr (kOffsets) {
    Offset x = index, y = split(x, decoder.kernel_width), z = 0;
    bool inside = true;
    if (deep) {
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
  } else {
    const bool in_plane = index < decoder.out_plane;
    const Offset target = in_plane ? index : 0;
    bool inside = in_plane;
    Offset x = target, y = split(x, decoder.out_width);
    if (deep) {
      const Offset z = split(y, decoder.out_height);
      inside &= z - start[0] < depth.kernel;
    }
    inside &= (y - start[1] < height.kernel) & (x - start[2] < width.kernel);
    return {in_plane ? target : static_cast<Offset>(-1), in_plane, inside};
  }
}

} // namespace maxunpool_cuda
