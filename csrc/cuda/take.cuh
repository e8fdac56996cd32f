// What an owner makes of the pooled elements that name its output, in row-major order. Held is how
// a pooled element lies in registers.
#pragma once

#include "../reduction.h"
#include "vector.cuh"

#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

// Elements of less than a word lie in the low bits of one; what is above them is not looked at.
template <class T>
struct TakeLast {
  using Element = T;
  static constexpr bool kMoves = true; // it only moves data
  static constexpr bool kSmall = sizeof(T) < sizeof(uint32_t);
  static constexpr int kBits = 8 * sizeof(T);
  using Held = std::conditional_t<kSmall, uint32_t, T>;

  Held value{};

  __device__ void add(Held pooled) { value = pooled; }
  __device__ void add_if(bool match, Held pooled) { value = match ? pooled : value; }
  __device__ T result() const { return static_cast<T>(value); }

  // `from` and `to` are aligned for N elements.
  template <int N>
  __device__ static void load(const T* from, Held* held) {
    if constexpr (kSmall && N * sizeof(T) % sizeof(uint32_t) == 0) {
      constexpr int kInWord = sizeof(uint32_t) / sizeof(T);
      const auto words = maxunpool_cuda::load<N / kInWord>(reinterpret_cast<const uint32_t*>(from));
#pragma unroll
      for (int i = 0; i < N; ++i) {
        held[i] = words.at[i / kInWord] >> i % kInWord * kBits;
      }
    } else {
      const auto vector = maxunpool_cuda::load<N>(from);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        held[i] = vector.at[i];
      }
    }
  }
  template <int N>
  __device__ static void store(T* to, const TakeLast* kept) {
    if constexpr (kSmall && N * sizeof(T) % sizeof(uint32_t) == 0) {
      constexpr int kInWord = sizeof(uint32_t) / sizeof(T);
      Vector<uint32_t, N / kInWord> words{};
#pragma unroll
      for (int i = 0; i < N; ++i) {
        words.at[i / kInWord] |= (kept[i].value & ((1u << kBits % 32) - 1)) << i % kInWord * kBits;
      }
      maxunpool_cuda::store(reinterpret_cast<uint32_t*>(to), words);
    } else {
      Vector<T, N> vector;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        vector.at[i] = kept[i].result();
      }
      maxunpool_cuda::store(to, vector);
    }
  }
};

// From a sum of nothing, +0, on.
template <class T>
struct TakeSum {
  using Element = T;
  static constexpr bool kMoves = false;
  using Held = Accumulator<T>;

  Held sum{};

  __device__ void add(Held pooled) {
    if constexpr (std::is_integral_v<T>) { // wraps
      sum = static_cast<int64_t>(static_cast<uint64_t>(sum) + static_cast<uint64_t>(pooled));
    } else {
      sum += pooled;
    }
  }
  __device__ void add_if(bool match, Held pooled) {
    if (match) {
      add(pooled);
    }
  }
  __device__ T result() const { return static_cast<T>(sum); }

  template <int N>
  __device__ static void load(const T* from, Held* held) {
    const auto vector = maxunpool_cuda::load<N>(from);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      held[i] = static_cast<Held>(vector.at[i]);
    }
  }
  template <int N>
  __device__ static void store(T* to, const TakeSum* kept) {
    Vector<T, N> vector;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      vector.at[i] = kept[i].result();
    }
    maxunpool_cuda::store(to, vector);
  }
};

template <class T>
struct TakeMean {
  using Element = T;
  using Held = T;

  Sum<T> sum{};

  __device__ void add(Held pooled) { sum.add(pooled); }
  __device__ T result() const { return sum.result(Reduce::mean); }
};

} // namespace maxunpool_cuda
