// Which kernels a call runs, with which arguments. Everything but the launch itself, which `Launch`
// does, so that the choice can be tested without a GPU:
//   launch(kernel, items, arguments...)   a grid of any size, in blocks of Arguments::threads
//   launch.shared(kernel, shape, arguments...)   at most shape.pieces blocks, of any size
#pragma once

#include "../dtypes.h"
#include "../geometry.h"
#include "../reduction.h"
#include "backward.cuh"
#include "forward.cuh"
#include "irregular.cuh"
#include "limits.h"
#include "report.cuh"
#include "tiling.cuh"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <type_traits>

namespace maxunpool_cuda {

struct Arguments {
  Geometry<int64_t> geometry;
  Reduce reduce;
  bool forward;
  bool deterministic;   // also in the last bits of sums
  c10::ScalarType type; // of the values
  c10::ScalarType index_type;
  size_t element_size;
  const void* values; // input, or grad_output
  const void* indices;
  void* result; // output, or grad_input
  ErrorRecord* error;
  Limits limits{};
  int64_t threads = kThreads; // of a block
  int64_t blocks = 256;       // of a kernel with slots in global memory, at most
};

// What a kernel with slots has to do.
struct SharedShape {
  int64_t pieces; // at most so many blocks have work, or slots
  int64_t slots;  // of a piece
  int64_t bytes;  // of shared memory, for each block
  bool likely;    // that the pieces need anything done
};

inline int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// How a call is cut up, and its workspace, which may start out as anything.
struct Plan {
  bool wide;                                     // 64-bit offsets
  bool shared = false;                           // the second kernel's slots are in shared memory
  bool alone;                                    // and there is no first kernel
  int64_t channels, groups, part, parts, pieces; // of the second kernel; see Pieces
  int64_t slots;                                 // of a piece
  int64_t blocks;                                // of the second kernel, at most
  size_t global_slots, slot_bytes, bytes;        // offset of the slots, each block's, and the whole

  explicit Plan(const Arguments& arguments) {
    const Geometry<int64_t>& g = arguments.geometry;
    const Limits& limits = arguments.limits;
    const bool last = arguments.reduce == Reduce::last;
    channels = std::min(g.inner, kMostChannels);
    wide = !fits(g, ((g.inner - 1) / channels + 1) * channels, limits.narrow);
    // Window offsets have no second kernel, and so no slots.
    const bool offsets = arguments.index_type == c10::ScalarType::Byte;
    const int64_t slot = offsets ? 0 : slot_size(arguments);
    // Narrower pieces would read and write less than a sector's worth of channels at a time.
    const int64_t enough = std::min<int64_t>(g.inner, kLeastBytes / arguments.element_size);
    const int64_t small = std::min(limits.small_plane / g.out_plane(), channels);
    alone =
        last && !offsets && !wide && small >= enough &&
        g.outer * g.out_slab() * static_cast<int64_t>(arguments.element_size) <= limits.small_bytes;
    part = g.out_plane();
    if (alone) {
      channels = small;
    } else if (last && !offsets && !wide) {
      const int64_t room = limits.shared_bytes / (slot * channels) / kGrain * kGrain;
      part = divide_up(part, kGrain) * kGrain;
      if (room > 0 && part <= kMostParts * room) {
        shared = true;
        part = divide_up(divide_up(part, divide_up(part, room)), kGrain) * kGrain;
      }
    }
    shared = shared || alone;
    part = std::min(part, g.out_plane());
    parts = divide_up(g.out_plane(), part);
    groups = divide_up(g.inner, channels);
    pieces = g.outer * groups * parts;
    slots = part * channels;
    blocks = pieces;
    slot_bytes = align(slots * slot);
    global_slots = bytes = 0;
    if (!alone && slot != 0) {
      global_slots = bytes =
          align(most_items(g) / arguments.threads * sizeof(uint32_t) + sizeof(uint32_t));
      if (!shared) {
        const auto room = limits.slot_bytes / static_cast<int64_t>(slot_bytes);
        blocks = std::clamp<int64_t>(room, 1, std::min(pieces, arguments.blocks));
        bytes += blocks * slot_bytes;
      }
    }
  }

