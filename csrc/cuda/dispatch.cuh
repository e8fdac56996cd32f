// Choice of the kernels that a call of max unpooling runs. `Launch` does the launches, so that the
// choice can be tested without a GPU:
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
#include "report.cuh"
#include "stray.cuh"
#include "unpool_plan.cuh"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

namespace maxunpool_cuda {

template <class Launch>
class Dispatch {
 public:
  Dispatch(const Launch& launch, const Arguments& arguments, const Plan& plan, void* workspace)
      : launch_(launch),
        arguments_(arguments),
        geometry_(arguments.geometry),
        plan_(plan),
        workspace_(static_cast<char*>(workspace)),
        aligned_(has_vectors(arguments)) {}

  void run() const {
    with_index_type(arguments_.index_type, [&]<class Index>(std::type_identity<Index>) {
      arguments_.forward ? forward<Index>() : backward<Index>();
    });
  }

 private:
  // Chunks of a first kernel, as the second has to know them: see StrayNotes.
  struct Chunks {
    int64_t items, slab_items, slabs;
  };

  template <class Index>
  void forward() const {
    const bool last = arguments_.reduce == Reduce::last;
    if (last || plan_.is_of_planes()) {
      with_bytes(arguments_.element_size, [&]<class T>(std::type_identity<T>) {
        std::optional<Chunks> chunks = compiled<TakeLast<T>, Index>();
        if (!chunks) {
          chunks = plan_.wide ? any_windows<TakeLast<T>, uint64_t>()
                              : any_windows<TakeLast<T>, uint32_t>();
        }
        second<T, Index>(*chunks);
      });
      return;
    }
    const Chunks chunks = sum<Index>();
    with_arithmetic_type(arguments_.type, [&]<class T>(std::type_identity<T>) {
      redo<SumSlot<T, uint64_t>, uint64_t>(any_indices(), chunks);
    });
  }

  template <class Index>
  void backward() const {
    if (arguments_.reduce == Reduce::mean) {
      with_arithmetic_type(arguments_.type, [&]<class T>(std::type_identity<T>) {
        redo<CountSlot<T, uint64_t>, uint64_t>(any_indices(), gather_any<T, true>());
      });
      return;
    }
    with_bytes(arguments_.element_size, [&]<class T>(std::type_identity<T>) {
      const Chunks chunks = plan_.bands ? bands<T, Index>() : gather<T, Index>();
      if (arguments_.reduce == Reduce::last) {
        second<T, Index>(chunks);
      }
    });
  }

  // Launches the first kernel of "sum" and "mean".
  template <class Index>
  Chunks sum() const {
    std::optional<Chunks> chunks;
    if (disjoint(geometry_) && !is_padded(geometry_) && !c10::isComplexType(arguments_.type)) {
      with_bytes(arguments_.element_size, [&]<class T>(std::type_identity<T>) {
        chunks = compiled<TakeLast<T>, Index>(); // an output has one element at most
      });
    }
    with_arithmetic_type(arguments_.type, [&]<class T>(std::type_identity<T>) {
      if constexpr (kIsFastSum<T>) { // what pooling's backward runs
        if (!chunks && arguments_.reduce == Reduce::sum && !plan_.wide) {
          chunks = compiled<TakeSum<T>, Index>();
          chunks = chunks ? chunks : any_windows<TakeSum<T>, uint32_t>();
        }
      }
      chunks = chunks ? chunks : any_windows<TakeCounted<T>, uint64_t>();
    });
    return *chunks;
  }

  // Types with a kernel of their own for sums: those that networks are trained in.
  template <class T>
  static constexpr bool kIsFastSum =
      std::is_floating_point_v<Accumulator<T>> && sizeof(T) <= sizeof(float);

