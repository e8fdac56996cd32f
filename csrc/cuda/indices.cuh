// Indices of pooled cells, as the thread that unpools the cells holds them. They are not decoded:
// for an output and a window over it, the index that names the output is known beforehand.
#pragma once

#include "../geometry.h"
#include "vector.cuh"

#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

// Position that no output has, nor one near it.
constexpr uint32_t kNowhere = 0xC0000000u;

// Flat indices in 32 bits; those that do not fit become kNowhere.
template <class Index, int N>
__device__ inline Vector<uint32_t, N> indices_32bit(const Vector<Index, N>& from) {
  Vector<uint32_t, N> to;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    to[i] = static_cast<uint32_t>(from[i]);
  }
  if constexpr (sizeof(Index) > sizeof(uint32_t)) {
    uint64_t all = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      all |= static_cast<uint64_t>(from[i]);
    }
    if (all >> 32 != 0) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        to[i] = static_cast<uint64_t>(from[i]) >> 32 == 0 ? to[i] : kNowhere;
      }
    }
  }
  return to;
}

constexpr uint32_t kOnes = 0x01010101u; // in each byte

// Whether all four bytes are below `end`, at most 128. The sum sets the top bits of others.
__device__ inline bool all_below(uint32_t end, uint32_t bytes) {
  return (((bytes + (0x80u - end) * kOnes) | bytes) & 0x80u * kOnes) == 0;
}

// Whether an index names a position in a window of kKernel rows and columns that begins at `first`,
// but not in its first `skipped` columns.
template <int kKernel>
__device__ inline bool is_in_window(
    uint32_t index, uint32_t first, uint32_t width, uint32_t skipped = 0) {
  bool inside = false;
#pragma unroll
  for (int y = 0; y < kKernel; ++y) {
    inside |= index - (first + y * width) - skipped < kKernel - skipped;
  }
  return inside;
}

// Indices of V channels of a cell, an aligned vector.
template <class Index, int V, int kKernel>
class ChannelIndices {
 public:
  __device__ void read(const Index* indices) { index_ = indices_32bit(load<V>(indices)); }
  // Whether the index of channel v names row y, column x of its window: the output `position`.
  __device__ bool is(int v, int, int, uint32_t position) const { return index_[v] == position; }
  // Whether every index lies in the window, which begins at `first` and is not clipped.
  __device__ bool all_inside(uint32_t first, uint32_t width) const {
    bool all = true;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      all &= is_in_window<kKernel>(index_[v], first, width);
    }
    return all;
  }

 private:
  Vector<uint32_t, V> index_;
};

template <int V, int kKernel>
class ChannelIndices<uint8_t, V, kKernel> {
 public:
  __device__ ChannelIndices() { set_all(words_, ~0u); } // which name nothing
  __device__ void read(const uint8_t* indices) {
    using Word =
        std::conditional_t<V == 1, uint8_t, std::conditional_t<V == 2, uint16_t, uint32_t>>;
    static_assert(V % sizeof(Word) == 0);
    const auto words = load<kWords>(reinterpret_cast<const Word*>(indices));
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words_[i] = words[i];
    }
  }
  __device__ bool is(int v, int y, int x, uint32_t) const {
    const uint32_t offset = y * kKernel + x;
    return (words_[v / 4] & 0xffu << v % 4 * 8) == offset << v % 4 * 8;
  }
  __device__ bool all_inside(uint32_t, uint32_t) const {
    bool all = true;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      all &= all_below(kKernel * kKernel, words_[i]);
    }
    return all;
  }

 protected:
  static constexpr int kWords = (V + 3) / 4;
  uint32_t words_[kWords];
};

// Indices of V cells of a row, an aligned vector, and of kRight cells after them. Windows are
// kKernel high and wide and kStride apart. `first` is the position where the first window begins;
// it may lie before the plane.
template <class Index, int V, int kRight, int kKernel, int kStride>
class RowIndices {
 public:
  __device__ RowIndices() { set_all(index_, kNowhere); }
  __device__ void read(const Index* indices, bool exist, bool right_exist) {
    if (exist) {
      const auto own = indices_32bit(load<V>(indices));
#pragma unroll
      for (int v = 0; v < V; ++v) {
        index_[v] = own[v];
      }
    }
    if (right_exist) {
#pragma unroll
      for (int v = V; v < V + kRight; ++v) {
        index_[v] = indices_32bit(load<1>(indices + v))[0];
      }
    }
  }
  // Whether the index of cell v names row y, column x of its window. y, x and v are constants.
  __device__ bool is(int v, int y, int x, uint32_t first, uint32_t width) const {
    return index_[v] - (first + y * width) == static_cast<uint32_t>(x + v * kStride);
  }
  // Whether every own index lies in its window. None of these is clipped, but for kPadding columns
  // of the first cell's if it `is_clipped`. `depth`: of the windows; `slice`: positions of a slice.
  template <int kPadding>
  __device__ bool all_inside(
      bool is_clipped, uint32_t first, uint32_t width, uint32_t depth, uint32_t slice) const {
    bool inside[V]{}, all = true;
#pragma unroll 1
    for (uint32_t z = 0; z < depth; ++z, first += slice) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const uint32_t skipped = v == 0 && is_clipped ? kPadding : 0;
        inside[v] |= is_in_window<kKernel>(index_[v] - v * kStride, first, width, skipped);
      }
    }
#pragma unroll
    for (int v = 0; v < V; ++v) {
      all &= inside[v];
    }
    return all;
  }
  // Makes is() ask of this slice of the windows. Flat positions differ between slices anyway.
  __device__ void move_to_depth(uint32_t) {}

 private:
  uint32_t index_[V + kRight];
};

template <int V, int kRight, int kKernel, int kStride>
class RowIndices<uint8_t, V, kRight, kKernel, kStride> : ChannelIndices<uint8_t, V, kKernel> {
  using Own = ChannelIndices<uint8_t, V, kKernel>;
  static_assert(V <= 4);

 public:
  __device__ RowIndices() { set_all(right_, ~0u); }
  __device__ void read(const uint8_t* indices, bool exist, bool right_exist) {
    if (exist) {
      Own::read(indices);
    }
    if (right_exist) {
#pragma unroll
      for (int v = V; v < V + kRight; ++v) {
        right_[v - V] = indices[v];
      }
    }
  }
  __device__ bool is(int v, int y, int x, uint32_t, uint32_t) const {
    return v < V ? Own::is(v, y, x, 0) : right_[v - V] == static_cast<uint32_t>(y * kKernel + x);
  }
  template <int kPadding>
  __device__ bool all_inside(bool is_clipped, uint32_t, uint32_t, uint32_t depth, uint32_t) const {
    const uint32_t end = depth * (kKernel * kKernel);
    bool all = end <= 128 && all_below(end, this->words_[0]);
    if constexpr (kPadding > 0) {
      bool in_padding = false;
#pragma unroll
      for (int y = 0; y < kKernel; ++y) {
        in_padding |= (this->words_[0] & 0xffu) - y * kKernel < kPadding;
      }
      all &= !(is_clipped && in_padding);
    }
    return all;
  }
  // Counts offsets from this slice on: a slice has a power of two of them.
  __device__ void move_to_depth(uint32_t z) {
    this->words_[0] ^= (z * (kKernel * kKernel) & 0xffu) * kOnes;
  }

 private:
  uint32_t right_[kRight > 0 ? kRight : 1];
};

} // namespace maxunpool_cuda
