// SPDX-License-Identifier: BSD-3-Clause
// Geometry: where the windows of a call lie, and how its tensors lie in memory. One struct serves
// 1d, 2d and 3d, contiguous and channels_last tensors, pooling and unpooling, the CPU and CUDA.
// This file takes nothing from others.
//
// Example: MaxPool2d(kernel_size=3, stride=2, padding=1) of an input [2, 5, 8, 8] makes pooled
// tensors [2, 5, 4, 4]. Unpooling goes back to [2, 5, 8, 8], and has the same geometry:
//
//   axis[0] (depth):           {.in = 1, .out = 1, .kernel = 1, .stride = 1, .padding = 0}
//   axis[1], axis[2]:          {.in = 4, .out = 8, .kernel = 3, .stride = 2, .padding = 1}
//   contiguous:                outer = 2 * 5, inner = 1
//   channels_last:             outer = 2, inner = 5
//   windows of an axis:        [-1, 2), [1, 4), [3, 6), [5, 8); the first is clipped to [0, 2)
//
// The cell at row 1, column 2 has the output rows [1, 4) and columns [3, 6) as its window. If the
// maximum is at row 2, column 4, its flat index is 2 * 8 + 4 = 20, and its window offset is
// (2 - 1) * 3 + (4 - 3) = 4.
//
// Words that mean one thing in all of csrc:
//   plane          the positions of one channel of one sample: 4x4 in the pooled tensor above, 8x8
//                  in the unpooled one, which is the output plane
//   image          what one outer index holds, without a gap in memory: all planes of a sample in
//                  channels_last, else one plane
//   cell           a position of a pooled plane; its window is the output positions that it covers
//   window offset  an index that counts the positions of its own window; uint8 indices do
//   owner          the one thread, or CUDA block, that writes an output; it reads every cell whose
//                  window covers that output
//   part           the outputs that one owner writes: some planes, or a range of some planes
//   chunk          consecutive pooled elements (on CUDA: work items) that are processed together
//   reach          the outputs, without a gap in memory, in which the windows of a chunk lie: if
//                  the chunk is row 1 of the pooled plane above, its windows cover the output rows
//                  [1, 4), and its reach is the outputs [8, 32)
//
// A flat index that lies in its plane but not in its own window is *out of window*: 60, for the
// cell above. It is valid, but slower. An index that lies outside its plane is *out of bounds*: 64,
// or -1. It is an error. So is a window offset beyond its window, or in the padding.
//
// A CUDA call whose flat indices may be out of window launches two kernels. The *fast kernel*
// assumes that each index lies in its own window, and flags chunks where one does not. The *fix-up
// kernel* recomputes the images of these chunks.
#pragma once

#include <cstdint>
#include <type_traits>

#if defined(__CUDACC__)
#define MAXUNPOOL_HOST_DEVICE __host__ __device__
#else
#define MAXUNPOOL_HOST_DEVICE
#endif

namespace maxunpool_cuda {

// a / b rounded up, for b > 0 and any a. (C++ rounds towards zero.)
MAXUNPOOL_HOST_DEVICE constexpr int64_t divide_up(int64_t a, int64_t b) {
  return a / b + (a % b > 0 ? 1 : 0);
}

// A spatial dimension. The window of pooled coordinate p covers the output coordinates
// [p * stride - padding, p * stride - padding + kernel), clipped to [0, out). The default values
// are those of a dimension that the call does not have. Offset is an integer type. The dilation of
// a pool is in PoolCall (calls.h).
template <class Offset>
struct Axis {
  Offset in = 1;  // pooled size
  Offset out = 1; // unpooled size
  Offset kernel = 1;
  Offset stride = 1;
  Offset padding = 0;

  // Whether it has one cell, whose window is the one output: such a dimension changes nothing.
  bool is_trivial() const { return in == 1 && out == 1 && kernel == 1 && padding == 0; }
};

// The pooled tensors and the unpooled one are dense arrays [outer][depth][height][width][inner].
// Their spatial sizes are axis[...].in and axis[...].out.
// - contiguous: outer = batch * channels, inner = 1;
// - channels_last: outer = batch, inner = channels.
// A plane is one (outer, inner) pair. An index names a position of the output plane, or of its own
// window (see kIsWindowOffset), and does not depend on the layout.
template <class Offset>
struct Geometry {
  static constexpr int kAxes = 3;

  Offset outer;
  Offset inner;
  Axis<Offset> axis[kAxes];
  int rank; // 1, 2 or 3: how many axes the caller has; those before them are defaults

  // Sizes, in elements, of a plane and of an image; `in` is pooled, `out` is unpooled.
  MAXUNPOOL_HOST_DEVICE Offset in_plane() const { return axis[0].in * axis[1].in * axis[2].in; }
  MAXUNPOOL_HOST_DEVICE Offset out_plane() const { return axis[0].out * axis[1].out * axis[2].out; }
  MAXUNPOOL_HOST_DEVICE Offset in_image() const { return in_plane() * inner; }
  MAXUNPOOL_HOST_DEVICE Offset out_image() const { return out_plane() * inner; }
};

// Whether no two windows share a position, even before they are clipped: 2x2 with stride 2 is
// disjoint, 3x3 with stride 2 is not. An axis with one window is no exception.
template <class Offset>
bool disjoint(const Geometry<Offset>& geometry) {
  for (const Axis<Offset>& axis : geometry.axis) {
    if (axis.kernel > axis.stride) {
      return false;
    }
  }
  return true;
}

// Whether indices of this type are window offsets, as uint8 ones are: row-major in the window of
// their cell, before it is clipped. int64 and int32 indices are flat positions in the output plane.
template <class Index>
constexpr bool kIsWindowOffset = std::is_same_v<Index, uint8_t>;
constexpr int kMostOffsets = 256; // positions of a window that uint8 can count

} // namespace maxunpool_cuda
