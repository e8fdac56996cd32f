// Taps: the elements of a window, as pooling compares and keeps them. A tap's name is what a kernel
// stores as its index.
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
template <class T, class Offset>
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

template <class T, class Offset, int V>
__device__ inline void store_values(T* to, const Best<T, Offset> (&best)[V]) {
  if constexpr (std::is_same_v<T, c10::BFloat16> && V % 2 == 0) {
    Vector<uint32_t, V / 2> words;
#pragma unroll
    for (int v = 0; v < V; v += 2) {
      words[v / 2] = best[v].tap.bits() >> 16 | best[v + 1].tap.bits();
    }
    store(reinterpret_cast<uint32_t*>(to), words);
  } else {
    Vector<T, V> values;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      values[v] = best[v].tap.value();
    }
    store(to, values);
  }
}

// Array that indices are written to. Void: their type is known only when the kernel runs. A name is
// the tap's window offset for uint8, else its position in the plane.
template <class Index>
struct IndexArray {
  void* data;
  size_t size; // of an index

  __device__ bool takes_offsets() const {
    return std::is_void_v<Index> ? size == sizeof(uint8_t) : kIsWindowOffset<Index>;
  }
  template <class T, class Offset, int V>
  __device__ void store_names(Offset to, const Best<T, Offset> (&best)[V]) const {
    const auto store_as = [&]<class As>(As) {
      Vector<As, V> names;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        names[v] = static_cast<As>(best[v].name);
      }
      store(static_cast<As*>(data) + to, names);
    };
    if constexpr (!std::is_void_v<Index>) {
      store_as(Index{});
    } else if (size == sizeof(int64_t)) {
      store_as(int64_t{});
    } else if (size == sizeof(int32_t)) {
      store_as(int32_t{});
    } else {
      store_as(uint8_t{});
    }
  }
};

// Coordinate below `size` that is nearest to `at`. Where a window without dilation leaves the
// input, it thus reads one of its own elements again: its maximum stays the same, and so does the
// name, for which the coordinate is brought inside as well.
__device__ inline uint32_t brought_inside(uint32_t at, uint32_t size) {
  const auto wanted = static_cast<int32_t>(at), last = static_cast<int32_t>(size - 1);
  const int32_t inside = wanted > 0 ? wanted : 0;
  return static_cast<uint32_t>(inside < last ? inside : last);
}

// Calls look(r, row, name, is_first) for the rows, r < kRows, of windows of K elements in height
// and width that begin at `front` and `top` and have no dilation, for all their slices in order.
// `row` is a row's position in the plane, `name` its first name; is_first: in the first slice.
template <int K, int kRows, class Look>
__device__ inline void for_each_row(
    const Geometry<uint32_t>& g, uint32_t front, uint32_t top, bool as_offsets, const Look& look) {
  const auto look_at_depth = [&](uint32_t k, bool is_first) {
    const uint32_t z = brought_inside(front + k, g.axis[0].out);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const uint32_t y = brought_inside(top + r, g.axis[1].out);
      const uint32_t row = (z * g.axis[1].out + y) * g.axis[2].out;
      look(r, row, as_offsets ? ((z - front) * K + y - top) * K : row, is_first);
    }
  };
  look_at_depth(0, true);
  for (uint32_t k = 1; k < g.axis[0].kernel; ++k) {
    look_at_depth(k, false);
  }
}

} // namespace maxunpool_cuda
