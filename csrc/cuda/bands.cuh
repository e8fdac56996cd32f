// Bands, and what the kernels of forward_bands.cuh and backward_bands.cuh share. They are for
// contiguous planes (inner == 1), whatever their windows, sizes and alignment.
//
// A band is outputs that are consecutive in memory: those of some small planes, or a part of a
// large one. A plane is cut into parts along one axis (see cut_into_parts). Parts have strips: a
// strip is the outputs from where the windows of a row of cells begin to where the next row's do.
//
//     row 0   o o o o      =========   strip 0
//     row 1   o o o o      =========   strip 1 |   a part, whose own cells are rows 1 and 2; its
//     row 2   o o o o      =========   strip 2 |   block reads row 0 too if windows of row 0 cover
//     row 3   o o o o      =========   strip 3     outputs of strip 1
//
// Cells are read in groups, and outputs written in vectors, of the whole tensor, so that they are
// aligned wherever a band begins. Outputs of a vector that are not all of one band are written one
// by one.
#pragma once

#include "decoder.cuh"
#include "divider.cuh"
#include "report.cuh"
#include "shared.cuh"
#include "vector.cuh"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

constexpr int kBandThreads = 256;     // of a block, at most
constexpr int64_t kMostClaims = 4096; // cells of a band

// Cells of a group: at most 16 bytes of values and 32 of indices.
constexpr int cells_of_group(size_t element_size, size_t index_size) {
  const size_t most = 8; // more do not fit the registers
  const size_t cells = std::min({kVectorBytes / element_size, 2 * kVectorBytes / index_size, most});
  return static_cast<int>(std::max(cells, sizeof(uint32_t) / index_size)); // whole words
}

// Whether slots say where an element is staged: of four or eight bytes, it does not fit a slot.
constexpr bool is_staged(size_t element_size) {
  return element_size > sizeof(uint16_t);
}

struct Bands {
  Decoder<uint32_t> decoder;
  uint32_t count;    // of bands
  uint32_t planes;   // of a band; the last one may have fewer. 0: a band is a part of a plane
  uint32_t readable; // cells that may be read in vectors: all, if arrays are aligned, or none
  uint32_t staged;   // bytes of staged elements, at the front of a block's memory
  bool aligned;      // all arrays begin where vectors do
  bool sums;         // "sum", else "last"
  bool bfloat16;     // else half, if numbers have two bytes; for sums
  // Members for bands that are parts of planes:
  int cut; // the axis
  Axis<uint32_t> axis;
  uint32_t strips, above;          // of a part
  uint32_t row_cells, row_outputs; // of one coordinate of the axis
  // A plane that is cut along its second axis is cut slice by slice; any other counts as one slice.
  uint32_t slice_cells, slice_outputs;
  Divider<uint32_t> parts;  // of a slice
  Divider<uint32_t> slices; // of a plane
  Divider<uint32_t> slice_stride;
  uint32_t slice_padding;
  // Divider of cells, counted in the band:
  ShortDivider cells_of_plane;
  // Members for window offsets alone:
  bool deep;  // depth is not trivial: see is_trivial
  bool plain; // not deep, and no window is clipped
  uint32_t kernel_volume;
  ShortDivider cells_of_row, cells_of_height, kernel_height, kernel_width;
  // Distance from a window's begin to the next one's, less one stride in width, at the first cell
  // of a row and of a plane. Both may wrap around.
  uint32_t next_row, next_plane;
};

// Elements [begin, end) of the tensor. They lie in `vectors` vectors of N from `base` on, of which
// `wholes` hold no others; none, unless `aligned`.
template <int N>
struct VectorRange {
  uint32_t begin, end, base, vectors, first_whole, wholes;

