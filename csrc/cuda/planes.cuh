// Small planes of contiguous tensors (inner == 1): a block does some consecutive planes whole, in
// one pass, whatever their windows and wherever their indices lie. There is no second kernel.
//
//     input,   ... |0 1 2 3 4 5 6|0 1 2 3 4 5 6| ...   cells of two planes, which one block reads
//     indices        \_______/ \_______/               in groups: vectors where they are whole
//                      | atomicMax of a claim
//     slots,       |. 1 . 2 . . .|. 4 . . 7 . .|       one for each output, in shared memory
//                      | the last cell that named it
//     output   ... |0 a 0 b 0 0 0|0 c 0 0 d 0 0| ...   in vectors, but at the block's ends
//
// Groups and vectors are those of the whole tensor, so that they are aligned wherever a plane
// begins; what a block shares of them with its neighbour is done element by element.
//
// "last" is a maximum of positions, so it does not depend on the order the atomics take. Of "sum"
// and "mean" only windows that share no output come here: an output that several cells name all the
// same, by stray indices, adds them up by itself, in row-major order.
#pragma once

#include "../reduction.h"
#include "divider.cuh"
#include "report.cuh"
#include "shared.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

// What a thread reads at a time: at most 16 bytes of values and 32 of indices.
constexpr int cells_of_group(size_t element_size, size_t index_size) {
  return static_cast<int>(std::min(kVectorBytes / element_size, 2 * kVectorBytes / index_size));
}

// Elements of four and eight bytes do not fit a slot, which then names them.
constexpr bool is_staged(size_t element_size) {
  return element_size > sizeof(uint16_t);
}

struct Planes {
  Geometry<uint32_t> geometry;
  ErrorRecord* error;
  uint32_t planes; // of a block; the last one may have fewer
  bool aligned;    // all arrays begin where vectors do
  bool clipped;    // some window reaches beyond the plane
  bool bfloat16;   // of two kinds of numbers of two bytes, for sums
  Reduce reduce;
  Divider<uint32_t> in_plane, in_height, in_width, kernel_height, kernel_width;
  uint32_t out_plane;
  uint32_t kernel_volume;
  uint32_t stage; // where staged elements begin: bytes after the slots
};

// Goes from a cell to the next, through the planes of a block.
template <class Index>
struct Walk {
  const Planes& all;
  uint32_t cell;  // in its plane
  uint32_t first; // slot of the plane's first output

  __device__ Walk(const Planes& planes, uint32_t first_slot, uint32_t cell_of_block)
      : all(planes), cell(cell_of_block) {
    first = first_slot + split(cell, all.in_plane) * all.out_plane;
  }
  __device__ void next() {
    if (++cell == all.in_plane.divisor()) {
      cell = 0;
      first += all.out_plane;
    }
  }
  // The slot that an index names; false: there is none.
  __device__ bool find(Index index, uint32_t& slot) const {
    const auto target = target_of<uint32_t>(index);
    slot = first + target;
    return target < all.out_plane;
  }
};

template <>
struct Walk<uint8_t> {
  const Planes& all;
  uint32_t front, top, left; // where the window begins, or wraps around to
  uint32_t origin;           // slot of that position

