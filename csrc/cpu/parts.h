// Parts that a call with any index is cut into, and which indices the owner of a part reads.
#pragma once

#include "../errors.h"
#include "../geometry.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>

namespace maxunpool_cuda {

// Output positions [begin, end) of every plane of a slab. One thread owns them, and each pooled
// element whose index names one of them.
struct Part {
  int64_t outer;
  int64_t begin;
  int64_t end;

  int64_t size() const { return end - begin; }
};

// First element, of the whole tensor, whose index leads out of the output positions that a search
// covers: a bad index, if the search covers every position.
class FirstBadIndex {
 public:
  bool any() const { return element_.load() != kNone; }
  void record(int64_t element) {
    int64_t seen = element_.load(std::memory_order_relaxed);
    while (element < seen && !element_.compare_exchange_weak(seen, element)) {
    }
  }

  // Raises an error for that element, after a search of everything.
  template <class Index>
  void raise_if_any(const Geometry<int64_t>& geometry, const Index* indices) const {
    const int64_t element = element_.load();
    if (element != kNone) {
      const int64_t outer = element / geometry.in_slab(), rest = element % geometry.in_slab();
      TORCH_CHECK(
          false,
          invalid_index(
              geometry.rank, {geometry.axis[0].out, geometry.axis[1].out, geometry.axis[2].out},
              kIsWindowOffset<Index>, indices[element], rest / geometry.inner,
              outer * geometry.inner + rest % geometry.inner));
    }
  }

 private:
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  std::atomic<int64_t> element_{kNone};
};

// Memory of a thread, for one part after the other.
class Scratch {
 public:
  template <class T>
  T* zeroed(int64_t count) {
    static_assert(alignof(T) <= __STDCPP_DEFAULT_NEW_ALIGNMENT__);
    const size_t bytes = count * sizeof(T);
    if (bytes > bytes_) {
      memory_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
      bytes_ = bytes;
    }
    std::memset(memory_.get(), 0, bytes);
    return reinterpret_cast<T*>(memory_.get());
  }

 private:
  std::unique_ptr<std::byte[]> memory_;
  size_t bytes_ = 0;
};

// Which indices the owner of a part reads.
enum class Search : bool {
  nearby,     // those of the pooled rows whose windows touch the part
  everything, // those of the whole slab
};

// Range of pooled rows. Rows follow one another along the first axis that is longer than 1.
struct Rows {
  int64_t begin, end;                // cells
  uint64_t extent_begin, extent_end; // the output positions that these cells' indices should name
};

// Partition of slabs: each into `splits` parts, and its cells into `chunks` ranges of rows.
struct Partition {
  const Geometry<int64_t>& geometry;
  Search search;
  int64_t splits, chunks;
  Axis<int64_t> axis;                   // the rows'
  int64_t rows;                         // of a chunk
  int64_t row_cells, row_positions = 1; // of a row

  Rows chunk(int64_t i) const {
    const int64_t begin = i * rows, end = std::min(begin + rows, axis.in);
    if (search == Search::everything) {
      return {begin * row_cells, end * row_cells, 0, static_cast<uint64_t>(geometry.out_plane())};
    }
    const int64_t first = std::max<int64_t>(0, begin * axis.stride - axis.padding);
    const int64_t last = std::min(axis.out, (end - 1) * axis.stride - axis.padding + axis.kernel);
    return {
        begin * row_cells, end * row_cells, static_cast<uint64_t>(first * row_positions),
        static_cast<uint64_t>(last * row_positions)};
  }
};

constexpr int64_t kPartGrain = 1 << 15; // outputs of a task

// Partition of a call. For a search of everything, slabs are cut only if there are fewer of them
// than threads; for a nearby one, planes are cut to what a core's cache holds.
inline Partition make_partition(
    const Geometry<int64_t>& geometry, int64_t element_size, Search search) {
  constexpr int64_t kChunkElements = 1 << 10, kPartBytes = 1 << 19;
  const int64_t threads = at::get_num_threads(), positions = geometry.out_plane();
  const int64_t worth = geometry.out_slab() / kPartGrain + 1;
  const int64_t busy = divide_up(threads, geometry.outer);
  const bool cuts = search == Search::nearby && geometry.inner == 1;
  const int64_t cached = cuts ? positions * element_size / kPartBytes + 1 : 1;
  int first = 0;
  while (first < 2 && geometry.axis[first].in == 1 && geometry.axis[first].out == 1) {
    ++first;
  }
  Partition all{geometry,
                search,
                std::min({std::max(busy, cached), worth, positions}),
                1,
                geometry.axis[first],
                1,
                1,
                1};
  for (int a = first + 1; a < Geometry<int64_t>::kAxes; ++a) {
    all.row_cells *= geometry.axis[a].in;
    all.row_positions *= geometry.axis[a].out;
  }
  const Axis<int64_t>& axis = all.axis;
  const bool touches =
      axis.kernel > axis.padding && (axis.in - 1) * axis.stride - axis.padding < axis.out;
  if (all.splits == 1 || !touches) {
    all.search = Search::everything;
  }
  all.rows = all.search == Search::everything
                 ? axis.in
                 : std::max<int64_t>(1, kChunkElements / (all.row_cells * geometry.inner));
  all.chunks = divide_up(axis.in, all.rows);
  return all;
}

// Calls work(part, scratch) for parts that together cover every slab.
template <class Work>
void for_each_part(const Partition& partition, const Work& work) {
  const Geometry<int64_t>& geometry = partition.geometry;
  const int64_t splits = partition.splits;
  const int64_t grain = std::max<int64_t>(1, kPartGrain * splits / geometry.out_slab());
  at::parallel_for(0, geometry.outer * splits, grain, [&](int64_t first, int64_t last) {
    Scratch scratch;
    for (int64_t part = first; part < last; ++part) {
      const int64_t split = part % splits;
      const int64_t quotient = geometry.out_plane() / splits;
      const int64_t remainder = geometry.out_plane() % splits;
      const int64_t begin = split * quotient + std::min(split, remainder);
      work(Part{part / splits, begin, begin + quotient + (split < remainder ? 1 : 0)}, scratch);
    }
  });
}

} // namespace maxunpool_cuda