  VectorRange() = default;
  __device__ VectorRange(uint32_t from, uint32_t to, bool aligned)
      : begin(from), end(to), base(from / N * N), vectors((to - base + N - 1) / N) {
    first_whole = (from - base + N - 1) / N;
    const uint32_t end_whole = (to - base) / N; // may be less, if one vector has both ends
    wholes = aligned && end_whole > first_whole ? end_whole - first_whole : 0;
  }
  __device__ bool holds(uint32_t i) const { return i - begin < end - begin; }
  // Number of elements of [i, i + N) that the range holds.
  __device__ uint32_t count_of(uint32_t i) const {
    return (end < i + N ? end : i + N) - (begin > i ? begin : i);
  }
  // Elements outside of whole vectors: how many, and the number of one, counted from `base`.
  __device__ uint32_t rest() const { return end - begin - wholes * N; }
  __device__ uint32_t number_of_rest(uint32_t i) const {
    const uint32_t number = begin - base + i;
    return wholes == 0 || number < first_whole * N ? number : number + wholes * N;
  }
  // Whether vector i is whole.
  __device__ bool holds_all(uint32_t i) const { return i - first_whole < wholes; }
};

// Band, as all threads of its block know it. Cells are read in groups of V, outputs written in
// vectors of N.
template <int V, int N>
struct alignas(kVectorBytes) Band {
  VectorRange<V> cells;
  VectorRange<N> outputs;
  uint32_t own_cell;       // first own cell; those before it are another band's too
  uint32_t low, size;      // first position, and number, of its outputs in each plane
  uint32_t first_slot;     // slot of the first output; a vector may begin before it
  uint32_t start_slot;     // where the window of its first cell begins
  Position<uint32_t> cell; // the first one, in the plane

  Band() = default;
  // of_planes() is quick enough for every thread. of_part() is called by one, for all.
  __device__ static Band of_planes(const Bands& all, uint32_t number) {
    const uint32_t outer = all.decoder.geometry.outer, out_plane = all.decoder.out_plane;
    const uint32_t plane = number * all.planes;
    const uint32_t end = plane + all.planes < outer ? plane + all.planes : outer;
    Band band{};
    band.own_cell = plane * all.decoder.in_plane;
    band.cells = VectorRange<V>(band.own_cell, end * all.decoder.in_plane, all.aligned);
    band.outputs = VectorRange<N>(plane * out_plane, end * out_plane, all.aligned);
    band.size = out_plane;
    band.first_slot = band.start_slot = band.outputs.begin - band.outputs.base;
    return band;
  }
  __device__ static Band of_part(const Bands& all, uint32_t number) {
    const auto& [depths, heights, widths] = all.decoder.geometry.axis;
    const uint32_t slice = all.parts.divide(number); // of all planes
    const uint32_t strip = (number - slice * all.parts.divisor()) * all.strips;
    const uint32_t plane = all.slices.divide(slice);
    const uint32_t depth = slice - plane * all.slices.divisor();
    const uint32_t padded = depth + all.slice_padding;
    const uint32_t cell_depth = all.slice_stride.divide(padded);
    const auto row_of = [&](uint32_t n) {
      const uint32_t end = n * all.axis.stride;
      const uint32_t row = end < all.axis.padding ? 0 : end - all.axis.padding;
      return row < all.axis.out ? row : all.axis.out;
    };
    const uint32_t row = row_of(strip), rows = row_of(strip + all.strips) - row;
    const uint32_t from = strip < all.above ? 0 : strip - all.above;
    uint32_t end = strip + all.strips < all.axis.in ? strip + all.strips : all.axis.in;
    if (cell_depth >= depths.in || end < from) {
      end = from;
    }
    // Where bands of several slices read the same cells, those of the first slice own them.
    const bool owns = depth == 0 || all.slice_stride.divide(padded - 1) != cell_depth;
    const uint32_t base = plane * all.decoder.in_plane + cell_depth * all.slice_cells;
    const uint32_t first = slice * all.slice_outputs + row * all.row_outputs;
    Band band;
    band.own_cell = base + (owns && strip < end ? strip : end) * all.row_cells;
    band.cells =
        VectorRange<V>(base + from * all.row_cells, base + end * all.row_cells, all.aligned);
    band.size = rows * all.row_outputs;
    band.low = depth * all.slice_outputs + row * all.row_outputs;
    band.outputs = VectorRange<N>(first, first + band.size, all.aligned);
    band.cell = {
        {cell_depth + (all.cut == 0 ? from : 0), all.cut == 1 ? from : 0, all.cut == 2 ? from : 0}};
    const auto& at = band.cell;
    band.first_slot = band.outputs.begin - band.outputs.base;
    band.start_slot = band.first_slot - band.low +
                      (at[0] * depths.stride * heights.out + at[1] * heights.stride) * widths.out +
                      at[2] * widths.stride;
    return band;
  }
  __device__ bool holds_slot(uint32_t slot) const {
    return slot - first_slot < outputs.end - outputs.begin;
  }
};

