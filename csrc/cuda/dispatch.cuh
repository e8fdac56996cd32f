// Which kernels a call runs, with which arguments. Everything but the launch itself, which `Launch`
// does, so that the choice can be tested without a GPU:
//   launch(kernel, items, arguments...)        a grid of any size, for so many items
//   launch.cooperative(kernel, arguments...)   a grid that is resident at once
#pragma once

#include "../dtypes.h"
#include "../geometry.h"
#include "../reduction.h"
#include "backward.cuh"
#include "forward.cuh"
#include "irregular.cuh"
#include "report.cuh"
#include "tiling.cuh"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace maxunpool_cuda {

// Where a call goes another way because of its size. Tests lower them.
struct Limits {
  int64_t narrow = int64_t{1} << 31; // offsets are 32-bit where all intermediate values stay below
  int64_t slot_bytes = 32 << 20;     // for all slots, or one unit's where that is more
};

struct Arguments {
  Geometry<int64_t> geometry;
  Reduce reduce;
  bool deterministic;   // also in the last bits of sums
  c10::ScalarType type; // of the values
  c10::ScalarType index_type;
  size_t element_size;
  const void* values; // input, or grad_output
  const void* indices;
  void* result; // output, or grad_input
  ErrorRecord* error;
  Limits limits{};
};

// The workspace of one call. Its first `zeroed` bytes start out as zeros, the rest as anything.
struct WorkspacePlan {
  bool wide; // 64-bit offsets
  int64_t channels, blocks, units, capacity;
  size_t zeroed, list, slots, bytes; // offsets of the parts, then the whole

  WorkspacePlan(const Arguments& arguments, bool forward) {
    const Geometry<int64_t>& g = arguments.geometry;
    channels = std::min<int64_t>(g.inner, kUnitChannels);
    blocks = (g.inner - 1) / channels + 1;
    units = g.outer * blocks;
    wide = !fits(g, blocks * channels, arguments.limits.narrow);
    const int64_t slot = slot_size(arguments, forward);
    const int64_t unit = slot * g.out_plane() * channels;
    capacity = slot == 0 ? 0 : std::clamp<int64_t>(arguments.limits.slot_bytes / unit, 1, units);
    const auto align = [](size_t size) { return (size + 15) / 16 * 16; };
    zeroed = (2 + units) * sizeof(uint32_t);
    list = align(zeroed);
    slots = align(list + units * sizeof(uint64_t));
    bytes = slots + capacity * unit;
  }

  Irregular irregular(void* memory) const {
    auto* words = static_cast<uint32_t*>(memory);
    auto* start = static_cast<char*>(memory);
    return {words, words + 1, words + 2, reinterpret_cast<uint64_t*>(start + list)};
  }

 private:
  // Do all intermediate values of all kernels stay below the limit?
  static bool fits(const Geometry<int64_t>& g, int64_t inner, int64_t limit) {
    double pooled = 1, unpooled = 1, tiles = 1, reach = 0;
    for (const Axis<int64_t>& axis : g.axis) {
      const auto in = static_cast<double>(axis.in), out = static_cast<double>(axis.out);
      pooled *= in;
      unpooled *= out;
      tiles *= std::max(in, out);
      reach = std::max(
          reach,
          (in + 1) * static_cast<double>(axis.stride) + out + static_cast<double>(axis.padding) +
              static_cast<double>(axis.kernel));
    }
    const double slabs = static_cast<double>(g.outer) * static_cast<double>(inner);
    return std::max({slabs * pooled, slabs * unpooled, slabs * tiles, reach}) <
           static_cast<double>(limit);
  }

  int64_t slot_size(const Arguments& arguments, bool forward) const {
    if (arguments.reduce == Reduce::last) {
      return wide ? sizeof(uint64_t) : sizeof(uint32_t);
    }
    if (!forward) {
      return arguments.reduce == Reduce::mean ? sizeof(uint64_t) : 0;
    }
    int64_t size = 0;
    with_arithmetic_type(
        arguments.type, [&]<class T>(std::type_identity<T>) { size = sizeof(Sum<T>); });
    return size;
  }
};

