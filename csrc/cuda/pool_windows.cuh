// Max pooling of any windows, of any dilation, that no other kernel is compiled for. A thread owns
// one window, of one channel:
//
//      x . x          x: a tap, . between them what dilation skips. The thread looks at one
//      . . .          after the other, in row-major order, but for those that lie in the padding.
//      x . x
#pragma once

#include "../geometry.h"
#include "divider.cuh"
#include "pool_tap.cuh"
#include "tiling.cuh"

#include <cstdint>

namespace maxunpool_cuda {

// Dilation, which the geometry does not say. Offset is as in Decoder.
template <class Offset>
struct Dilation {
  Divider<Offset> axis[3];

  // Taps of window p, in dimension a, that lie in the input: numbers [first, end).
  __device__ Range<Offset> taps_inside(const Geometry<Offset>& g, int a, Offset p) const {
    const auto& [in, out, kernel, stride, padding] = g.axis[a];
    const Offset start = p * stride, past = out + padding; // both count the padding
    const Offset end = start < past ? axis[a].divide(past - start - 1) + 1 : 0;
    const Offset first = start < padding ? axis[a].divide(padding - start - 1) + 1 : 0;
    return {first, end < kernel ? end : kernel};
  }
  __device__ Offset step(int a) const { return axis[a].divisor(); }
};

template <class T, class Offset>
__global__ void __launch_bounds__(kThreads, sizeof(Offset) == 4 ? 1024 / kThreads : 1) pool_windows(
    Tiling<Offset> tiling, Dilation<Offset> dilation, T lowest, const T* __restrict__ input,
    T* __restrict__ values, IndexArray<void> indices) {
  for_each_item(tiling.items, [&](Offset i) {
    const Geometry<Offset>& g = tiling.geometry;
    const auto item = tiling.item(i);
    const auto& p = item.tile;
    const auto [front, top, left] = window_start(tiling, p).at;
    const Offset first = (front * g.axis[1].out + top) * g.axis[2].out + left;
    const auto zs = dilation.taps_inside(g, 0, p[0]), ys = dilation.taps_inside(g, 1, p[1]),
               xs = dilation.taps_inside(g, 2, p[2]);
    const T* plane = input + (item.outer * tiling.out_plane * g.inner + item.group);
    const bool as_offsets = indices.takes_offsets();
    const Offset step = dilation.step(2), name_step = as_offsets ? 1 : step;
    const auto row_of = [&](Offset z, Offset y) { // where it begins; may wrap around
      return first + (z * dilation.step(0) * g.axis[1].out + y * dilation.step(1)) * g.axis[2].out;
    };
    const auto name_of = [&](Offset z, Offset y) { // of a row's first element, inside or not
      return as_offsets ? (z * g.axis[1].kernel + y) * g.axis[2].kernel : row_of(z, y);
    };
    // A window without taps in the input names the first after the padding before it.
    Best<T, Offset> best[1] = {
        {Tap<T>::of(lowest), name_of(zs.first, ys.first) + xs.first * name_step}};
    for (Offset z = zs.first; z < zs.end; ++z) {
      for (Offset y = ys.first; y < ys.end; ++y) {
        Offset at = (row_of(z, y) + xs.first * step) * g.inner;
        Offset name = name_of(z, y) + xs.first * name_step;
        for (Offset x = xs.first; x < xs.end; ++x) {
          best[0].look_at(Tap<T>::of(plane[at]), name);
          at += step * g.inner;
          name += name_step;
        }
      }
    }
    const Offset to = tiling.pooled(item.outer, p, item.group);
    store_values(values + to, best);
    indices.store_names(to, best);
  });
}

} // namespace maxunpool_cuda
