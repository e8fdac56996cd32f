// SPDX-License-Identifier: BSD-3-Clause
// What a thread of the kernel `forward` owns: a few pooled elements, and the outputs at them.
//
// The output plane is divided into squares of S x S outputs, S being the stride. The outputs "at" a
// cell (row, column) are the square that begins at (S * row, S * column). It is smaller than the
// window where windows overlap, and belongs to the owner of the cell whatever the windows cover.
// Example: a plane of 4 x 4 cells, 8 x 8 outputs, float32, and two cells for a thread. Numbers are
// those of pooled elements, and of positions in the output plane.
//
//   cells                outputs
//    0  1  2  3           0  1  2  3   4  5  6  7     Item 2 is (row 1, column 0). Its thread owns
//   [4  5] 6  7           8  9 10 11  12 13 14 15     cells 4 and 5, and the outputs in brackets.
//    8  9 10 11         [16 17 18 19] 20 21 22 23     locate() returns row = 1, column = 0,
//   12 13 14 15         [24 25 26 27] 28 29 30 31     first_element = 4, position = 16, and
//                        32 ..                        that rows 2 and 3 of the output exist.
//
// If an output plane is larger than S times the pooled one, the outputs beyond the last cell have
// owners, too: tiles whose own cell does not exist. If it is smaller, some outputs of the last
// tiles do not exist.
//
// From tiling.cuh come the numbering of tiles (Tiling) and the distance between a thread's planes
// (Planes).
#pragma once

#include "divider.cuh"
#include "tiling.cuh"
#include "vector.cuh"

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

// The windows that `forward` is compiled for: K rows and columns, S apart, with padding P. They are
// disjoint (K == S), or 3x3 windows that are 2 apart.
template <int kKernel, int kStride, int kPadding>
struct Square {
  static_assert(kKernel == kStride ? kPadding == 0 : kKernel == 3 && kStride == 2 && kPadding <= 1);
  static constexpr int K = kKernel;
  static constexpr int S = kStride;
  static constexpr int P = kPadding;

  // In one dimension, kCells neighbouring cells have windows that cover outputs of a tile. The
  // tile's own cell is number kOwn of these: outputs 2r and 2r + 1 at cell r are covered
  // - without padding by the windows of cells r - 1 and r, which begin at 2r - 2 and 2r;
  // - with padding 1 by the windows of cells r and r + 1, which begin at 2r - 1 and 2r + 1.
  static constexpr int kCells = K > S ? 2 : 1;
  static constexpr int kOwn = P == 0 && K > S ? 1 : 0;
};

// Which pooled elements a thread owns. There are elements_of_thread() of them.
enum class Elements {
  planes,   // of one cell, in several planes
  channels, // of one cell, in several channels, which are a vector in a channels_last tensor
  cells,    // of several cells of a row, which are a vector in a contiguous tensor
};

// How many pooled elements a thread owns: enough that several loads are under way at once, and few
// enough that 64 registers do (see `forward`). Each takes a register for its value (of 8 bytes:
// two) and one for its index (a flat one: two until it is narrowed, see kNarrowsLate), and of 3x3
// windows a thread holds four cells. The last column tells why there are no more; registers, and
// bytes spilled, are those of nvcc 13.0 for sm_90.
//
//             windows   indices  1 or 2 bytes       4    8 bytes of an element
//   cells     2x2, 3x3  uint8    4                  2    -   4 x 2 outputs of 2 bytes are 16 bytes
//             2x2, 3x3  flat     2                  2    -   2 int64 indices are 16 bytes
//             4x4       uint8    2                  1    -   2 x 4 outputs of 2 bytes are 16 bytes
//             4x4       flat     1                  1    -   as many outputs as of 2x2
//   channels  2x2       uint8    8                  4    -   8 values of 2 bytes are 16 bytes
//             3x3       uint8    4                  4    -   8 of 2 bytes would spill 176
//             2x2, 3x3  flat     4                  2    -   3x3: 8 of 2 bytes would spill 228
//   planes    2x2       any      4                  4    4   8 of 4 bytes would take 64 registers
//             3x3       any      3                  3    2   3 of 8 bytes would spill 68
//
// Flat indices are int64 or int32.
template <class T, bool kOffsets, class Window, Elements kElements>
constexpr int elements_of_thread() {
  constexpr int kVector = kVectorBytes / sizeof(T); // elements of a vector
  if (kElements == Elements::cells) {
    const int outputs_of_row = std::clamp(kVector, Window::S, kOffsets ? 8 : 4);
    return outputs_of_row / Window::S;
  }
  if (kElements == Elements::channels) {
    return kOffsets ? std::min(kVector, Window::K == 2 ? 8 : 4) : std::min(kVector / 2, 4);
  }
  if (Window::K == 2) {
    return 4;
  }
  return sizeof(T) < sizeof(uint64_t) ? 3 : 2;
}

// All that is fixed when `forward` is compiled.
template <class Combine, bool kWindowOffsets, class Window, Elements kElements>
struct ForwardTraits : Window { // has K, S, P, kCells, kOwn
  using OutputAccumulator = Combine;
  using Element = typename Combine::Element;
  using Register = typename Combine::Register;

