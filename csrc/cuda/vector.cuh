// N neighbours in memory, moved by as few instructions as their size allows (16 bytes each).
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

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

// A sum begins with zero, which -0 added to it leaves as it is. `negative_zero` is that number's
// bits where results are sums of floating-point numbers, else 0: bits that are not looked at stay.
template <class T>
__device__ inline T added_to_zero(T bits, T negative_zero) {
  return bits == negative_zero ? T{} : bits;
}

// N elements in 32-bit words, as they lie in memory: small ones stay packed, which takes fewer
// registers and needs no packing at the end.
template <class T, int N>
struct Lanes {
  using Word = std::conditional_t<sizeof(T) < sizeof(uint32_t), uint32_t, T>;
  static constexpr int kWords = sizeof(T) * N / sizeof(Word);

  Vector<Word, kWords> words{};

  __device__ static Lanes load(const T* from, T negative_zero) {
    auto values = maxunpool_cuda::load<N>(from);
    if (negative_zero != T{}) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        values.at[i] = added_to_zero(values.at[i], negative_zero);
      }
    }
    return {__builtin_bit_cast(Vector<Word, kWords>, values)};
  }
  __device__ void store(T* to) const { maxunpool_cuda::store(reinterpret_cast<Word*>(to), words); }
  // Takes over element i, if `match`.
  __device__ void take(int i, const Lanes& from, bool match) {
    if constexpr (sizeof(Word) == sizeof(T)) {
      words.at[i] = match ? from.words.at[i] : words.at[i];
    } else {
      const int bit = i * static_cast<int>(sizeof(T)) * 8;
      const uint32_t mask = ((1u << sizeof(T) * 8) - 1) << bit % 32;
      Word& word = words.at[bit / 32];
      word = match ? (word & ~mask) | (from.words.at[bit / 32] & mask) : word;
    }
  }
};

} // namespace maxunpool_cuda
