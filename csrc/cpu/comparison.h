// SPDX-License-Identifier: BSD-3-Clause
// What max pooling compares: the order of elements, and the best of a list of elements, for many
// windows at once, in vectors. It knows no geometry.
//
// The larger number wins, and of equal ones the first. A NaN wins over all elements before it, so
// of several NaNs the last one wins, as in PyTorch.
//
// Example: three windows of two elements each lie side by side in memory, as channels do:
//   base          7 2 5  9 4 1      the windows' first elements, then their second ones
//   the list      offsets {0, 3}, indices {0, 1}
//   the result    values {9, 4, 5}, indices {1, 1, 0}
#pragma once

#include "../dtypes.h"
#include "../torch.h"
#include "machine.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#pragma GCC diagnostic ignored "-Wpsabi" // vectors are returned: all functions are inlined

namespace maxunpool_cuda {
namespace {

// The order of elements of type T. V below is an Element or a vector of them.
//
// Example, float16: -1.5 and -2 have the bits 0xbe00 and 0xc000. As int16 they are -16896 and
// -16384, in the wrong order. comparable() makes them -15872 and -16384, and 1.5 stays 15872.
template <class T>
struct Order {
  // float16 or bfloat16, which processors do not compare: see comparable().
  static constexpr bool kHalf = sizeof(T) == 2 && !std::is_integral_v<T>;
  static constexpr int16_t kInfinity = std::is_same_v<T, Half> ? 0x7c00 : 0x7f80; // its bits
  static constexpr int16_t kNaN = std::numeric_limits<int16_t>::max(); // what NaNs compare as
  static constexpr int16_t kMagnitude = kNaN;                          // all bits but the sign

  using Element = std::conditional_t<kHalf, int16_t, T>; // of 16-bit floats the bits
  // An integer as wide as an element, so that vectors have as many of both. Of one byte unsigned,
  // so that a list may have 256 indices.
  using SameWidth =
      std::conditional_t<sizeof(T) == 1, uint8_t, std::make_signed_t<Bytes<sizeof(T)>>>;

  // The element that no other is below.
  static constexpr Element lowest() {
    if constexpr (kHalf) {
      return Element(kInfinity | std::numeric_limits<int16_t>::min()); // with the bit of the sign
    } else if constexpr (std::numeric_limits<Element>::has_infinity) {
      return -std::numeric_limits<Element>::infinity();
    } else {
      return std::numeric_limits<Element>::lowest();
    }
  }

  // What stands for an element in wins(). Of 16-bit floats an integer: the integers are in the
  // order of the numbers, that of both zeros is 0, and that of every NaN is the largest.
  template <class V>
  MAXUNPOOL_INLINE static V comparable(const V& element) {
    if constexpr (kHalf) {
      const V magnitude = element & kMagnitude;
      const V sign = element >> 15; // -1: negative
      const V number = (magnitude ^ sign) - sign;
      return magnitude > kInfinity ? V{} + kNaN : number;
    } else {
      return element;
    }
  }

  // Whether an element wins over the best of those before it. Both are comparable().
  template <class V>
  MAXUNPOOL_INLINE static auto wins(const V& element, const V& best) {
    if constexpr (std::is_integral_v<T>) {
      return element > best;
    } else if constexpr (kHalf) {
      return (element > best) | (element == kNaN);
    } else {
      return (element > best) | (element != element);
    }
  }
};

// Elements of a window, in row-major order: all of them, or a part that the list has room for.
template <class NarrowIndex>
struct ElementList {
  // Elements, whose offsets fill 32 KiB. Larger windows are compared in parts, whose merging costs
  // nothing beside so many comparisons.
  static constexpr int64_t kMost = 1 << 12;

  int64_t size = 0;
  int64_t first_index = 0;  // of the list's first element
  int64_t offset[kMost];    // from the window's base, in elements
  NarrowIndex index[kMost]; // less first_index

  // Begins a list of which this will be the first element's index.
  void restart(int64_t index_of_first) {
    size = 0;
    first_index = index_of_first;
  }
  // Indices grow, except where a window is taller than the plane: then elements in the padding
  // below have higher ones than the next depth slice.
  bool has_room_for(int64_t element_index, int64_t most) const {
    const int64_t narrow = element_index - first_index;
    return size < most && 0 <= narrow && narrow <= std::numeric_limits<NarrowIndex>::max();
  }
  void append(int64_t element_offset, int64_t element_index) {
    offset[size] = element_offset;
    index[size] = static_cast<NarrowIndex>(element_index - first_index);
    ++size;
  }
};

template <class T>
class Comparison {
  using Order = maxunpool_cuda::Order<T>;
  static constexpr int64_t kVector = 32; // bytes: the vectors of AVX2

 public:
  using Element = typename Order::Element;
  using NarrowIndex = typename Order::SameWidth;
  using List = ElementList<NarrowIndex>;

  static constexpr int64_t kLanes = kVector / sizeof(Element); // elements of a vector
  // Windows that are compared at once. The results fill at most 8 KiB, a fourth of a first cache.
  static constexpr int64_t kMostWindows = 512;

  // `input_end`: no element from there on is read. `ahead`: as ahead_of() says, or 0 for no
  // prefetching, as on a stage.
  Comparison(const Element* input_end, uint64_t ahead) : input_end_(input_end), ahead_(ahead) {}

