// SPDX-License-Identifier: BSD-3-Clause
// Which kernels a call of max unpooling launches, and in which order; and what the .cu files call
// of each other. Each .cu file compiles its own kernels:
//
//   operators.cu       none: registers the operators, makes a Launch (see launch.cuh) for each call
//   unpool.cu          unpool(), the kernels of backward.cuh, slots.cuh and ordered.cuh
//   unpool_forward.cu  the kernels of forward.cuh
//   max_pool.cu        pool(), the kernels of pool.cuh and pool_lanes.cuh
//
// A call of unpooling launches one fast kernel. If its indices are flat (int64 or int32), some may
// be out of window; then a fix-up kernel follows, which recomputes the images that the fast kernel
// has flagged. Example: a float32 tensor [8][64][56][56] with int64 indices, windows of 2x2, 2
// apart, and an output of 112x112 is of the first row of the table. So `forward`, whose threads own
// cells of a row, writes the whole output, and `ordered` follows.
//
// The fast kernel is that of the first row that fits the call:
//
//   call             windows     layout    elements                    fast kernel
//   forward, move    2x2, 3x3    rows      1, 2, 4 bytes               forward, cells
//   forward, move    2x2, 3x3    channels  1, 2, 4 bytes               forward, channels
//   forward, move    2x2, 3x3    any       1, 2, 4, 8 bytes            forward, column
//   forward, move    4x4         rows      2, 4 bytes                  forward, cells
//   forward, move    3x3/1       offsets   2, 4 bytes                  forward, cells
//   forward, move    3x3/1       any       2, 4 bytes                  forward, column
//   forward, move    5x5/1       offsets   2, 4 bytes                  forward, cells
//   forward, move    5x5/1       any       2, 4 bytes                  forward, column
//   forward, add     3x3         rows      float16, bfloat16, float32  forward, cells
//   forward, add     3x3         channels  float16, bfloat16, float32  forward, channels
//   forward, add     3x3         any       float16, bfloat16, float32  forward, column
//   forward, add     3x3/1       offsets   float16, bfloat16, float32  forward, cells
//   forward, add     3x3/1       any       float16, bfloat16, float32  forward, column
//   forward, add     5x5/1       offsets   float16, bfloat16, float32  forward, cells
//   forward, add     5x5/1       any       float16, bfloat16, float32  forward, column
//   backward, all    any         rows      1, 2, 4 bytes               backward, cells
//   backward, all    any         channels  1, 2, 4 bytes               backward, channels
//   backward, all    any         any       1, 2, 4, 8 bytes            backward, column
//   backward, last   near        rows      1, 2, 4 bytes               backward, cells
//   backward, last   near        channels  1, 2, 4 bytes               backward, channels
//   backward, last   near        any       1, 2, 4, 8 bytes            backward, column
//   any              any         any       any                         slots
//
// The fix-up kernel, if there is one, is that of the first row that fits:
//
//   call             indices     fix-up kernel
//   any              uint8       none, since an offset cannot leave its window
//   backward, sum    any         none, since it reads the gradient wherever an index leads
//   forward, sum     any         forward_any_sum_slots
//   any, last        any         ordered
//
// call      move: an output gets one element at most ("last", or "sum" of windows that do not
//           overlap and numbers that are not complex); add: all else.
//           all: each cell gets its gradient ("sum", or windows that do not overlap); last: only
//           the last of the cells that name one output does.
// windows   2x2: height and width 2, 2 apart, no padding. 3x3: 2 apart, padding 0 or 1. 4x4: 4
//           apart, no padding. In depth they may have any size, if they do not overlap there. In
//           one dimension, the windows of a row count as if they were as high as they are wide,
//           but not those of 3 with padding 1 and uint8 indices (see Dispatch::with_windows).
//           3x3/1, 5x5/1: 1 apart, padding 1 or 2, one deep; 5x5/1 with uint8 indices alone.
//           near: one deep, at most 32 elements, and at most twice as high and wide as the stride,
//           so that a window overlaps its neighbours alone.
// layout    rows: contiguous, aligned to 16 bytes; the cells of a row are a multiple of a thread's
//           (see cells.cuh), and forward, the output rows are as long as the stride times these.
//           offsets: such rows with uint8 indices.
//           channels: channels_last, aligned to 16 bytes; the channels are a multiple of a
//           thread's.
// slots     forward_last_slots, backward_last_slots or backward_sum_slots. The sum of a forward has
//           two: forward_own_sum_slots, as the fast kernel where 32 bits count the call and at most
//           256 windows cover an output; forward_any_sum_slots elsewhere and as fix-up kernel.
//
// `slots` is also the fast kernel of a call whose numbers need more than 32 bits even for one
// image, and of every call if MAXUNPOOL_CUDA_SIMPLE_KERNELS=1. tests/test_dispatch.py has calls on
// both sides of each rule, and compares the kernels that run.
#pragma once

#include "../calls.h"
#include "../geometry.h"
#include "../reduction.h"
#include "../torch.h"
#include "indices.cuh"
#include "launch.cuh"
#include "ordered.cuh"
#include "parts.cuh"
#include "report.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

