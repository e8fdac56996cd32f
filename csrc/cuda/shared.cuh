// The shared memory of a block, whose size the launch names.
#pragma once

#include <cstdint>

namespace maxunpool_cuda {

// At a multiple of 16 bytes; holds anything until it is written.
template <class T>
__device__ inline T* shared_memory() {
#ifdef __CUDACC__
  extern __shared__ uint4 memory_of_block[];
  return reinterpret_cast<T*>(memory_of_block);
#else
  return static_cast<T*>(shim::shared_memory());
#endif
}

// Calls visit(i) for this thread's share of what its block does.
template <class Offset, class Visit>
__device__ inline void for_each_in_block(Offset items, const Visit& visit) {
  for (Offset i = threadIdx.x; i < items; i += blockDim.x) {
    visit(i);
  }
}

// The same for visit(i, read(i)), with N items read before one of them is visited.
template <int N, class Offset, class Read, class Visit>
__device__ inline void for_each_in_block(Offset items, const Read& read, const Visit& visit) {
  for (Offset i = threadIdx.x; i < items; i += blockDim.x * N) {
    decltype(read(i)) held[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const Offset at = i + n * blockDim.x;
      held[n] = read(at < items ? at : i);
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const Offset at = i + n * blockDim.x;
      if (at < items) {
        visit(at, held[n]);
      }
    }
  }
}

} // namespace maxunpool_cuda
