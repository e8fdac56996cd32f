// SPDX-License-Identifier: BSD-3-Clause
// Parts: the outputs that a block of slots.cuh owns, and the cells that may name them.
//
// A plane that is too large for one block's shared memory has several parts:
//
//     a plane's outputs  |---- part 0 ----|---- part 1 ----|-- 2 --|
//     its cells             [ those whose windows reach into part 0 ]   in a fast kernel
//                        [ all of them ]                                in a fix-up kernel
//
// Planes that lie beside each other in memory form a group, and a part has the same positions in
// all planes of a group. Small planes of a contiguous tensor form groups, so that a block has
// enough to do. Channels of a channels_last tensor form groups, so that neighbouring threads access
// neighbours. Example: three planes of 2x2 outputs. The number of a slot tells its output:
//
//     contiguous                  channels_last
//     plane     0 0 0 0 1 1 ..    plane     0 1 2 0 1 2 0 ..
//     position  0 1 2 3 0 1 ..    position  0 0 0 1 1 1 2 ..
//     slot      0 1 2 3 4 5 ..    slot      0 1 2 3 4 5 6 ..
//
// The host computes the numbers of Parts once for a call; Cut decides how large groups and parts
// are. With a Part, the threads of a block find their cells and outputs.
//
// From other files: geometry.h defines planes and windows, indices.cuh decodes an index,
// divider.cuh divides by numbers that the host knows, and report.cuh has the flags by which the
// fast kernel tells the fix-up kernel which images to do again.
#pragma once

#include "../geometry.h"
#include "device.cuh"
#include "divider.cuh"
#include "indices.cuh"
#include "report.cuh"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <type_traits>

namespace maxunpool_cuda {

// The parts of a call. Offset is uint32_t if fits_32bit() holds for the geometry, else uint64_t.
// Example: 4-byte slots and planes of 56x56 cells and 112x112 = 12544 outputs, which have two parts
// if contiguous. With 64 channels in channels_last, 8 of them form a group, of 13 parts.
//
//                      contiguous   channels_last
//   cell_columns             3136               8    see Part::place
//   output_columns          12544               8
//   groups_of_image             1               8
//   channels_of_group           1               8
//   next_pooled              3136               1
//   outputs                  6272             965
//   parts_of_group              2              13
template <class Offset>
struct Parts {
  Decoder<Offset> decoder;
  Divider<Offset> strides[3]; // of windows
  Divider<Offset> in_height;  // of the pooled plane
  Divider<Offset> in_width;
  Divider<Offset> cell_columns; // see Part::place
  Divider<Offset> output_columns;
  Divider<Offset> groups_of_image;
  Offset images_of_group;   // one of these two is 1, and
  Offset channels_of_group; // their product is how many planes a group has
  Offset groups;
  Offset next_pooled; // from a plane's elements to those of the next plane of its group
  Offset next_output; // the same in the unpooled tensor
  Offset outputs;     // positions of a part; the last part of a group may have fewer
  Offset parts_of_group;
  Offset cells;   // without slots: positions of a part, which is a range of cells; else 0
  bool all_cells; // with slots: a part looks at all cells of its planes; else see Part::edge
  bool is_fixup;
  OutOfWindowFlags out_of_window_flags; // of the fast kernel, if this is the fix-up kernel

  int64_t shared_bytes; // of a block

  // Parts with slots of so many bytes; 0: without slots, so a part may be any range of cells.
  // `flags`: of the fast kernel, for its fix-up kernel; else null.
  Parts(const Geometry<int64_t>& geometry, int64_t slot_bytes, const OutOfWindowFlags* flags);

  // How many threads a block has: whole warps, with a thread for each cell of a group or for each 8
  // outputs of a part, whichever gives more, but no more than `most`.
  int64_t threads(int64_t most) const {
    constexpr int64_t kWarp = 32;
    constexpr int64_t kOutputsOfThread = 8;
    const auto planes = static_cast<int64_t>(images_of_group * channels_of_group);
    const auto outputs_of_plane = static_cast<int64_t>(outputs);
    const auto cells_of_plane = static_cast<int64_t>(decoder.in_plane);
    const int64_t work = std::max(cells_of_plane, divide_up(outputs_of_plane, kOutputsOfThread));
    return std::min(divide_up(work * planes, kWarp) * kWarp, most);
  }
  // Slots of the largest part.
  MAXUNPOOL_HOST_DEVICE Offset most_slots() const {
    return outputs * images_of_group * channels_of_group;
  }
  // Whether an image of the group is flagged, of the flags that this thread reads.
  __device__ bool has_flag(Offset group) const {
    Offset image = groups_of_image.divide(group) * images_of_group;
    const Offset end = std::min(image + images_of_group, decoder.geometry.outer);
    bool found = false;
    for (; image < end; ++image) {
      found |= out_of_window_flags.any(image);
    }
    return found;
  }
};

// How the planes of a call form groups, and planes parts. Examples, with room for 8192 outputs, as
// 4-byte slots have it, and a pooled plane a quarter of the output plane:
//
//   output plane, layout            channels  images  part_outputs
//   112x112, contiguous                    1       1          6272  2 equal parts
//   14x14, contiguous                      1      10           196  2048 / 196 images
//   112x112, 64 channels                   8       1           965  13 parts of about equal size
//   4x4, 64 channels                      64       1            16  8 channels, doubled 3 times
//   112x112, 64, whole_planes              1       1          6272  8 channels, halved 3 times
struct Cut {
  int64_t channels;     // of a group
  int64_t images;       // of a group; 1, if channels is not
  int64_t part_outputs; // positions of a part