// Slot that a cell's index names, if that output is in the band (`in_part`). Unless `in_window`,
// the index may be stray or bad, and any_stray() has to check it.
struct Found {
  uint32_t slot;
  bool in_part, in_window;
};

// Finds the slot of a cell, counted in the band. kPlain: see Bands; kInside: all windows then lie
// in the band.
template <bool kPlain, bool kInside, class Index, int V, int N>
__device__ inline Found find_slot(
    const Bands& all, const Band<V, N>& band, uint32_t cell, Index index) {
  const uint32_t planes = all.cells_of_plane.divide(cell);
  if constexpr (!kIsWindowOffset<Index>) {
    const uint32_t at = target_of<uint32_t>(index) - band.low;
    const bool in_part = at < band.size;
    return {planes * band.size + (band.first_slot + at), in_part, in_part};
  }
  const auto& [depth, height, width] = all.decoder.geometry.axis;
  const uint32_t offset = static_cast<uint32_t>(index), rows = all.cells_of_row.divide(cell);
  uint32_t y = all.kernel_width.divide(offset);
  if constexpr (kPlain) {
    const uint32_t slot = (cell * width.stride + band.start_slot) + offset + rows * all.next_row +
                          planes * all.next_plane + y * (width.out - width.kernel);
    const bool exists = offset < all.kernel_volume;
    return {slot, exists && (kInside || band.holds_slot(slot)), exists};
  }
  const auto& at = band.cell;
  const uint32_t x =
      (at[2] + cell - rows * width.in) * width.stride - width.padding + (offset - y * width.kernel);
  uint32_t depths = planes, z = 0;
  if (all.deep) {
    z = all.kernel_height.divide(y);
    y -= z * height.kernel;
    depths = all.cells_of_height.divide(cell);
    z += (at[0] + depths - planes * depth.in) * depth.stride - depth.padding;
  }
  y += (at[1] + rows - depths * height.in) * height.stride - height.padding;
  const uint32_t slot = planes * all.decoder.out_plane + (z * height.out + y) * width.out + x +
                        (band.first_slot - band.low);
  const bool exists =
      (offset < all.kernel_volume) & (x < width.out) & (y < height.out) & (z < depth.out);
  return {slot, exists && band.holds_slot(slot), exists};
}

// Elements [i, i + N) of an array, as a vector if that is `readable`, else those of the range
// alone. Bytes are kept in words, for fewer instructions than the compiler finds.
template <class T, int N>
struct Neighbours {
  using Word = std::conditional_t<sizeof(T) == 1, uint32_t, T>;
  static constexpr int kPerWord = sizeof(Word) / sizeof(T);

  Vector<Word, N / kPerWord> words;