  // Launches a kernel compiled for these windows, or for bands. Empty: there is none.
  template <class Take, class Index>
  std::optional<Chunks> compiled() const {
    using T = typename Take::Element;
    if constexpr (sizeof(T) <= sizeof(uint64_t)) {
      std::optional<Chunks> chunks;
      if (aligned_ && !plan_.wide && !plan_.is_of_planes()) {
        const auto found = [&](std::optional<Chunks> tried) {
          return (chunks = tried).has_value();
        };
        if constexpr (Take::kMoves) {
          if (found(rows<Take, Index, RowShape<T, 2, 2, 0>>()) ||
              found(rows<Take, Index, RowShape<T, 2, 2, 0, true>>()) ||
              found(channels<Take, Index, ChannelShape<2, 2, 0>>())) {
            return chunks;
          }
        }
        if (found(rows<Take, Index, RowShape<T, 3, 2, 1>>()) ||
            found(channels<Take, Index, ChannelShape<3, 2, 1>>()) ||
            found(channels<Take, Index, ChannelShape<3, 2, 0>>())) {
          return chunks;
        }
      }
      if constexpr (Take::kMoves) {
        if (plan_.bands) {
          return bands<T, Index>();
        }
      }
    }
    return {};
  }

  template <class Take, class Index, class Shape>
  std::optional<Chunks> rows() const {
    return launch_if<Take, Index>(
        forward_rows<Take, Index, Shape>, make_row_plan<Shape>(geometry_));
  }

  template <class Take, class Index, class Shape>
  std::optional<Chunks> channels() const {
    // Channels of a thread, as fit the registers: indices are up to eight times as large as values.
    constexpr int kMost = Shape::kDisjoint || kIsWindowOffset<Index> ? 8 : 4;
    constexpr int V = std::min<int>(kMost, kVectorBytes / sizeof(typename Take::Element));
    return launch_if<Take, Index>(
        forward_channels<Take, Index, V, Shape>, make_channel_plan<Shape>(geometry_, V));
  }

  // Launches the kernel if there is a plan.
  template <class Take, class Index, class Kernel, class First>
  std::optional<Chunks> launch_if(Kernel kernel, const std::optional<First>& plan) const {
    using T = typename Take::Element;
    if (!plan) {
      return {};
    }
    return launch_items(
        kernel, *plan, 1, negative_zero<T>(), values<T>(), indices<Index>(), result<T>());
  }

  // Launches a kernel of items, each of which spans so many slabs.
  template <class Kernel, class First, class... Rest>
  Chunks launch_items(Kernel kernel, const First& plan, int64_t slabs, const Rest&... rest) const {
    launch_(kernel, plan.items, plan, report(), rest...);
    const auto items = static_cast<int64_t>(plan.items);
    return {arguments_.threads, items / divide_up(geometry_.outer, slabs), slabs};
  }

  // Launches a kernel of bands.
  template <class T, class Index>
  Chunks bands() const {
    const Bands& bands = plan_.bands->bands;
    if constexpr (sizeof(T) <= sizeof(uint64_t)) {
      const SharedShape shape{
          bands.count, plan_.bands->threads * SharedShape::kSlotsPerThread, plan_.bands->bytes,
          true};
      const auto launch = [&](auto kernel, auto... zero) {
        launch_.shared(
            kernel, shape, bands, report(), zero..., values<T>(), indices<Index>(), result<T>());
      };
      constexpr bool kOffsets = kIsWindowOffset<Index>;
      if (!arguments_.forward) {
        if constexpr (!kOffsets) {
          launch(backward_bands<T, Index>);
        }
      } else if (!kOffsets || !disjoint(geometry_)) {
        launch(forward_bands<T, Index, true>, negative_zero<T>());
      } else if constexpr (kOffsets) {
        launch(forward_bands<T, Index, false>, negative_zero<T>());
      }
    }
    return {1, bands.count / geometry_.outer, 1};
  }

  // Launches forward_windows.
  template <class Take, class Offset>
  Chunks any_windows() const {
    using T = typename Take::Element;
    return launch_items(
        forward_windows<Take, Offset>, make_tiling_of_outputs<Offset>(geometry_), 1,
        arguments_.reduce, any_indices(), values<T>(), result<T>());
  }

  template <class T, class Index>
  Chunks gather() const {
    if constexpr (sizeof(T) <= sizeof(uint64_t)) {
      if (!plan_.wide) {
        const auto [d, h, w] = meeting_windows<uint32_t>(geometry_, arguments_.reduce).at;
        return (d | h | w) != 0 ? gather_cells<T, Index, true>() : gather_cells<T, Index, false>();
      }
    }
    return gather_any<T, false>();
  }

