// SPDX-License-Identifier: BSD-3-Clause
// Vectors: N neighbours in memory, moved by as few instructions as possible (16 bytes each). And
// how an owner combines the pooled elements that name its output, in row-major order; Held is the
// type of a pooled element in registers.
#pragma once

#include "../geometry.h"
#include "../reduction.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

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

// Packed words hold two elements of 16 bits, or two window offsets.
constexpr uint32_t kBoth = 0x10001; // times a number: the word with it in both halves

// Four bytes of two words, by number: 0 to 3 lie in `low`. The last digit is the lowest byte's.
__device__ inline uint32_t bytes_of(uint32_t low, uint32_t high, uint32_t numbers) {
#ifdef __CUDA_ARCH__
  return __byte_perm(low, high, numbers);
#else
  const uint64_t from = uint64_t{high} << 32 | low;
  const auto byte = [&](int i) { return (from >> 8 * (numbers >> 4 * i & 7) & 0xFF) << 8 * i; };
  return static_cast<uint32_t>(byte(0) | byte(1) | byte(2) | byte(3));
#endif
}

// Mask of the halves that are equal. They are compared as numbers of half precision: those of NaNs
// are not equal, and 0 may equal 0x8000.
__device__ inline uint32_t equal_halves(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint32_t mask;
  asm("set.eq.u32.f16x2 %0, %1, %2;" : "=r"(mask) : "r"(a), "r"(b)); // keeps subnormal numbers
  return mask;
#else
  return ((a ^ b) << 16 == 0 ? 0xFFFFu : 0) | ((a ^ b) >> 16 == 0 ? 0xFFFF0000u : 0);
#endif
}

// Last element. If smaller than a word, it lies in a word's low bits; the others are undefined.
template <class T>
struct CombineLast {
  using Element = T;
  using Held = std::conditional_t<sizeof(T) < sizeof(uint32_t), uint32_t, T>;

  Held value{};

  __device__ void add_if(bool match, Held pooled) { value = match ? pooled : value; }
  __device__ void add_bits(Held mask, Held pooled) { value = (pooled & mask) | (value & ~mask); }
  __device__ T result() const { return static_cast<T>(value); }
};

// Sum, which starts from +0.
template <class T>
struct CombineSum {
  using Element = T;
  using Held = Accumulator<T>;

  Held sum{};

  __device__ void add(Held pooled) { sum = plus<Held>(sum, pooled); }
  __device__ void add_if(bool match, Held pooled) {
    if (match) {
      add(pooled);
    }
  }
  __device__ T result() const { return static_cast<T>(sum); }
};

// The element, or both packed ones, plus the +0 that a sum starts from, which changes -0 alone.
// `negative_zero` is the bits of -0 where results are floating-point sums, else 0.
template <bool kPacked, class T, class Held>
__device__ inline Held added_to_zero(Held value, T negative_zero) {
  if constexpr (kPacked) {
    return value & ~(equal_halves(value, negative_zero * kBoth) & negative_zero * kBoth);
  }
  return negative_zero != T{} && static_cast<T>(value) == negative_zero ? Held{} : value;
}

// Whether N small elements, held in a word each, fill whole words.
template <class T, class Held, int N>
constexpr bool kFillWords = sizeof(T) < sizeof(uint32_t) && std::is_same_v<Held, uint32_t> &&
                            N * sizeof(T) % sizeof(uint32_t) == 0;

// Loads or stores N elements; `from` and `to` are aligned for all of them.
template <int N, class T, class Held>
__device__ inline void load_held(const T* from, Held* held) {
  if constexpr (kFillWords<T, Held, N>) {
    constexpr int kInWord = sizeof(uint32_t) / sizeof(T);
    const auto words = load<N / kInWord>(reinterpret_cast<const uint32_t*>(from));
#pragma unroll
    for (int i = 0; i < N; ++i) {
      held[i] = words[i / kInWord] >> i % kInWord * (8 * sizeof(T));
    }
  } else {
    const auto vector = load<N>(from);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      held[i] = static_cast<Held>(vector[i]);
    }
  }
}
template <int N, class Combine>
__device__ inline void store_results(typename Combine::Element* to, const Combine* kept) {
  using T = typename Combine::Element;
  if constexpr (kFillWords<T, typename Combine::Held, N>) {
    constexpr int kInWord = sizeof(uint32_t) / sizeof(T);
    Vector<uint32_t, N / kInWord> words{};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      words[i / kInWord] |= uint32_t{kept[i].result()} << i % kInWord * (8 * sizeof(T));
    }
    store(reinterpret_cast<uint32_t*>(to), words);
  } else {
    Vector<T, N> vector;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      vector[i] = kept[i].result();
    }
    store(to, vector);
  }
}

} // namespace maxunpool_cuda
