// Plan of a max pooling.
#pragma once

#include "../calls.h"
#include "../geometry.h"

#include <algorithm>
#include <cstdint>
#include <limits>

namespace maxunpool_cuda {

// Elements [first, end) of a window that lie in the input, along an axis. Element 0 would have
// coordinate `start`.
struct Span {
  int64_t start, first, end;

  Span(const Axis<int64_t>& axis, int64_t dilation, int64_t p)
      : start(p * axis.stride - axis.padding),
        first(start < 0 ? steps(dilation - 1 - start, dilation) : 0),
        end(start < axis.out ? std::min(axis.kernel, steps(axis.out - 1 - start, dilation) + 1)
                             : 0) {}

  bool empty() const { return first >= end; }

 private:
  // Each row has spans, each cell of channels too, and divisions cost as much as short ones.
  static int64_t steps(int64_t distance, int64_t dilation) {
    return dilation == 1 ? distance : distance / dilation;
  }
};

// Elements of a window that lie in the input.
struct Box {
  Span z, y, x;

  bool empty() const { return z.empty() || y.empty() || x.empty(); }
};

// Number of elements of a window.
inline int64_t window_volume(const Geometry<int64_t>& geometry) {
  double volume = 1;
  for (const Axis<int64_t>& axis : geometry.axis) {
    volume *= static_cast<double>(axis.kernel);
  }
  return static_cast<int64_t>(std::min(volume, 0x1p60));
}

// Whether Mark can hold how far the last element of a window lies from the window's begin.
template <class Mark>
bool holds_positions(const PoolCall& call) {
  const Axis<int64_t>* axis = call.geometry.axis;
  double position = 0;
  for (int a = 0; a < 3; ++a) {
    position = position * static_cast<double>(axis[a].out) +
               static_cast<double>(axis[a].kernel - 1) * static_cast<double>(call.dilation[a]);
  }
  return position <= static_cast<double>(std::numeric_limits<Mark>::max());
}

// Plan of a call.
struct PoolPlan {
  static constexpr int64_t kMostStaged = 4096; // deinterleaved elements, in all
  static constexpr int64_t kMostAtOnce = 512;  // neighbours that are compared at once
  static constexpr int64_t kVector = 16;       // a multiple of what one instruction compares
  static constexpr int64_t kMostStep = 4;      // from window to window in a deinterleaved row
  static constexpr int64_t kMostNumbered = 256;

  const PoolCall& call;
  int64_t step[3]; // positions from one element of a window to the next
  int64_t extent;  // of a window along a row
  int64_t at_once; // windows of a row that are compared at once; 0: too far apart, or too wide
  bool numbered;   // marks count elements; else they are positions from the window's begin
  bool marked;     // marks can do one of these; else elements are compared one by one
  int64_t position[kMostNumbered]; // of numbered elements, from the window's begin on

  const Geometry<int64_t>& geometry() const { return call.geometry; }
  int64_t position_of(int64_t z, int64_t y, int64_t x) const {
    return z * step[0] + y * step[1] + x * step[2];
  }
  int64_t number_of(int64_t z, int64_t y, int64_t x) const {
    return (z * geometry().axis[1].kernel + y) * geometry().axis[2].kernel + x;
  }
  int64_t begin(const Box& box) const {
    const auto& [depth, height, width] = geometry().axis;
    return (box.z.start * height.out + box.y.start) * width.out + box.x.start;
  }
};

template <class Mark>
PoolPlan make_pool_plan(const PoolCall& call) {
  const auto& [depth, height, width] = call.geometry.axis;
  const int64_t* dilation = call.dilation;
  PoolPlan plan{
      call,
      {dilation[0] * height.out * width.out, dilation[1] * width.out, dilation[2]},
      dilation[2] * (width.kernel - 1) + 1,
      0,
      call.index_type == c10::ScalarType::Byte || !holds_positions<Mark>(call),
      true,
      {}};
  const int64_t volume = window_volume(call.geometry);
  plan.marked = !plan.numbered || volume <= PoolPlan::kMostNumbered;
  if (width.stride <= PoolPlan::kMostStep && plan.extent < PoolPlan::kMostStaged / 2) {
    const int64_t most = (PoolPlan::kMostStaged - plan.extent) / width.stride;
    plan.at_once = std::min(PoolPlan::kMostAtOnce, most / PoolPlan::kVector * PoolPlan::kVector);
  }
  for (int64_t i = 0; plan.numbered && plan.marked && i < volume; ++i) {
    const int64_t row = i / width.kernel;
    plan.position[i] = plan.position_of(row / height.kernel, row % height.kernel, i % width.kernel);
  }
  return plan;
}

} // namespace maxunpool_cuda
