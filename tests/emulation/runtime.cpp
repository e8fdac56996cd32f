// SPDX-License-Identifier: BSD-3-Clause
// CUDA's runtime on a machine without a GPU: as much of it as tests of this package call, for
// PyTorch to have one device, whose memory is the host's, and for nvcc's host code to launch
// kernels there. It is preloaded, so its functions take the place of libcudart's. A kernel of this
// package runs on the emulated GPU; those of PyTorch do not run. Each call is done when it returns,
// but what a stream gets while it captures a graph is done when the graph is launched. One thread
// at a time calls all this.
//
// Example: `kernel<<<10, 128, 64, stream>>>(plan, input)`, as nvcc compiles it, is
//
//   __cudaPushCallConfiguration(10, 128, 64, stream)
//   a function of the host with the kernel's name: __cudaPopCallConfiguration(...), then
//   __cudaLaunchKernel(kernel, 10, 128, {&plan, &input}, 64, stream)
//
// The symbol of the kernel comes from __cudaRegisterFunction(), which is called when the library is
// loaded.
#include <cuda_runtime.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

constexpr int kProcessors = 132;
constexpr size_t kMemory = size_t{8} << 30;
constexpr size_t kSharedMemory = 48 << 10; // of a block that has not asked for more

struct Configuration {
  dim3 grid;
  dim3 block;
  size_t shared_bytes;
  cudaStream_t stream;
};

// What a stream gets to do.
using Work = std::function<void()>;
using Graph = std::vector<Work>;

// Makes the work of a launch of a kernel of this package: see invoke.cpp.
using WorkOfLaunch = Work (*)(
    const char* symbol, unsigned blocks, unsigned threads, size_t shared_bytes, void** arguments);

struct State {
  std::unordered_map<const void*, std::string> kernels; // symbols, by the host's function
  std::unordered_map<const void*, void*> variables;     // addresses, by the host's variable
  WorkOfLaunch work_of_launch = nullptr;
  Configuration pushed{};
  cudaError_t last_error = cudaSuccess;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  cudaStream_t capturing = nullptr; // a stream that captures this graph
  Graph* graph = nullptr;
  std::string log; // a line for each allocation, and for each work that was done
};
// A function, as libraries register what they have before variables of this one are initialized.
State& state() {
  static auto* const only = new State;
  return *only;
}

void* allocated(size_t bytes) {
  const size_t alignment = 512;
  const size_t whole = (bytes / alignment + 1) * alignment;
  return std::memset(std::aligned_alloc(alignment, whole), 0xa5, whole);
}

bool captures(cudaStream_t stream) {
  return state().graph != nullptr && state().capturing == stream;
}

// While a graph is captured, CUDA refuses some calls of threads that have not relaxed their mode.
bool is_refused() {
  return state().graph != nullptr && state().mode != cudaStreamCaptureModeRelaxed;
}

cudaError_t do_or_capture(cudaStream_t stream, const std::string& name, const Work& work) {
  const Work logged = [=] {
    state().log += name + '\n';
    work();
  };
  if (captures(stream)) {
    state().graph->push_back(logged);
  } else {
    logged();
  }
  return cudaSuccess;
}

} // namespace

