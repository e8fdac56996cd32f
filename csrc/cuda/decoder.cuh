// What an index of a cell names, and whether that lies in the cell's window.
#pragma once

#include "../geometry.h"
#include "divider.cuh"

#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

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
};

// Decoder for a geometry whose sizes fit Offset.
template <class Offset>
Decoder<Offset> decoder_of(const Geometry<int64_t>& from) {
  const auto size = [](int64_t n) { return static_cast<Offset>(n); };
  Decoder<Offset> decoder;
  Geometry<Offset>& to = decoder.geometry;
  to = {size(from.outer), size(from.inner), {}, from.rank};
  for (int a = 0; a < 3; ++a) {
    const Axis<int64_t>& axis = from.axis[a];
    to.axis[a] = {
        size(axis.in), size(axis.out), size(axis.kernel), size(axis.stride), size(axis.padding)};
  }
  decoder.in_plane = to.in_plane();
  decoder.out_plane = to.out_plane();
  const auto& [depth, height, width] = from.axis;
  decoder.out_height = divider<Offset>(height.out);
  decoder.out_width = divider<Offset>(width.out);
  decoder.kernel_height = divider<Offset>(height.kernel);
  decoder.kernel_width = divider<Offset>(width.kernel);
  return decoder;
}

// Flat position in the output plane that an index names. An index that does not fit Offset becomes
// a position that no plane has.
template <class Offset, class Index>
__device__ inline Offset target_of(Index index) {
  if constexpr (sizeof(Index) > sizeof(Offset)) {
    return static_cast<uint64_t>(index) >> 32 == 0 ? static_cast<Offset>(index)
                                                   : static_cast<Offset>(-1);
  } else {
    return static_cast<Offset>(index);
  }
}

// Indices of a type that is known when the kernel runs: window offsets, if of one byte.
struct AnyIndices {
  const void* indices;
  int bytes; // of one

  __device__ int64_t operator[](uint64_t i) const {
    switch (bytes) {
      case 8:
        return static_cast<const int64_t*>(indices)[i];
      case 4:
        return static_cast<const int32_t*>(indices)[i];
      default:
        return static_cast<const uint8_t*>(indices)[i];
    }
  }
};

__device__ inline bool are_offsets(const AnyIndices& indices) {
  return indices.bytes == 1;
}
template <class Index>
__device__ inline bool are_offsets(const Index*) {
  return kIsWindowOffset<Index>;
}

// Begin of the cell's window; a coordinate below 0 wraps around.
template <class Offset>
__device__ inline Position<Offset> window_start(
    const Decoder<Offset>& decoder, const Position<Offset>& cell) {
  Position<Offset> start;
#pragma unroll
  for (int a = 0; a < 3; ++a) {
    const Axis<Offset>& axis = decoder.geometry.axis[a];
    start[a] = cell[a] * axis.stride - axis.padding;
  }
  return start;
}

// What an index of a cell names.
template <class Offset>
struct Decoded {
  Offset target; // in the output plane, or beyond all planes
  bool in_plane, in_window;
};

// Decodes an index of the cell whose window begins at `start`. Unless `deep`, depth is one
// everywhere. `whole`: the window is not clipped, and not `deep`.
template <class Index, class Offset>
__device__ inline Decoded<Offset> decoded(
    const Decoder<Offset>& decoder, Index index, const Position<Offset>& start, bool deep,
    bool whole = false) {
  const auto& [depth, height, width] = decoder.geometry.axis;
  if constexpr (kIsWindowOffset<Index>) {
    Offset target, y = decoder.kernel_width.divide(index), x = index - y * width.kernel;
    bool inside = true;
    if (whole) {
      inside = index < height.kernel * width.kernel;
      target = start[1] * width.out + start[2] + index + y * (width.out - width.kernel);
    } else {
      Offset z = 0;
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
      target = (z * height.out + y) * width.out + x;
    }
    return {inside ? target : static_cast<Offset>(-1), inside, inside};
  } else {
    const bool in_plane = static_cast<std::make_unsigned_t<Index>>(index) < decoder.out_plane;
    bool inside = in_plane;
    const auto target = static_cast<Offset>(index);
    Offset x = target, y = split(x, decoder.out_width);
    if (deep) {
      const Offset z = split(y, decoder.out_height);
      inside &= z - start[0] < depth.kernel;
    }
    inside &= (y - start[1] < height.kernel) & (x - start[2] < width.kernel);
    return {in_plane ? target : static_cast<Offset>(-1), in_plane, inside};
  }
}

// Decodes the index of a pooled element, of that cell. Indices are a pointer, or AnyIndices.
template <class Indices, class Offset>
__device__ inline Decoded<Offset> decoded_at(
    const Decoder<Offset>& decoder, const Indices& indices, Offset element,
    const Position<Offset>& cell) {
  const Position<Offset> start = window_start(decoder, cell);
  const auto index = indices[element];
  if constexpr (std::is_same_v<Indices, AnyIndices>) {
    if (are_offsets(indices)) {
      return decoded(decoder, static_cast<uint8_t>(index), start, true);
    }
  }
  return decoded(decoder, index, start, true);
}

} // namespace maxunpool_cuda
