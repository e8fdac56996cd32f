// The one geometry that every kernel, of every rank, layout and backend, is written for.
#pragma once

#include <cstdint>
#include <type_traits>

#if defined(__CUDACC__)
#define MAXUNPOOL_HOST_DEVICE __host__ __device__
#else
#define MAXUNPOOL_HOST_DEVICE
#endif

namespace maxunpool_cuda {

// A spatial dimension. Window p covers the output coordinates [p * stride - padding,
// p * stride - padding + kernel), clipped to [0, out).
template <class Offset>
struct Axis {
  Offset in;  // pooled size
  Offset out; // unpooled size
  Offset kernel;
  Offset stride;
  Offset padding;
};

// A pooled tensor is a dense array [outer][depth][height][width][inner], and so is an unpooled one:
// - contiguous: outer = batch * channels, inner = 1;
// - channels last: outer = batch, inner = channels.
// Ranks below three have leading axes of size 1. A "slab" is what one outer index holds; a plane is
// one (outer, inner) pair. Indices count positions of the output plane, whatever the layout, or of
// the window of their cell; see kIsWindowOffset.
template <class Offset>
struct Geometry {
  static constexpr int kAxes = 3;

  Offset outer;
  Offset inner;
  Axis<Offset> axis[kAxes];
  int rank; // 1, 2 or 3: how many of the last axes the caller named

  MAXUNPOOL_HOST_DEVICE Offset in_plane() const { return axis[0].in * axis[1].in * axis[2].in; }
  MAXUNPOOL_HOST_DEVICE Offset out_plane() const { return axis[0].out * axis[1].out * axis[2].out; }
  MAXUNPOOL_HOST_DEVICE Offset in_slab() const { return in_plane() * inner; }
  MAXUNPOOL_HOST_DEVICE Offset out_slab() const { return out_plane() * inner; }
};

// Windows that share no position, before they are clipped.
template <class Offset>
bool windows_are_apart(const Geometry<Offset>& geometry) {
  for (const Axis<Offset>& axis : geometry.axis) {
    if (axis.kernel > axis.stride) {
      return false;
    }
  }
  return true;
}

// int64 and int32 indices are flat positions in the output plane. uint8 ones are row-major offsets
// in the window of their cell, before it is clipped: none can name an output beyond it.
template <class Index>
constexpr bool kIsWindowOffset = std::is_same_v<Index, uint8_t>;
constexpr int kMostOffsets = 256; // that a byte tells apart

} // namespace maxunpool_cuda