extern "C" {

void set_work_of_launch(WorkOfLaunch work_of_launch) {
  state().work_of_launch = work_of_launch;
}

// The log, which is empty then.
const char* take_log() {
  static std::string taken;
  taken = std::exchange(state().log, "");
  return taken.c_str();
}

// ---- what nvcc's host code calls

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaRegisterFunction(
    void**,
    const char* function,
    char*,
    const char* symbol,
    int,
    uint3*,
    uint3*,
    dim3*,
    dim3*,
    int*) {
  state().kernels[function] = symbol;
}
void __cudaRegisterVar(void**, char* variable, char*, const char*, int, size_t bytes, int, int) {
  state().variables[variable] = std::calloc(1, bytes);
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
unsigned __cudaPushCallConfiguration(
    dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
  state().pushed = {grid, block, shared_bytes, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(
    dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  *grid = state().pushed.grid;
  *block = state().pushed.block;
  *shared_bytes = state().pushed.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = state().pushed.stream;
  return cudaSuccess;
}
// What a GPU refuses is an error here, too.
cudaError_t __cudaLaunchKernel(
    cudaKernel_t kernel,
    dim3 grid,
    dim3 block,
    void** arguments,
    size_t shared_bytes,
    cudaStream_t stream) {
  const std::string symbol = state().kernels[kernel];
  const unsigned threads = block.x * block.y * block.z;
  const bool fits_grid = grid.x > 0 && grid.x < 1u << 31 && grid.y < 1u << 16 && grid.z < 1u << 16;
  if (!fits_grid || threads == 0 || threads > 1024 || shared_bytes > kSharedMemory) {
    return state().last_error = cudaErrorInvalidConfiguration;
  }
  Work work = [] {};
  if (symbol.find("maxunpool_cuda") != std::string::npos) {
    work = state().work_of_launch(symbol.c_str(), grid.x, threads, shared_bytes, arguments);
  }
  return do_or_capture(stream, symbol, work);
}
cudaError_t cudaGetSymbolAddress(void** address, const void* variable) {
  *address = state().variables[variable];
  return *address == nullptr ? cudaErrorInvalidSymbol : cudaSuccess;
}
cudaError_t cudaGetLastError() {
  return std::exchange(state().last_error, cudaSuccess);
}

// ---- the device

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) {
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::strcpy(properties->name, "a stand-in without a GPU");
  properties->major = 9;
  properties->warpSize = 32;
  properties->totalGlobalMem = kMemory;
  properties->multiProcessorCount = kProcessors;
  properties->maxThreadsPerMultiProcessor = 2048;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? kProcessors : 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  return cudaSuccess;
}
// PyTorch asks for functions of the driver by name, and calls none of them here.
cudaError_t cudaGetDriverEntryPointByVersion(
    const char*, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult*) {
  static const auto do_nothing = +[]() { return 0; };
  *function = reinterpret_cast<void*>(do_nothing);
  return cudaSuccess;
}

// ---- memory

cudaError_t cudaMalloc(void** address, size_t bytes) {
  if (bytes > kMemory) {
    return cudaErrorMemoryAllocation;
  }
  if (bytes == 0) {
    *address = nullptr;
    return cudaSuccess;
  }
  state().log += "cudaMalloc\n";
  *address = allocated(bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* address) {
  std::free(address);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
  if (is_refused()) {
    return cudaErrorStreamCaptureUnsupported;
  }
  *address = allocated(bytes);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* all) {
  *free = kMemory;
  *all = kMemory;
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(
    void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return do_or_capture(stream, "cudaMemcpyAsync", [=] { std::memcpy(to, from, bytes); });
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return do_or_capture(stream, "cudaMemsetAsync", [=] { std::memset(to, value, bytes); });
}

// ---- streams, and graphs, of which one at a time is captured

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -1;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  *stream = static_cast<cudaStream_t>(std::malloc(1));
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
  return is_refused() ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = captures(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream,
    cudaStreamCaptureStatus* status,
    unsigned long long* id,
    cudaGraph_t*,
    const cudaGraphNode_t**,
    const cudaGraphEdgeData**,
    size_t*) {
  if (id != nullptr) {
    *id = 1;
  }
  return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* next) {
  *next = std::exchange(state().mode, *next);
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  state().capturing = stream;
  state().graph = new Graph;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  *graph = reinterpret_cast<cudaGraph_t>(std::exchange(state().graph, nullptr));
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = reinterpret_cast<Graph*>(graph)->size();
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(
    cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  *made = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t) {
  for (const Work& work : *reinterpret_cast<Graph*>(graph)) {
    work();
  }
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}

} // extern "C"