  // At most `room` outputs in a part. `whole_planes`: rather fewer channels in a group than several
  // parts, since every part of a fix-up kernel looks at all cells of its planes.
  Cut(const Geometry<int64_t>& geometry, int64_t room, bool whole_planes) {
    constexpr int64_t kChannels = 8;  // whose elements, of float, fill a sector of memory
    constexpr int64_t kEnough = 2048; // cells or outputs of small planes, for 256 threads
    const int64_t out_plane = geometry.out_plane();
    const int64_t positions = std::max(geometry.in_plane(), out_plane);
    channels = std::gcd(geometry.inner, kChannels); // 1, 2, 4 or 8
    while (geometry.inner % (2 * channels) == 0 && 2 * channels * positions <= kEnough) {
      channels *= 2;
    }
    while (channels % 2 == 0 && channels * (whole_planes ? out_plane : 1) > room) {
      channels /= 2;
    }
    const int64_t most_outputs = std::clamp<int64_t>(room / channels, 1, out_plane);
    part_outputs = divide_up(out_plane, divide_up(out_plane, most_outputs)); // about equal parts
    images = 1; // only whole contiguous planes form groups of several images
    if (geometry.inner == 1 && part_outputs == out_plane) {
      const int64_t fitting = std::min(room / out_plane, kEnough / positions);
      images = std::clamp<int64_t>(fitting, 1, geometry.outer);
    }
  }
};

template <class Offset>
Parts<Offset>::Parts(
    const Geometry<int64_t>& geometry, int64_t slot_bytes, const OutOfWindowFlags* flags)
    : decoder(geometry),
      in_height(geometry.axis[1].in),
      in_width(geometry.axis[2].in),
      is_fixup(flags != nullptr),
      out_of_window_flags(is_fixup ? *flags : OutOfWindowFlags{}) {
  const bool by_cells = slot_bytes == 0;
  const int64_t room = kSharedBytes / (by_cells ? int64_t{sizeof(uint32_t)} : slot_bytes);
  const Cut cut(geometry, room, is_fixup);
  const int64_t in_plane = geometry.in_plane();
  const int64_t out_plane = geometry.out_plane();
  const int64_t parts = divide_up(out_plane, cut.part_outputs);
  const int64_t groups_together = geometry.inner / cut.channels;
  const auto offset = [](int64_t n) { return static_cast<Offset>(n); };
  cell_columns = Divider<Offset>(cut.channels > 1 ? cut.channels : in_plane);
  output_columns = Divider<Offset>(cut.channels > 1 ? cut.channels : out_plane);
  groups_of_image = Divider<Offset>(groups_together);
  images_of_group = offset(cut.images);
  channels_of_group = offset(cut.channels);
  groups = offset(divide_up(geometry.outer, cut.images) * groups_together);
  next_pooled = offset(cut.channels > 1 ? 1 : in_plane);
  next_output = offset(cut.channels > 1 ? 1 : out_plane);
  outputs = offset(cut.part_outputs);
  parts_of_group = offset(parts);
  cells = offset(by_cells ? divide_up(in_plane, parts) : 0);
  shared_bytes = cut.part_outputs * cut.channels * cut.images * slot_bytes;
  all_cells = is_fixup || parts == 1;
  for (int a = 0; a < 3; ++a) {
    const Axis<int64_t>& axis = geometry.axis[a];
    strides[a] = Divider<Offset>(axis.stride);
    // The index of a window that covers no output is checked all the same.
    all_cells |=
        axis.padding >= axis.kernel || (axis.in - 1) * axis.stride - axis.padding >= axis.out;
  }
}

// A cell or an output of a part.
template <class Offset>
struct Place {
  Offset position; // in its plane
  Offset plane;    // of the part's planes
};

// A cell, and its index as it was loaded.
template <class Offset>
struct LoadedCell {
  Place<Offset> cell;
  uint64_t index; // not extended by its sign
};

// Whether an index that a thread has decoded was out of window, or out of bounds.
struct Noted {
  bool out_of_window = false;
  bool out_of_bounds = false;
};

// A part, as the threads of its block see it.
template <class Offset>
class Part {
 public:
  Offset planes;
  Offset first_output; // of the positions that it owns
  Offset outputs;      // how many these are
  Offset first_cell;   // of the cells that it looks at, by their positions
  Offset cells;        // how many these are

