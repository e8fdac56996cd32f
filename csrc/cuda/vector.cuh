// N neighbours in memory, moved by as few instructions as their size allows (16 bytes each).
#pragma once

#include <cstddef>

namespace maxunpool_cuda {

constexpr size_t kVectorBytes = 16;

template <class T, int N>
struct alignas(sizeof(T) * N < kVectorBytes ? sizeof(T) * N : kVectorBytes) Vector {
  T at[N];
};

// `from` and `to` are aligned for the whole vector.
template <int N, class T>
__device__ inline Vector<T, N> load(const T* from) {
  return *reinterpret_cast<const Vector<T, N>*>(from);
}

template <int N, class T>
__device__ inline void store(T* to, const Vector<T, N>& vector) {
  *reinterpret_cast<Vector<T, N>*>(to) = vector;
}

} // namespace maxunpool_cuda