  __device__ Walk(const Planes& planes, uint32_t first_slot, uint32_t cell_of_block) : all(planes) {
    const auto& [depth, height, width] = all.geometry.axis;
    uint32_t w = cell_of_block;
    const uint32_t plane = split(w, all.in_plane);
    uint32_t h = split(w, all.in_width);
    const uint32_t d = split(h, all.in_height);
    front = d * depth.stride - depth.padding;
    top = h * height.stride - height.padding;
    left = w * width.stride - width.padding;
    origin = first_slot + plane * all.out_plane + (front * height.out + top) * width.out + left;
  }
  __device__ void next() {
    const auto& [depth, height, width] = all.geometry.axis;
    const auto carry = [](uint32_t& begin, const Axis<uint32_t>& axis) {
      begin += axis.stride;
      const bool over = begin == axis.in * axis.stride - axis.padding;
      begin = over ? -axis.padding : begin;
      return over;
    };
    origin += width.stride;
    if (carry(left, width)) {
      origin += height.stride * width.out - width.in * width.stride;
      if (carry(top, height)) {
        origin += (depth.stride * height.out - height.in * height.stride) * width.out;
        if (carry(front, depth)) {
          origin += all.out_plane - depth.in * depth.stride * height.out * width.out;
        }
      }
    }
  }
  __device__ bool find(uint8_t index, uint32_t& slot) const {
    const auto& [depth, height, width] = all.geometry.axis;
    const uint32_t row = all.kernel_width.divide(index), z = all.kernel_height.divide(row);
    slot = origin + index + row * (width.out - width.kernel) +
           z * ((height.out - height.kernel) * width.out);
    bool inside = index < all.kernel_volume;
    if (all.clipped) {
      const uint32_t x = index - row * width.kernel, y = row - z * height.kernel;
      inside &= left + x < width.out && top + y < height.out && front + z < depth.out;
    }
    return inside;
  }
};

// The planes of one block: cells, and outputs, from `begin` to `end`, counted in the tensor. The
// vectors that hold some of them begin at `base`, and slots are counted from there.
template <int N>
struct Run {
  uint32_t begin, end, base, vectors;

  __device__ Run(uint32_t from, uint32_t to)
      : begin(from), end(to), base(from / N * N), vectors((to - from / N * N + N - 1) / N) {}
  __device__ bool holds(uint32_t i) const { return i - begin < end - begin; }
  __device__ bool whole(uint32_t i) const { return i >= begin && i + N <= end; } // a vector at i
};

// N neighbours of an array; element by element where not all of them are this block's, or aligned.
template <int N, class T>
__device__ inline Vector<T, N> load_some(
    const T* array, const Run<N>& run, uint32_t i, bool aligned) {
  if (aligned && run.whole(i)) {
    return load<N>(array + i);
  }
  Vector<T, N> some{};
#pragma unroll
  for (int v = 0; v < N; ++v) {
    if (run.holds(i + v)) {
      some.at[v] = array[i + v];
    }
  }
  return some;
}
template <int N, class T>
__device__ inline void store_some(
    T* array, const Run<N>& run, uint32_t i, bool aligned, const Vector<T, N>& vector) {
  if (aligned && run.whole(i)) {
    store(array + i, vector);
    return;
  }
#pragma unroll
  for (int v = 0; v < N; ++v) {
    if (run.holds(i + v)) {
      array[i + v] = vector.at[v];
    }
  }
}

// Calls take(v, slot) for the cells i + v of a group; reports what names no output of its plane.
template <int V, class Index, class Take>
__device__ inline void for_each_of_group(
    const Planes& all,
    const Run<V>& cells,
    uint32_t first_slot,
    uint32_t i,
    const Vector<Index, V>& index,
    const Take& take) {
  Walk<Index> walk(all, first_slot, i < cells.begin ? 0 : i - cells.begin);
  int bad = V;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if (cells.holds(i + v)) {
      uint32_t slot;
      if (walk.find(index.at[v], slot)) {
        take(v, slot);
      } else {
        bad = v;
      }
      walk.next();
    }
  }
  if (bad < V) {
    int64_t number = 0;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      number = v == bad ? static_cast<int64_t>(index.at[v]) : number;
    }
    uint32_t cell = i + bad;
    const uint32_t plane = split(cell, all.in_plane);
    report_bad(all.error, all.geometry, plane, cell, 0u, kIsWindowOffset<Index>, number);
  }
}

// Clears a block's slots, in vectors.
__device__ inline void clear(uint32_t* slots, uint32_t count) {
  for_each_in_block(
      (count + 3) / 4, [&](uint32_t i) { store(slots + i * 4, Vector<uint32_t, 4>{}); });
}