template <class Offset>
Geometry<Offset> narrow(const Geometry<int64_t>& from) {
  Geometry<Offset> to;
  to.outer = static_cast<Offset>(from.outer);
  to.inner = static_cast<Offset>(from.inner);
  to.rank = from.rank;
  for (int a = 0; a < 3; ++a) {
    const Axis<int64_t>& axis = from.axis[a];
    to.axis[a] = {
        static_cast<Offset>(axis.in),
        static_cast<Offset>(axis.out),
        static_cast<Offset>(axis.kernel),
        static_cast<Offset>(axis.stride),
        static_cast<Offset>(axis.padding)};
  }
  return to;
}

// `tiles`: how many in each dimension; `groups`: of channels.
template <class Offset>
Tiling<Offset> make_tiling(
    const Geometry<int64_t>& geometry,
    const int64_t (&tile)[3],
    const int64_t (&tiles)[3],
    int64_t groups) {
  Tiling<Offset> tiling;
  tiling.geometry = narrow<Offset>(geometry);
  tiling.items = static_cast<Offset>(geometry.outer * tiles[0] * tiles[1] * tiles[2] * groups);
  for (int a = 0; a < 3; ++a) {
    tiling.tile[a] = static_cast<Offset>(tile[a]);
    tiling.tiles[a] = Divider<Offset>(static_cast<Offset>(tiles[a]));
    tiling.stride[a] = Divider<Offset>(tiling.geometry.axis[a].stride);
  }
  tiling.channels = Divider<Offset>(static_cast<Offset>(groups));
  tiling.out_height = Divider<Offset>(tiling.geometry.axis[1].out);
  tiling.out_width = Divider<Offset>(tiling.geometry.axis[2].out);
  return tiling;
}

inline bool windows_are_disjoint(const Geometry<int64_t>& geometry) {
  return std::all_of(std::begin(geometry.axis), std::end(geometry.axis), [](const auto& axis) {
    return axis.kernel <= axis.stride && axis.padding == 0;
  });
}

template <class Launch>
class Dispatch {
 public:
  Dispatch(const Launch& launch, const Arguments& arguments, bool forward, void* workspace)
      : launch_(launch),
        arguments_(arguments),
        plan_(arguments, forward),
        workspace_(workspace),
        aligned_(
            (reinterpret_cast<uintptr_t>(arguments.values) |
             reinterpret_cast<uintptr_t>(arguments.indices) |
             reinterpret_cast<uintptr_t>(arguments.result)) %
                kVectorBytes ==
            0) {}

  void forward() const {
    with_index_type(arguments_.index_type, [&]<class Index>(std::type_identity<Index>) {
      const bool disjoint = windows_are_disjoint(geometry());
      const bool moves = arguments_.reduce == Reduce::last;
      if (disjoint || moves) {
        with_bytes(arguments_.element_size, [&]<class T>(std::type_identity<T>) {
          if (!(disjoint && forward_vectors<T, Index>())) {
            forward_any<TakeLast<T>, Index>();
          }
          if (moves) {
            with_offset([&]<class Offset>(std::type_identity<Offset>) {
              forward_irregular<LastSlot<T, Offset>, Index, Offset>();
            });
          }
        });
      }
      if (!moves) {
        with_arithmetic_type(arguments_.type, [&]<class T>(std::type_identity<T>) {
          if (!disjoint) {
            forward_any<TakeSum<T>, Index>();
          }
          with_offset([&]<class Offset>(std::type_identity<Offset>) {
            forward_irregular<SumSlot<T, Offset>, Index, Offset>();
          });
        });
      }
    });
  }

