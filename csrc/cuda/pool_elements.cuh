// SPDX-License-Identifier: BSD-3-Clause
// Elements of a window, as pooling compares them; the candidate for the window's maximum; and the
// arrays that take it. Vectors come from vector.cuh.
//
// Example: a 1x4 window with the elements 2, 7, 7, NaN, and window offsets as indices. A candidate
// sees them in this order:
//
//   2      {2, 0}      the first one is taken as it is
//   7      {7, 1}      larger
//   7      {7, 1}      equal: the earlier one stays
//   NaN    {NaN, 3}    a NaN wins over every number, and over an earlier NaN
#pragma once

#include "../geometry.h"
#include "../torch.h"
#include "vector.cuh"

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

// An element of a window: `number` is compared, and original() is the element itself, all its bits.
template <class T>
struct Element {
  T number;

  __device__ static Element of(T value) { return {value}; }
  __device__ T original() const { return number; }
};
template <>
struct Element<BFloat16> {
  float number; // the upper half is the element, the lower one zero

  __device__ static Element of(BFloat16 value) {
    return of_upper_half(static_cast<uint32_t>(value.x) << 16);
  }
  __device__ static Element of_upper_half(uint32_t bits) {
    return {__builtin_bit_cast(float, bits)};
  }
  __device__ uint32_t bits() const { return __builtin_bit_cast(uint32_t, number); }
  __device__ BFloat16 original() const {
    return {static_cast<uint16_t>(bits() >> 16), BFloat16::from_bits()};
  }
};
template <>
struct Element<Half> { // a NaN would lose bits on its way through a float
  float number;
  Half half;

  __device__ static Element of(Half value) { return {static_cast<float>(value), value}; }
  __device__ Half original() const { return half; }
};

// The candidate for a window's maximum: the best of the elements so far, and an index of it. When
// it is stored, that is its window offset where the call's indices are uint8, else its position in
// the plane.
template <class T, class Offset = uint32_t>
struct Candidate {
  Element<T> value;
  Offset index;

  // Compares with the next element in row-major order, or with the best of the next row. The first
  // of equal elements stays, and the last NaN. `is_first`: there was none before.
  __device__ void update(const Element<T>& next, Offset next_index, bool is_first = false) {
    if (is_first | (next.number > value.number) | (next.number != next.number)) {
      value = next;
      index = next_index;
    }
  }

  // Compares with the candidate of other elements of the window, which may come before or after.
  // The result is that of all the elements in row-major order: of two NaNs the later one stays,
  // else a NaN wins, else the larger number, and of equal numbers the earlier one.
  __device__ void merge(const Candidate& other) {
    const bool comes_before = other.index < index;
    const bool is_nan = value.number != value.number;
    const bool other_is_nan = other.value.number != other.value.number;
    const bool exceeds = other.value.number > value.number;
    const bool is_first_equal = (other.value.number == value.number) & comes_before;
    if (other_is_nan ? !(is_nan & comes_before) : exceeds | is_first_equal) {
      *this = other;
    }
  }
};

// The elements of a vector, for comparison. A word of two bfloat16 makes two without a conversion.
template <class T, int N>
__device__ inline void unpack(const Vector<T, N>& vector, Element<T>* elements) {
  if constexpr (std::is_same_v<T, BFloat16> && N % 2 == 0) {
    const auto words = __builtin_bit_cast(Vector<uint32_t, N / 2>, vector);
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      elements[i] = Element<T>::of_upper_half(words[i / 2] << 16);
      elements[i + 1] = Element<T>::of_upper_half(words[i / 2] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      elements[i] = Element<T>::of(vector[i]);
    }
  }
}

// The arrays of the pooled tensor that a pooling kernel writes.
template <class T>
struct PoolResult {
  T* values;
  void* indices;
  size_t index_bytes; // of one

  __device__ bool takes_offsets() const { return index_bytes == sizeof(uint8_t); }

  // Stores the candidates of N neighbours as vectors; the first is this element of the pooled
  // tensor, and the addresses are aligned for them.
  template <class Offset, int N>
  __device__ void store_candidates(
      Offset element, const Candidate<T, Offset> (&candidates)[N]) const {
    store_values(element, candidates);
    switch (index_bytes) {
      case sizeof(int64_t):
        return store_indices<int64_t>(element, candidates);
      case sizeof(int32_t):
        return store_indices<int32_t>(element, candidates);
      default:
        return store_indices<uint8_t>(element, candidates);
    }
  }

 private:
  template <class Offset, int N>
  __device__ void store_values(Offset element, const Candidate<T, Offset> (&candidates)[N]) const {
    if constexpr (std::is_same_v<T, BFloat16> && N % 2 == 0) {
      Vector<uint32_t, N / 2> words;
#pragma unroll
      for (int i = 0; i < N; i += 2) {
        words[i / 2] = candidates[i].value.bits() >> 16 | candidates[i + 1].value.bits();
      }
      store(reinterpret_cast<uint32_t*>(values + element), words);
    } else {
      Vector<T, N> vector;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        vector[i] = candidates[i].value.original();
      }
      store(values + element, vector);
    }
  }

  template <class Index, class Offset, int N>
  __device__ void store_indices(Offset element, const Candidate<T, Offset> (&candidates)[N]) const {
    Vector<Index, N> vector;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      vector[i] = static_cast<Index>(candidates[i].index);
    }
    store(static_cast<Index*>(indices) + element, vector);
  }
};

} // namespace maxunpool_cuda
