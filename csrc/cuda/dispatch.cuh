// Choice of the kernels that a call of max unpooling runs. `Launch` does the launches, so that the
// choice can be tested without a GPU:
//   launch(kernel, items, arguments...)   a grid of any size, in blocks of Arguments::threads
//   launch.shared(kernel, shape, arguments...)   at most shape.blocks blocks, of any size
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
        workspace_(static_cast<char*>(workspace)) {}

  void run() const {
    with_index_type(arguments_.index_type, [&]<class Index>(std::type_identity<Index>) {
      arguments_.forward ? forward<Index>() : backward<Index>();
    });
  }

 private:
  template <class Index>
  void forward() const {
    std::optional<FlagLayout> flags;
    if (arguments_.reduce == Reduce::last || plan_.is_of_planes()) {
      with_bytes(arguments_.element_size, [&]<class T>(std::type_identity<T>) {
        compiled<CombineLast<T>, Index>(flags);
        if (!flags) {
          flags = plan_.is_64bit ? any_windows<CombineLast<T>, uint64_t>()
                                 : any_windows<CombineLast<T>, uint32_t>();
        }
        rewrite_stray_last<T, Index>(*flags);
      });
      return;
    }
    if (disjoint(geometry_) && !is_padded(geometry_) && !c10::isComplexType(arguments_.type)) {
      with_bytes(arguments_.element_size, [&]<class T>(std::type_identity<T>) {
        compiled<CombineLast<T>, Index>(flags); // an output has one element at most
      });
    }
    with_arithmetic_type(arguments_.type, [&]<class T>(std::type_identity<T>) {
      if constexpr (kIsFastSum<T>) { // what pooling's backward runs
        if (!flags && !plan_.is_64bit) {
          compiled<CombineSum<T>, Index>(flags);
          flags = flags ? flags : any_windows<CombineSum<T>, uint32_t>();
        }
      }
      flags = flags ? flags : any_windows<CombineSum<T>, uint64_t>();
      rewrite_stray<SumSlot<T>>(any_indices(), *flags);
    });
  }

  template <class Index>
  void backward() const {
    with_bytes(arguments_.element_size, [&]<class T>(std::type_identity<T>) {
      const FlagLayout flags = plan_.bands ? bands<T, Index>() : gather<T, Index>();
      if (arguments_.reduce == Reduce::last) {
        rewrite_stray_last<T, Index>(flags);
      }
    });
  }

  // Types with a kernel of their own for sums: those that networks are trained in.
  template <class T>
  static constexpr bool kIsFastSum =
      std::is_floating_point_v<Accumulator<T>> && sizeof(T) <= sizeof(float);

  // Launches a kernel compiled for these windows, or for bands, if there is one: the first that
  // fits.
  template <class Combine, class Index>
  void compiled(std::optional<FlagLayout>& flags) const {
    using T = typename Combine::Element;
    if constexpr (sizeof(T) <= sizeof(uint64_t)) {
      if (has_vectors(arguments_) && !plan_.is_64bit && !plan_.is_of_planes()) {
        if constexpr (Combine::kMoves) {
          rows<Combine, Index, RowShape<T, 2, 2, 0>>(flags);
          rows<Combine, Index, RowShape<T, 2, 2, 0, true>>(flags);
          channels<Combine, Index, ChannelShape<2, 2, 0>>(flags);
        }
        rows<Combine, Index, RowShape<T, 3, 2, 1>>(flags);
        channels<Combine, Index, ChannelShape<3, 2, 1>>(flags);
        channels<Combine, Index, ChannelShape<3, 2, 0>>(flags);
      }
      if constexpr (Combine::kMoves) {
        if (!flags && plan_.bands) {
          flags = bands<T, Index>();
        }
      }
    }
  }

  template <class Combine, class Index, class Shape>
  void rows(std::optional<FlagLayout>& flags) const {
    if (!flags) {
      flags = launch_if<Combine, Index>(
          forward_rows<Combine, Index, Shape>, tile_rows<Shape>(geometry_));
    }
  }

  template <class Combine, class Index, class Shape>
  void channels(std::optional<FlagLayout>& flags) const {
    // Channels of a thread, as fit the registers: indices are up to eight times as large as values.
    constexpr int kMost = Shape::kDisjoint || kIsWindowOffset<Index> ? 8 : 4;
    constexpr int V = std::min<int>(kMost, kVectorBytes / sizeof(typename Combine::Element));
    if (!flags) {
      flags = launch_if<Combine, Index>(
          forward_channels<Combine, Index, V, Shape>, tile_channels<Shape>(geometry_, V));
    }
  }

  // Launches the kernel if there is a tiling.
  template <class Combine, class Index, class Kernel>
  std::optional<FlagLayout> launch_if(
      Kernel* kernel, const std::optional<Tiling<uint32_t>>& tiling) const {
    using T = typename Combine::Element;
    if (!tiling) {
      return {};
    }
    return launch_items(
        kernel, *tiling, 1, negative_zero<T>(), values<T>(), indices<Index>(), result<T>());
  }

  // Launches a kernel of items, each of which is of so many slabs.
  template <class Kernel, class Offset, class... Rest>
  FlagLayout launch_items(
      Kernel* kernel, const Tiling<Offset>& tiling, int64_t slabs, const Rest&... rest) const {
    launch_(kernel, tiling.items, tiling, report(), rest...);
    const auto items = static_cast<int64_t>(tiling.items);
    return {arguments_.threads, items / divide_up(geometry_.outer, slabs), slabs};
  }

  // Launches a kernel of bands.
  template <class T, class Index>
  FlagLayout bands() const {
    const Bands& bands = plan_.bands->bands;
    if constexpr (sizeof(T) <= sizeof(uint64_t)) {
      const auto launch = [&](auto kernel, auto... zero) {
        launch_.shared(
            kernel, plan_.bands->shape, bands, report(), zero..., values<T>(), indices<Index>(),
            result<T>());
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

  template <class Combine, class Offset>
  FlagLayout any_windows() const {
    using T = typename Combine::Element;
    return launch_items(
        forward_windows<Combine, Offset>, tile_outputs<Offset>(geometry_), 1, any_indices(),
        values<T>(), result<T>());
  }

  template <class T, class Index>
  FlagLayout gather() const {
    if constexpr (sizeof(T) <= sizeof(uint64_t)) {
      if (!plan_.is_64bit) {
        const auto [d, h, w] = overlap_of<uint32_t>(geometry_, arguments_.reduce).at;
        return (d | h | w) != 0 ? gather_cells<T, Index, true>() : gather_cells<T, Index, false>();
      }
    }
    return gather_any<T>();
  }

  template <class T, class Index, bool kDropsLosers>
  FlagLayout gather_cells() const {
    const auto [tiling, plan] =
        make_gather_plan(geometry_, arguments_.reduce, kPlanesOfThread<kDropsLosers>);
    return launch_items(
        maxunpool_cuda::backward<T, Index, kDropsLosers>, tiling, plan.slabs, plan, values<T>(),
        indices<Index>(), result<T>());
  }

  template <class T>
  FlagLayout gather_any() const {
    return launch_items(
        backward_any<T>, tile_cells<uint64_t>(geometry_, geometry_.inner), 1,
        arguments_.reduce == Reduce::last, overlap_of<uint64_t>(geometry_, arguments_.reduce),
        values<T>(), any_indices(), result<T>());
  }

  // Launches the second kernel of "last". Slots in global memory are rare, so 64 bits will do.
  template <class T, class Index>
  void rewrite_stray_last(const FlagLayout& flags) const {
    if constexpr (sizeof(T) <= sizeof(uint64_t) && !kIsWindowOffset<Index>) {
      if (plan_.stray && plan_.stray->shared) {
        rewrite_stray<LastSlot<T, uint32_t>>(indices<Index>(), flags);
        return;
      }
    }
    rewrite_stray<LastSlot<T, uint64_t>>(any_indices(), flags);
  }

  // Launches the second kernel, if there is one.
  template <class Slot, class Indices>
  void rewrite_stray(Indices indices, const FlagLayout& flags) const {
    if (!plan_.stray) {
      return;
    }
    using T = typename Slot::Element;
    const auto launch = [&](auto kernel) {
      const auto pieces = make_pieces<typename Slot::Offset>(
          arguments_, *plan_.stray, flags, report().stray_flags, workspace_ + plan_.flags_bytes);
      launch_.shared(kernel, plan_.stray->shape, pieces, values<T>(), indices, result<T>());
    };
    if constexpr (requires { &Slot::grad_input; }) {
      if (!arguments_.forward) {
        launch(backward_stray<Slot, Indices>);
      }
    }
    if (arguments_.forward) {
      launch(forward_stray<Slot, Indices>);
    }
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
  // Argument of add_to_zero.
  template <class T>
  T negative_zero() const {
    if constexpr (std::is_unsigned_v<T>) {
      const bool sums = arguments_.reduce == Reduce::sum && c10::isFloatingType(arguments_.type);
      return sums ? T{1} << (8 * sizeof(T) - 1) : T{};
    } else {
      return T{};
    }
  }
  // Report of the first kernel. Without a second one there are no stray flags.
  Report report() const {
    return {plan_.stray ? reinterpret_cast<uint32_t*>(workspace_) : nullptr, arguments_.error};
  }

  const Launch& launch_;
  const Arguments& arguments_;
  const Geometry<int64_t>& geometry_;
  const Plan& plan_;
  char* workspace_;
};

} // namespace maxunpool_cuda