  void backward() const {
    with_index_type(arguments_.index_type, [&]<class Index>(std::type_identity<Index>) {
      const bool disjoint = windows_are_disjoint(geometry());
      if (arguments_.reduce == Reduce::mean) {
        with_arithmetic_type(arguments_.type, [&]<class T>(std::type_identity<T>) {
          with_offset([&]<class Offset>(std::type_identity<Offset>) {
            run_backward<GiveMean<T>, Index, Offset, 1>();
            backward_irregular<CountSlot<T, Offset>, Index, Offset>();
          });
        });
        return;
      }
      with_bytes(arguments_.element_size, [&]<class T>(std::type_identity<T>) {
        if (arguments_.reduce == Reduce::sum) {
          backward_alike<GiveAll<T>, Index>();
          return;
        }
        if (disjoint) {
          backward_alike<GiveAlone<T>, Index>();
        }
        with_offset([&]<class Offset>(std::type_identity<Offset>) {
          if (!disjoint) {
            run_backward<GiveLast<T>, Index, Offset, 1>();
          }
          backward_irregular<LastSlot<T, Offset>, Index, Offset>();
        });
      });
    });
  }

 private:
  const Geometry<int64_t>& geometry() const { return arguments_.geometry; }

  template <class F>
  void with_offset(F&& f) const {
    return plan_.wide ? f(std::type_identity<uint64_t>{}) : f(std::type_identity<uint32_t>{});
  }

  template <class T>
  const T* values() const {
    return static_cast<const T*>(arguments_.values);
  }
  template <class Index>
  const Index* indices() const {
    return static_cast<const Index*>(arguments_.indices);
  }
  template <class T>
  T* result() const {
    return static_cast<T*>(arguments_.result);
  }

  template <class Offset>
  Report<Offset> report() const {
    return {
        plan_.irregular(workspace_),
        arguments_.error,
        geometry(),
        static_cast<Offset>(plan_.blocks)};
  }

  // How many tiles cover both the pooled cells and the output; see Tiling.
  static int64_t tiles(const Axis<int64_t>& axis, int64_t tile) {
    return std::max(axis.in, (axis.out - 1) / tile + 1);
  }

  // The fast ways for windows that do not overlap. False: none of them fits.
  template <class T, class Index>
  bool forward_vectors() const {
    const Geometry<int64_t>& g = geometry();
    const auto& [depth, height, width] = g.axis;
    constexpr int64_t kMostStride = 4; // beyond it a tile is too much for a thread
    if (plan_.wide || !aligned_ ||
        std::max({depth.stride, height.stride, width.stride}) > kMostStride) {
      return false;
    }
    constexpr int64_t kChannels = kVectorBytes / sizeof(T);
    constexpr int kStrideWidth = 2;
    constexpr int64_t kCells = std::max<int64_t>(1, kChannels / kStrideWidth);
    if (g.inner == 1 && width.stride == kStrideWidth && width.out == width.in * kStrideWidth &&
        width.in % kCells == 0) {
      run_disjoint<T, Index, kCells, kStrideWidth>(width.in / kCells, 1);
      return true;
    }
    if (g.inner % kChannels == 0) {
      run_disjoint<T, Index, kChannels, 0>(tiles(width, width.stride), g.inner / kChannels);
      return true;
    }
    return false;
  }

  template <class T, class Index, int64_t V, int kStrideWidth>
  void run_disjoint(int64_t tiles_in_width, int64_t groups) const {
    const auto& axis = geometry().axis;
    const auto tiling = make_tiling<uint32_t>(
        geometry(),
        {axis[0].stride, axis[1].stride, axis[2].stride},
        {tiles(axis[0], axis[0].stride), tiles(axis[1], axis[1].stride), tiles_in_width},
        groups);
    launch_(
        forward_disjoint<T, Index, static_cast<int>(V), kStrideWidth>,
        tiling.items,
        tiling,
        report<uint32_t>(),
        values<T>(),
        indices<Index>(),
        result<T>());
  }

  template <class Take, class Index>
  void forward_any() const {
    constexpr int kChannels = kVectorBytes / sizeof(typename Take::Element);
    if (plan_.wide) {
      run_windows<Take, Index, uint64_t, 1>();
    } else if constexpr (Take::kReverse && kChannels > 1) {
      if (aligned_ && geometry().inner % kChannels == 0) {
        run_windows<Take, Index, uint32_t, kChannels>();
      } else {
        run_windows<Take, Index, uint32_t, 1>();
      }
    } else {
      run_windows<Take, Index, uint32_t, 1>();
    }
  }

