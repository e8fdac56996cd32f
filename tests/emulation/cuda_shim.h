// Enough of CUDA's language for g++ to compile the kernels as they are and run them: one thread of
// the operating system per CUDA thread, all of a grid at once, so that sanitizers see what a GPU
// would race on.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstdint>
#include <numeric>
#include <optional>
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
inline void __threadfence_system() {} // the atomics above are sequentially consistent

namespace shim {

inline std::optional<std::barrier<>> grid_barrier;
inline bool skip_grid_barrier = false; // a race on purpose

// kernel<<<blocks, threads>>>(arguments...), with the threads started in an order drawn by `seed`.
template <class... Parameters>
void launch(
    void (*kernel)(Parameters...),
    unsigned blocks,
    unsigned threads,
    unsigned seed,
    const std::type_identity_t<Parameters>&... arguments) {
  gridDim.x = blocks;
  blockDim.x = threads;
  grid_barrier.emplace(blocks * threads);
  std::vector<unsigned> order(blocks * threads);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), std::mt19937(seed));
  std::vector<std::thread> running;
  for (const unsigned i : order) {
    running.emplace_back([&, i] {
      blockIdx.x = i / threads;
      threadIdx.x = i % threads;
      kernel(arguments...);
    });
  }
  for (std::thread& thread : running) {
    thread.join();
  }
}

} // namespace shim
