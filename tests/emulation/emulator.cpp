// Runs calls that come on standard input through the CUDA kernels, as the dispatch chooses them,
// and writes the results and the kernels' names to standard output. test_emulation.py speaks the
// other end of the protocol. Compiled for unpooling or, with POOLING, for max pooling.
#include "cuda_shim.h"

#ifdef POOLING
#include "../../csrc/cuda/max_pool.cuh"
#else
#include "../../csrc/cuda/dispatch.cuh"
#endif
#include "../../csrc/cuda/limits.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace maxunpool_cuda {
namespace {

// One call. Every field is a 64-bit number, or padded to one.
struct Request {
  Geometry<int64_t> geometry;
  int64_t dilation[3];
  int64_t forward, reduce, deterministic, type, index_type;
  Limits limits;
  int64_t blocks, threads, seed;
  int64_t misaligned;    // elements the arrays start past a vector's alignment
  int64_t skip_barriers; // seeds a race
  int64_t missing_bytes; // seeds writes past the end of the result, which is so much shorter
};

void read(void* to, size_t size) {
  if (std::fread(to, 1, size, stdin) != size) {
    std::fputs("emulator: input ended early\n", stderr);
    std::exit(2);
  }
}

// An array in a block of memory that ends where the array does: sanitizers see a step beyond it.
class Array {
 public:
  Array(size_t size, size_t misaligned) : block_(misaligned + size, '\xa5'), begin_(misaligned) {}

  char* data() { return block_.data() + begin_; }
  void read_in() { read(data(), block_.size() - begin_); }
  void write_out() { std::fwrite(data(), 1, block_.size() - begin_, stdout); }

 private:
  std::vector<char> block_;
  size_t begin_;
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
  template <class Shape, class... Parameters>
  void shared(
      void (*kernel)(Parameters...), const Shape& shape,
      const std::type_identity_t<Parameters>&... arguments) const {
    run(kernel, std::min(request.blocks, shape.blocks), shape.shared_bytes, arguments...);
  }

 private:
  template <class... Parameters>
  void run(
      void (*kernel)(Parameters...), int64_t blocks, size_t shared_bytes,
      const std::type_identity_t<Parameters>&... arguments) const {
    Dl_info info{};
    dladdr(reinterpret_cast<const void*>(kernel), &info);
    *kernels += std::string(info.dli_sname) + "\n";
    shim::launch(
        kernel, static_cast<unsigned>(blocks), static_cast<unsigned>(request.threads), shared_bytes,
        static_cast<unsigned>(request.seed), arguments...);
  }
};

void run(const Request& request) {
  const Geometry<int64_t>& g = request.geometry;
  const auto type = static_cast<c10::ScalarType>(request.type);
  const auto index_type = static_cast<c10::ScalarType>(request.index_type);
  const size_t size = c10::elementSize(type), index_size = c10::elementSize(index_type);
  const size_t pooled = g.outer * g.in_slab(), unpooled = g.outer * g.out_slab();
  const size_t shift = request.misaligned * size;
  Array values((request.forward ? pooled : unpooled) * size, shift);
  Array result((request.forward ? unpooled : pooled) * size - request.missing_bytes, shift);
  Array indices(pooled * index_size, request.misaligned * index_size);
  values.read_in();
  uint64_t items = 0;
  int64_t reported[4] = {}; // of a bad index: whether there is one, the index, position and plane
  std::string kernels;
  const Launch launch{request, &items, &kernels};
#ifdef POOLING
  const auto [depth, height, width] = request.dilation;
  const PoolCall call{
      g, {depth, height, width}, type, index_type, values.data(), result.data(), indices.data()};
  PoolDispatch(launch, call, request.limits.max_32bit_offset).run();
#else
  indices.read_in();
  uint32_t ready = 0;
  ErrorRecord error{};
  error.ready = &ready;
  const Arguments arguments{
      {g, static_cast<Reduce>(request.reduce), request.forward != 0, type, index_type, size,
       values.data(), indices.data(), result.data()},
      request.deterministic != 0,
      &error,
      request.limits,
      request.threads,
      request.blocks};
  const Plan plan(arguments);
  Array workspace(plan.bytes, 0);
  shim::skip_barriers = request.skip_barriers != 0;
  Dispatch(launch, arguments, plan, workspace.data()).run();
  const int64_t found[] = {ready, error.index, error.position, error.plane};
  std::copy(found, found + 4, reported);
#endif
  const uint64_t launched[] = {items, kernels.size()};
  std::fwrite(reported, 1, sizeof(reported), stdout);
  std::fwrite(launched, 1, sizeof(launched), stdout);
  std::fwrite(kernels.data(), 1, kernels.size(), stdout);
  result.write_out();
  indices.write_out();
}

} // namespace
} // namespace maxunpool_cuda

int main() {
  int64_t count = 0;
  maxunpool_cuda::read(&count, sizeof(count));
  for (; count > 0; --count) {
    maxunpool_cuda::Request request{};
    maxunpool_cuda::read(&request, sizeof(request));
    maxunpool_cuda::run(request);
  }
}
