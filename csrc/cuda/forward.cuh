// SPDX-License-Identifier: BSD-3-Clause
// Unpooling of windows of 2x2 or 3x3 outputs, 2 apart, or of 4x4, 4 apart, in one pass over the
// output: the one owner of an element writes it, zero or not.
//
//   cells      | c  |(c)     A thread owns a cell and the SxS outputs at it, of V elements each
//              |(c) |(c)     (see Elements). If windows overlap, cells in brackets may name these
//   outputs    | oo |        outputs too. Without padding, those lie above and to the left.
//              | oo |
//
// A thread compares its outputs with what the indices of all these cells name, in row-major order:
// the last match is kept, or all are added. It also checks the indices of its own cell. If one is
// out of window, the thread flags that (see Report), and the fix-up kernel rewrites the image.
#pragma once

#include "report.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <algorithm>
#include <cstdint>

namespace maxunpool_cuda {

// Windows of kKernel rows and columns, kStride apart, with kPadding: disjoint ones, or 3x3, 2
// apart.
template <int kKernel, int kStride, int kPadding>
struct Square {
  static_assert(kKernel == kStride ? kPadding == 0 : kKernel == 3 && kStride == 2 && kPadding <= 1);
  static constexpr int K = kKernel, S = kStride, P = kPadding;
  // In a row or column, the cells whose windows cover outputs of a tile: how many, and which of
  // them is the tile's own.
  static constexpr int kCells = K > S ? 2 : 1, kOwn = K == 3 && P == 0 ? 1 : 0;
};

// The elements of a thread: of one cell in V planes, of one cell in V channels that are a vector,
// or of V cells of a row that are a vector.
enum class Elements { planes, channels, cells };

template <class T, bool kOffsets, class Window, Elements kOf>
constexpr int elements_of_thread() {
  constexpr int kVector = kVectorBytes / sizeof(T);
  switch (kOf) {
    case Elements::cells:
      return std::clamp(kVector, Window::S, kOffsets ? 8 : 4) / Window::S;
    case Elements::channels:
      return kOffsets ? std::min(kVector, Window::K == 2 || std::is_same_v<T, uint16_t> ? 8 : 4)
                      : std::min(kVector / 2, 4);
    default:
      return Window::K == 2 ? 4 : sizeof(T) < sizeof(uint64_t) ? 3 : 2;
  }
}

// From the elements of a row, N words, to their neighbours on one side. The last one's is `away`.
template <bool kPacked, int kSide, int N, class Word>
__device__ inline void take_neighbours(const Word (&words)[N], Word away, Word (&to)[N]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    to[n] = n == (kSide > 0 ? N - 1 : 0) ? away : words[n + kSide];
    if constexpr (kPacked) {
      to[n] = kSide > 0 ? bytes_of(words[n], to[n], 0x5432)
                        : bytes_of(to[n], words[n], n == 0 ? 0x5410 : 0x5432);
    }
  }
}

// Bits of the offsets of a 3x3 window that are not clipped. It begins at `top` and `left`; of its
// columns, those whose bits are in `edges` may be clipped. Octal numbers have a digit for each row.
__device__ inline uint32_t unclipped_offsets(
    const Geometry<uint32_t>& g, uint32_t top, uint32_t left, int edges) {
  uint32_t rows = 0, columns = 0;
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    rows |= top + k < g.axis[1].out ? 0007u << 3 * k : 0;
    columns |= (edges >> k & 1) == 0 || left + k < g.axis[2].out ? 0111u << k : 0;
  }
  return rows & columns;
}

