// Which kernels a call runs, with which arguments. Everything but the launch itself, which `Launch`
// does, so that the choice can be tested without a GPU:
//   launch(kernel, items, arguments...)   a grid of any size, in blocks of Arguments::threads
//   launch.shared(kernel, shape, arguments...)   at most shape.pieces blocks, of any size
#pragma once

#include "../dtypes.h"
#include "../geometry.h"
#include "../reduction.h"
#include "backward.cuh"
#include "backward_bands.cuh"
#include "forward_bands.cuh"
#include "forward_channels.cuh"
#include "forward_rows.cuh"
#include "forward_windows.cuh"
#include "plan.cuh"
#include "report.cuh"
#include "stray.cuh"
#include "tiling.cuh"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace maxunpool_cuda {

template <class Launch>
class Dispatch {
 public:
  Dispatch(const Launch& launch, const Arguments& arguments, const Plan& plan, void* workspace)
      : launch_(launch),
        arguments_(arguments),
        plan_(plan),
        workspace_(static_cast<char*>(workspace)),
        aligned_(
            is_aligned(arguments.result) && is_aligned(arguments.values) &&
            is_aligned(arguments.indices)) {}

  void run() const { arguments_.forward ? forward() : backward(); }

 private:
  static bool is_aligned(const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % kVectorBytes == 0;
  }

