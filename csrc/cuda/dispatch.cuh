// SPDX-License-Identifier: BSD-3-Clause
// Which kernels a call of max unpooling launches, and in which order; and what the .cu files call
// of each other. Each .cu file compiles its own kernels:
//
//   operators.cu       none: registers the operators, makes a Launch (see launch.cuh) for each call
//   unpool.cu          unpool(), the kernels of backward.cuh, slots.cuh and ordered.cuh
//   unpool_forward.cu  the kernels of forward.cuh
//   max_pool.cu        pool(), the kernels of pool.cuh and pool_lanes.cuh
//
// A call launches the kernel of the first row that fits it. tests/test_dispatch.py reads this
// table, and compares what runs.
//
//   call             windows     layout    elements                    kernel
//   forward, move    2x2, 3x3    rows      1, 2, 4 bytes               forward, cells
//   forward, move    2x2, 3x3    channels  1, 2, 4 bytes               forward, channels
//   forward, move    2x2, 3x3    planes    1, 2, 4, 8 bytes            forward, column
//   forward, move    4x4         rows      2, 4 bytes                  forward, cells
//   forward, move    3x3/1       offsets   2, 4 bytes                  forward, cells
//   forward, move    3x3/1       planes    2, 4 bytes                  forward, column
//   forward, move    5x5/1       offsets   2, 4 bytes                  forward, cells
//   forward, move    5x5/1       planes    2, 4 bytes                  forward, column
//   forward, add     3x3         rows      float16, bfloat16, float32  forward, cells
//   forward, add     3x3         channels  float16, bfloat16, float32  forward, channels
//   forward, add     3x3         planes    float16, bfloat16, float32  forward, column
//   forward, add     3x3/1       offsets   float16, bfloat16, float32  forward, cells
//   forward, add     3x3/1       planes    float16, bfloat16, float32  forward, column
//   forward, add     5x5/1       offsets   float16, bfloat16, float32  forward, cells
//   forward, add     5x5/1       planes    float16, bfloat16, float32  forward, column
//   forward, any     covering    any       any                         slots
//   backward, all    any         rows      1, 2, 4 bytes               backward, cells
//   backward, all    any         channels  1, 2, 4 bytes               backward, channels
//   backward, all    any         any       any                         backward, column
//   backward, last   near        rows      1, 2, 4 bytes               backward, cells
//   backward, last   near        channels  1, 2, 4 bytes               backward, channels
//   backward, last   near        planes    1, 2, 4, 8 bytes            backward, column
//   backward, last   any         any       any                         slots
//   any              any         any       any                         ordered
//
// call      move: an output gets one element at most ("last", or "sum" of windows that do not
//           overlap and numbers that are not complex); add: all else.
//           all: each cell gets its gradient ("sum", or windows that do not overlap); last: only
//           the last of the cells that name one output does.
// windows   2x2: height and width 2, 2 apart, no padding. 3x3: 2 apart, padding 0 or 1. 4x4: 4
//           apart, no padding. In depth they may have any size without padding, if they do not
//           overlap there, and each begins in the output. 3x3/1, 5x5/1: 1 apart, padding 1 and 2,
//           of planes one deep; 5x5/1 with uint8 indices alone. In planes of one row, windows count
//           as if they were as high as they are wide; but with uint8 indices only those without
//           padding, and one deep (see Dispatch::with_windows).
//           covering: "last", or "sum" where at most 256 windows cover an output.
//           near: windows one deep, of at most 32 elements, and at most twice as high and wide as
//           the stride, so that a window overlaps its neighbours alone.
// layout    rows: contiguous, aligned to 16 bytes; the cells of a row are a multiple of a thread's
//           (see cells.cuh), and forward, the output rows are as long as the stride times these.
//           offsets: such rows with uint8 indices.
//           channels: channels_last, aligned to 16 bytes; the channels are a multiple of a
//           thread's.
//           planes: of several rows of cells.
//
// `ordered` also serves calls whose numbers need more than 32 bits even for one image, and every
// call if MAXUNPOOL_CUDA_SIMPLE_KERNELS=1.
//
// All kernels but `ordered` are fast kernels: they rely on indices in their windows. Flat indices
// (int64 or int32) may be out of window. Then `ordered` follows as the fix-up kernel, and
// recomputes the images that the fast kernel has flagged; but not for the gradient of "sum", which
// is read wherever an index leads. Example: a float32 tensor [8][64][56][56] with int64 indices,
// windows of 2x2, 2 apart, and an output of 112x112 is of the first row. So `forward`, whose
// threads own cells of a row, writes the whole output, and `ordered` finds no flag.
#pragma once

#include "../calls.h"
#include "../dtypes.h"
#include "../geometry.h"
#include "../reduction.h"
#include "../torch.h"
#include "combine.cuh"
#include "indices.cuh"
#include "launch.cuh"
#include "report.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <type_traits>

