// Enough of CUDA's language for g++ to compile the kernels as they are and run them: one thread of
// the operating system per CUDA thread, all of a grid at once, so that sanitizers see what a GPU
// would race on.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstdint>
#include <deque>
#include <numeric>
#include <random>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)

struct Dim3 {
  unsigned x = 1;
};
inline thread_local Dim3 threadIdx, blockIdx;
inline Dim3 blockDim, gridDim;

template <class T, class Value>
T atomicAdd(T* to, Value value) {
  return std::atomic_ref<T>(*to).fetch_add(static_cast<T>(value));
}
// In global memory a GPU takes subnormal numbers for zero here.
float atomicAdd(float*, float) = delete;
template <class T>
T atomicCAS(T* to, T expected, T desired) {
  std::atomic_ref<T>(*to).compare_exchange_strong(expected, desired);
  return expected;
}
template <class T>
T atomicExch(T* to, T value) {
  return std::atomic_ref<T>(*to).exchange(value);
}
template <class T>
T atomicMax(T* to, T value) {
  std::atomic_ref<T> target(*to);
  T seen = target.load();
  while (seen < value && !target.compare_exchange_weak(seen, value)) {
  }
  return seen;
}

namespace shim {

// What the threads of a block share.
struct Block {
  struct alignas(16) Unit {
    uint64_t undefined[2] = {0xa5a5a5a5a5a5a5a5, 0xa5a5a5a5a5a5a5a5};
  };

  Block(unsigned threads, size_t shared_bytes)
      : barrier(threads), shared((shared_bytes + 15) / 16) {}

  std::barrier<> barrier;
  std::atomic<int> any = 0;
  std::vector<Unit> shared;
};
inline thread_local Block* block;
inline bool skip_barriers = false; // a race on purpose

inline void* shared_memory() {
  return block->shared.data();
}

// kernel<<<blocks, threads, shared_bytes>>>(arguments...), with the threads started in an order
// drawn by `seed`.
template <class... Parameters>
void launch(
    void (*kernel)(Parameters...), unsigned blocks, unsigned threads, size_t shared_bytes,
    unsigned seed, const std::type_identity_t<Parameters>&... arguments) {
  gridDim.x = blocks;
  blockDim.x = threads;
  std::deque<Block> shared;
  for (unsigned i = 0; i < blocks; ++i) {
    shared.emplace_back(threads, shared_bytes);
  }
  std::vector<unsigned> order(blocks * threads);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), std::mt19937(seed));
  std::vector<std::thread> running;
  for (const unsigned i : order) {
    running.emplace_back([&, i] {
      blockIdx.x = i / threads;
      threadIdx.x = i % threads;
      block = &shared[blockIdx.x];
      kernel(arguments...);
    });
  }
  for (std::thread& thread : running) {
    thread.join();
  }
}

} // namespace shim

inline void __syncthreads() {
  if (!shim::skip_barriers) {
    shim::block->barrier.arrive_and_wait();
  }
}
inline int __syncthreads_or(int predicate) {
  shim::Block& block = *shim::block;
  block.any.fetch_or(predicate != 0);
  block.barrier.arrive_and_wait();
  const int any = block.any;
  block.barrier.arrive_and_wait();
  block.any = 0;
  block.barrier.arrive_and_wait();
  return any;
}
