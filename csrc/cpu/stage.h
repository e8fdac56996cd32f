// SPDX-License-Identifier: BSD-3-Clause
// Where the windows of a pool lie in its input; and the stage: a part of a contiguous input, copied
// so that the elements which neighbouring windows compare lie side by side.
//
// It takes the call from ../calls.h. In the geometry, as for unpooling, `in` is the pooled side,
// and `out` is the input.
//
// Example: the row a b c d e f g h, four windows of 3 columns, stride 2, padding 1:
//   (- a b) (b c d) (d e f) (f g h)
// It is copied to as many phases as the stride, and the padding with it:
//   phase 0    - b d f h      the windows' columns 0, and from the second place on their columns 2
//   phase 1    a c e g .      the windows' columns 1
// A phase has every second coordinate, as the stride is 2; a place is a position in it. So column c
// of window i lies at place i + c / 2 of phase c % 2, and one vector of a phase has one column of
// as many windows.
//
// The same holds for rows: phases and places have two dimensions. The places of one row follow
// those of the row before, so one vector may have windows of several rows, or planes. The last
// places of a row, here the fifth, begin no window: what is compared there is not used.
#pragma once

#include "../calls.h"
#include "../dtypes.h"
#include "../geometry.h"
#include "machine.h"

#include <algorithm>
#include <cstdint>

namespace maxunpool_cuda {
namespace {

// Elements [begin, end) of window p lie in the input, along an axis. Element 0 has, or would have,
// the coordinate `start`.
//
// Example: a row of 8 elements, windows of 3, stride 2, padding 1. Window 0 would begin at
// coordinate -1, so its elements [1, 3) lie in the row. With dilation 2 its elements would have the
// coordinates -1, 1 and 3, and again [1, 3) of them lie in the row.
struct Span {
  int64_t start;
  int64_t begin = 0;
  int64_t end;

  Span(const Axis<int64_t>& axis, int64_t dilation, int64_t p)
      : start(p * axis.stride - axis.padding), end(axis.kernel) {
    if (start < 0) { // divisions cost as much as short rows
      begin = divide_up(-start, dilation);
    }
    if (start + dilation * (axis.kernel - 1) >= axis.out) {
      end = divide_up(axis.out - start, dilation);
    }
  }

  int64_t size() const { return std::max<int64_t>(0, end - begin); }
};

// Numbers of elements along the three axes.
struct Box {
  int64_t z = 0;
  int64_t y = 0;
  int64_t x = 0;

  bool operator==(const Box&) const = default;
};

// The window of a cell.
struct PoolWindow {
  Span z;
  Span y;
  Span x;

  // The elements that lie in the input.
  Box box() const { return {z.size(), y.size(), x.size()}; }
  bool empty() const { return z.size() * y.size() * x.size() == 0; }
  // Whether the window starts before the input along some axis.
  bool begins_in_padding() const { return std::min({z.start, y.start, x.start}) < 0; }
};

// Windows that are pooled together: cells (y, x) to (y + rows, x + columns) of some pooled depth
// slices, which are counted through all images. In 1d and 2d each plane is one slice.
struct Batch {
  int64_t slice;
  int64_t y;
  int64_t x;
  int64_t slices;
  int64_t rows;
  int64_t columns;
};

// How a call is divided into batches, and where the elements of their windows are on a stage.
class PoolPlan {
 public:
  // A stage has room for `room` elements, and `most_windows` places are compared at once. `lanes`:
  // elements of a vector.
  PoolPlan(const PoolCall& call, int64_t room, int64_t most_windows, int64_t lanes) : call_(call) {
    const auto& [depth, height, width] = call.geometry.axis;
    const int64_t down = call.dilation[1] * (height.kernel - 1); // from a window's first row
    row_phases_ = std::min(height.stride, down + 1);
    more_rows_ = down / height.stride;
    more_columns_ = call.dilation[2] * (width.kernel - 1) / width.stride;
    const bool may_fit = std::max({depth.kernel, row_phases_, width.stride}) <= room;
    const int64_t phases = may_fit ? depth.kernel * row_phases_ * width.stride : room + 1;
    const int64_t columns = room / phases / (1 + more_rows_) - more_columns_; // as many fit
    staged_ = suits_stage() && columns >= std::min(width.in, lanes);
    if (staged_) {
      choose_batches(std::min(most_windows, columns), room / phases, most_windows);
    } else {
      more_rows_ = 0;
      more_columns_ = 0;
      const auto worth = static_cast<int64_t>(kGrain / work_of_cell());
      const int64_t piece = std::max<int64_t>(1, kMostResults / call.geometry.inner);
      const int64_t cells = std::max(worth, std::min(width.in, piece));
      choose_batches(cells, cells, cells); // a cell is a place
    }
  }

  // Whether batches are put on a stage.
  bool staged() const { return staged_; }

  int64_t batches() const { return divide_up(all_slices(), slices_) * bands() * pieces(); }