  // A tile is at most as large as the stride, which lets its outputs share windows, and one wide
  // where neighbouring threads then write neighbouring outputs.
  template <class Take, class Index, class Offset, int V>
  void run_windows() const {
    constexpr int64_t kMostTile = 4;
    int64_t tile[3], counts[3];
    for (int a = 0; a < 3; ++a) {
      const Axis<int64_t>& axis = geometry().axis[a];
      tile[a] = a == 2 && geometry().inner == 1 ? 1 : std::min(axis.stride, kMostTile);
      counts[a] = tiles(axis, tile[a]);
    }
    const auto tiling = make_tiling<Offset>(geometry(), tile, counts, geometry().inner / V);
    using T = typename Take::Element;
    launch_(
        forward_windows<Take, Index, Offset, V>,
        tiling.items,
        tiling,
        report<Offset>(),
        arguments_.reduce,
        values<T>(),
        indices<Index>(),
        result<T>());
  }

  // The backward of cells that need not look at others, in vectors where that divides evenly.
  template <class Give, class Index>
  void backward_alike() const {
    constexpr int kMostVector = 8; // indices are up to eight times as large as values
    constexpr int kNeighbours =
        std::min<int>(kMostVector, kVectorBytes / sizeof(typename Give::Element));
    const int64_t elements = geometry().outer * geometry().in_slab();
    if (plan_.wide) {
      run_backward<Give, Index, uint64_t, 1>();
    } else if (aligned_ && elements % kNeighbours == 0) {
      run_backward<Give, Index, uint32_t, kNeighbours>();
    } else {
      run_backward<Give, Index, uint32_t, 1>();
    }
  }

  template <class Give, class Index, class Offset, int V>
  void run_backward() const {
    const auto& axis = geometry().axis;
    auto tiling = make_tiling<Offset>(
        geometry(), {1, 1, 1}, {axis[0].in, axis[1].in, axis[2].in}, geometry().inner);
    tiling.items /= V;
    using T = typename Give::Element;
    launch_(
        maxunpool_cuda::backward<Give, Index, Offset, V>,
        tiling.items,
        tiling,
        report<Offset>(),
        values<T>(),
        indices<Index>(),
        result<T>());
  }

  template <class Slot, class Offset>
  Workspace<Slot, Offset> workspace() const {
    const Geometry<int64_t>& g = geometry();
    return {
        narrow<Offset>(g),
        plan_.irregular(workspace_),
        arguments_.deterministic,
        reinterpret_cast<Slot*>(static_cast<char*>(workspace_) + plan_.slots),
        static_cast<Offset>(plan_.capacity),
        Divider<Offset>(static_cast<Offset>(plan_.channels)),
        Divider<Offset>(static_cast<Offset>(plan_.blocks)),
        Divider<Offset>(static_cast<Offset>(g.in_plane())),
        Divider<Offset>(static_cast<Offset>(g.out_plane()))};
  }

  template <class Slot, class Index, class Offset>
  void forward_irregular() const {
    using T = typename Slot::Element;
    launch_.cooperative(
        irregular_forward<Slot, Index, Offset>,
        workspace<Slot, Offset>(),
        arguments_.reduce,
        values<T>(),
        indices<Index>(),
        result<T>());
  }

  template <class Slot, class Index, class Offset>
  void backward_irregular() const {
    using T = typename Slot::Element;
    launch_.cooperative(
        irregular_backward<Slot, Index, Offset>,
        workspace<Slot, Offset>(),
        values<T>(),
        indices<Index>(),
        result<T>());
  }

  const Launch& launch_;
  const Arguments& arguments_;
  const WorkspacePlan plan_;
  void* workspace_;
  const bool aligned_;
};

} // namespace maxunpool_cuda
