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

template <class T, int N>
__device__ inline void set_all(T (&array)[N], T value) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    array[i] = value;
  }
}

} // namespace maxunpool_cuda