  static size_t align(size_t size) {
    return (size + kVectorBytes - 1) / kVectorBytes * kVectorBytes;
  }

 private:
  static constexpr int64_t kMostChannels = 32, kLeastBytes = 16, kMostParts = 64,
                           kGrain = 16; // outputs, so that parts begin where vectors do

  // No kernel has more items than this.
  static int64_t most_items(const Geometry<int64_t>& g) {
    int64_t items = g.outer * g.inner;
    for (const Axis<int64_t>& axis : g.axis) {
      items *= std::max(axis.in, axis.out);
    }
    return items;
  }

  // Do all intermediate values of all kernels stay below the limit?
  static bool fits(const Geometry<int64_t>& g, int64_t inner, int64_t limit) {
    double tiles = 1, reach = 0;
    for (const Axis<int64_t>& axis : g.axis) {
      const auto in = static_cast<double>(axis.in), out = static_cast<double>(axis.out);
      tiles *= std::max(in, out);
      reach = std::max(
          reach,
          (in + 1) * static_cast<double>(axis.stride) + out + static_cast<double>(axis.padding) +
              static_cast<double>(axis.kernel));
    }
    const double slabs = static_cast<double>(g.outer) * static_cast<double>(inner);
    return std::max(slabs * tiles, reach) < static_cast<double>(limit);
  }

