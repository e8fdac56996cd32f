// SPDX-License-Identifier: BSD-3-Clause
// Kernels for all that the others are not compiled for, and for out-of-window indices. A block owns
// a part of a plane's output, with a slot in shared memory for each element, which the cells that
// name it fill.
//
//     a plane's outputs  |---- part 0 ----|---- part 1 ----|-- 2 --|
//     its cells             [ those whose windows reach into part 0 ]   as the fast kernel
//                        [ all of them ]                                as the fix-up kernel
//
// As the fix-up kernel of a call, it reads the out-of-window flags that the fast one wrote, and
// rewrites the planes of flagged images. No block waits for another. Offsets are 64-bit, for any
// tensor.
#pragma once

#include "../reduction.h"
#include "combine.cuh"
#include "indices.cuh"
#include "report.cuh"
#include "tiling.cuh"

#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

constexpr int kSlotThreads = 2 * kThreads; // of a block, at most
// With 1024 threads on a processor each may have 64 registers.
constexpr int kSlotBlocksOfProcessor = 1024 / kSlotThreads;

struct Parts {
  Decoder<uint64_t> decoder;
  Divider<uint64_t> stride[3];     // of windows
  Divider<uint64_t> height, width; // of the pooled side
  Divider<uint64_t> inner;
  uint64_t part;       // outputs of a part
  uint64_t part_cells; // cells of a part, where parts are of the cells
  uint64_t parts;      // of a plane
  uint64_t planes;
  bool all_cells; // a part looks at all cells of its plane
  bool is_fixup;
  OutOfWindowFlags out_of_window_flags; // of the fast kernel, if this is the fix-up kernel
};

// Part of a plane.
class Piece {
 public:
  uint64_t number; // of the part, in its plane
  uint64_t pooled; // the plane's first elements
  uint64_t unpooled;
  uint64_t first; // output of the part
  uint32_t count; // of its outputs
  uint64_t begin; // the first cell that is looked at
  uint32_t cells; // how many cells are looked at

  __device__ Piece(const Parts& parts, uint64_t plane, uint64_t part_number)
      : number(part_number), all_(parts) {
    const Decoder<uint64_t>& decoder = parts.decoder;
    uint64_t channel = plane;
    const uint64_t outer = split(channel, parts.inner);
    pooled = outer * decoder.in_plane * decoder.geometry.inner + channel;
    unpooled = outer * decoder.out_plane * decoder.geometry.inner + channel;
    first = number * parts.part;
    const uint64_t rest = decoder.out_plane - first;
    count = static_cast<uint32_t>(rest < parts.part ? rest : parts.part);
    begin = 0;
    cells = static_cast<uint32_t>(decoder.in_plane);
    if (!parts.all_cells) {
      const uint64_t last = first + count - 1;
      begin = edge(first, last, false);
      const uint64_t end = edge(last, first, true);
      cells = static_cast<uint32_t>(begin < end ? end - begin : 0);
    }
  }

  __device__ uint64_t element(uint64_t cell) const {
    return pooled + cell * all_.decoder.geometry.inner;
  }
  __device__ uint64_t output(uint64_t target) const {
    return unpooled + target * all_.decoder.geometry.inner;
  }
  __device__ bool is_in_plane(uint64_t target) const { return target < all_.decoder.out_plane; }
  __device__ bool holds(uint64_t target) const { return target - first < count; }