  __device__ Part(const Parts<Offset>& parts, Offset group, Offset number) : parts_(parts) {
    const Geometry<Offset>& geometry = parts.decoder.geometry;
    Offset channel = group; // after the next two lines: the group's first channel
    const Offset image = split(channel, parts.groups_of_image) * parts.images_of_group;
    channel *= parts.channels_of_group;
    const Offset images = smaller(parts.images_of_group, geometry.outer - image);
    planes = images * parts.channels_of_group;
    first_pooled_ = image * parts.decoder.in_plane * geometry.inner + channel;
    first_unpooled_ = image * parts.decoder.out_plane * geometry.inner + channel;
    first_output = number * parts.outputs;
    outputs = smaller(parts.outputs, parts.decoder.out_plane - first_output);
    first_cell = 0;
    cells = parts.decoder.in_plane;
    if (parts.cells != 0) { // without slots
      first_cell = smaller(number * parts.cells, cells);
      cells = smaller(parts.cells, cells - first_cell);
    } else if (!parts.all_cells) {
      const Offset last_output = first_output + outputs - 1;
      first_cell = edge(first_output, last_output, false);
      const Offset end = edge(last_output, first_output, true);
      cells = first_cell < end ? end - first_cell : 0;
    }
  }

  // Cells and outputs have numbers in the part, from 0 on; an output's is its slot's.
  __device__ Offset cell_count() const { return cells * planes; }
  __device__ Offset slot_count() const { return outputs * planes; }
  __device__ Place<Offset> cell(Offset number) const {
    return place(number, first_cell, parts_.cell_columns);
  }
  __device__ Place<Offset> output(Offset slot) const {
    return place(slot, first_output, parts_.output_columns);
  }
  // The slot of an output of the part.
  __device__ Offset slot(const Place<Offset>& output) const {
    return (output.position - first_output) * parts_.channels_of_group +
           output.plane * parts_.next_output;
  }

  // Numbers of elements, in their tensors.
  __device__ Offset pooled(const Place<Offset>& cell) const {
    return first_pooled_ + cell.position * parts_.decoder.geometry.inner +
           cell.plane * parts_.next_pooled;
  }
  __device__ Offset unpooled(const Place<Offset>& output) const {
    return first_unpooled_ + output.position * parts_.decoder.geometry.inner +
           output.plane * parts_.next_output;
  }

  __device__ LoadedCell<Offset> load_cell(const AnyIndices& indices, Offset number) const {
    const Place<Offset> place = cell(number);
    return {place, indices.raw(pooled(place))};
  }
  // What a cell's index names.
  __device__ Decoded<Offset> decode(
      const AnyIndices& indices, uint64_t index, const Position<Offset>& start) const {
    const Decoder<Offset>& decoder = parts_.decoder;
    const Offset narrowed = narrow(indices, index);
    return indices.are_offsets() ? decoded<true>(decoder, narrowed, start)
                                 : decoded<false>(decoder, narrowed, start);
  }
  // The position of the output that a cell's index names, or a number beyond the plane.
  __device__ Offset target(const AnyIndices& indices, const LoadedCell<Offset>& loaded) const {
    if (!indices.are_offsets()) {
      return narrow(indices, loaded.index);
    }
    return decode(indices, loaded.index, window_start(loaded.cell)).target;
  }
  // As target(), and notes where the index leads. The fix-up kernel does not ask whether it leads
  // out of its window.
  __device__ Offset
  noted_target(const AnyIndices& indices, const LoadedCell<Offset>& loaded, Noted& noted) const {
    if (parts_.is_fixup) {
      const Offset position = target(indices, loaded);
      noted.out_of_bounds |= !is_in_plane(position);
      return position;
    }
    return noted_decode(indices, loaded, window_start(loaded.cell), noted).target;
  }
  // As decode(), and notes where the index leads.
  __device__ Decoded<Offset> noted_decode(
      const AnyIndices& indices,
      const LoadedCell<Offset>& loaded,
      const Position<Offset>& start,
      Noted& noted) const {
    const Decoded<Offset> found = decode(indices, loaded.index, start);
    noted.out_of_bounds |= !found.in_plane;
    noted.out_of_window |= found.in_plane && !found.in_window;
    return found;
  }

