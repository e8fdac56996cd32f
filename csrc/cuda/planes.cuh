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

constexpr int kPlanesThreads = 256; // of a block, at most

// What a thread reads at a time: at most 16 bytes of values and 32 of indices.
constexpr int cells_of_group(size_t element_size, size_t index_size) {
  const size_t most = 8; // more do not fit the registers
  const size_t cells = std::min({kVectorBytes / element_size, 2 * kVectorBytes / index_size, most});
  return static_cast<int>(std::max(cells, sizeof(uint32_t) / index_size)); // whole words
}

// Elements of four and eight bytes do not fit a slot, which then names them.
constexpr bool is_staged(size_t element_size) {
  return element_size > sizeof(uint16_t);
}

// Divides by multiplication with a rounded-up reciprocal, where n * divisor < 2^31.
class ShortDivider {
 public:
  ShortDivider() = default;
  explicit ShortDivider(int64_t divisor)
      : reciprocal_(static_cast<uint32_t>((int64_t{1} << 31) / divisor + 1)) {}

  __device__ uint32_t divide(uint32_t n) const {
#ifdef __CUDA_ARCH__
    return __umulhi(2 * n, reciprocal_);
#else
    return static_cast<uint32_t>(uint64_t{2 * n} * reciprocal_ >> 32);
#endif
  }

 private:
  uint32_t reciprocal_ = 0;
};

struct Planes {
  Geometry<uint32_t> geometry;
  ErrorRecord* error;
  uint32_t planes; // of a block; the last one may have fewer
  uint32_t in_plane, out_plane;
  uint32_t stage; // where a block's staged elements begin: bytes after its slots
  bool aligned;   // all arrays begin where vectors do
  bool bfloat16;  // of two kinds of numbers of two bytes, for sums
  Reduce reduce;
  ShortDivider cells_of_plane; // of a block's cells
  // For window offsets alone.
  bool plain; // all windows lie in the plane, which has no depth
  uint32_t kernel_volume;
  ShortDivider cells_of_row, cells_of_height, kernel_height, kernel_width;
  // How much further the window of the next cell begins than one stride in width, if that is the
  // first of a row; of a height of rows; of a depth of them. All may wrap around.
  uint32_t next_row, next_height, next_depth;
};

// Finds the slot that a cell's index names. Cells are counted in the block, whose first slot is
// `first`.
template <class Index, bool kPlain>
__device__ inline bool find_slot(
    const Planes& all, uint32_t first, uint32_t cell, Index index, uint32_t& slot) {
  if constexpr (!kIsWindowOffset<Index>) {
    const auto target = target_of<uint32_t>(index);
    slot = all.cells_of_plane.divide(cell) * all.out_plane + (first + target);
    return target < all.out_plane;
  } else {
    const auto& [depth, height, width] = all.geometry.axis;
    const uint32_t offset = index, y = all.kernel_width.divide(offset);
    const uint32_t rows = all.cells_of_row.divide(cell);
    const uint32_t heights = all.cells_of_height.divide(cell);
    slot = (cell * width.stride + first) + offset + rows * all.next_row +
           heights * all.next_height + y * (width.out - width.kernel);
    if constexpr (kPlain) {
      return offset < all.kernel_volume;
    }
    const uint32_t depths = all.cells_of_plane.divide(cell), z = all.kernel_height.divide(y);
    const auto inside = [](const Axis<uint32_t>& axis, uint32_t p, uint32_t o) {
      return p * axis.stride - axis.padding + o < axis.out;
    };
    slot += depths * all.next_depth + z * ((height.out - height.kernel) * width.out) -
            ((depth.padding * height.out + height.padding) * width.out + width.padding);
    return offset < all.kernel_volume &&
           inside(width, cell - rows * width.in, offset - y * width.kernel) &&
           inside(height, rows - heights * height.in, y - z * height.kernel) &&
           inside(depth, heights - depths * depth.in, z);
  }
}

// The planes of one block: cells, or outputs, from `begin` to `end`, counted in the tensor. They
// lie in `vectors` vectors of it from `base` on, of which the block has all of some, if `aligned`.
template <int N>
struct Run {
  uint32_t begin, end, base, vectors, first_whole, wholes;

  __device__ Run(uint32_t from, uint32_t to, bool aligned)
      : begin(from), end(to), base(from / N * N), vectors((to - base + N - 1) / N) {
    first_whole = (from - base + N - 1) / N;
    const uint32_t end_whole = (to - base) / N; // may lie before, if one vector has both ends
    wholes = aligned && end_whole > first_whole ? end_whole - first_whole : 0;
  }
  __device__ bool holds(uint32_t i) const { return i - begin < end - begin; }
  // What is not in vectors that are whole: so many elements, and which, counted from `base`.
  __device__ uint32_t rest() const { return end - begin - wholes * N; }
  __device__ uint32_t number_of_rest(uint32_t i) const {
    const uint32_t number = begin - base + i;
    return wholes == 0 || number < first_whole * N ? number : number + wholes * N;
  }
  // Of vector i.
  __device__ bool holds_all(uint32_t i) const { return i - first_whole < wholes; }
};