  __device__ Position<uint64_t> window_start(uint64_t cell) const {
    return all_.decoder.window_start(coordinates(cell, all_.height, all_.width));
  }
  // Output that a cell names, or a number beyond the plane.
  __device__ uint64_t target(const AnyIndices& indices, uint64_t cell) const {
    const auto index = static_cast<uint64_t>(indices[element(cell)]); // below 0: beyond the plane
    if (!indices.are_offsets()) {
      return index;
    }
    return decoded<true>(all_.decoder, index, window_start(cell), true).target;
  }
  // The same. The fast kernel also finds out-of-window indices and reports out-of-bounds ones.
  __device__ uint64_t checked_target(
      const AnyIndices& indices,
      uint64_t cell,
      const Position<uint64_t>& start,
      const Errors& errors,
      bool& out_of_window) const {
    if (all_.is_fixup) { // the fast kernel has checked it
      return target(indices, cell);
    }
    const auto found = decoded_or_reported(all_.decoder, errors, indices, element(cell), start);
    out_of_window |= found.in_plane && !found.in_window;
    return found.target;
  }
  // Whether the part holds the output where a window begins, after it was clipped.
  __device__ bool holds_start(const Position<uint64_t>& start) const {
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

// Calls visit(i) for this thread's share of a block's items, whose numbers are 0, 1, 2 ..
template <class Visit>
__device__ inline void for_each_in_block(uint32_t count, const Visit& visit) {
  for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
    visit(i);
  }
}

// Calls visit(piece) for this block's pieces; as the fix-up kernel, for those of flagged images.
// visit() returns whether an index is out of window. A team of blocks, as many as a plane has
// parts, shares out these; teams take planes in turn.
template <class Visit>
__device__ inline void for_each_piece(
    const Parts& parts, const Report& report, const Visit& visit) {
  // All threads of the block go by what one of them has read, as the word may change meanwhile.
  if (parts.is_fixup &&
      !__syncthreads_or(threadIdx.x == 0 && parts.out_of_window_flags.launches.may_have())) {
    return;
  }
  const auto team_blocks = static_cast<uint32_t>(parts.parts < gridDim.x ? parts.parts : gridDim.x);
  const uint32_t teams = gridDim.x / team_blocks;
  const uint32_t team = blockIdx.x / team_blocks;
  if (team == teams) { // these blocks are too few to be a team
    return;
  }
  for (uint64_t plane = team; plane < parts.planes; plane += teams) {
    const uint64_t image = parts.inner.divide(plane);
    if (parts.is_fixup && !__syncthreads_or(parts.out_of_window_flags.any(image))) {
      continue;
    }
    for (uint64_t part = blockIdx.x % team_blocks; part < parts.parts; part += team_blocks) {
      // Waits until the slots have been read, too.
      const int out_of_window = __syncthreads_or(visit(Piece(parts, plane, part)));
      if (report.out_of_window_flags != nullptr && threadIdx.x == 0) {
        report.write_flag(plane * parts.parts + part, out_of_window != 0);
      }
    }
  }
}

// Makes each slot the number of the last cell that names its output, counted from 1 on at the
// piece's first; 0: there is none. Calls visit_out_of_bounds(cell, start) for cells whose index is
// out of bounds; `start` is where their windows begin. Returns whether an index is out of window.
template <class Visit>
__device__ inline bool fill_with_last(
    uint32_t* slots,
    const Piece& piece,
    const AnyIndices& indices,
    const Errors& errors,
    const Visit& visit_out_of_bounds) {
  for_each_in_block(piece.count, [&](uint32_t i) { slots[i] = 0; });
  __syncthreads();
  bool out_of_window = false;
  for_each_in_block(piece.cells, [&](uint32_t i) {
    const uint64_t cell = piece.begin + i;
    const auto start = piece.window_start(cell);
    const uint64_t target = piece.checked_target(indices, cell, start, errors, out_of_window);
    if (piece.holds(target)) {
      atomicMax(slots + (target - piece.first), i + 1);
    } else if (!piece.is_in_plane(target)) {
      visit_out_of_bounds(cell, start);
    }
  });
  __syncthreads();
  return out_of_window;
}

template <class T>
__global__ void __launch_bounds__(kSlotThreads, kSlotBlocksOfProcessor) forward_last_slots(
    Parts parts,
    Report report,
    const T* __restrict__ input,
    AnyIndices indices,
    T* __restrict__ output) {
  auto* const slots = shared_memory<uint32_t>();
  for_each_piece(parts, report, [&](const Piece& piece) {
    const bool out_of_window = fill_with_last(slots, piece, indices, report.errors, [](auto...) {});
    for_each_in_block(piece.count, [&](uint32_t i) {
      const uint32_t last = slots[i];
      output[piece.output(piece.first + i)] =
          last == 0 ? T{} : input[piece.element(piece.begin + last - 1)];
    });
    return out_of_window;
  });
}

// Sums in row-major order. Slots are [part] of CombineSum, and then [part] turns. The threads of a
// block hold a cell each; of those whose cells name one output, the first adds in the first round,
// the next one in the second.
template <class T>
__global__ void __launch_bounds__(kSlotThreads, kSlotBlocksOfProcessor) forward_sum_slots(
    Parts parts,
    Report report,
    const T* __restrict__ input,
    AnyIndices indices,
    T* __restrict__ output) {
  auto* const sums = shared_memory<CombineSum<T>>();
  auto* const turns = reinterpret_cast<uint32_t*>(sums + parts.part);
  for_each_piece(parts, report, [&](const Piece& piece) {
    for_each_in_block(piece.count, [&](uint32_t i) {
      sums[i] = CombineSum<T>{};
      turns[i] = 0;
    });
    bool out_of_window = false;
    for (uint32_t chunk = 0; chunk < piece.cells; chunk += blockDim.x) {
      uint64_t slot = parts.part;
      T value{};
      if (chunk + threadIdx.x < piece.cells) {
        const uint64_t cell = piece.begin + chunk + threadIdx.x;
        const uint64_t target = piece.checked_target(
            indices, cell, piece.window_start(cell), report.errors, out_of_window);
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
    for_each_in_block(
        piece.count, [&](uint32_t i) { output[piece.output(piece.first + i)] = sums[i].result(); });
    return out_of_window;
  });
}

// Gradient of "last": of the cells that name one output, the last one gets its gradient. A part
// writes the cells that name its outputs, and those with an out-of-bounds index whose windows begin
// in it.
template <class T>
__global__ void __launch_bounds__(kSlotThreads, kSlotBlocksOfProcessor) backward_last_slots(
    Parts parts,
    Report report,
    const T* __restrict__ grad_output,
    AnyIndices indices,
    T* __restrict__ grad_input) {
  auto* const slots = shared_memory<uint32_t>();
  for_each_piece(parts, report, [&](const Piece& piece) {
    const auto visit_out_of_bounds = [&](uint64_t cell, const Position<uint64_t>& start) {
      if (piece.holds_start(start)) {
        grad_input[piece.element(cell)] = T{};
      }
    };
    const bool out_of_window =
        fill_with_last(slots, piece, indices, report.errors, visit_out_of_bounds);
    for_each_in_block(piece.cells, [&](uint32_t i) {
      const uint64_t cell = piece.begin + i;
      const uint64_t target = piece.target(indices, cell);
      if (piece.holds(target)) {
        if (slots[target - piece.first] == i + 1) { // two stores take fewer registers than one
          grad_input[piece.element(cell)] = grad_output[piece.output(target)];
        } else {
          grad_input[piece.element(cell)] = T{};
        }
      }
    });
    return out_of_window;
  });
}

// Gradient of "sum": every cell gets that of the output that it names, wherever that is. So parts
// are of the cells, and need no slots.
template <class T>
__global__ void __launch_bounds__(kSlotThreads, kSlotBlocksOfProcessor) backward_sum_slots(
    Parts parts,
    Report report,
    const T* __restrict__ grad_output,
    AnyIndices indices,
    T* __restrict__ grad_input) {
  for_each_piece(parts, report, [&](const Piece& piece) {
    const uint64_t begin = piece.number * parts.part_cells;
    const uint64_t end = begin + parts.part_cells;
    const uint64_t cells = parts.decoder.in_plane;
    bool out_of_window = false;
    for (uint64_t cell = begin + threadIdx.x; cell < end && cell < cells; cell += blockDim.x) {
      const uint64_t target = piece.checked_target(
          indices, cell, piece.window_start(cell), report.errors, out_of_window);
      grad_input[piece.element(cell)] =
          piece.is_in_plane(target) ? grad_output[piece.output(target)] : T{};
    }
    return out_of_window;
  });
}

} // namespace maxunpool_cuda
