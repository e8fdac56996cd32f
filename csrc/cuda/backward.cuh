// The gradient of the input: each pooled element gathers the gradient of the output it was written
// to. Every element of grad_input is written once, by its owner. What indices outside their own
// windows spoil is reported, and written again by irregular.cuh.
//
// A thread of backward() owns one cell in kPlanes planes. Of a contiguous tensor with windows of
// 2x2, threads 0, 1, 2 .. of a warp own and read
//
//            indices, grad_input    grad_output
//   plane 0  0 1 2 3 4 5 ..         0 0 1 1 2 2 ..    of each window, the element that the index
//                                   0 0 1 1 2 2 ..    names
//   plane 1  0 1 2 3 4 5 ..         0 0 1 1 2 2 ..
//                                   0 0 1 1 2 2 ..
//   and so on
//
// so that neighbours move neighbours, whatever the width of a row; no read of a thread waits for
// another plane's; and where the window lies is worked out once for all of them. Of a channels-last
// tensor, threads that follow each other own channels that do.
#pragma once

#include "../reduction.h"
#include "report.cuh"
#include "tiling.cuh"

#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

constexpr int kPlanes = 4; // of a thread

// What backward() has to know beside its tiling.
struct Gather {
  uint32_t slabs;                    // that a thread's planes are of: kPlanes, or one
  uint32_t next_pooled, next_output; // from one of its planes to the next, in elements
  bool any_position;                 // indices need not lie in their own windows: "sum"
  bool clipped;                      // some window reaches beyond the output
  Position<uint32_t> reach;          // windows meet those of the cells up to so far away
  uint32_t offsets;                  // in a window, as far as a byte tells them apart
  uint32_t row_reciprocal;           // see FlatWindow
  uint32_t offset_reciprocal;        // see OffsetWindow
  Divider<uint32_t> slice;           // outputs of a plane that have the same depth
};

// The upper half of a product.
__device__ inline uint32_t high_product(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  return __umulhi(a, b);
#else
  return static_cast<uint32_t>((uint64_t{a} * b) >> 32);
#endif
}

// A cell's window:
// - find(index, target): does the index name a position of it? `target` is that position.
// - same(own, later, d, h, w): does the index of the cell (d, h, w) further on name the position of
//   `own`, which find() has found here?
template <class Index>
struct FlatWindow {
  uint32_t first = 0, span; // positions in the plane, from the first row's on
  uint32_t rows;            // positions of the window's rows in one depth
  uint32_t left = 0, last_column = static_cast<uint32_t>(-1);
  uint32_t width, reciprocal; // 2^32 / width, rounded up; exact for positions up to 2^32 / width
  Divider<uint32_t> slice;
  bool deep;

  __device__ FlatWindow(
      const Tiling<uint32_t>& tiling, const Gather& gather, const Position<uint32_t>& cell)
      : span(tiling.out_plane),
        rows(tiling.out_plane),
        width(tiling.geometry.axis[2].out),
        reciprocal(gather.row_reciprocal),
        slice(gather.slice),
        deep(tiling.geometry.axis[0].out != 1) {
    if (gather.any_position) { // as if the window were the plane
      return;
    }
    const auto& [depth, height, columns] = tiling.geometry.axis;
    rows = clip(height, cell.at[1], first) * width;
    first *= width;
    span = rows;
    if (deep) {
      uint32_t above;
      const uint32_t depths = clip(depth, cell.at[0], above);
      first += above * slice.divisor();
      span = rows == 0 || depths == 0 ? 0 : (depths - 1) * slice.divisor() + rows;
    }
    left = cell.at[2] * columns.stride - columns.padding;
    if (width != 1) {
      last_column = columns.kernel - 1;
    } else if (-left >= columns.kernel) { // rows need no division, unless the window misses them
      span = 0;
    }
  }
  __device__ bool find(Index index, uint32_t& target) const {
    using Unsigned = std::make_unsigned_t<Index>;
    const Unsigned below = static_cast<Unsigned>(index) - first;
    uint32_t rest = static_cast<uint32_t>(below);
    bool inside = below < span;
    if (deep) {
      split(rest, slice);
      inside &= rest < rows;
    }
    target = static_cast<uint32_t>(index);
    return inside & (rest - high_product(rest, reciprocal) * width - left <= last_column);
  }
  __device__ bool same(Index own, Index later, uint32_t, uint32_t, uint32_t) const {
    return own == later;
  }