  Neighbours() = default;
  __device__ Neighbours(const T* array, const VectorRange<N>& range, uint32_t i, bool readable) {
    if (readable) {
      words = load<N / kPerWord>(reinterpret_cast<const Word*>(array + i));
      return;
    }
    words = {};
#pragma unroll
    for (int v = 0; v < N; ++v) {
      if (range.holds(i + v)) {
        words[v / kPerWord] |= static_cast<Word>(array[i + v]) << v % kPerWord * 8;
      }
    }
  }
  // Sets elements outside of the range to -1, or 255, which name no output.
  __device__ void drop_others(const VectorRange<N>& range, uint32_t i) {
    if (range.count_of(i) < N) {
#pragma unroll
      for (int v = 0; v < N; ++v) {
        const auto ones = static_cast<Word>(static_cast<std::make_unsigned_t<T>>(-1));
        words[v / kPerWord] |= range.holds(i + v) ? Word{} : ones << v % kPerWord * 8;
      }
    }
  }
  __device__ T operator[](int v) const {
    return static_cast<T>(words[v / kPerWord] >> v % kPerWord * 8);
  }
};

// Whether an index of the band's own cells in [i, end) is stray. Reports bad ones.
template <class Index, int V, int N>
__device__ inline bool any_stray(
    const Bands& all, const Band<V, N>& band, ErrorRecord* error, uint32_t i, uint32_t end,
    const Index* indices) {
  const auto& [depth, height, width] = all.decoder.geometry.axis;
  bool stray = false;
#pragma unroll 1
  for (i = i < band.own_cell ? band.own_cell : i; i < end && i < band.cells.end; ++i) {
    const uint32_t cell = i - band.cells.begin;
    const uint32_t rows = all.cells_of_row.divide(cell);
    const uint32_t heights = all.cells_of_height.divide(cell);
    const uint32_t planes = all.cells_of_plane.divide(cell);
    const auto& at = band.cell;
    const Position<uint32_t> p{
        {at[0] + heights - planes * depth.in, at[1] + rows - heights * height.in,
         at[2] + cell - rows * width.in}};
    stray |= is_stray(all.decoder, error, indices, i, p);
  }
  return stray;
}

// Calls take(v, slot) for the cells i + v of a group whose indices name slots of the band. Returns
// whether another index is stray, as any_stray() does.
template <bool kInside, int V, int N, class Index, class Combine>
__device__ inline bool for_each_of_group(
    const Bands& all, const Band<V, N>& band, ErrorRecord* error, const Index* indices, uint32_t i,
    const Neighbours<Index, V>& index, const Combine& take) {
  uint32_t checked = 0;
  const auto visit = [&]<bool kPlain>(std::bool_constant<kPlain>) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      constexpr bool kAllInside = kInside && kPlain;
      const auto found =
          find_slot<kPlain, kAllInside>(all, band, i - band.cells.begin + v, index[v]);
      if (found.in_part) {
        take(v, found.slot);
      }
      checked += found.in_window ? 1 : 0;
    }
  };
  if (!kIsWindowOffset<Index> || all.plain) {
    visit(std::true_type{});
  } else {
    visit(std::false_type{});
  }
  return checked < band.cells.count_of(i) && any_stray(all, band, error, i, i + V, indices);
}

// Calls visit(i, group) for this thread's groups of a band. The first one has been read before.
template <class Group, class Read, class Visit>
__device__ inline void for_each_group(
    uint32_t groups, const Group& first, const Read& read, const Visit& visit) {
  if (threadIdx.x < groups) {
    visit(threadIdx.x, first);
  }
  for (uint32_t i = threadIdx.x + blockDim.x; i < groups; i += blockDim.x) {
    visit(i, read(i));
  }
}

// Clears a block's slots, in vectors.
template <class Slot>
__device__ inline void clear(Slot* slots, uint32_t count) {
  constexpr int N = kVectorBytes / sizeof(Slot);
  for_each_in_block(
      (count + N - 1) / N, [&](uint32_t i) { store(slots + i * N, Vector<Slot, N>{}); });
}

} // namespace maxunpool_cuda