  template <class T, class Index, bool kLooks>
  Chunks gather_cells() const {
    const auto [tiling, gather] =
        make_gather(geometry_, arguments_.reduce, kPlanesOfThread<kLooks>);
    return launch_items(
        maxunpool_cuda::backward<T, Index, kLooks>, tiling, gather.slabs, gather, values<T>(),
        indices<Index>(), result<T>());
  }

  // Launches backward_any.
  template <class T, bool kMean>
  Chunks gather_any() const {
    return launch_items(
        backward_any<T, kMean>, make_tiling_of_cells<uint64_t>(geometry_, geometry_.inner), 1,
        arguments_.reduce != Reduce::sum, meeting_windows<uint64_t>(geometry_, arguments_.reduce),
        values<T>(), any_indices(), result<T>());
  }

  // Launches the second kernel. Slots in global memory are rare, so 64 bits will do for them.
  template <class T, class Index>
  void second(const Chunks& chunks) const {
    if constexpr (sizeof(T) <= sizeof(uint64_t) && !kIsWindowOffset<Index>) {
      if (plan_.stray && plan_.stray->shared) {
        redo<LastSlot<T, uint32_t>, uint32_t, true>(indices<Index>(), chunks);
        return;
      }
    }
    redo<LastSlot<T, uint64_t>, uint64_t>(any_indices(), chunks);
  }

  template <class Slot, class Offset, bool kShared = false, class Indices>
  void redo(Indices indices, const Chunks& chunks) const {
    if (!plan_.stray) {
      return;
    }
    using T = typename Slot::Element;
    const auto launch = [&](auto kernel, const auto&... reduce) {
      const int64_t bytes = kShared ? plan_.stray->slot_bytes : 0;
      launch_.shared(
          kernel, SharedShape{plan_.stray->blocks, plan_.stray->slots, bytes, false},
          pieces<Offset>(*plan_.stray, chunks), reduce..., values<T>(), indices, result<T>());
    };
    if constexpr (requires { &Slot::grad_input; }) {
      if (!arguments_.forward) {
        launch(backward_stray<Slot, Indices, Offset, kShared>);
      }
    }
    if constexpr (!std::is_same_v<Slot, CountSlot<T, Offset>>) {
      if (arguments_.forward) {
        launch(forward_stray<Slot, Indices, Offset, kShared>, arguments_.reduce);
      }
    }
  }

  template <class Offset>
  Pieces<Offset> pieces(const StrayPlan& plan, const Chunks& chunks) const {
    return {
        {report().stray, divider<Offset>(chunks.items), divider<Offset>(chunks.slabs),
         static_cast<Offset>(chunks.slab_items)},
        sums_in_order(),
        static_cast<Offset>(plan.pieces),
        divider<Offset>(plan.channels),
        divider<Offset>(plan.groups),
        divider<Offset>(plan.parts),
        static_cast<Offset>(geometry_.in_plane()),
        static_cast<Offset>(geometry_.out_plane()),
        static_cast<Offset>(geometry_.inner),
        static_cast<Offset>(plan.part),
        workspace_ + plan_.notes_bytes,
        static_cast<uint64_t>(plan.slot_bytes)};
  }

  // Whether one thread adds up a plane. Else atomics add floating-point numbers, in any order.
  bool sums_in_order() const {
    return arguments_.forward && arguments_.reduce != Reduce::last &&
           (arguments_.deterministic || !c10::isFloatingType(arguments_.type));
  }
  bool are_offsets() const { return arguments_.index_type == c10::ScalarType::Byte; }

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
  // Argument of add_to_zero.
  template <class T>
  T negative_zero() const {
    if constexpr (std::is_unsigned_v<T>) {
      const bool sums = arguments_.reduce != Reduce::last && c10::isFloatingType(arguments_.type);
      return sums ? T{1} << (8 * sizeof(T) - 1) : T{};
    } else {
      return T{};
    }
  }
  // Report of a first kernel. Window offsets cannot be stray.
  Report report() const {
    return {are_offsets() ? nullptr : reinterpret_cast<uint32_t*>(workspace_), arguments_.error};
  }

  const Launch& launch_;
  const Arguments& arguments_;
  const Geometry<int64_t>& geometry_;
  const Plan& plan_;
  char* workspace_;
  const bool aligned_;
};

} // namespace maxunpool_cuda