  // How far ahead to prefetch, in bytes: as far as the comparisons come while they read kDistance
  // bytes. Many `windows` of `size` elements lie side by side, as those of channels do, and as many
  // again `step` elements further on.
  //
  // Example: float, 2x2 windows with stride 2. Blocks of 32 windows read 512 bytes each, so what is
  // prefetched is 16 blocks ahead: with 64 channels 8 cells, 8 * 2 * 64 elements further on.
  static uint64_t ahead_of(int64_t windows, double size, uint64_t step) {
    const auto ahead = static_cast<uint64_t>(std::ceil(kDistance / (size * kBlock)));
    const uint64_t blocks = std::max<uint64_t>(1, windows * sizeof(Element) / kBlock); // of a cell
    return ahead < blocks ? ahead * kBlock : (ahead + blocks - 1) / blocks * step * sizeof(Element);
  }

  // Compares the listed elements of `count` windows. Those of the first window lie at their offsets
  // from `base`, and those of each next window one further on. Vectors are read whole, also for
  // fewer than kLanes windows, except where the input ends: the last offset of a list is its
  // largest in the input. (On a stage it may not be, but there count is at least kLanes.)
  MAXUNPOOL_INLINE void run(const Element* base, const List& list, int64_t count) {
    if (count >= kMany * kLanes) {
      compare<kMany, false>(base, list, count);
    } else if (count >= kLanes || input_end_ - (base + list.offset[list.size - 1]) >= kLanes) {
      compare<1, false>(base, list, count);
    } else {
      compare<1, true>(base, list, count);
    }
  }

  // The best of each window: the element, and its index less the list's first_index.
  const Element* values() const { return values_; }
  const NarrowIndex* indices() const { return indices_; }

 private:
  typedef Element Elements __attribute__((vector_size(kVector)));
  typedef NarrowIndex Indices __attribute__((vector_size(kVector)));

  // Vectors that are compared together. Four independent chains of comparisons hide the latency of
  // one, and their best elements and indices still fit the 16 registers.
  static constexpr int kMany = 4;
  static constexpr int64_t kBlock = kMany * kVector; // bytes
  // Bytes. A core reads them in about 0.3 us, longer than memory takes to answer. With 1 KiB 2x2
  // windows of 64 channels took 1.5 times as long, on an AMD EPYC (Zen 4).
  static constexpr double kDistance = 8 << 10;

  // Compares kVectors vectors of windows at a time. The last ones overlap those before them.
  // kAtEnd: a vector may reach beyond the end of the input.
  template <int kVectors, bool kAtEnd>
  MAXUNPOOL_INLINE void compare(const Element* base, const List& list, int64_t count) {
    for (int64_t i = 0; i < count; i += kVectors * kLanes) {
      const int64_t window = std::min(i, std::max<int64_t>(0, count - kVectors * kLanes));
      compare_vectors<kVectors, kAtEnd>(base + window, list, window);
    }
  }

  // Compares the windows from this one on; its base is given.
  template <int kVectors, bool kAtEnd>
  MAXUNPOOL_INLINE void compare_vectors(const Element* base, const List& list, int64_t window) {
    Elements best[kVectors];
    Elements best_comparable[kVectors];
    Indices best_index[kVectors] = {};
    for (int v = 0; v < kVectors; ++v) {
      best[v] = load<kAtEnd>(base + list.offset[0] + v * kLanes);
      best_comparable[v] = Order::comparable(best[v]);
      best_index[v] += list.index[0];
    }
    for (int64_t e = 1; e < list.size; ++e) {
      const Element* from = base + list.offset[e];
      if (kVectors > 1 && ahead_ > 0) {
        static_assert(kBlock == 2 * kLine);
        const auto address = reinterpret_cast<uintptr_t>(from);
        MAXUNPOOL_PREFETCH(address + ahead_);
        MAXUNPOOL_PREFETCH(address + ahead_ + kLine);
      }
      for (int v = 0; v < kVectors; ++v) {
        const Elements element = load<kAtEnd>(from + v * kLanes);
        const Elements comparable = Order::comparable(element);
        const auto wins = Order::wins(comparable, best_comparable[v]);
        best[v] = wins ? element : best[v];
        best_comparable[v] = wins ? comparable : best_comparable[v];
        best_index[v] = wins ? Indices{} + list.index[e] : best_index[v];
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      std::memcpy(values_ + window + v * kLanes, &best[v], kVector);
      std::memcpy(indices_ + window + v * kLanes, &best_index[v], kVector);
    }
  }

  // A function, because GCC does not keep an array in registers that a call gets the address of.
  template <bool kAtEnd>
  MAXUNPOOL_INLINE Elements load(const Element* from) const {
    Elements vector = {};
    const int64_t left = kAtEnd ? input_end_ - from : kLanes; // elements
    std::memcpy(&vector, from, std::min(kLanes, left) * sizeof(Element));
    return vector;
  }

  const Element* const input_end_;
  const uint64_t ahead_; // bytes
  // Aligned, so that no vector lies in two cache lines.
  alignas(64) Element values_[kMostWindows];
  alignas(64) NarrowIndex indices_[kMostWindows];
};

} // namespace
} // namespace maxunpool_cuda