 private:
  // How much of the window is in the output, in one dimension, and from where on.
  __device__ static uint32_t clip(const Axis<uint32_t>& axis, uint32_t cell, uint32_t& first) {
    const uint32_t begin = cell * axis.stride, stop = begin + axis.kernel;
    const uint32_t end = stop > axis.padding ? stop - axis.padding : 0;
    const uint32_t clipped = end < axis.out ? end : axis.out;
    first = begin > axis.padding ? begin - axis.padding : 0;
    return first < clipped ? clipped - first : 0;
  }
};

struct OffsetWindow {
  uint32_t start[3];       // wraps around where that is left of the output
  uint32_t origin;         // the position there
  uint32_t beside, behind; // positions skipped after a row, and after the rows of a depth
  uint32_t kernel[3], stride[3], out[3];
  uint32_t offsets, reciprocal; // 2^16 / width, rounded up: exact, as offsets are bytes
  Divider<uint32_t> height;
  bool deep, clipped;

  __device__ OffsetWindow(
      const Tiling<uint32_t>& tiling, const Gather& gather, const Position<uint32_t>& cell)
      : offsets(gather.offsets),
        reciprocal(gather.offset_reciprocal),
        height(tiling.kernel_height),
        deep(tiling.geometry.axis[0].out != 1),
        clipped(gather.clipped) {
    for (int a = 0; a < 3; ++a) {
      const Axis<uint32_t>& axis = tiling.geometry.axis[a];
      kernel[a] = axis.kernel;
      stride[a] = axis.stride;
      out[a] = axis.out;
      start[a] = cell.at[a] * axis.stride - axis.padding;
    }
    origin = (start[0] * out[1] + start[1]) * out[2] + start[2];
    beside = out[2] - kernel[2];
    behind = (out[1] - kernel[1]) * out[2];
  }
  __device__ uint32_t row_of(uint32_t offset) const { return (offset * reciprocal) >> 16; }
  __device__ bool find(uint8_t index, uint32_t& target) const {
    const uint32_t offset = index, row = row_of(offset);
    target = origin + offset + row * beside;
    bool inside = offset < offsets;
    uint32_t z = 0, y = row;
    if (deep) {
      z = split(y, height);
      target += z * behind;
    }
    if (clipped) {
      inside &= (start[0] + z < out[0]) & (start[1] + y < out[1]) &
                (start[2] + offset - row * kernel[2] < out[2]);
    }
    return inside;
  }
  // The later cell's window begins so much further on: from there, too, `own` must be in its rows
  // and columns.
  __device__ bool same(uint8_t own, uint8_t later, uint32_t d, uint32_t h, uint32_t w) const {
    const uint32_t right = w * stride[2], down = h * stride[1], row = row_of(own);
    const uint32_t less = (d * stride[0] * kernel[1] + down) * kernel[2] + right;
    bool there = own - row * kernel[2] - right < kernel[2];
    if (deep) {
      uint32_t y = row;
      split(y, height);
      there &= y - down < kernel[1];
    }
    return there & (later + less == own);
  }
};

// Reports that the index of this pooled element, counted through the tensor, is in no plane.
template <class Index, class Offset>
__device__ inline void report_element(
    const Tiling<Offset>& tiling, ErrorRecord* error, Offset element, Index index) {
  const Geometry<Offset>& g = tiling.geometry;
  const Offset cells = element / g.inner, planes = cells / g.in_plane();
  report_bad(
      error,
      g,
      planes,
      cells - planes * g.in_plane(),
      element - cells * g.inner,
      kIsWindowOffset<Index>,
      index);
}

