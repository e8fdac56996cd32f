// Pooled cells of a row, as the thread that unpools them holds them. Indices are not decoded: for
// an output and a window over it, the index that names the output is known beforehand.
#pragma once

#include "../geometry.h"
#include "vector.cuh"

#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

// No output has this position, nor one near it.
constexpr uint32_t kNowhere = 0xC0000000u;

// Flat indices as 32 bits hold them; what does not fit becomes kNowhere.
template <class Index, int N>
__device__ inline Vector<uint32_t, N> narrow_indices(const Vector<Index, N>& from) {
  Vector<uint32_t, N> to;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    to.at[i] = static_cast<uint32_t>(from.at[i]);
  }
  if constexpr (sizeof(Index) > sizeof(uint32_t)) {
    uint64_t all = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      all |= static_cast<uint64_t>(from.at[i]);
    }
    if (all >> 32 != 0) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        to.at[i] = static_cast<uint64_t>(from.at[i]) >> 32 == 0 ? to.at[i] : kNowhere;
      }
    }
  }
  return to;
}

// Are all four bytes below kEnd?
template <int kEnd>
__device__ inline bool all_below(uint32_t bytes) {
  static_assert(kEnd <= 128);
  constexpr uint32_t kOnes = 0x01010101u, kHighest = 0x80u * kOnes;
  return (((bytes + (0x80u - kEnd) * kOnes) | bytes) & kHighest) == 0; // the sum lifts what is not
}

// What an owner asks of the indices of V cells in a row, an aligned vector, and of kRight after
// them, whose windows are kKernel high and wide and kStride apart. `first` is where the first
// window begins, counted in positions of its plane; it may lie before it.
template <class Index, int V, int kRight, int kKernel, int kStride>
class RowIndices {
 public:
  __device__ RowIndices() {
#pragma unroll
    for (int v = 0; v < V + kRight; ++v) {
      index_[v] = kNowhere;
    }
  }
  __device__ void read(const Index* indices, bool exist, bool right_exist) {
    if (exist) {
      const auto own = narrow_indices(load<V>(indices));
#pragma unroll
      for (int v = 0; v < V; ++v) {
        index_[v] = own.at[v];
      }
    }
    if (right_exist) {
#pragma unroll
      for (int v = V; v < V + kRight; ++v) {
        index_[v] = narrow_indices(load<1>(indices + v)).at[0];
      }
    }
  }
  // Does the index of cell v name cell (y, x) of its window? (y, x, v) are known when compiled.
  __device__ bool is(int v, int y, int x, uint32_t first, uint32_t width) const {
    return index_[v] - (first + y * width) == static_cast<uint32_t>(x + v * kStride);
  }
  // Does every own index name a cell of its window, none of which is clipped but kPadding columns
  // of the first cell's, if it `is_clipped`?
  template <int kPadding>
  __device__ bool all_inside(bool is_clipped, uint32_t first, uint32_t width) const {
    bool all = true;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const uint32_t skipped = v == 0 && is_clipped ? kPadding : 0;
      bool inside = false;
#pragma unroll
      for (int y = 0; y < kKernel; ++y) {
        const uint32_t x = index_[v] - (first + y * width) - v * kStride;
        inside |= x - skipped < kKernel - skipped;
      }
      all &= inside;
    }
    return all;
  }
  // The same of windows that are so deep, in planes whose depths are `slice` apart, without
  // padding.
  __device__ bool all_inside_deep(
      uint32_t first, uint32_t width, uint32_t depth, uint32_t slice) const {
    uint32_t inside = 0;
#pragma unroll 1
    for (uint32_t z = 0; z < depth; ++z, first += slice) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
#pragma unroll
        for (int y = 0; y < kKernel; ++y) {
          const uint32_t x = index_[v] - (first + y * width) - v * kStride;
          inside |= x < kKernel ? 1u << v : 0;
        }
      }
    }
    return inside == (1u << V) - 1;
  }
  // is() then asks of this depth of the windows. Positions differ anyway.
  __device__ void move_to_depth(uint32_t) {}

 private:
  uint32_t index_[V + kRight];
};

