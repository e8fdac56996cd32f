// As emulator.cpp, for max pooling: calls come on standard input, and their values, indices, the
// number of threads asked for and the kernel's name go to standard output. test_emulation.py speaks
// the other end.
#include "arrays.h"
#include "cuda_shim.h"

#include "../../csrc/cuda/max_pool.cuh"

#include <cstdio>
#include <string>

namespace {

using namespace maxunpool_cuda;

// One call; all fields are int64, in this order.
struct Request {
  int64_t type, index_type, element_size, index_size;
  int64_t narrow; // see Limits
  int64_t blocks, threads, seed;
  int64_t misaligned;    // elements the arrays start past a vector's alignment
  int64_t missing_bytes; // seeds writes past the end of the values, which are so much shorter
  int64_t dilation[3];
  Geometry<int64_t> geometry; // its rank is padded to eight bytes
};

struct Launch {
  const Request& request;
  int64_t* items;
  std::string* name; // mangled

  template <class... Parameters>
  void operator()(
      void (*kernel)(Parameters...), uint64_t count,
      const std::type_identity_t<Parameters>&... arguments) const {
    *items = static_cast<int64_t>(count);
    *name = name_of(reinterpret_cast<const void*>(kernel));
    shim::launch(
        kernel, static_cast<unsigned>(request.blocks), static_cast<unsigned>(request.threads), 0,
        static_cast<unsigned>(request.seed), arguments...);
  }
};

void run(const Request& request) {
  const Geometry<int64_t>& g = request.geometry;
  const size_t pooled = g.outer * g.in_slab(), unpooled = g.outer * g.out_slab();
  const size_t values_size = pooled * request.element_size - request.missing_bytes;
  const size_t shift = request.misaligned * request.element_size;
  const Array input(unpooled * request.element_size, shift), values(values_size, shift);
  const Array indices(pooled * request.index_size, request.misaligned * request.index_size);
  read(input.data(), unpooled * request.element_size);

  const PoolCall call{
      g,
      {request.dilation[0], request.dilation[1], request.dilation[2]},
      static_cast<c10::ScalarType>(request.type),
      static_cast<c10::ScalarType>(request.index_type),
      input.data(),
      values.data(),
      indices.data()};
  int64_t items = 0;
  std::string name;
  const Launch launch{request, &items, &name};
  PoolDispatch(launch, call, request.narrow).run();

  const int64_t told[] = {items, static_cast<int64_t>(name.size())};
  std::fwrite(told, 1, sizeof(told), stdout);
  std::fwrite(name.data(), 1, name.size(), stdout);
  std::fwrite(values.data(), 1, values_size, stdout);
  std::fwrite(indices.data(), 1, pooled * request.index_size, stdout);
}

} // namespace

int main() {
  for_each_request<Request>(run);
}
