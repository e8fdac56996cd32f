// SPDX-License-Identifier: BSD-3-Clause
// The one geometry that every kernel, of every rank, layout and backend, is written for.
//
// Words that mean one thing in all of csrc:
//   cell    a position of a pooled plane; its window is the set of output positions that it covers
//   image   what one outer index of a Geometry holds: all planes of a sample in channels_last, else
//           one plane
//   slice   the positions of a plane that have one depth coordinate
//   output  an element of the unpooled tensor; its owner is the one thread or block that writes it
//   part    the output positions of an image, or of a plane, that one thread or one CUDA block owns
//   chunk   consecutive elements, rows or items that are processed together
//   tile    the cells, with their outputs, that one CUDA thread does at a time
//   item    a tile in one plane or several: the work of one CUDA thread at a time
//   group   consecutive cells or channels that are read together
//   tap     an element of a window that pooling compares (cuda/pool_taps.cuh)
//   lane    one of the CUDA threads that share a large window (cuda/pool_lanes.cuh)
//   slot    what a kernel remembers of one output while it runs
//   out of window: an index in its plane, but outside its own window
//   out of bounds: an index outside its plane
//   fast kernel, fix-up kernel: a CUDA call with flat indices launches two kernels. The fast one
//           assumes that each index lies in its own window, and flags images where one does not.
//           The fix-up kernel recomputes those images.
#pragma once

#include <cstdint>
#include <type_traits>

#if defined(__CUDACC__)
#define MAXUNPOOL_HOST_DEVICE __host__ __device__
#else
#define MAXUNPOOL_HOST_DEVICE
#endif

namespace maxunpool_cuda {

// Quotients rounded down and up, of any number by a positive one.
MAXUNPOOL_HOST_DEVICE constexpr int64_t divide_down(int64_t a, int64_t b) {
  return a / b - (a % b < 0 ? 1 : 0);
}
MAXUNPOOL_HOST_DEVICE constexpr int64_t divide_up(int64_t a, int64_t b) {
  return a / b + (a % b > 0 ? 1 : 0);
}

// A spatial dimension. Window p covers the output coordinates [p * stride - padding,
// p * stride - padding + kernel), clipped to [0, out).
template <class Offset>
struct Axis {
  Offset in = 1;  // pooled size
  Offset out = 1; // unpooled size
  Offset kernel = 1;
  Offset stride = 1;
  Offset padding = 0;
};

// A pooled tensor is a dense array [outer][depth][height][width][inner], and so is an unpooled one:
// - contiguous: outer = batch * channels, inner = 1;
// - channels last: outer = batch, inner = channels.
// Ranks below three have leading axes of size 1. A plane is one (outer, inner) pair. Indices count
// positions of the output plane, whatever the layout, or of the window of their cell: see
// kIsWindowOffset.
template <class Offset>
struct Geometry {
  static constexpr int kAxes = 3;

  Offset outer;
  Offset inner;
  Axis<Offset> axis[kAxes];
  int rank; // 1, 2 or 3: how many of the last axes the caller named

  MAXUNPOOL_HOST_DEVICE Offset in_plane() const { return axis[0].in * axis[1].in * axis[2].in; }
  MAXUNPOOL_HOST_DEVICE Offset out_plane() const { return axis[0].out * axis[1].out * axis[2].out; }
  MAXUNPOOL_HOST_DEVICE Offset in_image() const { return in_plane() * inner; }
  MAXUNPOOL_HOST_DEVICE Offset out_image() const { return out_plane() * inner; }
};

// Whether no two windows share a position, even before they are clipped.
template <class Offset>
bool disjoint(const Geometry<Offset>& geometry) {
  for (const Axis<Offset>& axis : geometry.axis) {
    if (axis.kernel > axis.stride) {
      return false;
    }
  }
  return true;
}

// Whether indices are window offsets, as uint8 ones are: row-major in the window of their cell,
// before it is clipped. int64 and int32 indices are flat positions in the output plane.
template <class Index>
constexpr bool kIsWindowOffset = std::is_same_v<Index, uint8_t>;
constexpr int kMostOffsets = 256; // that uint8 can hold

} // namespace maxunpool_cuda