// All cells of a plane that name an output, added up in order.
template <class T, class Index>
__device__ inline T sum_of(
    const Planes& all, uint32_t plane, uint32_t target, const T* input, const Index* indices) {
  const uint32_t cells = all.in_plane.divisor();
  Sum<T> sum{};
  for (uint32_t cell = plane * cells; cell < (plane + 1) * cells; ++cell) {
    if (target_of<uint32_t>(indices[cell]) == target) {
      sum.add(input[cell]);
    }
  }
  return sum.result(all.reduce);
}

// A claim is larger the later its cell; 0: no cell has named the output. A small element is part of
// it, and a larger one lies at stage[claim] (stage[0] == 0).
template <class Element, class Index>
__global__ void __launch_bounds__(kThreads, 4) forward_planes(
    Planes all,
    Element negative_zero,
    const Element* __restrict__ input,
    const Index* __restrict__ indices,
    Element* __restrict__ output) {
  constexpr int V = cells_of_group(sizeof(Element), sizeof(Index));
  constexpr int N = kVectorBytes / sizeof(Element);
  constexpr bool kStaged = is_staged(sizeof(Element));
  constexpr uint32_t kShared = 1u << 31; // by several cells, of a sum: more than any claim
  const uint32_t in_plane = all.in_plane.divisor(), outer = all.geometry.outer;
  auto* const slots = shared_memory<uint32_t>();
  auto* const stage = reinterpret_cast<Element*>(shared_memory<char>() + all.stage);
  for (uint32_t plane = blockIdx.x * all.planes; plane < outer; plane += gridDim.x * all.planes) {
    const uint32_t end = plane + all.planes < outer ? plane + all.planes : outer;
    const Run<V> cells(plane * in_plane, end * in_plane);
    const Run<N> outputs(plane * all.out_plane, end * all.out_plane);
    struct Group {
      Vector<Index, V> index;
      Vector<Element, V> value;
    };
    const auto read = [&](uint32_t i) {
      const uint32_t at = cells.base + i * V;
      return Group{
          load_some<V>(indices, cells, at, all.aligned),
          load_some<V>(input, cells, at, all.aligned)};
    };
    const auto claim = [&](uint32_t i, const Group& group) {
      Vector<Element, V> value = group.value;
      if (negative_zero != Element{}) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          value.at[v] = added_to_zero(value.at[v], negative_zero);
        }
      }
      if constexpr (kStaged) {
        store(stage + (i + 1) * V, value);
      }
      for_each_of_group(
          all,
          cells,
          outputs.begin - outputs.base,
          cells.base + i * V,
          group.index,
          [&](int v, uint32_t slot) {
            uint32_t mine = (i + 1) * V + v;
            if constexpr (!kStaged) {
              mine = mine << 16 | value.at[v];
            }
            const uint32_t before = atomicMax(slots + slot, mine);
            if (!kIsWindowOffset<Index> && all.reduce != Reduce::last && before != 0) {
              atomicMax(slots + slot, kShared);
            }
          });
    };

    Group first{};
    if (threadIdx.x < cells.vectors) {
      first = read(threadIdx.x);
    }
    clear(slots, outputs.vectors * N);
    if (kStaged && threadIdx.x == 0) {
      stage[0] = Element{};
    }
    __syncthreads();
    if (threadIdx.x < cells.vectors) {
      claim(threadIdx.x, first);
    }
    for (uint32_t i = threadIdx.x + blockDim.x; i < cells.vectors; i += blockDim.x) {
      claim(i, read(i));
    }
    __syncthreads();
    for_each_in_block(outputs.vectors, [&](uint32_t i) {
      const auto claims = load<N>(slots + i * N);
      const uint32_t at = outputs.base + i * N;
      Vector<Element, N> stored;
#pragma unroll
      for (int v = 0; v < N; ++v) {
        const uint32_t claim = claims.at[v];
        if constexpr (kStaged) {
          stored.at[v] = stage[claim & ~kShared];
        } else {
          stored.at[v] = static_cast<Element>(claim);
        }
      }
      if constexpr (!kIsWindowOffset<Index> && sizeof(Element) > 1) {
        if (all.reduce != Reduce::last) {
#pragma unroll 1
          for (int v = 0; v < N; ++v) {
            if (slots[i * N + v] >= kShared) {
              const uint32_t owner = (at + v) / all.out_plane;
              const auto add = [&]<class T>(T) {
                return __builtin_bit_cast(
                    Element,
                    sum_of(
                        all,
                        owner,
                        at + v - owner * all.out_plane,
                        reinterpret_cast<const T*>(input),
                        indices));
              };
              Element sum;
              if constexpr (sizeof(Element) == 8) {
                sum = add(double{});
              } else if constexpr (sizeof(Element) == 4) {
                sum = add(float{});
              } else {
                sum = all.bfloat16 ? add(c10::BFloat16{}) : add(c10::Half{});
              }
#pragma unroll
              for (int u = 0; u < N; ++u) {
                stored.at[u] = u == v ? sum : stored.at[u];
              }
            }
          }
        }
      }
      store_some(output, outputs, at, all.aligned, stored);
    });
    __syncthreads();
  }
}