  Batch batch(int64_t i) const {
    const auto& [depth, height, width] = call_.geometry.axis;
    const int64_t x = i % pieces() * columns_;
    const int64_t y = i / pieces() % bands() * rows_;
    const int64_t slice = i / pieces() / bands() * slices_;
    return {
        .slice = slice,
        .y = y,
        .x = x,
        .slices = std::min(slices_, all_slices() - slice),
        .rows = std::min(rows_, height.in - y),
        .columns = std::min(columns_, width.in - x)};
  }

  // Batches that are worth a thread.
  int64_t grain() const {
    const double work = work_of_cell() * static_cast<double>(slices_ * rows_ * columns_);
    return static_cast<int64_t>(std::max(1.0, kGrain / work));
  }

  // Elements of a window that lie in the input, at most.
  double window_size() const {
    double size = 1;
    for (const Axis<int64_t>& axis : call_.geometry.axis) {
      size *= static_cast<double>(std::min(axis.kernel, axis.out));
    }
    return size;
  }

  // Place of the first window of a row of a batch.
  int64_t place(int64_t slice, int64_t row) const { return slice * slice_pitch_ + row * pitch_; }

  // Places from the first window of so many slices, rows and columns to the last, both included.
  int64_t places(int64_t slices, int64_t rows, int64_t columns) const {
    return place(slices - 1, rows - 1) + columns;
  }

  // From a window's place to the place that has an element of it.
  int64_t offset(int64_t z, int64_t y, int64_t x) const {
    const auto& [depth, height, width] = call_.geometry.axis;
    const int64_t down = y * call_.dilation[1];
    const int64_t right = x * call_.dilation[2];
    return phase_begin(z, down % height.stride) + right % width.stride * phase_ +
           place(0, down / height.stride) + right / width.stride;
  }

  // Where the phases begin that have the elements z of windows, and of these one of row_phases().
  int64_t phase_begin(int64_t z, int64_t remainder) const {
    return (z * row_phases_ + remainder) * call_.geometry.axis[2].stride * phase_;
  }

  int64_t more_rows() const { return more_rows_; }
  int64_t more_columns() const { return more_columns_; }
  int64_t row_phases() const { return row_phases_; }
  int64_t phase() const { return phase_; }

 private:
  // Compared elements that are worth a thread: they take about 5 us, as they are compared in
  // vectors, and to wake a thread takes a few us.
  static constexpr double kGrain = 1 << 15;
  // Results of a row of cells. A longer row is divided among threads.
  static constexpr int64_t kMostResults = 1 << 13;

  // If a row has fewer windows than a window has columns, columns fill a vector better than windows
  // do, unless they are dilated.
  bool suits_stage() const {
    const Axis<int64_t>& width = call_.geometry.axis[2];
    return call_.geometry.inner == 1 && (width.in >= width.kernel || call_.dilation[2] > 1);
  }

  double work_of_cell() const { return window_size() * static_cast<double>(call_.geometry.inner); }

  int64_t all_slices() const { return call_.geometry.outer * call_.geometry.axis[0].in; }
  int64_t bands() const { return divide_up(call_.geometry.axis[1].in, rows_); }
  int64_t pieces() const { return divide_up(call_.geometry.axis[2].in, columns_); } // of a row

  // Chooses batches: of whole slices if they fit, else of whole rows, else of a piece of a row. The
  // limits are windows of a row, places of a phase, and places that are compared.
  void choose_batches(int64_t columns, int64_t room, int64_t compared) {
    const auto& [depth, height, width] = call_.geometry.axis;
    columns_ = even(width.in, columns);
    pitch_ = columns_ + more_columns_;
    if (columns_ == width.in) {
      rows_ =
          even(height.in, std::min(room / pitch_ - more_rows_, (compared - columns_) / pitch_ + 1));
    }
    slice_pitch_ = (rows_ + more_rows_) * pitch_;
    if (columns_ == width.in && rows_ == height.in) {
      const int64_t rest = compared - places(1, rows_, columns_);
      slices_ = even(all_slices(), std::min(room / slice_pitch_, rest / slice_pitch_ + 1));
    }
    phase_ = slices_ * slice_pitch_;
  }

  // So many of `all`, at most, that the last ones are not far fewer.
  static int64_t even(int64_t all, int64_t most) {
    return divide_up(all, divide_up(all, std::max<int64_t>(1, most)));
  }

  const PoolCall& call_;
  bool staged_;
  int64_t slices_ = 1; // of a batch, as are the next two
  int64_t rows_ = 1;
  int64_t columns_;
  int64_t row_phases_;   // phases that differ in rows; as many as the stride differ in columns
  int64_t more_rows_;    // rows of places of a slice, beyond its rows of windows
  int64_t more_columns_; // places of a row, beyond its windows
  int64_t pitch_;        // places of a row
  int64_t slice_pitch_;  // places of a slice
  int64_t phase_;        // places of a phase
};

// The memory of one thread.
template <class Element>
class Stage {
 public:
  // Elements of 8 KiB. What is read for them, what the next batch will read and the results fill
  // the rest of a first cache of 32 KiB.
  static constexpr int64_t kRoom = (8 << 10) / sizeof(Element);