// N neighbours of an array; element by element, those of the block alone, unless `whole`. Bytes lie
// in words, which takes fewer instructions than the compiler finds.
template <class T, int N>
struct Neighbours {
  using Word = std::conditional_t<sizeof(T) == 1, uint32_t, T>;
  static constexpr int kPerWord = sizeof(Word) / sizeof(T);

  Vector<Word, N / kPerWord> words;

  Neighbours() = default;
  __device__ Neighbours(const T* array, const Run<N>& run, uint32_t i, bool whole) {
    if (whole) {
      words = load<N / kPerWord>(reinterpret_cast<const Word*>(array + i));
      return;
    }
    words = {};
#pragma unroll
    for (int v = 0; v < N; ++v) {
      if (run.holds(i + v)) {
        words.at[v / kPerWord] |= static_cast<Word>(array[i + v]) << v % kPerWord * 8;
      }
    }
  }
  __device__ T operator[](int v) const {
    return static_cast<T>(words.at[v / kPerWord] >> v % kPerWord * 8);
  }
};

// Calls take(v, slot) for the cells i + v of a group; reports what names no output of its plane.
template <int V, class Index, class Take>
__device__ inline void for_each_of_group(
    const Planes& all,
    const Run<V>& cells,
    uint32_t first_slot,
    uint32_t i,
    bool whole,
    const Neighbours<Index, V>& index,
    const Take& take) {
  bool usual = whole && (!kIsWindowOffset<Index> || all.plain);
  if (usual) {
    uint32_t slot[V];
#pragma unroll
    for (int v = 0; v < V; ++v) {
      usual &= find_slot<Index, true>(all, first_slot, i - cells.begin + v, index[v], slot[v]);
    }
    if (usual) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        take(v, slot[v]);
      }
      return;
    }
  }
  int bad = V;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    uint32_t slot;
    if (!cells.holds(i + v)) {
      continue;
    }
    if (find_slot<Index, false>(all, first_slot, i - cells.begin + v, index[v], slot)) {
      take(v, slot);
    } else {
      bad = v;
    }
  }
  if (bad < V) {
    int64_t number = 0;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      number = v == bad ? static_cast<int64_t>(index[v]) : number;
    }
    report_bad(all.error, all.geometry, i + bad, kIsWindowOffset<Index>, number);
  }
}

// Clears a block's slots, in vectors.
template <class Slot>
__device__ inline void clear(Slot* slots, uint32_t count) {
  constexpr int N = kVectorBytes / sizeof(Slot);
  for_each_in_block(
      (count + N - 1) / N, [&](uint32_t i) { store(slots + i * N, Vector<Slot, N>{}); });
}

// All cells of a plane that name an output, added up in order; its bits.
template <class Element, class Index>
__device__ inline Element sum_of(
    const Planes& all, uint32_t output, const Element* input, const Index* indices) {
  const uint32_t plane = output / all.out_plane, target = output % all.out_plane;
  const auto sum = [&]<class T>(T) {
    Sum<Accumulator<T>> sum{};
    for (uint32_t cell = plane * all.in_plane; cell < (plane + 1) * all.in_plane; ++cell) {
      if (target_of<uint32_t>(indices[cell]) == target) {
        sum.add(static_cast<Accumulator<T>>(__builtin_bit_cast(T, input[cell])));
      }
    }
    return sum.result(all.reduce);
  };
  if constexpr (sizeof(Element) == sizeof(double)) {
    return __builtin_bit_cast(Element, sum(double{}));
  } else if constexpr (sizeof(Element) == sizeof(float)) {
    return __builtin_bit_cast(Element, sum(float{}));
  } else if (all.bfloat16) {
    return c10::detail::round_to_nearest_even(sum(c10::BFloat16{})); // on any architecture
  } else {
    return __builtin_bit_cast(Element, static_cast<c10::Half>(sum(c10::Half{})));
  }
}

