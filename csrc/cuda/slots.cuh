// Kernels for all that the others are not compiled for, and for stray indices. A block owns a part
// of a plane's output, with a slot in shared memory for each element, which the cells that name it
// fill.
//
//     a plane's outputs  |---- part 0 ----|---- part 1 ----|-- 2 --|
//     its cells             [ those whose windows reach into part 0 ]   as the first kernel
//                        [ all of them ]                                as the second kernel
//
// As the second kernel of a call, it reads the stray flags that the first one wrote, and rewrites
// the planes of flagged slabs. No block waits for another. Offsets are 64-bit, for any tensor.
#pragma once

#include "../reduction.h"
#include "indices.cuh"
#include "report.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

constexpr int kSlotThreads = 2 * kThreads; // of a block, at most

struct Parts {
  Decoder<uint64_t> decoder;
  Divider<uint64_t> stride[3], height, width; // of windows; of the pooled side
  uint64_t part, parts, planes;               // outputs of a part; parts of a plane
  bool all_cells;                             // a part looks at all cells of its plane
  bool is_second;
  StrayFlags stray_flags; // of the first kernel, if this is the second
};

// Part of a plane.
class Piece {
 public:
  uint64_t pooled, unpooled; // the plane's first elements
  uint64_t first, count;     // outputs of the part
  uint64_t begin, end;       // cells that are looked at; none, if end is not above begin

  __device__ Piece(const Parts& parts, uint64_t plane, uint64_t number) : all_(parts) {
    const Decoder<uint64_t>& decoder = parts.decoder;
    const uint64_t inner = decoder.geometry.inner, outer = plane / inner;
    pooled = outer * decoder.in_plane * inner + plane % inner;
    unpooled = outer * decoder.out_plane * inner + plane % inner;
    first = number * parts.part;
    const uint64_t rest = decoder.out_plane - first;
    count = rest < parts.part ? rest : parts.part;
    begin = 0;
    end = decoder.in_plane;
    if (!parts.all_cells) {
      begin = edge(first, first + count - 1, false);
      end = edge(first + count - 1, first, true);
    }
  }

  __device__ uint64_t element(uint64_t cell) const {
    return pooled + cell * all_.decoder.geometry.inner;
  }
  __device__ uint64_t output(uint64_t target) const {
    return unpooled + target * all_.decoder.geometry.inner;
  }
  __device__ bool holds(uint64_t target) const { return target - first < count; }

  // Output that a cell names, or a number beyond the plane. The first kernel also finds stray
  // indices and reports bad ones.
  __device__ uint64_t
  target(const AnyIndices& indices, uint64_t cell, const Errors& errors, bool& stray) const {
    const Decoder<uint64_t>& decoder = all_.decoder;
    if (all_.is_second) { // only flat indices have one
      return static_cast<uint64_t>(indices[element(cell)]);
    }
    const auto found =
        decoded_or_reported(decoder, errors, indices, element(cell), window_start(cell));
    stray |= found.in_plane && !found.in_window;
    return found.target;
  }
  // Whether the part holds the output where the cell's window begins.
  __device__ bool holds_window(uint64_t cell) const {
    const Position<uint64_t> start = window_start(cell);
    uint64_t at = 0;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      const uint64_t out = all_.decoder.geometry.axis[a].out;
      const bool is_before = static_cast<int64_t>(start[a]) < 0;
      at = at * out + (is_before ? 0 : start[a] < out ? start[a] : out - 1);
    }
    return holds(at);
  }

 private:
  __device__ static Position<uint64_t> coordinates(
      uint64_t number, const Divider<uint64_t>& height, const Divider<uint64_t>& width) {
    Position<uint64_t> at{{0, 0, number}};
    at[1] = split(at[2], width);
    at[0] = split(at[1], height);
    return at;
  }
  __device__ Position<uint64_t> window_start(uint64_t cell) const {
    return all_.decoder.window_start(coordinates(cell, all_.height, all_.width));
  }
  // Begin or end of the cells whose windows may reach into the part. `at` is the part's first
  // output for the begin, and its last one for the end; `other` is the opposite one. After the
  // first dimension in which these two differ, a window may lie anywhere.
  __device__ uint64_t edge(uint64_t at, uint64_t other, bool is_end) const {
    const Decoder<uint64_t>& decoder = all_.decoder;
    const auto here = coordinates(at, decoder.out_height, decoder.out_width);
    const auto there = coordinates(other, decoder.out_height, decoder.out_width);
    bool equal = true; // in the dimensions before
    uint64_t cell = 0;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      const Axis<uint64_t>& axis = decoder.geometry.axis[a];
      const uint64_t shifted = here[a] + axis.padding, last = axis.in - 1;
      uint64_t to = is_end ? last : 0;
      if (equal && is_end) {
        const uint64_t covering = all_.stride[a].divide(shifted);
        to = covering < last ? covering : last;
      } else if (equal && shifted >= axis.kernel) {
        to = all_.stride[a].divide(shifted - axis.kernel) + 1; // axis.in, if no window covers it
      }
      cell = cell * axis.in + to;
      equal = equal && here[a] == there[a];
    }
    return cell + (is_end ? 1 : 0);
  }

  const Parts& all_;
};

