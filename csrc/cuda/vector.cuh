// Vectors: N neighbours in memory, moved by as few instructions as possible (16 bytes each).
#pragma once

#include "../geometry.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace maxunpool_cuda {

constexpr size_t kVectorBytes = 16;

template <class T, int N>
struct alignas(sizeof(T) * N < kVectorBytes ? sizeof(T) * N : kVectorBytes) Vector {
  T at[N];

  __device__ T& operator[](int i) { return at[i]; }
  __device__ const T& operator[](int i) const { return at[i]; }
};

// Rounds bytes up to whole vectors.
inline int64_t align(int64_t bytes) {
  constexpr int64_t kVector = kVectorBytes;
  return divide_up(bytes, kVector) * kVector;
}

// Whether arrays begin where vectors do.
inline bool are_aligned(std::initializer_list<const void*> arrays) {
  return std::all_of(arrays.begin(), arrays.end(), [](const void* array) {
    return reinterpret_cast<uintptr_t>(array) % kVectorBytes == 0;
  });
}

// Loads or stores a vector; `from` and `to` are aligned for all of it.
template <int N, class T>
__device__ inline Vector<T, N> load(const T* from) {
  return *reinterpret_cast<const Vector<T, N>*>(from);
}

template <int N, class T>
__device__ inline void store(T* to, const Vector<T, N>& vector) {
  *reinterpret_cast<Vector<T, N>*>(to) = vector;
}

// Adds +0, from which a sum starts, to each element: that changes -0 alone. `negative_zero` is the
// bits of -0 where results are sums of floating-point numbers, else 0, and nothing changes.
template <class T, class Held, int N>
__device__ inline void add_to_zero(Held (&held)[N], T negative_zero) {
  if (negative_zero != T{}) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      held[i] = static_cast<T>(held[i]) == negative_zero ? Held{} : held[i];
    }
  }
}

template <class T, int N>
__device__ inline void set_all(T (&array)[N], T value) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    array[i] = value;
  }
}

} // namespace maxunpool_cuda