template <int V, int kRight, int kKernel, int kStride>
class RowIndices<uint8_t, V, kRight, kKernel, kStride> {
 public:
  __device__ void read(const uint8_t* indices, bool exist, bool right_exist) {
    using Word =
        std::conditional_t<V == 1, uint8_t, std::conditional_t<V == 2, uint16_t, uint32_t>>;
    static_assert(sizeof(Word) == V);
    if (exist) {
      own_ = *reinterpret_cast<const Word*>(indices);
    }
    if (right_exist) {
#pragma unroll
      for (int v = V; v < V + kRight; ++v) {
        right_[v - V] = indices[v];
      }
    }
  }
  __device__ bool is(int v, int y, int x, uint32_t, uint32_t) const {
    const uint32_t offset = y * kKernel + x;
    return v < V ? (own_ & 0xffu << v % V * 8) == offset << v % V * 8 : right_[v - V] == offset;
  }
  template <int kPadding>
  __device__ bool all_inside(bool is_clipped, uint32_t, uint32_t) const {
    bool all = all_below<kKernel * kKernel>(own_);
    if constexpr (kPadding > 0) {
      bool in_padding = false;
#pragma unroll
      for (int y = 0; y < kKernel; ++y) {
        in_padding |= (own_ & 0xffu) - y * kKernel < kPadding;
      }
      all &= !(is_clipped && in_padding);
    }
    return all;
  }
  __device__ bool all_inside_deep(uint32_t, uint32_t, uint32_t depth, uint32_t) const {
    const uint32_t end = depth * (kKernel * kKernel);
    return end <= 128 && (((own_ + (0x80u - end) * kOnes) | own_) & (kOnes << 7)) == 0;
  }
  // A power of two of offsets to a depth, which they then count from.
  __device__ void move_to_depth(uint32_t z) { own_ ^= (z * (kKernel * kKernel) & 0xffu) * kOnes; }

 private:
  static constexpr uint32_t kOnes = 0x01010101u;
  static constexpr uint32_t kNone = ~0u; // no offset in a window
  uint32_t own_ = kNone, right_[kRight > 0 ? kRight : 1]{kNone};
};

// What an owner asks of the indices of V channels of a cell, an aligned vector.
template <class Index, int V, int kKernel>
class LaneIndices {
 public:
  __device__ void read(const Index* indices) { index_ = narrow_indices(load<V>(indices)); }
  // Does the index of channel v name cell (y, x) of its window, which is the output `position`?
  __device__ bool is(int v, int, int, uint32_t position) const { return index_.at[v] == position; }
  // Does every index name a cell of the window, which begins at `first` and is not clipped?
  __device__ bool all_inside(uint32_t first, uint32_t width) const {
    bool all = true;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      bool inside = false;
#pragma unroll
      for (int y = 0; y < kKernel; ++y) {
        inside |= index_.at[v] - (first + y * width) < kKernel;
      }
      all &= inside;
    }
    return all;
  }

 private:
  Vector<uint32_t, V> index_ = none();

  __device__ static Vector<uint32_t, V> none() {
    Vector<uint32_t, V> none;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      none.at[v] = kNowhere;
    }
    return none;
  }
};

template <int V, int kKernel>
class LaneIndices<uint8_t, V, kKernel> {
  static constexpr int kWords = (V + 3) / 4;

 public:
  __device__ void read(const uint8_t* indices) {
    if constexpr (V % 4 == 0) {
      words_ = load<kWords>(reinterpret_cast<const uint32_t*>(indices));
    } else {
      words_.at[0] = 0;
      const auto bytes = load<V>(indices);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        words_.at[0] |= static_cast<uint32_t>(bytes.at[v]) << v * 8;
      }
    }
  }
  __device__ bool is(int v, int y, int x, uint32_t) const {
    return (words_.at[v / 4] & 0xffu << v % 4 * 8) == static_cast<uint32_t>(y * kKernel + x)
                                                          << v % 4 * 8;
  }
  __device__ bool all_inside(uint32_t, uint32_t) const {
    bool all = true;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      all &= all_below<kKernel * kKernel>(words_.at[i]);
    }
    return all;
  }

 private:
  Vector<uint32_t, kWords> words_ = none();

  __device__ static Vector<uint32_t, kWords> none() {
    Vector<uint32_t, kWords> none;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      none.at[i] = ~0u; // no offset in a window
    }
    return none;
  }
};

} // namespace maxunpool_cuda