  // `lowest`: what the padding is filled with.
  Stage(const PoolCall& call, const PoolPlan& plan, Element lowest)
      : call_(call), plan_(plan), lowest_(lowest) {
    // Places that begin no window are compared, too, and whole vectors beyond the last place.
    if (plan.staged()) {
      std::fill_n(places_, plan.phase_begin(call.geometry.axis[0].kernel, 0) + kSlack, Element{});
    }
  }

  // Where place 0 is.
  const Element* begin() const { return places_; }

  // Puts there what the windows of a batch compare.
  void put(const Batch& batch) {
    const auto& [depth, height, width] = call_.geometry.axis;
    const auto* input = static_cast<const Element*>(call_.input);
    for (int64_t slice = 0; slice < batch.slices; ++slice) {
      const int64_t image = (batch.slice + slice) / depth.in;
      const int64_t first = (batch.slice + slice) % depth.in * depth.stride - depth.padding;
      for (int64_t k = 0; k < depth.kernel; ++k) {
        const int64_t z = first + k * call_.dilation[0];
        const bool exists = 0 <= z && z < depth.out;
        const int64_t plane = (image * depth.out + z) * height.out * width.out;
        put_slice(exists ? input + plane : nullptr, batch, places_ + plan_.place(slice, 0), k);
      }
    }
  }

 private:
  static constexpr int64_t kSlack = kLine / sizeof(Element); // more than a vector

  // Puts the rows of a slice of the input, or of the padding if `plane` is null, to `places`. `k`:
  // the depth of windows that they have.
  void put_slice(const Element* plane, const Batch& batch, Element* places, int64_t k) {
    const Axis<int64_t>& height = call_.geometry.axis[1];
    const Axis<int64_t>& width = call_.geometry.axis[2];
    const int64_t down = call_.dilation[1] * (height.kernel - 1);
    const int64_t first = batch.y * height.stride - height.padding;
    const int64_t end = first + (batch.rows - 1) * height.stride + down + 1;
    for (int64_t row = 0; row < batch.rows + plan_.more_rows(); ++row) {
      for (int64_t phase = 0; phase < plan_.row_phases(); ++phase) {
        const int64_t y = first + row * height.stride + phase;
        if (y >= end) {
          return; // no window has this row
        }
        Element* to = places + plan_.phase_begin(k, phase) + plan_.place(0, row);
        const bool exists = plane != nullptr && 0 <= y && y < height.out;
        put_row(exists ? plane + y * width.out : nullptr, batch, to);
      }
    }
  }

  // Puts a row of the input, or of the padding if it is null, as much of it as the batch needs. As
  // many rows further on as the batch has, the next batch will mostly read: that is prefetched,
  // since in 3d batches read slices in turn, which the processor does not foresee. Inlined, as rows
  // are often short; compiled without AVX2, with which it takes a little longer.
  MAXUNPOOL_INLINE void put_row(const Element* row, const Batch& batch, Element* to) {
    const Axis<int64_t>& width = call_.geometry.axis[2];
    const int64_t stride = width.stride;
    const int64_t begin = batch.x * stride - width.padding; // a coordinate
    const int64_t places = batch.columns + plan_.more_columns();
    const int64_t length = places * stride;
    if (row == nullptr) {
      for (int64_t k = 0; k < stride; ++k) {
        std::fill_n(to + k * plan_.phase(), places, lowest_);
      }
      return;
    }
    const int64_t left = std::clamp<int64_t>(-begin, 0, length); // in the padding
    const int64_t right = std::clamp(width.out - begin, left, length);
    const Element* from = row + (begin + left);
    const uint64_t rows = static_cast<uint64_t>(batch.rows) * call_.geometry.axis[1].stride;
    const uintptr_t later = reinterpret_cast<uintptr_t>(from) + rows * width.out * sizeof(Element);
    for (uint64_t byte = 0; byte < length * sizeof(Element); byte += kLine) {
      MAXUNPOOL_PREFETCH(later + byte);
    }
    if (stride == 1 || right - left < length) {
      Element* padded = stride == 1 ? to : padded_;
      std::fill(padded, padded + left, lowest_);
      std::copy(from, from + (right - left), padded + left);
      std::fill(padded + right, padded + length, lowest_);
      from = padded;
    }
    const int64_t phase = plan_.phase();
    const auto split = [=](auto steps) MAXUNPOOL_INLINE {
      for (int64_t i = 0; i < places; ++i) {
        for (int64_t k = 0; k < steps; ++k) {
          to[k * phase + i] = from[i * steps + k];
        }
      }
    };
    if (stride > 1 && !with_one_of<2, 3, 4>(stride, split)) { // known to the compiler
      split(stride);
    }
  }

  const PoolCall& call_;
  const PoolPlan& plan_;
  const Element lowest_;
  // Aligned, so that fewer vectors lie in two cache lines.
  alignas(64) Element padded_[kRoom];
  alignas(64) Element places_[kRoom + kSlack];
};

} // namespace
} // namespace maxunpool_cuda
