// Which kernels a call runs, with which arguments. Everything but the launch itself, which `Launch`
// does, so that the choice can be tested without a GPU:
//   launch(kernel, items, arguments...)   a grid of any size, in blocks of Arguments::threads
//   launch.shared(kernel, shape, arguments...)   at most shape.pieces blocks, of any size
#pragma once

#include "../dtypes.h"
#include "../geometry.h"
#include "../reduction.h"
#include "backward.cuh"
#include "forward_bands.cuh"
#include "forward_channels.cuh"
#include "forward_rows.cuh"
#include "forward_windows.cuh"
#include "limits.h"
#include "planes.cuh"
#include "report.cuh"
#include "stray.cuh"
#include "tiling.cuh"

#include <algorithm>
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
  int64_t planes = 0;                            // of a block that does small planes whole; or 0
  int64_t stage, planes_bytes, planes_threads;   // its shared memory; see Planes
  bool shared = false;                           // the second kernel's slots are in shared memory
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
    int64_t slot = offsets ? 0 : slot_size(arguments);
    planes = wide ? 0 : small_planes(arguments);
    part = g.out_plane();
    if (last && !offsets && !wide && arguments.element_size <= sizeof(uint64_t)) {
      const auto small = static_cast<int64_t>(sizeof(uint32_t));
      const int64_t room = limits.shared_bytes / (small * channels) / kGrain * kGrain;
      part = divide_up(part, kGrain) * kGrain;
      if (room > 0 && part <= kMostParts * room) {
        shared = true;
        slot = small;
        part = divide_up(divide_up(part, divide_up(part, room)), kGrain) * kGrain;
      }
    }
    part = std::min(part, g.out_plane());
    parts = divide_up(g.out_plane(), part);
    groups = divide_up(g.inner, channels);
    pieces = g.outer * groups * parts;
    slots = part * channels;
    blocks = pieces;
    slot_bytes = align(slots * slot);
    global_slots = bytes = 0;
    if (planes == 0 && slot != 0) {
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
  static constexpr int64_t kMostChannels = 32, kMostParts = 64,
                           kGrain = 16; // outputs, so that parts begin where vectors do

  // Whether planes.cuh does this call, and so many planes to a block.
  int64_t small_planes(const Arguments& arguments) {
    const Geometry<int64_t>& g = arguments.geometry;
    const auto size = static_cast<int64_t>(arguments.element_size);
    const auto index_size = static_cast<int64_t>(c10::elementSize(arguments.index_type));
    const bool any_windows = arguments.reduce == Reduce::last &&
                             (arguments.forward || arguments.index_type != c10::ScalarType::Byte);
    const bool one_window = arguments.reduce != Reduce::last && arguments.forward &&
                            windows_are_apart(g) && c10::isFloatingType(arguments.type);
    if (g.inner != 1 || size > kMostSmall || !(any_windows || one_window)) {
      return 0;
    }
    // Of so many planes, with the vectors at their ends.
    const bool claims = arguments.index_type != c10::ScalarType::Byte || !windows_are_apart(g);
    const bool staged = arguments.forward && claims && is_staged(size);
    const int64_t vector = kVectorBytes, slot = claims ? sizeof(uint32_t) : size;
    const auto bytes = [&](int64_t count) {
      stage = static_cast<int64_t>(align(count * g.out_plane() * slot + 2 * vector * slot));
      return stage + (staged ? count * g.in_plane() * size + 8 * vector : 0);
    };
    const auto fits = [&](int64_t count) {
      return bytes(count) <= arguments.limits.small_bytes && count * g.in_plane() <= kMostClaims;
    };
    if (!fits(1)) {
      return 0;
    }
    int64_t count = 1;
    const int64_t group = cells_of_group(size, index_size);
    while (count < g.outer && count * g.in_plane() < arguments.limits.small_plane * group &&
           fits(2 * count)) {
      count *= 2;
    }
    planes_bytes = bytes(count);
    const int64_t groups = count * g.in_plane() / group + 1;
    const int64_t vectors = arguments.forward ? count * g.out_plane() * size / vector : 0;
    planes_threads = std::min<int64_t>(std::max(groups, vectors / kVectorsPerThread), kThreads);
    return count;
  }
  static constexpr int64_t kMostSmall = 8, kMostClaims = 4096, kVectorsPerThread = 4;

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
      return sizeof(uint64_t);
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
      if (plan_.planes != 0) {
        with_bytes(arguments_.element_size, [&]<class T>(std::type_identity<T>) {
          small_planes<T, Index>();
        });
        return;
      }
      if (arguments_.reduce == Reduce::last) {
        with_bytes(arguments_.element_size, [&]<class T>(std::type_identity<T>) {
          if (!forward_compiled<TakeLast<T>, Index>()) {
            with_offset([&]<class Offset>(std::type_identity<Offset>) {
              forward_windows<TakeLast<T>, Offset>();
            });
          }
          second<T, Index>();
        });
        return;
      }
      sum<Index>();
      with_arithmetic_type(arguments_.type, [&]<class T>(std::type_identity<T>) {
        redo<SumSlot<T, uint64_t>, Index, uint64_t>(); // for the rare, 64 bits will do
      });
    });
  }

  // "sum" and "mean".
  template <class Index>
  void sum() const {
    bool done = false;
    if (windows_are_disjoint(geometry()) && !c10::isComplexType(arguments_.type)) {
      with_bytes(arguments_.element_size, [&]<class T>(std::type_identity<T>) {
        done = forward_compiled<TakeLast<T>, Index>(); // nothing is added to anything
      });
    }
    with_arithmetic_type(arguments_.type, [&]<class T>(std::type_identity<T>) {
      if constexpr (kIsFastSum<T>) { // what pooling's backward runs
        if (!done && arguments_.reduce == Reduce::sum && !plan_.wide) {
          if (!forward_compiled<TakeSum<T>, Index>()) {
            forward_windows<TakeSum<T>, uint32_t>();
          }
          done = true;
        }
      }
      if (!done) {
        arguments_.reduce == Reduce::sum ? forward_windows<TakeSum<T>, uint64_t>()
                                         : forward_windows<TakeMean<T>, uint64_t>();
      }
    });
  }

  // The types that networks are trained in.
  template <class T>
  static constexpr bool kIsFastSum =
      std::is_floating_point_v<Accumulator<T>> && sizeof(T) <= sizeof(float);

  // By a kernel compiled for these windows. False: there is none.
  template <class Take, class Index>
  bool forward_compiled() const {
    if (forward_rows<Take, Index>() || forward_channels<Take, Index>()) {
      return true;
    }
    if constexpr (Take::kMoves) {
      return forward_bands<typename Take::Element, Index>();
    }
    return false;
  }

  void backward() const {
    with_index_type(arguments_.index_type, [&]<class Index>(std::type_identity<Index>) {
      if (arguments_.reduce == Reduce::mean) {
        with_arithmetic_type(arguments_.type, [&]<class T>(std::type_identity<T>) {
          run_backward<GiveMean<T>, Index, uint64_t, 1, Group::channels>();
          redo<CountSlot<T, uint64_t>, Index, uint64_t>();
        });
        return;
      }
      with_bytes(arguments_.element_size, [&]<class T>(std::type_identity<T>) {
        if (plan_.planes != 0) {
          small_planes<T, Index>();
          return;
        }
        if (arguments_.reduce == Reduce::sum) {
          backward_groups<GiveAll<T>, Index>();
          return;
        }
        if (kIsWindowOffset<Index> ? windows_are_apart(geometry())
                                   : windows_are_disjoint(geometry())) {
          backward_groups<GiveAlone<T>, Index>();
        } else {
          backward_groups<GiveLast<T>, Index>();
        }
        second<T, Index>();
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

  // Window offsets cannot be stray.
  Report report() const {
    const bool offsets = arguments_.index_type == c10::ScalarType::Byte;
    return {offsets ? nullptr : reinterpret_cast<uint32_t*>(workspace_), arguments_.error};
  }

  // How many tiles cover both the pooled cells and the output; see Tiling.
  static int64_t tiles(const Axis<int64_t>& axis, int64_t tile) {
    return std::max(axis.in, divide_up(axis.out, tile));
  }

  // The only kernel of a call on small planes.
  template <class T, class Index>
  void small_planes() const {
    if constexpr (sizeof(T) <= sizeof(uint64_t)) {
      const Geometry<int64_t>& g = geometry();
      const auto& [depth, height, width] = g.axis;
      const auto clips = [](const Axis<int64_t>& axis) {
        return axis.padding != 0 || (axis.in - 1) * axis.stride + axis.kernel > axis.out;
      };
      const bool deep = depth.in != 1 || depth.kernel != 1;
      const int64_t next_row = height.stride * width.out - width.in * width.stride;
      int64_t next_height = g.out_plane() - height.in * height.stride * width.out;
      const int64_t next_depth = g.out_plane() - depth.in * depth.stride * height.out * width.out;
      if (deep) {
        next_height = (depth.stride * height.out - height.in * height.stride) * width.out;
      }
      const Planes planes{
          narrow<uint32_t>(g),
          arguments_.error,
          static_cast<uint32_t>(plan_.planes),
          static_cast<uint32_t>(g.in_plane()),
          static_cast<uint32_t>(g.out_plane()),
          static_cast<uint32_t>(plan_.stage),
          aligned_,
          arguments_.type == c10::ScalarType::BFloat16,
          arguments_.reduce,
          ShortDivider(g.in_plane()),
          !deep && std::none_of(std::begin(g.axis), std::end(g.axis), clips),
          static_cast<uint32_t>(depth.kernel * height.kernel * width.kernel),
          ShortDivider(width.in),
          ShortDivider(width.in * height.in),
          ShortDivider(height.kernel),
          ShortDivider(width.kernel),
          static_cast<uint32_t>(next_row),
          static_cast<uint32_t>(next_height),
          static_cast<uint32_t>(deep ? next_depth : 0)};
      const int64_t blocks = divide_up(geometry().outer, plan_.planes);
      constexpr int64_t kSlotsPerThread = 4; // see Launch
      const SharedShape shape{
          blocks, plan_.planes_threads * kSlotsPerThread, plan_.planes_bytes, true};
      if (arguments_.forward) {
        const auto run = [&](auto kernel) {
          launch_.shared(
              kernel,
              shape,
              planes,
              negative_zero<T>(),
              values<T>(),
              indices<Index>(),
              result<T>());
        };
        if constexpr (kIsWindowOffset<Index>) {
          if (windows_are_apart(g)) {
            run(forward_planes<T, Index, false>);
            return;
          }
        }
        run(forward_planes<T, Index, true>);
      } else if constexpr (!kIsWindowOffset<Index>) {
        launch_.shared(
            backward_planes<T, Index>, shape, planes, values<T>(), indices<Index>(), result<T>());
      }
    }
  }

  // The way for rows of contiguous tensors that divide into vectors. False: it has no kernel for
  // these windows.
  template <class Take, class Index>
  bool forward_rows() const {
    using T = typename Take::Element;
    if constexpr (sizeof(T) > 8) {
      return false;
    } else {
      if constexpr (Take::kMoves) {
        if (rows_if_they_fit<Take, Index, RowShape<T, 2, 2, 0>>() ||
            rows_if_they_fit<Take, Index, RowShape<T, 2, 2, 0, true>>()) {
          return true;
        }
      }
      return rows_if_they_fit<Take, Index, RowShape<T, 3, 2, 1>>();
    }
  }

  // Are these the windows, in width and in height?
  bool has_windows(int64_t kernel, int64_t stride, int64_t padding) const {
    const auto same = [&](const Axis<int64_t>& axis) {
      return axis.kernel == kernel && axis.stride == stride && axis.padding == padding;
    };
    const auto& [depth, height, width] = geometry().axis;
    return same(width) && same(height);
  }
  static bool is_trivial(const Axis<int64_t>& axis) {
    return axis.in == 1 && axis.out == 1 && axis.padding == 0;
  }

  template <class Take, class Index, class Shape>
  bool rows_if_they_fit() const {
    using T = typename Take::Element;
    const auto& [depth, height, width] = geometry().axis;
    const bool depth_fits = Shape::kDeep ? depth.kernel <= depth.stride && depth.padding == 0 &&
                                               is_found_in_depth(depth)
                                         : is_trivial(depth) && depth.kernel == 1;
    if (plan_.wide || geometry().inner != 1 || !aligned_ || !depth_fits ||
        !has_windows(Shape::kKernel, Shape::kStride, Shape::kPadding) || width.in % Shape::V != 0 || width.out != width.in * Shape::kStride ||
        height.in != divide_up(height.out, Shape::kStride)) {
      return false;
    }
    const auto groups = static_cast<uint32_t>(width.in / Shape::V);
    const RowPlan plan{
        narrow<uint32_t>(geometry()),
        static_cast<uint32_t>(geometry().outer * depth.out * height.in * groups),
        static_cast<uint32_t>(geometry().out_plane()),
        Divider<uint32_t>(groups),
        Divider<uint32_t>(static_cast<uint32_t>(height.in)),
        Divider<uint32_t>(static_cast<uint32_t>(depth.out)),
        Divider<uint32_t>(static_cast<uint32_t>(depth.stride))};
    slab_items_ = plan.items / geometry().outer;
    launch_(
        maxunpool_cuda::forward_rows<Take, Index, Shape>,
        plan.items,
        plan,
        report(),
        negative_zero<T>(),
        values<T>(),
        indices<Index>(),
        result<T>());
    return true;
  }

  // See added_to_zero.
  template <class T>
  T negative_zero() const {
    if constexpr (std::is_unsigned_v<T>) {
      const bool sums = arguments_.reduce != Reduce::last && c10::isFloatingType(arguments_.type);
      return sums ? T{1} << (8 * sizeof(T) - 1) : T{};
    } else {
      return T{};
    }
  }

  bool divides_into(int64_t channels) const {
    return !plan_.wide && aligned_ && geometry().inner % channels == 0;
  }

  // The way for vectors of channels. False: it has no kernel for these windows.
  template <class Take, class Index>
  bool forward_channels() const {
    using T = typename Take::Element;
    if constexpr (sizeof(T) > 8) {
      return false;
    } else {
      return (Take::kMoves && channels_if_they_fit<Take, Index, ChannelShape<2, 2, 0>>()) ||
             channels_if_they_fit<Take, Index, ChannelShape<3, 2, 1>>() ||
             channels_if_they_fit<Take, Index, ChannelShape<3, 2, 0>>();
    }
  }

  template <class Take, class Index, class Shape>
  bool channels_if_they_fit() const {
    using T = typename Take::Element;
    // As many as fit the registers: indices are up to eight times as large as values.
    constexpr int kMost = Shape::kDisjoint ? 8 : 2 * kVectorBytes / sizeof(Index);
    constexpr int V = std::min<int>({8, kMost, kVectorBytes / sizeof(T)});
    const auto& [depth, height, width] = geometry().axis;
    if (!divides_into(V) || geometry().inner == 1 || !is_trivial(depth) || depth.kernel != 1 ||
        !has_windows(Shape::kKernel, Shape::kStride, Shape::kPadding)) {
      return false;
    }
    const int64_t groups = geometry().inner / V, rows = tiles(height, Shape::kStride),
                  columns = tiles(width, Shape::kStride);
    const auto divider = [](int64_t n) { return Divider<uint32_t>(static_cast<uint32_t>(n)); };
    const ChannelPlan plan{
        narrow<uint32_t>(geometry()),
        static_cast<uint32_t>(geometry().outer * rows * columns * groups),
        static_cast<uint32_t>(geometry().in_plane()),
        static_cast<uint32_t>(geometry().out_plane()),
        divider(groups),
        divider(columns),
        divider(rows)};
    slab_items_ = plan.items / geometry().outer;
    launch_(
        maxunpool_cuda::forward_channels<Take, Index, V, Shape>,
        plan.items,
        plan,
        report(),
        negative_zero<T>(),
        values<T>(),
        indices<Index>(),
        result<T>());
    return true;
  }

  // The way for rows of contiguous tensors of any width.
  template <class T, class Index>
  bool forward_bands() const {
    if constexpr (sizeof(T) > 8) {
      return false;
    } else {
      const auto& [depth, height, width] = geometry().axis;
      const auto overlaps = [](const Axis<int64_t>& axis) { return axis.kernel > axis.stride; };
      const bool overlap = overlaps(height) || overlaps(width);
      const bool deep = !is_trivial(depth) || depth.kernel != 1;
      if (plan_.wide || geometry().inner != 1 || (deep && overlap) ||
          (overlap && arguments_.reduce != Reduce::last) || overlaps(depth) ||
          !is_found_in_depth(depth)) {
        return false;
      }
      const int64_t slot = overlap ? sizeof(uint32_t) : sizeof(T);
      // Tiles begin where windows do, and cover all outputs and cells.
      const auto tiles_of = [](const Axis<int64_t>& axis) {
        return std::max(axis.in, divide_up(axis.out + axis.padding, axis.stride));
      };
      const auto beside = [](const Axis<int64_t>& axis) { return (axis.kernel - 1) / axis.stride; };
      const int64_t heights = tiles_of(height), strips = geometry().outer * depth.out * heights;
      const int64_t strip_slots = height.stride * width.out;
      constexpr int64_t kFew = 1 << 13, kMost = 1 << 14; // bytes of a block
      const bool whole = strip_slots * slot <= kMost;
      // A thread then has kAhead cells.
      const int64_t turns = kAhead * std::max<int64_t>(1, kBandThreads / width.in);
      const int64_t band_strips =
          whole ? std::clamp<int64_t>(std::min(turns, kMost / (strip_slots * slot)), 1, strips) : 1;
      const int64_t part_columns =
          whole ? tiles_of(width) : std::max<int64_t>(1, kFew / (height.stride * width.stride * slot));
      const int64_t pitch = whole ? width.out : std::min(part_columns * width.stride, width.out);
      const int64_t parts = divide_up(tiles_of(width), part_columns);
      const int64_t spare = kVectorBytes / sizeof(T);
      const int64_t slots =
          divide_up(band_strips * height.stride * pitch + spare, spare) * spare;
      const auto divider = [](int64_t n) { return Divider<uint32_t>(static_cast<uint32_t>(n)); };
      const int64_t before = beside(width), bands = divide_up(strips, band_strips) * parts;
      const auto notes = static_cast<int64_t>(plan_.global_slots / sizeof(uint32_t));
      if (slots * slot > 2 * kMost || (!kIsWindowOffset<Index> && bands > notes)) {
        return false; // for huge strides
      }
      const BandPlan plan{
          narrow<uint32_t>(geometry()),
          static_cast<uint32_t>(geometry().in_plane()),
          static_cast<uint32_t>(bands),
          static_cast<uint32_t>(strips),
          static_cast<uint32_t>(band_strips),
          static_cast<uint32_t>(beside(height)),
          static_cast<uint32_t>(before),
          static_cast<uint32_t>(part_columns),
          static_cast<uint32_t>(pitch),
          static_cast<uint32_t>(slots),
          divider(parts),
          divider(heights),
          divider(depth.out),
          divider(whole ? width.in : part_columns + before),
          divider(width.out),
          divider(height.out),
          divider(width.kernel),
          divider(height.kernel),
          divider(depth.stride)};
      chunk_items_ = band_strips;
      slab_items_ = depth.out * heights * parts;
      const SharedShape shape{bands, 4 * kBandThreads, slots * slot, true};
      const auto run = [&](auto kernel) {
        launch_.shared(kernel, shape, plan, report(), negative_zero<T>(), values<T>(), indices<Index>(), result<T>());
      };
      if (overlap) {
        run(maxunpool_cuda::forward_bands<T, Index, Band::overlapping>);
      } else if (deep) {
        run(maxunpool_cuda::forward_bands<T, Index, Band::deep>);
      } else {
        run(maxunpool_cuda::forward_bands<T, Index, Band::disjoint>);
      }
      return true;
    }
  }

  // Does the window of every cell hold the output at its number times the stride?
  static bool is_found_in_depth(const Axis<int64_t>& depth) {
    return (depth.in - 1) * depth.stride < depth.out && depth.padding < depth.kernel;
  }

  // At most as large as the stride.
  static int64_t tile_of(const Axis<int64_t>& axis) {
    return std::min<int64_t>(axis.stride, kMostTile);
  }

  // The way for any windows.
  template <class Take, class Offset>
  void forward_windows() const {
    const auto& [depth, height, width] = geometry().axis;
    const int64_t tile[] = {
        tile_of(depth), tile_of(height), geometry().inner == 1 ? 1 : tile_of(width)};
    const int64_t counts[] = {tiles(depth, tile[0]), tiles(height, tile[1]), tiles(width, tile[2])};
    using T = typename Take::Element;
    run_first(
        1,
        maxunpool_cuda::forward_windows<Take, Offset>,
        make_tiling<Offset>(geometry(), tile, counts, geometry().inner),
        AnyIndices{arguments_.indices, static_cast<int>(c10::elementSize(arguments_.index_type))},
        values<T>(),
        result<T>());
  }

  template <class Give, class Index>
  void backward_groups() const {
    using T = typename Give::Element;
    // As many as fit the registers with their indices.
    constexpr int kChannels = std::min<int>(Give::kLooks ? 4 : 8, kVectorBytes / sizeof(T));
    constexpr int kCells = std::min<int>(4, kVectorBytes / sizeof(T));
    const Geometry<int64_t>& g = geometry();
    if (plan_.wide) {
      run_backward<Give, Index, uint64_t, 1, Group::channels>();
      return;
    }
    if constexpr (kChannels > 1) {
      if (g.inner == 1) {
        aligned_&& g.axis[2].in % kCells == 0 && (g.axis[2].kernel - 1) / g.axis[2].stride <= 1
            ? run_backward<Give, Index, uint32_t, kCells, Group::even_row>()
            : run_backward<Give, Index, uint32_t, kCells, Group::row>();
        return;
      }
      if (aligned_ && g.inner % kChannels == 0) {
        run_backward<Give, Index, uint32_t, kChannels, Group::channels>();
        return;
      }
    }
    run_backward<Give, Index, uint32_t, 1, Group::channels>();
  }

  template <class Give, class Index, class Offset, int V, Group kGroup>
  void run_backward() const {
    const auto& [depth, height, width] = geometry().axis;
    const bool row = kGroup != Group::channels;
    // Windows overlap where their distance is less than the kernel.
    const auto reach = [](const Axis<int64_t>& axis) {
      return static_cast<Offset>((axis.kernel - 1) / axis.stride);
    };
    using T = typename Give::Element;
    run_first(
        1,
        maxunpool_cuda::backward<Give, Index, Offset, V, kGroup>,
        make_tiling<Offset>(
            geometry(),
            {1, 1, 1},
            {depth.in, height.in, row ? divide_up(width.in, V) : width.in},
            row ? 1 : geometry().inner / V),
        Position<Offset>{{reach(depth), reach(height), reach(width)}},
        values<T>(),
        indices<Index>(),
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
    if constexpr (sizeof(T) <= sizeof(uint64_t)) {
      if (plan_.shared) {
        redo<LastSlot<T, uint32_t>, Index, uint32_t, true>();
        return;
      }
    }
    redo<LastSlot<T, uint64_t>, Index, uint64_t>(); // for the rare, 64 bits will do
  }

  template <class Offset>
  Pieces<Offset> pieces() const {
    const Geometry<int64_t>& g = geometry();
    const auto divider = [](int64_t n) { return Divider<Offset>(static_cast<Offset>(n)); };
    return {
        narrow<Offset>(g),
        {report().stray,
         divider(chunk_items_ == 0 ? arguments_.threads : chunk_items_),
         divider(planes_),
         static_cast<Offset>(slab_items_)},
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

  // What the first kernel has found stray.
  template <class Slot, class Index, class Offset, bool kShared = false>
  void redo() const {
    using T = typename Slot::Element;
    const auto run = [&](auto kernel, const auto&... reduce) {
      const int64_t bytes = kShared ? plan_.slot_bytes : 0;
      launch_.shared(
          kernel,
          SharedShape{plan_.blocks, plan_.slots, bytes, false},
          pieces<Offset>(),
          reduce...,
          values<T>(),
          indices<Index>(),
          result<T>());
    };
    if constexpr (!kIsWindowOffset<Index> && requires { &Slot::grad_input; }) {
      if (!arguments_.forward) {
        run(backward_stray<Slot, Index, Offset, kShared>);
      }
    }
    if constexpr (!kIsWindowOffset<Index> && !std::is_same_v<Slot, CountSlot<T, Offset>>) {
      if (arguments_.forward) {
        run(forward_stray<Slot, Index, Offset, kShared>, arguments_.reduce);
      }
    }
  }

  const Launch& launch_;
  const Arguments& arguments_;
  const Plan& plan_;
  char* workspace_;
  const bool result_aligned_, aligned_;
  mutable int64_t chunk_items_ = 0, planes_ = 1, slab_items_ = 0; // of the first kernel's threads, and so many slabs'
};

} // namespace maxunpool_cuda
