// SPDX-License-Identifier: BSD-3-Clause
// A call of max pooling as a whole, cut into launches that 32 bits can count; with it the kernels
// of pool.cuh and pool_lanes.cuh are compiled, which PoolDispatch chooses from (max_pool.cuh).
//
// Example: a call of 300 images (see geometry.h) of which 100 fit a launch runs four times, on 75
// each, as 300 is halved until it fits.
#include "../calls.h"
#include "../geometry.h"
#include "../torch.h"
#include "dispatch.cuh"
#include "max_pool.cuh"
#include "tiling.cuh"

#include <cstdint>

namespace maxunpool_cuda {

// The call of `count` images of this call, from image `first` on.
static PoolCall images_of(const PoolCall& call, int64_t first, int64_t count) {
  const auto value_size = static_cast<int64_t>(element_size(call.type));
  const auto index_size = static_cast<int64_t>(element_size(call.index_type));
  const int64_t pooled = first * call.geometry.in_image(); // elements before the first
  const int64_t unpooled = first * call.geometry.out_image();
  PoolCall images = call;
  images.geometry.outer = count;
  images.input = static_cast<const char*>(call.input) + unpooled * value_size;
  images.values = static_cast<char*>(call.values) + pooled * value_size;
  images.indices = static_cast<char*>(call.indices) + pooled * index_size;
  return images;
}

void pool(const Launch& launch, const PoolCall& call) {
  const Geometry<int64_t>& geometry = call.geometry;
  const int64_t fitting = outer_that_fits(geometry, call.dilation, PoolDispatch::kMostRows);
  for_each_range_of_images(geometry.outer, fitting, [&](int64_t first, int64_t count) {
    const PoolCall images = images_of(call, first, count);
    PoolDispatch(launch, images).run();
  });
}

} // namespace maxunpool_cuda