  static constexpr bool kOffsets = kWindowOffsets; // indices are window offsets, else positions
  static constexpr bool kOfPlanes = kElements == Elements::planes;
  static constexpr bool kOfChannels = kElements == Elements::channels;
  static constexpr bool kOfCells = kElements == Elements::cells;
  static constexpr int kCount = elements_of_thread<Element, kOffsets, Window, kElements>();
};

// What locate() finds out about a thread's tile. In 2d, all depths are 0, and is_covered is true.
template <class Traits>
struct ThreadTile {
  uint32_t row;             // of its cells, in the pooled plane
  uint32_t column;          // of its first cell
  uint32_t depth;           // of its cells
  uint32_t output_depth;    // of its outputs
  uint32_t depth_in_window; // of its outputs, counted from the depth where their windows begin
  uint32_t position;        // of its first output, in the output plane

  bool is_covered; // windows cover the depth of its outputs; if not, none of its cells exists
  bool row_exists[Traits::S];    // of its outputs
  bool column_exists[Traits::S]; // of the outputs at a cell

  uint32_t first_element; // the number of its first element in the pooled tensor
  uint32_t first_output;  // the number of its first output in the unpooled tensor
  // Planes from its first to the tensor's last, if its planes lie in several images; else kCount.
  // If there are fewer than kCount, the thread does the last one several times: it writes the same
  // values to the same places again, so no loop over planes needs a condition.
  int left;
  // Of Elements::planes: how far each plane is from the first, in elements of the pooled tensor and
  // of the unpooled one; planes that do not exist repeat the last distance. Else 0.
  uint32_t element_distance[Traits::kCount];
  uint32_t output_distance[Traits::kCount];
};

// Fills in what 3d tells of a tile, and moves its position to its depth. `outer` counts sets of
// images and, within each, the depths of the output: it is set * depth.out + output depth. Returns
// the set. Example: windows 2 deep, 3 apart, and 2 cells in depth. Output depths 0 and 1 have the
// cell at depth 0, with depth_in_window 0 and 1; output depth 2 is not covered; 3 and 4 have the
// cell at depth 1.
template <class Traits>
__device__ __forceinline__ uint32_t locate_depth(
    const Tiling<uint32_t>& tiling,
    const Planes& planes,
    uint32_t outer,
    ThreadTile<Traits>& tile) {
  const auto& [depth, height, width] = tiling.geometry.axis;
  tile.output_depth = outer;
  const uint32_t image_set = split(tile.output_depth, tiling.tiles[0]);
  uint32_t depth_in_window = tile.output_depth;
  tile.depth = split(depth_in_window, planes.depth_stride);
  tile.is_covered = tile.depth < depth.in && depth_in_window < depth.kernel;
  // Where no window is, this is 0, so that no window offset can wrap around to kNoIndex.
  tile.depth_in_window = tile.is_covered ? depth_in_window : 0;
  tile.position += tile.output_depth * height.out * width.out;
  return image_set;
}

// Finds the tile of a work item. All divisions are here and in locate_depth(). (tiling.item()
// leaves the depth in the outer number, as only calls in 3d have to divide by it.)
template <class Traits>
__device__ __forceinline__ ThreadTile<Traits> locate(
    const Tiling<uint32_t>& tiling, const Planes& planes, uint32_t item) {
  constexpr int S = Traits::S;
  constexpr int kCount = Traits::kCount;
  const Geometry<uint32_t>& geometry = tiling.geometry;
  const auto& [depth, height, width] = geometry.axis;
  const auto [outer_and_depth, coordinates, channel_vector] =
      tiling.item(item, !Traits::kOfCells && geometry.inner != 1, false);

  ThreadTile<Traits> tile{};
  tile.row = coordinates[1];
  tile.column = Traits::kOfCells ? coordinates[2] * kCount : coordinates[2];
  tile.position = S * tile.row * width.out + S * tile.column;
  tile.is_covered = true;
  uint32_t image_set = outer_and_depth;
  if (planes.deep) {
    image_set = locate_depth(tiling, planes, outer_and_depth, tile);
  }
  const uint32_t outer = image_set * planes.images;
  const uint32_t channel = Traits::kOfChannels ? channel_vector * kCount : channel_vector;
  tile.first_output = (outer * tiling.out_plane + tile.position) * geometry.inner + channel;
  tile.first_element = tiling.pooled(outer, {{tile.depth, tile.row, tile.column}}, channel);
#pragma unroll
  for (int i = 0; i < S; ++i) {
    tile.row_exists[i] = S * tile.row + i < height.out;
    tile.column_exists[i] = Traits::kOfCells || S * tile.column + i < width.out;
  }

  const bool is_full = !Traits::kOfPlanes || planes.images == 1;
  tile.left = is_full ? kCount : static_cast<int>(geometry.outer - outer);
  if constexpr (Traits::kOfPlanes) {
#pragma unroll
    for (int n = 1; n < kCount; ++n) {
      const bool exists = n < tile.left;
      tile.element_distance[n] = tile.element_distance[n - 1] + (exists ? planes.next_pooled : 0);
      tile.output_distance[n] = tile.output_distance[n - 1] + (exists ? planes.next_output : 0);
    }
  }
  return tile;
}

} // namespace maxunpool_cuda