template <class Combine, bool kOffsets, class Window, Elements kOf>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads) forward(
    Tiling<uint32_t> tiling,
    Planes planes,
    Report report,
    typename Combine::Element negative_zero, // see added_to_zero
    const typename Combine::Element* __restrict__ input,
    AnyIndices indices,
    typename Combine::Element* __restrict__ output) {
  using T = typename Combine::Element;
  constexpr int K = Window::K, S = Window::S, P = Window::P, kCells = Window::kCells,
                kOwn = Window::kOwn;
  constexpr bool kOfCells = kOf == Elements::cells, kOfChannels = kOf == Elements::channels;
  // Whether elements, and the offsets that name their outputs, are packed.
  constexpr bool kPacked =
      std::is_same_v<T, uint16_t> && kOffsets && S == 2 && (kOfCells || kOfChannels);
  using Kept = std::conditional_t<kPacked, CombineLast<uint32_t>, Combine>;
  using Word = typename Kept::Element;
  using Held = typename Kept::Held;
  constexpr int V = elements_of_thread<T, kOffsets, Window, kOf>();
  constexpr int kInWord = sizeof(Word) / sizeof(T), kWords = V / kInWord; // of a thread
  // An index of 8 bytes is narrowed after the last load, so that no load waits for another. More
  // than 12 of them would not fit the registers: these are narrowed as they come.
  constexpr bool kNarrowsLate = !kOffsets && kCells * kCells * V <= 12;
  using Raw = std::conditional_t<kNarrowsLate, uint64_t, uint32_t>;
  const Geometry<uint32_t>& g = tiling.geometry;
  const auto& [depth, height, width] = g.axis;
  for_each_flagged_item<!kOffsets>(tiling.items, report, [&](uint32_t i) {
    auto [images, tile, group] = tiling.item(i, !kOfCells && g.inner != 1, false);
    const uint32_t p = tile[1], q = kOfCells ? tile[2] * V : tile[2];
    uint32_t position = S * p * width.out + S * q; // of the first output
    uint32_t z = 0, d = 0, in_depth = 0; // slice of outputs, of cells, and of their windows
    bool is_covered = true;
    if (planes.deep) {
      z = images;
      images = split(z, tiling.tiles[0]);
      in_depth = z;
      d = split(in_depth, planes.depth_stride);
      is_covered = d < depth.in && in_depth < depth.kernel;
      in_depth = is_covered ? in_depth : 0; // else names might wrap around
      position += z * height.out * width.out;
    }
    const uint32_t outer = images * planes.images, channel = kOfChannels ? group * V : group;
    const uint32_t first = (outer * tiling.out_plane + position) * g.inner + channel;
    const uint32_t own = tiling.pooled(outer, {{d, p, q}}, channel);
    bool row_exists[S], column_exists[S];
#pragma unroll
    for (int k = 0; k < S; ++k) {
      row_exists[k] = S * p + k < height.out;
      column_exists[k] = kOfCells || S * q + k < width.out;
    }
    // Distance of each plane from the first. If fewer than V are left, the last is done again.
    const bool all_left = kOf != Elements::planes || planes.images == 1;
    const int left = all_left ? V : static_cast<int>(g.outer - outer);
    uint32_t pooled[V] = {}, unpooled[V] = {};
    if constexpr (kOf == Elements::planes) {
#pragma unroll
      for (int v = 1; v < V; ++v) {
        pooled[v] = pooled[v - 1] + (v < left ? planes.next_pooled : 0);
        unpooled[v] = unpooled[v - 1] + (v < left ? planes.next_output : 0);
      }
    }

    // All cells are read before any is looked at. A `||` below would be a branch where loads wait.
    constexpr Raw kNoIndex = static_cast<Raw>(-1); // of a cell that does not exist
    Raw raw[kCells][kCells][kWords];
    Held value[kCells][kCells][kWords];
#pragma unroll
    for (int y = 0; y < kCells; ++y) {
      const bool exists = is_covered && p + (y - kOwn) < height.in; // may wrap around
      const uint32_t row = own + (y - kOwn) * width.in * g.inner;
#pragma unroll
      for (int x = 0; x < kCells; ++x) {
#pragma unroll
        for (int n = 0; n < kWords; ++n) {
          raw[y][x][n] = kNoIndex;
        }
        const uint32_t from = row + (x - kOwn) * g.inner;
        if (!exists | (kOfCells ? x != kOwn : q + (x - kOwn) >= width.in)) {
          continue;
        }
        if constexpr (kOf == Elements::planes) {
#pragma unroll
          for (int v = 0; v < V; ++v) {
            raw[y][x][v] = index_as<Raw>(load_indices<kOffsets, 1>(indices, from + pooled[v])[0]);
            value[y][x][v] = static_cast<Held>(input[from + pooled[v]]);
          }
        } else if constexpr (kPacked) {
          load_held<kWords>(reinterpret_cast<const Word*>(input + from), value[y][x]);
          const auto* const offsets = static_cast<const uint8_t*>(indices.data) + from;
          const auto words = load<V / 4>(reinterpret_cast<const uint32_t*>(offsets));
#pragma unroll
          for (int n = 0; n < kWords; ++n) {
            raw[y][x][n] = bytes_of(words[n / 2], 0, n % 2 == 0 ? 0x4140 : 0x4342);
          }
        } else {
          const auto loaded = load_indices<kOffsets, V>(indices, from);
          load_held<V>(input + from, value[y][x]);
#pragma unroll
          for (int v = 0; v < V; ++v) {
            raw[y][x][v] = index_as<Raw>(loaded[v]);
          }
        }
      }
      if constexpr (kOfCells && kCells > 1) { // but for one, neighbours are the thread's own cells
        constexpr int kOther = 1 - kOwn, kSide = kOther - kOwn, kAway = kSide > 0 ? V : -1;
        Raw away_index = kNoIndex;
        Held away_value{};
        if (exists && q + static_cast<uint32_t>(kAway) < width.in) {
          away_index = index_as<Raw>(load_indices<kOffsets, 1>(indices, row, kAway)[0]);
          away_value = static_cast<Held>((input + row)[kAway]);
        }
        take_neighbours<kPacked, kSide>(raw[y][kOwn], away_index, raw[y][kOther]);
        take_neighbours<kPacked, kSide>(value[y][kOwn], away_value, value[y][kOther]);
      }
    }

    // A name is the position that an index names, or the window offset. That of a cell that does
    // not exist is the name of no output, packed or not.
    uint32_t named[kCells][kCells][kWords];
#pragma unroll
    for (int y = 0; y < kCells; ++y) {
#pragma unroll
      for (int x = 0; x < kCells; ++x) {
#pragma unroll
        for (int n = 0; n < kWords; ++n) {
          if constexpr (kOffsets) {
            named[y][x][n] = raw[y][x][n];
          } else {
            named[y][x][n] = index_as<uint32_t>(raw[y][x][n]);
          }
        }
      }
    }

    // Whether all own indices are in their windows. The test is cheap: it may doubt one that is.
    const uint32_t top = S * p - P, first_column = S * q - P; // of the window
    // Offsets below this one are not clipped from a disjoint window.
    uint32_t end = row_exists[S - 1] ? K * K * depth.kernel : row_exists[0] ? K : 0;
    end = column_exists[S - 1] && z + depth.kernel <= depth.out ? end : 0;
    // Distance to the second slice of a disjoint window, or 0 where it has none.
    const bool second_slice = planes.deep && depth.kernel > 1 && z + 1 < depth.out;
    const uint32_t slice = second_slice ? height.out * width.out : 0;
    uint32_t all_inside = K > S || (row_exists[0] && column_exists[S - 1]);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const uint32_t word = named[kOwn][kOwn][v / kInWord], right = kOfCells ? S * v : 0;
      const uint32_t name = !kPacked ? word : v % 2 == 0 ? word & 0xFFFF : word >> 16;
      if constexpr (K == 3 && kOffsets) {
        // In rows that divide into vectors, a window's first column may be clipped, or its last.
        const int edges = !kOfCells ? 7 : P == 1 ? (v == 0 ? 1 : 0) : v == V - 1 ? 4 : 0;
        const uint32_t offsets = unclipped_offsets(g, top, first_column + right, edges);
        all_inside &= offsets >> (name < K * K ? name : K * K);
      } else if constexpr (kOffsets) {
        const bool both_below = ((word + (0x8000 - end) * kBoth) & 0x8000 * kBoth) == 0;
        all_inside &= kPacked ? both_below : name < end;
      } else if constexpr (K == 3) {
        const Position<uint32_t> start{{z, top, first_column + right}};
        all_inside &= decoded<false>(tiling, name, start, planes.deep).in_window;
      } else {
        // From the window's first output; then from the first one of the slice, and of the row.
        uint32_t away = name - position - right;
        away = std::min(away, away - slice); // a difference below 0 wraps around
#pragma unroll
        for (int k = 1; k < K; ++k) {
          away = std::min(away, away - (row_exists[k] ? width.out : 0));
        }
        all_inside &= away < K;
      }
    }
    if constexpr (K == S) {
#pragma unroll
      for (int n = 0; n < kWords; ++n) {
        value[0][0][n] = added_to_zero<kPacked>(value[0][0][n], negative_zero);
      }
    }
    const auto store_row = [&](int r, const Kept(&kept)[S][kWords]) {
      Word* const to = reinterpret_cast<Word*>(output + (first + r * width.out * g.inner));
      if constexpr (kOfCells) {
        Kept line[S * kWords];
#pragma unroll
        for (int n = 0; n < S * kWords; ++n) {
          line[n] = kept[n % S][n / S];
          if constexpr (kPacked) { // the two outputs at a cell, whose halves these are
            line[n].value =
                bytes_of(kept[0][n / S].value, kept[1][n / S].value, n % S == 0 ? 0x5410 : 0x7632);
          }
        }
        return store_results<S * kWords>(to, line);
      }
      if constexpr (kOfChannels) {
#pragma unroll
        for (int e = 0; e < S; ++e) {
          if (column_exists[e]) {
            store_results<kWords>(to + e * g.inner / kInWord, kept[e]);
          }
        }
        return;
      }
#pragma unroll
      for (int n = 0; n < kWords; ++n) {
        Word* const at = to + unpooled[n];
        // Where rows have an odd width, the pairs of every second one are aligned.
        const bool aligned = reinterpret_cast<uintptr_t>(at) % sizeof(Word[2]) == 0;
        if (g.inner == 1 && column_exists[1] && aligned) {
          const Kept pair[] = {kept[0][n], kept[1][n]};
          store_results<2>(at, pair);
          continue;
        }
#pragma unroll
        for (int e = 0; e < S; ++e) {
          if (column_exists[e]) {
            at[e * g.inner] = kept[e][n].result();
          }
        }
      }
    };
#pragma unroll
    for (int r = 0; r < S; ++r) {
      Kept kept[S][kWords];
#pragma unroll
      for (int y = 0; y < kCells; ++y) {
#pragma unroll
        for (int x = 0; x < kCells; ++x) {
#pragma unroll
          for (int e = 0; e < S; ++e) { // the output's coordinates in the cell's window:
            const int in_y = r - S * (y - kOwn) + P, in_x = e - S * (x - kOwn) + P;
            if (in_y < 0 || in_y >= K || in_x < 0 || in_x >= K) {
              continue;
            }
            const auto name =
                kOffsets ? (in_depth * K + in_y) * K + in_x : position + r * width.out + e;
#pragma unroll
            for (int n = 0; n < kWords; ++n) {
              if constexpr (kPacked) {
                kept[e][n].add_bits(equal_halves(named[y][x][n], name * kBoth), value[y][x][n]);
              } else {
                const bool match = named[y][x][n] == name + (kOfCells && !kOffsets ? S * n : 0);
                kept[e][n].add_if(match, value[y][x][n]);
              }
            }
          }
        }
      }
      if (row_exists[r]) {
        store_row(r, kept);
      }
    }

    bool out_of_window = false;
    const bool is_cell = is_covered && in_depth == 0 && p < height.in && (kOfCells || q < width.in);
    if (is_cell && all_inside == 0) {
#pragma unroll 1
      for (int v = 0; v < (left < V ? left : V); ++v) {
        const uint32_t element = own + v * (kOf == Elements::planes ? planes.next_pooled : 1);
        const auto start = tiling.window_start({{d, p, q + (kOfCells ? v : 0)}});
        const auto found = decoded_or_reported(tiling, report.errors, indices, element, start);
        out_of_window |= found.in_plane && !found.in_window;
      }
    }
    return out_of_window;
  });
}

} // namespace maxunpool_cuda