namespace maxunpool_cuda {

// Runs a call of max unpooling, whose errors go to `errors`. `simple`: the fast kernel is
// one of slots.cuh. In unpool.cu.
void unpool(const Launch& launch, const UnpoolCall& call, const Errors& errors, bool simple);

// Runs a call of max pooling. In max_pool.cu.
void pool(const Launch& launch, const PoolCall& call);

// Calls visit(first, count) for ranges of images that together are all of a call's. Each has at
// most as many as fit a launch (see outer_that_fits); if not even one fits, all are one range.
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
        report_{.out_of_window_flags = nullptr, .out_of_window_launches = {}, .errors = errors},
        last_(call.reduce == Reduce::last),
        offsets_(call.index_type == ScalarType::Byte),
        may_leave_window_(!offsets_ && (call.forward || last_)) {}

  // Launches the fast kernel and, if one has to follow, the fix-up kernel.
  void run(bool simple) {
    const bool tries_fast = !simple && fits_32bit(geometry_);
    const bool is_done = tries_fast && (call_.forward ? forward() : backward());
    if (!is_done) {
      slots();
    }
    if (may_leave_window_) {
      is_fixup_ = true;
      report_.out_of_window_flags = nullptr; // the fix-up kernel flags nothing
      last_ ? ordered() : slots();
    }
  }

 private:
  // ---- unpool_forward.cu: launches `forward`, if the table has a row for the call. Returns
  // whether it did.

  bool forward();
  template <class Combine, bool kOffsets, class Window>
  bool forward_if();
  template <class Window>
  std::optional<Geometry<int64_t>> with_windows() const;

  // ---- unpool.cu: launches `backward`, if the table has a row for the call. Returns whether it
  // did.

  bool backward();
  template <class T, bool kOffsets, bool kDropsLosers>
  void launch_backward();

  // ---- unpool.cu: launches `ordered`, the fix-up kernel of "last" and of its gradient.

  void ordered();

  // ---- unpool.cu: launches the kernel of slots.cuh, as the fast one, or as the fix-up kernel of
  // "sum".

  void slots();
  template <class Offset>
  void slots_of();
  template <class Offset>
  Parts<Offset> parts(int64_t slot_bytes) const;
  template <class T, class Kernel, class Offset, class... Rest>
  void launch_parts(Kernel* kernel, const Parts<Offset>& parts, const Rest&... rest);

  // ---- what these need

  // Launches a fast kernel whose threads each do one of the tiling's items. T is the type of an
  // element. The kernel's parameters are (tiling, report, rest..., values, indices, result).
  template <class T, class Kernel, class... Rest>
  void launch_items(Kernel* kernel, const Tiling<uint32_t>& tiling, const Rest&... rest) {
    const int64_t items = tiling.items;
    const int64_t blocks = divide_up(items, kThreads);
    flag(blocks, kThreads, items / geometry_.outer, 1);
    launch_(
        kernel,
        blocks,
        kThreads,
        0,
        tiling,
        report_,
        rest...,
        static_cast<const T*>(call_.values),
        any_indices(),
        static_cast<T*>(call_.result));
  }

  // Called before the fast kernel is launched: if a fix-up kernel will follow, makes room for its
  // out-of-window flags, one for each of `chunks` chunks, and keeps for the fix-up kernel how they
  // belong to images. OutOfWindowFlags explains the last three parameters.
  void flag(int64_t chunks, int64_t chunk_items, int64_t image_items, int64_t images) {
    if (may_leave_window_) {
      if (last_) {
        ordered_ = OrderedPlan(geometry_, any_indices().bytes, launch_.processors());
      }
      const int64_t taken_words = call_.forward ? 0 : ordered_.all_taken_words();
      uint32_t* const own = launch_.workspace(Launch::kOwnWords + chunks + taken_words);
      ordered_.taken = own + Launch::kOwnWords + chunks;
      report_.out_of_window_flags = own + Launch::kOwnWords;
      report_.out_of_window_launches = launch_.out_of_window_launches(own, chunks);
      out_of_window_flags_ = {
          .flags = report_.out_of_window_flags,
          .launches = report_.out_of_window_launches,
          .chunk_items = Divider<uint64_t>(chunk_items),
          .images = Divider<uint64_t>(images),
          .image_items = static_cast<uint64_t>(image_items)};
      ordered_.flags = out_of_window_flags_;
    }
  }

  // Whether vectors of the call's tensors may be loaded and stored.
  bool is_aligned() const { return are_aligned({call_.values, call_.indices, call_.result}); }
  AnyIndices any_indices() const {
    return {.data = call_.indices, .bytes = static_cast<int>(element_size(call_.index_type))};
  }

  const Launch& launch_;
  const UnpoolCall& call_;
  const Geometry<int64_t>& geometry_;
  Report report_; // for the kernel that is launched next
  const bool last_;
  const bool offsets_;
  const bool may_leave_window_;
  OutOfWindowFlags out_of_window_flags_{}; // that the fast kernel writes, for the fix-up kernel
  OrderedPlan ordered_{};                  // for the fix-up kernel of "last"
  bool is_fixup_ = false;                  // whether slots() launches the fix-up kernel
};

} // namespace maxunpool_cuda