// What a slot holds.
// - kClaims: the largest claim of a cell, the later the larger; 0: no cell has named the output. A
//   small element is part of it, a larger one lies at stage[claim], of which stage[0] == 0.
// - otherwise, where no two indices can name one output: the element.
template <class Element, class Index, bool kClaims>
__global__ void __launch_bounds__(kPlanesThreads, sizeof(Element) == 1 ? 3 : 4) forward_planes(
    Planes all,
    Element negative_zero,
    const Element* __restrict__ input,
    const Index* __restrict__ indices,
    Element* __restrict__ output) {
  constexpr int V = cells_of_group(sizeof(Element), sizeof(Index));
  constexpr int N = kVectorBytes / sizeof(Element);
  constexpr bool kStaged = kClaims && is_staged(sizeof(Element));
  constexpr bool kSums = kClaims && !kIsWindowOffset<Index> && sizeof(Element) > 1;
  constexpr uint32_t kMany = 1u << 31; // cells have named an output of a sum: more than any claim
  using Slot = std::conditional_t<kClaims, uint32_t, Element>;
  auto* const slots = shared_memory<Slot>();
  auto* const stage = reinterpret_cast<Element*>(shared_memory<char>() + all.stage);
  const uint32_t outer = all.geometry.outer;
  for (uint32_t plane = blockIdx.x * all.planes; plane < outer; plane += gridDim.x * all.planes) {
    const uint32_t end = plane + all.planes < outer ? plane + all.planes : outer;
    const Run<V> cells(plane * all.in_plane, end * all.in_plane, all.aligned);
    const Run<N> outputs(plane * all.out_plane, end * all.out_plane, all.aligned);
    struct Group {
      bool whole;
      Neighbours<Index, V> index;
      Neighbours<Element, V> value;
    };
    const auto read = [&](uint32_t i) {
      const uint32_t at = cells.base + i * V;
      const bool whole = cells.holds_all(i);
      return Group{whole, {indices, cells, at, whole}, {input, cells, at, whole}};
    };
    const auto claim = [&](uint32_t i, const Group& group) {
      Vector<Element, V> value;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        value.at[v] = group.value[v];
      }
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
          group.whole,
          group.index,
          [&](int v, uint32_t number) {
            Slot* const slot = slots + number;
            if constexpr (kClaims) {
              uint32_t mine = (i + 1) * V + v;
              if constexpr (!kStaged) {
                mine = mine << 16 | value.at[v];
              }
              if (atomicMax(slot, mine) != 0 && kSums && all.reduce != Reduce::last) {
                atomicMax(slot, kMany);
              }
            } else {
              *slot = value.at[v];
            }
          });
    };

    Group first;
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

    const auto element = [&](Slot slot) {
      if constexpr (kStaged) {
        return stage[slot & ~kMany];
      } else {
        return static_cast<Element>(slot);
      }
    };
    const auto add_up = [&](uint32_t i) { // the outputs of sums that many cells name
      if constexpr (kSums) {
        if (all.reduce != Reduce::last && slots[i] == kMany) {
          output[outputs.base + i] = sum_of(all, outputs.base + i, input, indices);
        }
      }
    };
    Element* const to = output + outputs.base;
    for_each_in_block(outputs.wholes, [&](uint32_t vector) {
      const uint32_t i = (outputs.first_whole + vector) * N;
      const auto taken = load<N>(slots + i);
      Vector<Element, N> stored;
#pragma unroll
      for (int v = 0; v < N; ++v) {
        stored.at[v] = element(taken.at[v]);
      }
      store(to + i, stored);
      if (kSums && all.reduce != Reduce::last) {
#pragma unroll 1
        for (int v = 0; v < N; ++v) {
          add_up(i + v);
        }
      }
    });
    for_each_in_block(outputs.rest(), [&](uint32_t number) {
      const uint32_t i = outputs.number_of_rest(number);
      to[i] = element(slots[i]);
      add_up(i);
    });
    __syncthreads();
  }
}

// The gradient of "last": the cell that an output was written from is given the output's.
template <class Element, class Index>
__global__ void __launch_bounds__(kPlanesThreads, 4) backward_planes(
    Planes all,
    const Element* __restrict__ grad_output,
    const Index* __restrict__ indices,
    Element* __restrict__ grad_input) {
  constexpr int V = cells_of_group(sizeof(Element), sizeof(Index));
  const uint32_t outer = all.geometry.outer;
  auto* const slots = shared_memory<uint32_t>();
  for (uint32_t plane = blockIdx.x * all.planes; plane < outer; plane += gridDim.x * all.planes) {
    const uint32_t end = plane + all.planes < outer ? plane + all.planes : outer;
    const Run<V> cells(plane * all.in_plane, end * all.in_plane, all.aligned);
    const uint32_t first_output = plane * all.out_plane;
    struct Group {
      uint32_t slot[V];
      Vector<Element, V> grad;
    };
    constexpr uint32_t kNone = ~0u;
    const auto read = [&](uint32_t i) {
      const uint32_t at = cells.base + i * V;
      const bool whole = cells.holds_all(i);
      const Neighbours<Index, V> index(indices, cells, at, whole);
      Group group{};
#pragma unroll
      for (int v = 0; v < V; ++v) {
        group.slot[v] = kNone;
      }
      for_each_of_group(all, cells, 0u, at, whole, index, [&](int v, uint32_t slot) {
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
      Element* const to = grad_input + cells.base + i * V;
      if (cells.holds_all(i)) {
        store(to, group.grad);
        return;
      }
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (cells.holds(cells.base + i * V + v)) {
          to[v] = group.grad.at[v];
        }
      }
    };

    Group first;
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