namespace maxunpool_cuda {

// Runs a call of max unpooling, whose errors go to `errors`. `simple`: by `ordered` alone. In
// unpool.cu.
void unpool(const Launch& launch, const UnpoolCall& call, const Errors& errors, bool simple);

// Runs a call of max pooling. In max_pool.cu.
void pool(const Launch& launch, const PoolCall& call);

// Calls visit(first, count) for ranges of images that together make up a call. Each has at most as
// many as fit a launch (see outer_that_fits); if not even one fits, all are one range.
template <class Visit>
void for_each_range_of_images(int64_t images, int64_t fitting, const Visit& visit) {
  const int64_t step = fitting == 0 ? images : fitting;
  for (int64_t first = 0; first < images; first += step) {
    visit(first, std::min(step, images - first));
  }
}

// One range of images of a call of max unpooling: the choice of its kernels, and their launches.
class Dispatch {
 public:
  Dispatch(const Launch& launch, const UnpoolCall& call, const Errors& errors)
      : launch_(launch),
        call_(call),
        geometry_(call.geometry),
        errors_(errors),
        last_(call.reduce == Reduce::last),
        offsets_(call.index_type == ScalarType::Byte),
        may_leave_window_(!offsets_ && (call.forward || last_)) {}

  // Launches the kernels of the call. `simple`: no fast kernel.
  void run(bool simple) {
    const bool tries_fast = !simple && fits_32bit(geometry_);
    const bool is_done = tries_fast && ((call_.forward ? forward() : backward()) || slots());
    if (!is_done || may_leave_window_) {
      ordered(/*is_fixup=*/is_done);
    }
  }

 private:
  // ---- unpool_forward.cu

  // Launches the kernel of its name, if the table has a row for the call. Returns whether it did.
  bool forward();
  template <class Combine, bool kOffsets, class Window>
  bool forward_if();
  template <class Window>
  std::optional<Geometry<int64_t>> with_windows() const;

  // ---- unpool.cu

  // The same for the gradient.
  bool backward();
  template <class T, bool kOffsets, bool kDropsLosers>
  bool launch_backward();

  // The same for what these two leave.
  bool slots();
  template <class T, Order kOrder>
  void launch_slots(int64_t words_of_slot);

  void ordered(bool is_fixup);
  template <class T, Order kOrder>
  void launch_ordered(bool is_fixup);

  // ---- what these need

  // Calls f.operator()<T, kOrder>() for the elements of the call, and for what becomes of those
  // that name one output.
  template <class F>
  void with_order(const F& f) const {
    if (call_.forward && !last_) {
      with_arithmetic_type(call_.type, [&]<class T>(std::type_identity<T>) {
        f.template operator()<T, Order::sum>();
      });
      return;
    }
    // All but the sum only move elements, so the size of an element is enough.
    with_bytes(call_.element_size, [&]<class T>(std::type_identity<T>) {
      call_.forward ? f.template operator()<T, Order::last>()
                    : f.template operator()<T, Order::gradient>();
    });
  }

  // Launches a fast kernel whose threads each do one of the tiling's items. T is the type of an
  // element. The kernel's parameters are (tiling, report, rest..., values, indices, result).
  template <class T, class Kernel, class... Rest>
  void launch_items(Kernel* kernel, const Tiling<uint32_t>& tiling, const Rest&... rest) {
    const int64_t items = tiling.items;
    const int64_t blocks = divide_up(items, kThreads);
    if (may_leave_window_) {
      make_flags(blocks, kThreads, items / geometry_.outer);
    }
    launch_(
        kernel,
        blocks,
        kThreads,
        0,
        tiling,
        report(),
        rest...,
        static_cast<const T*>(call_.values),
        any_indices(),
        static_cast<T*>(call_.result));
  }

  // Makes room for the flags that the fast kernel's chunks write for the fix-up kernel; see
  // OutOfWindowFlags.
  void make_flags(int64_t chunks, int64_t chunk_items, int64_t image_items) {
    flag_memory_ = launch_.workspace(Launch::kOwnWords + chunks);
    uint32_t* const own = flag_memory_.get();
    flags_ = {
        .flags = own + Launch::kOwnWords,
        .launches = launch_.out_of_window_launches(own, chunks),
        .chunk_items = Divider<uint64_t>(chunk_items),
        .image_items = static_cast<uint64_t>(image_items)};
  }

  Report report() const {
    return {
        .out_of_window_flags = flags_.flags,
        .out_of_window_launches = flags_.launches,
        .errors = errors_};
  }

  // Whether vectors of the call's tensors may be loaded and stored.
  bool is_aligned() const { return are_aligned({call_.values, call_.indices, call_.result}); }
  AnyIndices any_indices() const {
    return {.data = call_.indices, .bytes = static_cast<int>(element_size(call_.index_type))};
  }

  const Launch& launch_;
  const UnpoolCall& call_;
  const Geometry<int64_t>& geometry_;
  const Errors errors_;
  const bool last_;
  const bool offsets_;
  const bool may_leave_window_;
  std::shared_ptr<uint32_t> flag_memory_;
  OutOfWindowFlags flags_{}; // that the fast kernel writes, for the fix-up kernel
};

} // namespace maxunpool_cuda