// Address of a block's shared memory, a multiple of 16 bytes. Undefined until it is written.
template <class T>
__device__ inline T* shared_memory() {
#ifdef __CUDACC__
  extern __shared__ uint4 memory_of_block[];
  return reinterpret_cast<T*>(memory_of_block);
#else
  return static_cast<T*>(shim::shared_memory());
#endif
}

// Calls visit(i) for this thread's share of a block's items.
template <class Visit>
__device__ inline void for_each_in_block(uint64_t first, uint64_t end, const Visit& visit) {
  for (uint64_t i = first + threadIdx.x; i < end; i += blockDim.x) {
    visit(i);
  }
}

// Calls visit(piece) for this block's pieces; as the second kernel, for those of flagged slabs.
// visit() returns whether an index is stray. Blocks share out planes, and as many as a plane has
// parts share out these.
template <class Visit>
__device__ inline void for_each_piece(
    const Parts& parts, uint32_t* stray_flags, const Visit& visit) {
  const auto together = static_cast<uint32_t>(parts.parts < gridDim.x ? parts.parts : gridDim.x);
  const uint32_t shares = gridDim.x / together;
  const uint64_t share = (parts.planes - 1) / shares + 1, begin = blockIdx.x / together * share;
  const uint64_t end = begin + share < parts.planes ? begin + share : parts.planes;
  const auto is_flagged = [&](uint64_t first, uint64_t end) {
    const uint64_t inner = parts.decoder.geometry.inner;
    return __syncthreads_or(parts.stray_flags.any(first / inner, (end - 1) / inner + 1)) != 0;
  };
  if (parts.is_second && !is_flagged(begin, end)) { // one look at all, for a quick end
    return;
  }
  for (uint64_t plane = begin; plane < end; ++plane) {
    if (parts.is_second && !is_flagged(plane, plane + 1)) {
      continue;
    }
    for (uint64_t part = blockIdx.x % together; part < parts.parts; part += together) {
      // Waits until the slots have been read, too.
      const int stray = __syncthreads_or(visit(Piece(parts, plane, part)));
      if (stray_flags != nullptr && threadIdx.x == 0) {
        stray_flags[plane * parts.parts + part] = static_cast<uint32_t>(stray);
      }
    }
  }
}

// Makes each slot the number of the last cell that names its output, counted from 1 on at the
// piece's first; 0: there is none. Returns whether an index is stray.
__device__ inline bool fill_with_last(
    uint32_t* slots, const Piece& piece, const AnyIndices& indices, const Errors& errors) {
  for_each_in_block(0, piece.count, [&](uint64_t i) { slots[i] = 0; });
  __syncthreads();
  bool stray = false;
  for_each_in_block(piece.begin, piece.end, [&](uint64_t cell) {
    const uint64_t target = piece.target(indices, cell, errors, stray);
    if (piece.holds(target)) {
      atomicMax(slots + (target - piece.first), static_cast<uint32_t>(cell - piece.begin + 1));
    }
  });
  __syncthreads();
  return stray;
}

