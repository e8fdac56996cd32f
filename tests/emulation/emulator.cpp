// Runs calls that come on standard input through the CUDA kernels, as the dispatch chooses them,
// and writes the results and the kernels' names to standard output. test_emulation.py speaks the
// other end of the protocol.
#include "arrays.h"
#include "cuda_shim.h"

#include "../../csrc/cuda/dispatch.cuh"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

using namespace maxunpool_cuda;

// One call; all fields are int64, in this order.
struct Request {
  int64_t forward, reduce, deterministic, type, index_type, element_size;
  int64_t narrow, slot_bytes, shared_bytes, small_bytes, small_plane; // the limits
  int64_t blocks, threads, seed;
  int64_t misaligned;         // elements the arrays start past a vector's alignment
  int64_t skip_barriers;      // seeds a race
  int64_t missing_bytes;      // seeds writes past the end of the result, which is so much shorter
  Geometry<int64_t> geometry; // its rank is padded to eight bytes
};

struct Launch {
  const Request& request;
  uint64_t* items;      // of the first kernel
  std::string* kernels; // the mangled name of each, on a line

  template <class... Parameters>
  void operator()(
      void (*kernel)(Parameters...), uint64_t count,
      const std::type_identity_t<Parameters>&... arguments) const {
    *items = count;
    run(kernel, request.blocks, 0, arguments...);
  }
  template <class... Parameters>
  void shared(
      void (*kernel)(Parameters...), const BlockShape& shape,
      const std::type_identity_t<Parameters>&... arguments) const {
    run(kernel, std::min(request.blocks, shape.blocks), shape.shared_bytes, arguments...);
  }

 private:
  template <class... Parameters>
  void run(
      void (*kernel)(Parameters...), int64_t blocks, size_t shared_bytes,
      const std::type_identity_t<Parameters>&... arguments) const {
    *kernels += name_of(reinterpret_cast<const void*>(kernel)) + "\n";
    shim::launch(
        kernel, static_cast<unsigned>(blocks), static_cast<unsigned>(request.threads), shared_bytes,
        static_cast<unsigned>(request.seed), arguments...);
  }
};

void run(const Request& request) {
  const Geometry<int64_t>& g = request.geometry;
  const size_t index_size = c10::elementSize(static_cast<c10::ScalarType>(request.index_type));
  const size_t pooled = g.outer * g.in_slab(), unpooled = g.outer * g.out_slab();
  const size_t values_size = (request.forward ? pooled : unpooled) * request.element_size;
  const size_t result_size = (request.forward ? unpooled : pooled) * request.element_size;
  const Array values(values_size, request.misaligned * request.element_size);
  const Array indices(pooled * index_size, request.misaligned * index_size);
  const Array result(
      result_size - request.missing_bytes, request.misaligned * request.element_size);
  read(values.data(), values_size);
  read(indices.data(), pooled * index_size);

  ErrorRecord error{};
  const Array ready(sizeof(uint32_t), 0);
  error.ready = new (ready.data()) uint32_t{0};
  const Arguments arguments{
      {g, static_cast<Reduce>(request.reduce), request.forward != 0,
       static_cast<c10::ScalarType>(request.type), static_cast<c10::ScalarType>(request.index_type),
       static_cast<size_t>(request.element_size), values.data(), indices.data(), result.data()},
      request.deterministic != 0,
      &error,
      {request.narrow, request.slot_bytes, request.shared_bytes, request.small_bytes,
       request.small_plane},
      request.threads,
      request.blocks};
  const Plan plan(arguments);
  const Array workspace(plan.bytes, 0);
  shim::skip_barriers = request.skip_barriers != 0;
  uint64_t items = 0;
  std::string kernels;
  const Launch launch{request, &items, &kernels};
  Dispatch(launch, arguments, plan, workspace.data()).run();

  const int64_t reported[] = {
      *error.ready,
      error.index,
      error.position,
      error.plane,
      static_cast<int64_t>(items),
      static_cast<int64_t>(kernels.size())};
  std::fwrite(reported, 1, sizeof(reported), stdout);
  std::fwrite(kernels.data(), 1, kernels.size(), stdout);
  std::fwrite(result.data(), 1, result_size - request.missing_bytes, stdout);
}

} // namespace

int main() {
  for_each_request<Request>(run);
}
