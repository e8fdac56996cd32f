// SPDX-License-Identifier: BSD-3-Clause
// Vectors: N neighbours in memory, which a thread loads or stores by as few instructions as
// possible. One instruction moves at most 16 bytes.
//
// Example: load<4>(from) of floats is one load of 16 bytes, and `from` is a multiple of 16.
// load<8>(from) is two such loads, and `from` still needs to be a multiple of 16 only.
// load<3>(from) is not allowed: no instruction loads 12 bytes. load<1>(from) is an ordinary load.
//
// This file needs nothing of the others.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

namespace maxunpool_cuda {

constexpr size_t kVectorBytes = 16; // the longest load or store of one thread

template <class T, int N>
struct alignas(sizeof(T) * N < kVectorBytes ? sizeof(T) * N : kVectorBytes) Vector {
  T at[N];

  __device__ __forceinline__ T& operator[](int i) { return at[i]; }
  __device__ __forceinline__ const T& operator[](int i) const { return at[i]; }
};

// Whether all arrays begin at a multiple of kVectorBytes.
inline bool are_aligned(std::initializer_list<const void*> arrays) {
  return std::all_of(arrays.begin(), arrays.end(), [](const void* array) {
    return reinterpret_cast<uintptr_t>(array) % kVectorBytes == 0;
  });
}

// Loads or stores a vector. `from` and `to` are aligned for a Vector<T, N>.
template <int N, class T>
__device__ __forceinline__ Vector<T, N> load(const T* from) {
  return *reinterpret_cast<const Vector<T, N>*>(from);
}

template <int N, class T>
__device__ __forceinline__ void store(T* to, const Vector<T, N>& vector) {
  *reinterpret_cast<Vector<T, N>*>(to) = vector;
}

// Whether N elements of 1 or 2 bytes fill whole 32-bit words. The next two functions move these as
// words: nvcc would move them as bytes or halves, with an instruction more for each. Example: the
// bytes 1, 2, 3, 4 are the word 0x04030201, and become the registers 0x04030201, 0x00040302, 0x0403
// and 0x04. Stored again, the lowest byte of each counts.
template <class T, int N>
constexpr bool kFillWords =
    std::is_unsigned_v<T> && sizeof(T) < sizeof(uint32_t) && N * sizeof(T) % sizeof(uint32_t) == 0;

// Loads N neighbours into a variable each; `from` is aligned for a Vector<T, N>. If T has 1 or 2
// bytes and Register is uint32_t, an element is in its low bits, and the bits above are arbitrary.
template <class T, class Register, int N>
__device__ __forceinline__ void load_registers(const T* from, Register (&registers)[N]) {
  if constexpr (kFillWords<T, N> && std::is_same_v<Register, uint32_t>) {
    constexpr int kInWord = sizeof(uint32_t) / sizeof(T);
    const auto words = load<N / kInWord>(reinterpret_cast<const uint32_t*>(from));
#pragma unroll
    for (int i = 0; i < N; ++i) {
      registers[i] = words[i / kInWord] >> i % kInWord * (8 * sizeof(T));
    }
  } else {
    const auto vector = load<N>(from);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      registers[i] = static_cast<Register>(vector[i]);
    }
  }
}

// Stores N such variables, as T, as neighbours; `to` is aligned for a Vector<T, N>.
template <class T, class Register, int N>
__device__ __forceinline__ void store_registers(T* to, const Register (&registers)[N]) {
  if constexpr (kFillWords<T, N> && std::is_same_v<Register, uint32_t>) {
    constexpr int kInWord = sizeof(uint32_t) / sizeof(T);
    Vector<uint32_t, N / kInWord> words{};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      words[i / kInWord] |= uint32_t{static_cast<T>(registers[i])} << i % kInWord * (8 * sizeof(T));
    }
    store(reinterpret_cast<uint32_t*>(to), words);
  } else {
    Vector<T, N> vector;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      vector[i] = static_cast<T>(registers[i]);
    }
    store(to, vector);
  }
}

} // namespace maxunpool_cuda