template <class T>
__global__ void __launch_bounds__(kSlotThreads, 1024 / kSlotThreads) forward_last_slots(
    Parts parts, Report report, const T* __restrict__ input, AnyIndices indices,
    T* __restrict__ output) {
  auto* const slots = shared_memory<uint32_t>();
  for_each_piece(parts, report.stray_flags, [&](const Piece& piece) {
    const bool stray = fill_with_last(slots, piece, indices, report.errors);
    for_each_in_block(0, piece.count, [&](uint64_t i) {
      const uint32_t last = slots[i];
      output[piece.output(piece.first + i)] =
          last == 0 ? T{} : input[piece.element(piece.begin + last - 1)];
    });
    return stray;
  });
}

// Sums in row-major order. Slots are [part] of CombineSum, and then [part] turns. The threads of a
// block hold a cell each; of those whose cells name one output, the first adds in the first round,
// the next one in the second.
template <class T>
__global__ void __launch_bounds__(kSlotThreads, 1024 / kSlotThreads) forward_sum_slots(
    Parts parts, Report report, const T* __restrict__ input, AnyIndices indices,
    T* __restrict__ output) {
  auto* const sums = shared_memory<CombineSum<T>>();
  auto* const turns = reinterpret_cast<uint32_t*>(sums + parts.part);
  for_each_piece(parts, report.stray_flags, [&](const Piece& piece) {
    for_each_in_block(0, piece.count, [&](uint64_t i) {
      sums[i] = CombineSum<T>{};
      turns[i] = 0;
    });
    bool stray = false;
    for (uint64_t chunk = piece.begin; chunk < piece.end; chunk += blockDim.x) {
      const uint64_t cell = chunk + threadIdx.x;
      uint64_t slot = parts.part;
      T value{};
      if (cell < piece.end) {
        const uint64_t target = piece.target(indices, cell, report.errors, stray);
        if (piece.holds(target)) {
          slot = target - piece.first;
          value = input[piece.element(cell)];
        }
      }
      bool waits = slot < parts.part;
      // In later rounds turns are larger, and in one round the first thread's is the largest.
      for (uint32_t turn = blockDim.x - threadIdx.x; __syncthreads_or(waits); turn += blockDim.x) {
        if (waits) {
          atomicMax(turns + slot, turn);
        }
        __syncthreads();
        if (waits && turns[slot] == turn) {
          sums[slot].add(value);
          waits = false;
        }
      }
      if (slot < parts.part) {
        atomicExch(turns + slot, 0u);
      }
    }
    __syncthreads();
    for_each_in_block(0, piece.count, [&](uint64_t i) {
      output[piece.output(piece.first + i)] = sums[i].result();
    });
    return stray;
  });
}

// Gradient. That of "sum" takes any index, so it needs no slots, and parts are of the cells.
template <class T>
__global__ void __launch_bounds__(kSlotThreads, 1024 / kSlotThreads) backward_slots(
    Parts parts, Report report, bool sum, const T* __restrict__ grad_output, AnyIndices indices,
    T* __restrict__ grad_input) {
  auto* const slots = shared_memory<uint32_t>();
  for_each_piece(parts, report.stray_flags, [&](const Piece& piece) {
    bool stray = false;
    if (!sum) {
      stray = fill_with_last(slots, piece, indices, report.errors);
    }
    const uint64_t cells = parts.decoder.in_plane, share = (cells - 1) / parts.parts + 1;
    const uint64_t first = piece.first / parts.part * share;
    const uint64_t begin = sum ? first : piece.begin;
    const uint64_t end = !sum ? piece.end : first + share < cells ? first + share : cells;
    for_each_in_block(begin, end, [&](uint64_t cell) {
      const uint64_t target = piece.target(indices, cell, report.errors, stray);
      const bool in_plane = target < parts.decoder.out_plane;
      if (sum || (in_plane ? piece.holds(target) : piece.holds_window(cell))) {
        const bool wins = sum || (in_plane && slots[target - piece.first] == cell - begin + 1);
        grad_input[piece.element(cell)] =
            in_plane && wins ? grad_output[piece.output(target)] : T{};
      }
    });
    return stray;
  });
}

} // namespace maxunpool_cuda