// The gradient of "last": the cell that an output was written from is given the output's.
template <class Element, class Index>
__global__ void __launch_bounds__(kThreads, 4) backward_planes(
    Planes all,
    const Element* __restrict__ grad_output,
    const Index* __restrict__ indices,
    Element* __restrict__ grad_input) {
  constexpr int V = cells_of_group(sizeof(Element), sizeof(Index));
  const uint32_t in_plane = all.in_plane.divisor(), outer = all.geometry.outer;
  auto* const slots = shared_memory<uint32_t>();
  for (uint32_t plane = blockIdx.x * all.planes; plane < outer; plane += gridDim.x * all.planes) {
    const uint32_t end = plane + all.planes < outer ? plane + all.planes : outer;
    const Run<V> cells(plane * in_plane, end * in_plane);
    const uint32_t first_output = plane * all.out_plane;
    struct Group {
      uint32_t slot[V];
      Vector<Element, V> grad;
    };
    constexpr uint32_t kNone = ~0u;
    const auto read = [&](uint32_t i) {
      const uint32_t at = cells.base + i * V;
      const auto index = load_some<V>(indices, cells, at, all.aligned);
      Group group{};
#pragma unroll
      for (int v = 0; v < V; ++v) {
        group.slot[v] = kNone;
      }
      for_each_of_group(all, cells, 0u, at, index, [&](int v, uint32_t slot) {
        group.slot[v] = slot;
        group.grad.at[v] = grad_output[first_output + slot];
      });
      return group;
    };
    const auto claim = [&](uint32_t i, const Group& group) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (group.slot[v] != kNone) {
          atomicMax(slots + group.slot[v], i * V + v + 1);
        }
      }
    };
    const auto give = [&](uint32_t i, Group group) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (group.slot[v] != kNone && slots[group.slot[v]] != i * V + v + 1) {
          group.grad.at[v] = Element{};
        }
      }
      store_some(grad_input, cells, cells.base + i * V, all.aligned, group.grad);
    };

    Group first{};
    if (threadIdx.x < cells.vectors) {
      first = read(threadIdx.x);
    }
    clear(slots, (end - plane) * all.out_plane);
    __syncthreads();
    if (threadIdx.x < cells.vectors) {
      claim(threadIdx.x, first);
    }
    for (uint32_t i = threadIdx.x + blockDim.x; i < cells.vectors; i += blockDim.x) {
      claim(i, read(i));
    }
    __syncthreads();
    if (threadIdx.x < cells.vectors) {
      give(threadIdx.x, first);
    }
    for (uint32_t i = threadIdx.x + blockDim.x; i < cells.vectors; i += blockDim.x) {
      give(i, read(i));
    }
    __syncthreads();
  }
}

} // namespace maxunpool_cuda
