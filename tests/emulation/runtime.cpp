// SPDX-License-Identifier: BSD-3-Clause
// CUDA's runtime on a machine without a GPU: as much of it as the tests of host_code.py call, for
// PyTorch to have one device, whose memory is the host's, and for nvcc's host code to launch
// kernels there. It is preloaded, so its functions take the place of libcudart's. A kernel of this
// package runs on the emulated GPU; those of PyTorch do nothing. Each call is done when it returns,
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
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace {

constexpr int kProcessors = 132;
constexpr size_t kMemory = size_t{8} << 30;

// What a stream gets to do.
using Work = std::function<void()>;
using Graph = std::vector<Work>;

std::map<const void*, std::string> symbols; // of kernels, by the host's function
std::map<const void*, void*> variables;     // addresses, by the host's variable
std::tuple<dim3, dim3, size_t, cudaStream_t> pushed;
std::string history; // a line for each cudaMalloc, launch, copy and fill

// Makes the work of a launch of a kernel of this package: see invoke.cpp.
Work (*work_of_launch)(
    const char* symbol, unsigned blocks, unsigned threads, size_t shared_bytes, void** arguments);

cudaStream_t capturing = nullptr; // the stream that captures a graph, if one does
Graph captured;
cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;

bool captures(cudaStream_t stream) {
  return stream != nullptr && stream == capturing;
}

// While a graph is captured, CUDA refuses some calls of threads that have not relaxed their mode.
bool is_refused() {
  return capturing != nullptr && mode != cudaStreamCaptureModeRelaxed;
}

cudaError_t do_or_capture(cudaStream_t stream, const std::string& name, const Work& work) {
  history += name + '\n';
  if (captures(stream)) {
    captured.push_back(work);
  } else {
    work();
  }
  return cudaSuccess;
}

void* allocated(size_t bytes) {
  const size_t alignment = 512;
  const size_t whole = (bytes / alignment + 1) * alignment;
  return std::memset(std::aligned_alloc(alignment, whole), 0xa5, whole);
}

} // namespace

extern "C" {

void set_work_of_launch(decltype(work_of_launch) given) {
  work_of_launch = given;
}

// The history since the last call.
const char* take_history() {
  static std::string taken;
  taken = std::exchange(history, "");
  return taken.c_str();
}

// ---- what does nothing: memory is never freed, and nothing has to be waited for

#define DOES_NOTHING(function, ...)   \
  cudaError_t function(__VA_ARGS__) { \
    return cudaSuccess;               \
  }
DOES_NOTHING(cudaSetDevice, int)
DOES_NOTHING(cudaDeviceSynchronize)
DOES_NOTHING(cudaGetLastError)
DOES_NOTHING(cudaFree, void*)
DOES_NOTHING(cudaMemGetInfo, size_t*, size_t*)
DOES_NOTHING(cudaGraphDestroy, cudaGraph_t)
DOES_NOTHING(cudaGraphExecDestroy, cudaGraphExec_t)
DOES_NOTHING(cudaGraphGetNodes, cudaGraph_t, cudaGraphNode_t*, size_t*)

// ---- what nvcc's host code calls. Parameters that would be the last ones are left out.

DOES_NOTHING(__cudaRegisterFatBinary)
DOES_NOTHING(__cudaRegisterFatBinaryEnd)
void __cudaRegisterFunction(void**, const char* function, char*, const char* symbol) {
  symbols[function] = symbol;
}
void __cudaRegisterVar(void**, char* variable, char*, const char*, int, size_t bytes) {
  variables[variable] = std::calloc(1, bytes);
}
cudaError_t cudaGetSymbolAddress(void** address, const void* variable) {
  *address = variables.at(variable);
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
unsigned __cudaPushCallConfiguration(
    dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
  pushed = {grid, block, shared_bytes, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(
    dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  std::tie(*grid, *block, *shared_bytes, *static_cast<cudaStream_t*>(stream)) = pushed;
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(
    cudaKernel_t kernel,
    dim3 grid,
    dim3 block,
    void** arguments,
    size_t shared_bytes,
    cudaStream_t stream) {
  const std::string& symbol = symbols.at(kernel);
  if (symbol.find("maxunpool_cuda") == std::string::npos) {
    return do_or_capture(stream, symbol, [] {});
  }
  const auto work = work_of_launch(symbol.c_str(), grid.x, block.x, shared_bytes, arguments);
  return do_or_capture(stream, symbol, work);
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
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::strcpy(properties->name, "a stand-in without a GPU");
  properties->totalGlobalMem = kMemory;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = kProcessors; // which is what the package asks for
  return cudaSuccess;
}
// PyTorch asks for functions of the driver by name, and calls none of them here.
cudaError_t cudaGetDriverEntryPointByVersion(
    const char*, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult*) {
  *function = reinterpret_cast<void*>(cudaDeviceSynchronize);
  return cudaSuccess;
}

// ---- memory

cudaError_t cudaMalloc(void** address, size_t bytes) {
  if (bytes > kMemory) {
    return cudaErrorMemoryAllocation;
  }
  history += "cudaMalloc\n";
  *address = allocated(bytes);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
  *address = allocated(bytes);
  return is_refused() ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
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
  *id = 1;
  return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* next) {
  std::swap(mode, *next);
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  capturing = stream;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  *graph = reinterpret_cast<cudaGraph_t>(new Graph(std::exchange(captured, {})));
  capturing = nullptr;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(
    cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  *made = reinterpret_cast<cudaGraphExec_t>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t) {
  for (const Work& work : *reinterpret_cast<Graph*>(graph)) {
    work();
  }
  return cudaSuccess;
}

} // extern "C"
