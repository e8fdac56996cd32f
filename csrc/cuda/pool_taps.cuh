// SPDX-License-Identifier: BSD-3-Clause
// Taps: the elements of a window, as pooling compares and keeps them. A tap's name is what a kernel
// stores as its index: its window offset for uint8, else its position in the plane.
#pragma once

#include "../geometry.h"
#include "vector.cuh"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

// Tap: the number that is compared. value() is the element, bit by bit.
template <class T>
struct Tap {
  T number;

  __device__ static Tap of(T value) { return {value}; }
  __device__ T value() const { return number; }
};
template <>
struct Tap<c10::BFloat16> {
  float number; // whose upper half is the element

  __device__ static Tap of(c10::BFloat16 value) {
    return of_upper(static_cast<uint32_t>(value.x) << 16);
  }
  __device__ static Tap of_upper(uint32_t bits) { return {__builtin_bit_cast(float, bits)}; }
  __device__ uint32_t bits() const { return __builtin_bit_cast(uint32_t, number); }
  __device__ c10::BFloat16 value() const {
    return {static_cast<uint16_t>(bits() >> 16), c10::BFloat16::from_bits()};
  }
};
template <>
struct Tap<c10::Half> { // a NaN would lose bits on its way through a float
  float number;
  c10::Half kept;

  __device__ static Tap of(c10::Half value) { return {static_cast<float>(value), value}; }
  __device__ c10::Half value() const { return kept; }
};

// Best tap of a window so far, and its name.
template <class T, class Offset = uint32_t>
struct Best {
  Tap<T> tap;
  Offset name;

  // Looks at the next tap, or at a row's best, in row-major order. The first of equal ones stays,
  // and the last NaN.
  __device__ void look_at(const Tap<T>& other, Offset other_name, bool first = false) {
    if (first | (other.number > tap.number) | (other.number != other.number)) {
      tap = other;
      name = other_name;
    }
  }

  // Takes the best of other taps of the window, whose names need not come after this one's.
  __device__ void merge(const Best& other) {
    const bool comes_before = other.name < name;
    const bool is_nan = tap.number != tap.number;
    const bool other_is_nan = other.tap.number != other.tap.number;
    const bool exceeds = other.tap.number > tap.number;
    const bool is_first_equal = (other.tap.number == tap.number) & comes_before;
    if (other_is_nan ? !(is_nan & comes_before) : exceeds | is_first_equal) {
      *this = other;
    }
  }
};

template <class T, int N>
__device__ inline void unpack(const Vector<T, N>& from, Tap<T>* to) {
  if constexpr (std::is_same_v<T, c10::BFloat16> && N % 2 == 0) {
    const auto words = __builtin_bit_cast(Vector<uint32_t, N / 2>, from);
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      to[i] = Tap<T>::of_upper(words[i / 2] << 16);
      to[i + 1] = Tap<T>::of_upper(words[i / 2] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      to[i] = Tap<T>::of(from[i]);
    }
  }
}

// Arrays that a kernel of pooling writes.
template <class T>
struct Pooled {
  T* values;
  void* indices;
  size_t index_bytes; // of one

  __device__ bool takes_offsets() const { return index_bytes == sizeof(uint8_t); }

  // Stores the best of V neighbours; `to` is aligned for all of them.
  template <class Offset, int V>
  __device__ void store_best(Offset to, const Best<T, Offset> (&best)[V]) const {
    if constexpr (std::is_same_v<T, c10::BFloat16> && V % 2 == 0) {
      Vector<uint32_t, V / 2> words;
#pragma unroll
      for (int v = 0; v < V; v += 2) {
        words[v / 2] = best[v].tap.bits() >> 16 | best[v + 1].tap.bits();
      }
      store(reinterpret_cast<uint32_t*>(values + to), words);
    } else {
      Vector<T, V> elements;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        elements[v] = best[v].tap.value();
      }
      store(values + to, elements);
    }
    const auto store_names_as = [&]<class Index>(Index) {
      Vector<Index, V> names;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        names[v] = static_cast<Index>(best[v].name);
      }
      store(static_cast<Index*>(indices) + to, names);
    };
    switch (index_bytes) {
      case sizeof(int64_t):
        return store_names_as(int64_t{});
      case sizeof(int32_t):
        return store_names_as(int32_t{});
      default:
        return store_names_as(uint8_t{});
    }
  }
};

} // namespace maxunpool_cuda