  // Both return false for what target() returns for an index that is out of bounds.
  __device__ bool is_in_plane(Offset position) const { return position < parts_.decoder.out_plane; }
  __device__ bool holds(Offset position) const { return position - first_output < outputs; }
  __device__ Position<Offset> window_start(const Place<Offset>& cell) const {
    return parts_.decoder.window_start(
        coordinates(cell.position, parts_.in_height, parts_.in_width));
  }
  // Whether the part holds the output where a window begins, after it was clipped.
  __device__ bool holds_start(const Position<Offset>& start) const {
    Offset position = 0;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      const Offset out = parts_.decoder.geometry.axis[a].out;
      const bool is_before = static_cast<std::make_signed_t<Offset>>(start[a]) < 0;
      const Offset clipped = is_before ? 0 : smaller(start[a], out - 1);
      position = position * out + clipped;
    }
    return holds(position);
  }
  // Coordinates of an output's position.
  __device__ Position<Offset> coordinates(Offset position) const {
    return coordinates(position, parts_.decoder.out_height, parts_.decoder.out_width);
  }
  // The position of the last cell, in row-major order, whose window covers an output. It may lie
  // beyond the plane.
  __device__ Offset last_covering(const Place<Offset>& output) const {
    const Position<Offset> at = coordinates(output.position);
    Offset cell = 0;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      if (a == 0 && !parts_.decoder.deep) {
        continue;
      }
      const Axis<Offset>& axis = parts_.decoder.geometry.axis[a];
      cell = cell * axis.in + parts_.strides[a].divide(at[a] + axis.padding);
    }
    return cell;
  }

 private:
  // Coordinates of a position in a plane of that height and width.
  __device__ Position<Offset> coordinates(
      Offset position, const Divider<Offset>& height, const Divider<Offset>& width) const {
    Position<Offset> at{{0, 0, position}};
    at[1] = split(at[2], width);
    if (parts_.decoder.deep) {
      at[0] = split(at[1], height);
    }
    return at;
  }
  __device__ static Offset smaller(Offset a, Offset b) { return a < b ? a : b; }

  // The place of a cell or an output, from its number in the part. `columns` is parts_.cell_columns
  // or parts_.output_columns. The table at the top of this file has
  //   contiguous      number = plane * columns + position, and columns is the size of a plane;
  //   channels_last   number = position * columns + plane, and columns is the channels of a group.
  __device__ Place<Offset> place(
      Offset number, Offset first_position, const Divider<Offset>& columns) const {
    if (planes == 1) { // saves most of the work
      return {first_position + number, 0};
    }
    Offset column = number;
    const Offset row = split(column, columns);
    const bool channels = parts_.channels_of_group > 1;
    return {first_position + (channels ? row : column), channels ? column : row};
  }

  // An index that AnyIndices::raw() returned. An index below 0 becomes a number beyond all planes.
  __device__ static Offset narrow(const AnyIndices& indices, uint64_t raw) {
    if (sizeof(Offset) == sizeof(raw) && indices.bytes == sizeof(int32_t)) {
      return static_cast<Offset>(static_cast<int32_t>(raw));
    }
    return index_as<Offset>(raw);
  }

  // Begin or end, as cell positions, of the cells whose windows may reach into the part. For the
  // begin, `own_end` is the part's first position, and `other_end` its last one; for the end, it is
  // the other way round. Examples, of 3x3 windows with stride 1 and no padding, so that cell (y, x)
  // covers rows y to y + 2:
  //   part (3, 2) to (3, 5): begins with cell (1, 0), whose window ends at (3, 2);
  //                          ends after cell (3, 5), whose window begins there;
  //   part (3, 2) to (4, 1): cells (1, 0) to (4, last), as rows differ, and so columns may be any.
  __device__ Offset edge(Offset own_end, Offset other_end, bool is_end) const {
    const Decoder<Offset>& decoder = parts_.decoder;
    const auto nearest = coordinates(own_end);
    const auto opposite = coordinates(other_end);
    bool equal = true; // the part lies at one coordinate in each dimension before `a`
    Offset cell = 0;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      const Axis<Offset>& axis = decoder.geometry.axis[a];
      const Offset shifted = nearest[a] + axis.padding;
      const Offset last = axis.in - 1;
      Offset coordinate = is_end ? last : 0; // if not `equal`, any may be needed
      if (equal && is_end) {                 // the last window that begins at nearest[a] or before
        coordinate = smaller(parts_.strides[a].divide(shifted), last);
      } else if (equal && shifted >= axis.kernel) {
        // The first window that ends behind nearest[a]; axis.in, if no window does.
        coordinate = parts_.strides[a].divide(shifted - axis.kernel) + 1;
      }
      cell = cell * axis.in + coordinate;
      equal = equal && nearest[a] == opposite[a];
    }
    return cell + (is_end ? 1 : 0);
  }

  const Parts<Offset>& parts_;
  Offset first_pooled_;   // number of the first plane's first element in the pooled tensor
  Offset first_unpooled_; // and in the unpooled one
};

} // namespace maxunpool_cuda