  void forward() const {
    with_index_type(arguments_.index_type, [&]<class Index>(std::type_identity<Index>) {
      if (plan_.bands && plan_.bands->of_planes()) {
        with_bytes(
            arguments_.element_size, [&]<class T>(std::type_identity<T>) { bands<T, Index>(); });
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
        redo<SumSlot<T, uint64_t>, uint64_t>(any_indices());
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
      if (plan_.bands) {
        bands<typename Take::Element, Index>();
        return true;
      }
    }
    return false;
  }

  void backward() const {
    with_index_type(arguments_.index_type, [&]<class Index>(std::type_identity<Index>) {
      if (arguments_.reduce == Reduce::mean) {
        with_arithmetic_type(arguments_.type, [&]<class T>(std::type_identity<T>) {
          backward_of_any<T, true>();
          redo<CountSlot<T, uint64_t>, uint64_t>(any_indices());
        });
        return;
      }
      with_bytes(arguments_.element_size, [&]<class T>(std::type_identity<T>) {
        if (plan_.bands) {
          bands<T, Index>();
          return;
        }
        backward_groups<T, Index>();
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
  AnyIndices any_indices() const {
    return {arguments_.indices, static_cast<int>(c10::elementSize(arguments_.index_type))};
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

  // The way for contiguous tensors of any windows and sizes.
  template <class T, class Index>
  void bands() const {
    if constexpr (sizeof(T) <= sizeof(uint64_t)) {
      Bands bands = plan_.bands->bands;
      bands.aligned = aligned_;
      chunk_items_ = 1;
      slab_items_ = bands.count / geometry().outer;
      constexpr int64_t kSlotsPerThread = 4; // see Launch
      const SharedShape shape{
          bands.count, plan_.bands->threads * kSlotsPerThread, plan_.bands->bytes, true};
      const auto run = [&](auto kernel, auto... zero) {
        launch_.shared(
            kernel, shape, bands, report(), zero..., values<T>(), indices<Index>(), result<T>());
      };
      constexpr bool kOffsets = kIsWindowOffset<Index>;
      if (!arguments_.forward) {
        if constexpr (!kOffsets) {
          run(backward_bands<T, Index>);
        }
      } else if (!kOffsets || !windows_are_apart(geometry())) {
        run(forward_bands<T, Index, true>, negative_zero<T>());
      } else if constexpr (kOffsets) {
        run(forward_bands<T, Index, false>, negative_zero<T>());
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

  template <class Take, class Index, class Shape>
  bool rows_if_they_fit() const {
    const auto plan = make_row_plan<Shape>(geometry());
    if (plan_.wide || !aligned_ || !plan) {
      return false;
    }
    run_compiled<Take, Index>(maxunpool_cuda::forward_rows<Take, Index, Shape>, *plan, plan->items);
    return true;
  }

  // A kernel whose items are threads'.
  template <class Take, class Index, class Kernel, class First>
  void run_compiled(Kernel kernel, const First& plan, uint32_t items) const {
    slab_items_ = items / geometry().outer;
    using T = typename Take::Element;
    launch_(
        kernel,
        items,
        plan,
        report(),
        negative_zero<T>(),
        values<T>(),
        indices<Index>(),
        result<T>());
  }

  // See add_to_zero.
  template <class T>
  T negative_zero() const {
    if constexpr (std::is_unsigned_v<T>) {
      const bool sums = arguments_.reduce != Reduce::last && c10::isFloatingType(arguments_.type);
      return sums ? T{1} << (8 * sizeof(T) - 1) : T{};
    } else {
      return T{};
    }
  }

  // The way for vectors of channels. False: it has no kernel for these windows.
  template <class Take, class Index>
  bool forward_channels() const {
    using T = typename Take::Element;
    if constexpr (sizeof(T) > 8) {
      return false;
    } else {
      if constexpr (Take::kMoves) {
        if (channels_if_they_fit<Take, Index, ChannelShape<2, 2, 0>>()) {
          return true;
        }
      }
      return channels_if_they_fit<Take, Index, ChannelShape<3, 2, 1>>() ||
             channels_if_they_fit<Take, Index, ChannelShape<3, 2, 0>>();
    }
  }

  template <class Take, class Index, class Shape>
  bool channels_if_they_fit() const {
    using T = typename Take::Element;
    // As many as fit the registers: indices are up to eight times as large as values.
    constexpr int kMost = Shape::kDisjoint || kIsWindowOffset<Index> ? 8 : 4;
    constexpr int V = std::min<int>({8, kMost, kVectorBytes / sizeof(T)});
    const auto plan = make_channel_plan<Shape>(geometry(), V);
    if (plan_.wide || !aligned_ || !plan) {
      return false;
    }
    run_compiled<Take, Index>(
        maxunpool_cuda::forward_channels<Take, Index, V, Shape>, *plan, plan->items);
    return true;
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
    const int64_t counts[] = {
        tiles_of(depth, tile[0]), tiles_of(height, tile[1]), tiles_of(width, tile[2])};
    using T = typename Take::Element;
    run_first(
        1,
        maxunpool_cuda::forward_windows<Take, Offset>,
        make_tiling<Offset>(geometry(), tile, counts, geometry().inner),
        any_indices(),
        values<T>(),
        result<T>());
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
  std::array<int64_t, 3> reach_of_windows() const {
    std::array<int64_t, 3> reach{};
    for (int a = 0; a < 3 && arguments_.reduce != Reduce::sum; ++a) {
      const Axis<int64_t>& axis = geometry().axis[a];
      reach[a] = std::min((axis.kernel - 1) / axis.stride, axis.in);
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
        {{narrow(reach[0]), narrow(reach[1]), narrow(reach[2])}}};
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
        Position<uint64_t>{
            {static_cast<uint64_t>(reach[0]),
             static_cast<uint64_t>(reach[1]),
             static_cast<uint64_t>(reach[2])}},
        values<T>(),
        any_indices(),
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

  // What the first kernel has found stray. In global memory, for the rare, 64 bits will do.
  template <class T, class Index>
  void second() const {
    if constexpr (sizeof(T) <= sizeof(uint64_t) && !kIsWindowOffset<Index>) {
      if (plan_.shared) {
        redo<LastSlot<T, uint32_t>, uint32_t, true>(indices<Index>());
        return;
      }
    }
    redo<LastSlot<T, uint64_t>, uint64_t>(any_indices());
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

  template <class Slot, class Offset, bool kShared = false, class Indices>
  void redo(Indices indices) const {
    if (arguments_.index_type == c10::ScalarType::Byte) {
      return;
    }
    using T = typename Slot::Element;
    const auto run = [&](auto kernel, const auto&... reduce) {
      const int64_t bytes = kShared ? plan_.slot_bytes : 0;
      launch_.shared(
          kernel,
          SharedShape{plan_.blocks, plan_.slots, bytes, false},
          pieces<Offset>(),
          reduce...,
          values<T>(),
          indices,
          result<T>());
    };
    if constexpr (requires { &Slot::grad_input; }) {
      if (!arguments_.forward) {
        run(backward_stray<Slot, Indices, Offset, kShared>);
      }
    }
    if constexpr (!std::is_same_v<Slot, CountSlot<T, Offset>>) {
      if (arguments_.forward) {
        run(forward_stray<Slot, Indices, Offset, kShared>, arguments_.reduce);
      }
    }
  }

  const Launch& launch_;
  const Arguments& arguments_;
  const Plan& plan_;
  char* workspace_;
  const bool aligned_;
  mutable int64_t chunk_items_ = 0, planes_ = 1,
                  slab_items_ = 0; // of the first kernel's threads, and so many slabs'
};

} // namespace maxunpool_cuda