// For 32-bit offsets, and elements of up to eight bytes.
//
// kLooks: "last" of windows that overlap, which gives to the last cell alone of those whose indices
// name one output: no later one may have the same.
template <class T, class Index, bool kLooks>
__global__ void __launch_bounds__(kThreads, 1280 / kThreads) backward(
    Tiling<uint32_t> tiling,
    Report report,
    Gather shared,
    const T* __restrict__ grad_output,
    const Index* __restrict__ indices,
    T* __restrict__ grad_input) {
  using Window = std::conditional_t<kIsWindowOffset<Index>, OffsetWindow, FlatWindow<Index>>;
  const auto gather = [&](uint32_t i) {
    const Geometry<uint32_t> g = tiling.geometry;
    const auto [depth, height, width] = g.axis;
    uint32_t channel = 0, rest = i;
    if (g.inner != 1) {
      channel = i;
      rest = split(channel, tiling.channels);
    }
    Position<uint32_t> cell{{0, 0, rest}};
    cell.at[1] = split(cell.at[2], tiling.tiles[2]);
    uint32_t outer = split(cell.at[1], tiling.tiles[1]);
    if (depth.in != 1) {
      cell.at[0] = outer;
      outer = split(cell.at[0], tiling.tiles[0]);
    }
    outer *= shared.slabs;
    // There may be fewer planes than the thread has room for: then it does the first one again,
    // but for the writing.
    const uint32_t planes = shared.slabs == 1 ? kPlanes : g.outer - outer;
    const auto plane = [&](uint32_t u) { return u < planes ? u : 0; };
    const uint32_t row = ((outer * depth.in + cell.at[0]) * height.in + cell.at[1]) * width.in;
    const uint32_t source = (row + cell.at[2]) * g.inner + channel;
    uint32_t own[kPlanes];
    Index index[kPlanes];
#pragma unroll
    for (uint32_t u = 0; u < kPlanes; ++u) {
      own[u] = source + plane(u) * shared.next_pooled;
      index[u] = indices[own[u]];
    }

    const Window window(tiling, shared, cell);
    const uint32_t output = outer * tiling.out_plane * g.inner + channel;
    T grad[kPlanes];
    bool inside[kPlanes], all_inside = true;
#pragma unroll
    for (uint32_t u = 0; u < kPlanes; ++u) {
      uint32_t target;
      inside[u] = window.find(index[u], target);
      all_inside &= inside[u];
      target = inside[u] ? target : 0;
      grad[u] = grad_output[target * g.inner + (output + plane(u) * shared.next_output)];
    }
    if (!all_inside) {
      bool stray = false;
#pragma unroll
      for (uint32_t u = 0; u < kPlanes; ++u) {
        if (inside[u]) {
          continue;
        }
        grad[u] = T{};
        if (!kIsWindowOffset<Index> && target_of<uint32_t>(index[u]) < tiling.out_plane) {
          stray = true;
        } else {
          report_element(tiling, report.error, own[u], index[u]);
        }
      }
      if (stray) {
        return true;
      }
    }

    if constexpr (kLooks) {
      const Position<uint32_t> reach = shared.reach;
#pragma unroll 1
      for (uint32_t d = 0; d != reach.at[0] + 1; ++d) {
#pragma unroll 1
        for (uint32_t h = d == 0 ? 0 : -reach.at[1]; h != reach.at[1] + 1; ++h) {
          if (cell.at[0] + d >= depth.in || cell.at[1] + h >= height.in) {
            continue;
          }
          const uint32_t later = (d * height.in + h) * width.in;
#pragma unroll 1
          for (uint32_t w = (d | h) == 0 ? 1 : -reach.at[2]; w != reach.at[2] + 1; ++w) {
            if (cell.at[2] + w >= width.in) {
              continue;
            }
            const Index* const around = indices + static_cast<int32_t>((later + w) * g.inner);
            Index held[kPlanes];
#pragma unroll
            for (uint32_t u = 0; u < kPlanes; ++u) {
              held[u] = around[own[u]];
            }
#pragma unroll
            for (uint32_t u = 0; u < kPlanes; ++u) {
              grad[u] = window.same(index[u], held[u], d, h, w) ? T{} : grad[u];
            }
          }
        }
      }
    }
#pragma unroll
    for (uint32_t u = 0; u < kPlanes; ++u) {
      if (u < planes) {
        grad_input[own[u]] = grad[u];
      }
    }
    return false;
  };
  if (kLooks || !shared.any_position) {
    for_each_chunk<Index>(tiling.items, report, gather);
  } else {
    for_each_item(tiling.items, gather);
  }
}

// What an index names. `at` counts from where its cell's window begins, or wraps around to; it is
// not set where flat indices are not asked for their windows.
template <class Offset>
struct Named {
  Offset target; // in the output plane, or beyond all planes
  Offset at[3];
  bool in_window; // and in the plane; or only the latter, if that is all that was asked for
};

