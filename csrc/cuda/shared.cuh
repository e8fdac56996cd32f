// Shared memory of a block, whose size is given at the launch.
#pragma once

#include <cstdint>

namespace maxunpool_cuda {

// Address of shared memory, a multiple of 16 bytes. Undefined until it is written.
template <class T>
__device__ inline T* shared_memory() {
#ifdef __CUDACC__
  extern __shared__ uint4 memory_of_block[];
  return reinterpret_cast<T*>(memory_of_block);
#else
  return static_cast<T*>(shim::shared_memory());
#endif
}

// Calls visit(i) for this thread's share of the block's items.
template <class Offset, class Visit>
__device__ inline void for_each_in_block(Offset items, const Visit& visit) {
  for (Offset i = threadIdx.x; i < items; i += blockDim.x) {
    visit(i);
  }
}

} // namespace maxunpool_cuda