  int64_t slot_size(const Arguments& arguments) const {
    if (arguments.reduce == Reduce::last) {
      return wide ? sizeof(uint64_t) : sizeof(uint32_t);
    }
    if (!arguments.forward) {
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

inline int64_t floor_divide(int64_t a, int64_t b) {
  return a >= 0 ? a / b : -((b - 1 - a) / b);
}

// Windows that share no output and begin at multiples of the stride.
inline bool windows_are_disjoint(const Geometry<int64_t>& geometry) {
  const auto padded = [](const Axis<int64_t>& axis) { return axis.padding != 0; };
  return windows_are_apart(geometry) &&
         std::none_of(std::begin(geometry.axis), std::end(geometry.axis), padded);
}

// `tiles`: how many in each dimension; `groups`: of channels; `planes`: that a thread does.
template <class Offset>
Tiling<Offset> make_tiling(
    const Geometry<int64_t>& geometry,
    const int64_t (&tile)[3],
    const int64_t (&tiles)[3],
    int64_t groups,
    int64_t planes = 1) {
  Tiling<Offset> tiling;
  tiling.geometry = narrow<Offset>(geometry);
  tiling.items = static_cast<Offset>(
      divide_up(geometry.outer, planes) * tiles[0] * tiles[1] * tiles[2] * groups);
  tiling.out_plane = static_cast<Offset>(geometry.out_plane());
  for (int a = 0; a < 3; ++a) {
    tiling.tile[a] = static_cast<Offset>(tile[a]);
    tiling.tiles[a] = Divider<Offset>(static_cast<Offset>(tiles[a]));
    tiling.stride[a] = Divider<Offset>(tiling.geometry.axis[a].stride);
  }
  const auto& [in, out, kernel, stride, padding] = geometry.axis[0];
  for (int64_t r = 0; r < kMostTile; ++r) {
    tiling.around_first[r] = static_cast<int32_t>(floor_divide(r + padding - kernel, stride) + 1);
    tiling.around_end[r] = static_cast<int32_t>(floor_divide(r + padding, stride) + 1);
  }
  tiling.channels = Divider<Offset>(static_cast<Offset>(groups));
  tiling.out_height = Divider<Offset>(tiling.geometry.axis[1].out);
  tiling.out_width = Divider<Offset>(tiling.geometry.axis[2].out);
  tiling.kernel_height = Divider<Offset>(tiling.geometry.axis[1].kernel);
  tiling.kernel_width = Divider<Offset>(tiling.geometry.axis[2].kernel);
  return tiling;
}

template <class Launch>
class Dispatch {
 public:
  Dispatch(const Launch& launch, const Arguments& arguments, const Plan& plan, void* workspace)
      : launch_(launch),
        arguments_(arguments),
        plan_(plan),
        workspace_(static_cast<char*>(workspace)),
        result_aligned_(is_aligned(arguments.result)),
        aligned_(result_aligned_ && is_aligned(arguments.values) && is_aligned(arguments.indices)) {
  }

  void run() const { arguments_.forward ? forward() : backward(); }

 private:
  static bool is_aligned(const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % kVectorBytes == 0;
  }

  void forward() const {
    with_index_type(arguments_.index_type, [&]<class Index>(std::type_identity<Index>) {
      const bool moves = arguments_.reduce == Reduce::last;
      bool done = plan_.alone;
      if (moves || (windows_are_disjoint(geometry()) && !c10::isComplexType(arguments_.type))) {
        with_bytes(arguments_.element_size, [&]<class T>(std::type_identity<T>) {
          done = done || forward_rows<T, Index>() || forward_channels<T, Index>();
          if (moves) {
            if (!done) {
              move_windows<T, Index>();
            }
            second<T, Index>();
          }
        });
      }
      if (!moves) {
        with_arithmetic_type(arguments_.type, [&]<class T>(std::type_identity<T>) {
          if (!done) {
            sum_windows<T, Index>();
          }
          redo<SumSlot<T, uint64_t>, Index, uint64_t>(); // for the rare, 64 bits will do
        });
      }
    });
  }

  void backward() const {
    with_index_type(arguments_.index_type, [&]<class Index>(std::type_identity<Index>) {
      if (arguments_.reduce == Reduce::mean) {
        with_arithmetic_type(arguments_.type, [&]<class T>(std::type_identity<T>) {
          backward_of_any<T, true>();
          redo<CountSlot<T, uint64_t>, Index, uint64_t>();
        });
        return;
      }
      with_bytes(arguments_.element_size, [&]<class T>(std::type_identity<T>) {
        if (!plan_.alone) {
          backward_groups<T, Index>();
        }
        if (arguments_.reduce == Reduce::last) {
          second<T, Index>();
        }
      });
    });
  }

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

  Report report() const { return {reinterpret_cast<uint32_t*>(workspace_), arguments_.error}; }

  // How many tiles cover both the pooled cells and the output; see Tiling.
  static int64_t tiles(const Axis<int64_t>& axis, int64_t tile) {
    return std::max(axis.in, divide_up(axis.out, tile));
  }

  // The way for rows of contiguous tensors. False: it has no kernel for these windows.
  template <class T, class Index>
  bool forward_rows() const {
    if constexpr (sizeof(T) > 8) {
      return false;
    } else if (
        plan_.wide || geometry().inner != 1 || !result_aligned_ ||
        geometry().axis[0].stride > kMostTile) {
      return false;
    } else {
      return rows_if_they_fit<T, Index, 2, 2, 0>() || rows_if_they_fit<T, Index, 3, 2, 1>() ||
             rows_if_they_fit<T, Index, 3, 2, 0>() || rows_if_they_fit<T, Index, 3, 1, 1>() ||
             rows_if_they_fit<T, Index, 3, 3, 0>() || rows_if_they_fit<T, Index, 4, 4, 0>();
    }
  }

  // Is every cell that can reach an output, in height and width, one of those that could in a
  // kernel compiled for these windows?
  template <int kKernel, int kStride, int kPadding>
  bool windows_fit() const {
    const auto fits = [](const Axis<int64_t>& axis) {
      bool within = axis.stride == kStride;
      for (int e = 0; e < kStride; ++e) {
        within = within &&
                 floor_divide(e + axis.padding - axis.kernel, kStride) + 1 >=
                     first_cell(kKernel, kStride, kPadding, e) &&
                 floor_divide(e + axis.padding, kStride) <= last_cell(kStride, kPadding, e);
      }
      return within;
    };
    const auto& [depth, height, width] = geometry().axis;
    return fits(width) && (fits(height) || (height.in == 1 && height.out == 1));
  }

  template <class T, class Index, int kKernel, int kStride, int kPadding>
  bool rows_if_they_fit() const {
    using Even = RowShape<T, kKernel, kStride, kPadding, true, false>;
    const bool sums = arguments_.reduce != Reduce::last;
    if (!windows_fit<kKernel, kStride, kPadding>() || (sums && !Even::kDisjoint)) {
      return false;
    }
    const auto& [depth, height, width] = geometry().axis;
    const bool deep = depth.in != 1 || depth.out != 1;
    if (aligned_ && width.in % Even::V == 0 && width.out % Even::N == 0) {
      if (!deep) {
        run_rows<T, Index, Even>(0);
        return true;
      }
      if constexpr (kStride == 2) { // else there are too many outputs to a thread
        run_rows<T, Index, RowShape<T, kKernel, kStride, kPadding, true, true>>(0);
        return true;
      }
      return false;
    }
    if constexpr (kStride == 2 || kStride == 3) { // rows of others divide, or come seldom
      constexpr bool kDeep = kStride == 2;
      if (kDeep || !deep) {
        run_rows<T, Index, RowShape<T, kKernel, kStride, kPadding, false, kDeep>>(Even::kGrain - 1);
        return true;
      }
    }
    return false;
  }

  // `slack`: how many outputs to the left of a row its first thread may begin.
  template <class T, class Index, class Shape>
  void run_rows(int64_t slack) const {
    const auto& [depth, height, width] = geometry().axis;
    const int64_t tile[] = {depth.stride, Shape::kStride, Shape::N};
    const int64_t counts[] = {
        tiles(depth, tile[0]),
        tiles(height, tile[1]),
        std::max(divide_up(width.in, Shape::V), divide_up(width.out + slack, Shape::N))};
    // Planes share a thread as long as there are threads enough to fill any device.
    constexpr int64_t kMostPlanes = 4;
    const int64_t threads = geometry().outer * counts[0] * counts[1] * counts[2];
    const int64_t planes =
        std::clamp<int64_t>(threads / arguments_.limits.enough_threads, 1, kMostPlanes);
    run_first(
        planes,
        maxunpool_cuda::forward_rows<T, Index, Shape>,
        make_tiling<uint32_t>(geometry(), tile, counts, 1, planes),
        static_cast<uint32_t>(planes),
        negative_zero<T>(),
        values<T>(),
        indices<Index>(),
        result<T>());
  }

  // At most as large as the stride, which lets a tile's outputs share windows.
  static int64_t tile_of(const Axis<int64_t>& axis) {
    return std::min<int64_t>(axis.stride, kMostTile);
  }

  // See added_to_zero.
  template <class T>
  T negative_zero() const {
    const bool sums = arguments_.reduce != Reduce::last && c10::isFloatingType(arguments_.type);
    return sums ? T{1} << (8 * sizeof(T) - 1) : T{};
  }

  // As many as fit the registers: indices are up to eight times as large as values.
  template <class T>
  static constexpr int kForwardChannels = std::min<int>(8, kVectorBytes / sizeof(T));

  bool divides_into(int64_t channels) const {
    return !plan_.wide && aligned_ && geometry().inner % channels == 0;
  }

  // The way for vectors of channels. False: it has no kernel for these windows.
  template <class T, class Index>
  bool forward_channels() const {
    constexpr int kChannels = kForwardChannels<T>;
    if constexpr (kChannels > 1) {
      if (divides_into(kChannels)) {
        const auto& [depth, height, width] = geometry().axis;
        const auto run = [&]<class Shape>(std::type_identity<Shape>) {
          const int64_t tile[] = {
              Shape::kAlone ? depth.stride : 1,
              Shape::kAlone ? height.stride : Shape::kStride,
              Shape::kAlone ? width.stride : Shape::kStride};
          const int64_t counts[] = {
              tiles(depth, tile[0]), tiles(height, tile[1]), tiles(width, tile[2])};
          run_first(
              1,
              maxunpool_cuda::forward_channels<T, Index, kChannels, Shape>,
              make_tiling<uint32_t>(geometry(), tile, counts, geometry().inner / kChannels),
              negative_zero<T>(),
              values<T>(),
              indices<Index>(),
              result<T>());
          return true;
        };
        const bool flat = depth.in == 1 && depth.out == 1;
        if (flat && windows_fit<2, 2, 0>()) {
          return run(std::type_identity<ChannelShape<2, 2, 0>>{});
        }
        if (flat && windows_fit<3, 2, 1>()) {
          return run(std::type_identity<ChannelShape<3, 2, 1>>{});
        }
        if (flat && windows_fit<3, 2, 0>()) {
          return run(std::type_identity<ChannelShape<3, 2, 0>>{});
        }
        if (windows_are_disjoint(geometry()) &&
            std::max({depth.stride, height.stride, width.stride}) <= kMostTile) {
          return run(std::type_identity<ChannelShape<0, 1, 0>>{});
        }
      }
    }
    return false;
  }

  // The way for any windows.
  template <class T, class Index>
  void move_windows() const {
    constexpr int kChannels = kForwardChannels<T>;
    if constexpr (kChannels > 1) {
      if (divides_into(kChannels)) {
        run_windows<TakeLast<T>, Index, uint32_t, kChannels>();
        return;
      }
    }
    with_offset([&]<class Offset>(std::type_identity<Offset>) {
      run_windows<TakeLast<T>, Index, Offset, 1>();
    });
  }

  // Tiles are one wide where neighbouring threads then write neighbouring outputs.
  template <class Take, class Index, class Offset, int V>
  void run_windows() const {
    const auto& [depth, height, width] = geometry().axis;
    const int64_t tile[] = {
        tile_of(depth), tile_of(height), geometry().inner == 1 ? 1 : tile_of(width)};
    const int64_t counts[] = {tiles(depth, tile[0]), tiles(height, tile[1]), tiles(width, tile[2])};
    using T = typename Take::Element;
    run_first(
        1,
        forward_windows<Take, Index, Offset, V>,
        make_tiling<Offset>(geometry(), tile, counts, geometry().inner / V),
        arguments_.reduce,
        values<T>(),
        indices<Index>(),
        result<T>());
  }

  // What pooling's backward runs, of floating-point numbers: other sums are rare.
  template <class T, class Index>
  void sum_windows() const {
    if constexpr (std::is_floating_point_v<Accumulator<T>>) {
      constexpr int kChannels = std::min<int>(4, kVectorBytes / sizeof(T));
      if (divides_into(kChannels)) {
        run_windows<TakeSum<T>, Index, uint32_t, kChannels>();
        return;
      }
    }
    with_offset([&]<class Offset>(std::type_identity<Offset>) {
      run_windows<TakeSum<T>, Index, Offset, 1>();
    });
  }

  template <class T, class Index>
  void backward_groups() const {
    if constexpr (sizeof(T) <= 8) {
      if (!plan_.wide) {
        const auto reach = reach_of_windows();
        reach[0] + reach[1] + reach[2] != 0 ? run_backward<T, Index, true>()
                                            : run_backward<T, Index, false>();
        return;
      }
    }
    backward_of_any<T, false>();
  }

  // Of the cells whose windows meet a cell's, how far away the farthest is.
  std::array<uint32_t, 3> reach_of_windows() const {
    std::array<uint32_t, 3> reach{};
    for (int a = 0; a < 3 && arguments_.reduce != Reduce::sum; ++a) {
      const Axis<int64_t>& axis = geometry().axis[a];
      reach[a] = static_cast<uint32_t>((axis.kernel - 1) / axis.stride);
    }
    return reach;
  }

  template <class T, class Index, bool kLooks>
  void run_backward() const {
    constexpr int kPlanes = kPlanesOfThread<kLooks>;
    const Geometry<int64_t>& g = geometry();
    const auto& [depth, height, width] = g.axis;
    const bool of_channels = g.inner % kPlanes == 0;
    const int64_t slabs = of_channels ? 1 : kPlanes;
    const int64_t channels = of_channels ? g.inner / kPlanes : g.inner;
    const auto narrow = [](int64_t n) { return static_cast<uint32_t>(n); };
    const auto reach = reach_of_windows();
    const Gather gather{
        narrow(slabs),
        narrow(of_channels ? channels : g.in_slab()),
        narrow(of_channels ? channels : g.out_slab()),
        arguments_.reduce == Reduce::sum,
        std::max({depth.in, depth.out, depth.kernel}) != 1,
        {{reach[0], reach[1], reach[2]}}};
    run_first(
        slabs,
        maxunpool_cuda::backward<T, Index, kLooks>,
        make_tiling<uint32_t>(g, {1, 1, 1}, {depth.in, height.in, width.in}, channels, slabs),
        gather,
        values<T>(),
        indices<Index>(),
        result<T>());
  }

  // The way for any windows, layout, size and type.
  template <class T, bool kMean>
  void backward_of_any() const {
    const auto reach = reach_of_windows();
    const auto& [depth, height, width] = geometry().axis;
    run_first(
        1,
        backward_any<T, kMean>,
        make_tiling<uint64_t>(
            geometry(), {1, 1, 1}, {depth.in, height.in, width.in}, geometry().inner),
        arguments_.reduce != Reduce::sum,
        Position<uint64_t>{{reach[0], reach[1], reach[2]}},
        values<T>(),
        arguments_.indices,
        static_cast<int>(c10::elementSize(arguments_.index_type)),
        result<T>());
  }

  template <class Offset, class... Parameters, class... Rest>
  void run_first(
      int64_t planes,
      void (*kernel)(Tiling<Offset>, Report, Parameters...),
      const Tiling<Offset>& tiling,
      const Rest&... rest) const {
    planes_ = planes;
    slab_items_ = tiling.items / divide_up(geometry().outer, planes);
    launch_(kernel, tiling.items, tiling, report(), rest...);
  }

  template <class T, class Index>
  void second() const {
    if (plan_.shared) {
      redo<LastSlot<T, uint32_t>, Index, uint32_t, true>();
      return;
    }
    with_offset([&]<class Offset>(std::type_identity<Offset>) {
      redo<LastSlot<T, Offset>, Index, Offset>();
    });
  }

  template <class Offset>
  Pieces<Offset> pieces() const {
    const Geometry<int64_t>& g = geometry();
    const auto divider = [](int64_t n) { return Divider<Offset>(static_cast<Offset>(n)); };
    return {
        narrow<Offset>(g),
        {plan_.alone ? nullptr : report().astray,
         static_cast<uint64_t>(arguments_.threads),
         static_cast<uint64_t>(slab_items_),
         static_cast<uint64_t>(planes_)},
        plan_.alone ? arguments_.error : nullptr,
        arguments_.deterministic,
        static_cast<Offset>(plan_.pieces),
        divider(plan_.channels),
        divider(plan_.groups),
        divider(plan_.parts),
        static_cast<Offset>(g.in_plane()),
        static_cast<Offset>(g.out_plane()),
        static_cast<Offset>(plan_.part),
        workspace_ + plan_.global_slots,
        plan_.slot_bytes};
  }

  // What the first kernel has found astray; or everything, if there is none.
  template <class Slot, class Index, class Offset, bool kShared = false>
  void redo() const {
    using T = typename Slot::Element;
    const auto run = [&](auto kernel, const auto&... reduce) {
      const int64_t bytes = kShared ? plan_.slot_bytes : 0;
      launch_.shared(
          kernel,
          SharedShape{plan_.blocks, plan_.slots, bytes, plan_.alone},
          pieces<Offset>(),
          reduce...,
          values<T>(),
          indices<Index>(),
          result<T>());
    };
    if constexpr (!kIsWindowOffset<Index> && requires { &Slot::grad_input; }) {
      if (!arguments_.forward) {
        run(irregular_backward<Slot, Index, Offset, kShared>);
      }
    }
    if constexpr (!kIsWindowOffset<Index> && !std::is_same_v<Slot, CountSlot<T, Offset>>) {
      if (arguments_.forward) {
        run(irregular_forward<Slot, Index, Offset, kShared>, arguments_.reduce);
      }
    }
  }

  const Launch& launch_;
  const Arguments& arguments_;
  const Plan& plan_;
  char* workspace_;
  const bool result_aligned_, aligned_;
  mutable int64_t planes_ = 1, slab_items_ = 0; // of the first kernel's threads, and so many slabs'
};

} // namespace maxunpool_cuda