template <class Index, class Offset>
__device__ inline Named<Offset> named(
    const Tiling<Offset>& tiling, Index index, const Offset (&start)[3], bool asks_window) {
  const Axis<Offset>(&axis)[3] = tiling.geometry.axis;
  Named<Offset> found;
  if constexpr (kIsWindowOffset<Index>) {
    found.at[2] = index;
    found.at[1] = split(found.at[2], tiling.kernel_width);
    found.at[0] = split(found.at[1], tiling.kernel_height);
    const Offset z = found.at[0] + start[0], y = found.at[1] + start[1], x = found.at[2] + start[2];
    found.in_window =
        (found.at[0] < axis[0].kernel) & (z < axis[0].out) & (y < axis[1].out) & (x < axis[2].out);
    found.target =
        found.in_window ? (z * axis[1].out + y) * axis[2].out + x : static_cast<Offset>(-1);
  } else {
    found.target = target_of<Offset>(index);
    found.in_window = found.target < tiling.out_plane;
    if (asks_window) {
      Offset x = found.target;
      Offset y = split(x, tiling.out_width);
      const Offset z = split(y, tiling.out_height);
      found.at[0] = z - start[0];
      found.at[1] = y - start[1];
      found.at[2] = x - start[2];
      found.in_window = found.in_window & (found.at[0] < axis[0].kernel) &
                        (found.at[1] < axis[1].kernel) & (found.at[2] < axis[2].kernel);
    }
  }
  return found;
}

// The same for any windows, sizes and types: thread i owns pooled element i. kMean: the gradient is
// divided among the elements whose indices name the same output.
template <class T, bool kMean>
__global__ void __launch_bounds__(kThreads, 512 / kThreads) backward_any(
    Tiling<uint64_t> tiling,
    Report report,
    bool checks,
    Position<uint64_t> reach,
    const T* __restrict__ grad_output,
    const void* __restrict__ indices,
    int index_size,
    T* __restrict__ grad_input) {
  const Geometry<uint64_t>& g = tiling.geometry;
  const bool offsets = index_size == 1;
  const auto index_of = [&](uint64_t element) {
    return offsets           ? static_cast<const uint8_t*>(indices)[element]
           : index_size == 4 ? static_cast<const int32_t*>(indices)[element]
                             : static_cast<const int64_t*>(indices)[element];
  };
  const auto name_of = [&](uint64_t element, const uint64_t (&p)[3]) {
    uint64_t start[3];
    for (int a = 0; a < 3; ++a) {
      start[a] = p[a] * g.axis[a].stride - g.axis[a].padding;
    }
    const int64_t index = index_of(element);
    return offsets ? named(tiling, static_cast<uint8_t>(index), start, checks)
                   : named(tiling, index, start, checks);
  };
  const auto gather = [&](uint64_t i) {
    const auto [outer, p, channel] = tiling.item(i);
    const auto own = name_of(i, p.at);
    T grad{};
    if (own.target >= tiling.out_plane) {
      report_element(tiling, report.error, i, index_of(i));
    } else if (!own.in_window) {
      return true;
    } else {
      grad = grad_output[(outer * tiling.out_plane + own.target) * g.inner + channel];
      // Is looked around for only the later cells, or for all of them?
      const Position<uint64_t> before = kMean ? reach : Position<uint64_t>{};
      int64_t count = 0;
      for (uint64_t d = -before.at[0]; d != reach.at[0] + 1; ++d) {
        for (uint64_t h = -reach.at[1]; h != reach.at[1] + 1; ++h) {
          for (uint64_t w = -reach.at[2]; w != reach.at[2] + 1; ++w) {
            const Position<uint64_t> q{{p.at[0] + d, p.at[1] + h, p.at[2] + w}};
            const uint64_t shift = tiling.cell({{d, h, w}});
            const bool later = static_cast<int64_t>(shift) > 0; // in row-major order
            if ((kMean || later) && tiling.is_cell(q)) {
              count += name_of(i + shift * g.inner, q.at).target == own.target;
            }
          }
        }
      }
      if constexpr (kMean) {
        grad = mean_of<T>(grad, count);
      } else {
        grad = count == 0 ? grad : T{};
      }
    }
    grad_input[i] = grad;
    return false;
  };
  if (checks && !offsets) {
    for_each_chunk<int64_t>(tiling.items, report, gather);
  } else {
    for_each_item(tiling.items, gather);
  }
}

} // namespace maxunpool_cuda
