// Max pooling on the CPU: choice of types, tasks of rows, registration.
#include "../max_pool.h"
#include "compare.h"
#include "huge_pages.h"
#include "pool_plan.h"
#include "pool_window.h"

#include <ATen/Parallel.h>
#include <c10/core/Device.h>
#include <torch/library.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {
namespace {

template <class Order, class Index>
void pool_rows(const PoolCall& call) {
  constexpr int64_t kGrain = 1 << 15;       // compared elements of a task
  constexpr int64_t kMostWindows = 1 << 13; // of a row, in a task
  const Geometry<int64_t>& geometry = call.geometry;
  const auto& [depth, height, width] = geometry.axis;
  const int64_t volume = std::min(window_volume(geometry), geometry.out_plane());
  const int64_t windows = std::min(width.in, kMostWindows), tasks = divide_up(width.in, windows);
  const int64_t work = std::min(kGrain, windows * geometry.inner) * std::min(kGrain, volume);
  const PoolPlan plan = make_pool_plan<typename Order::Mark>(call);
  at::parallel_for(
      0, geometry.outer * depth.in * height.in * tasks, kGrain / std::min(kGrain, work),
      [&](int64_t begin, int64_t end) {
        Pool<Order, Index> pool(plan);
        int64_t task = begin % tasks, row = begin / tasks;
        int64_t y = row % height.in, z = row / height.in % depth.in;
        int64_t outer = row / height.in / depth.in;
        for (int64_t i = begin; i < end; ++i) {
          const int64_t first = task * windows;
          pool.row(outer, z, y, first, std::min(width.in, first + windows));
          // Counting is cheaper than dividing, which short rows would notice.
          const auto carries = [](int64_t& digit, int64_t base) {
            digit = digit + 1 == base ? 0 : digit + 1;
            return digit == 0;
          };
          outer += carries(task, tasks) && carries(y, height.in) && carries(z, depth.in) ? 1 : 0;
        }
      });
}

void pool(const PoolCall& call, c10::Device) {
  const size_t pooled = call.geometry.outer * call.geometry.in_slab();
  use_huge_pages(call.values, pooled * c10::elementSize(call.type));
  use_huge_pages(call.indices, pooled * c10::elementSize(call.index_type));
  with_ordered_type(call.type, [&]<class T>(std::type_identity<T>) {
    with_index_type(call.index_type, [&]<class Index>(std::type_identity<Index>) {
      pool_rows<OrderOf<T>, Index>(call);
    });
  });
}

} // namespace

TORCH_LIBRARY_IMPL(maxunpool_cuda, CPU, m) {
  m.impl("max_pool", run_pool<int64_t, pool>);
}

} // namespace maxunpool_cuda
