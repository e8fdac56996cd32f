// SPDX-License-Identifier: BSD-3-Clause
// Runs grids on fibers, in an order that a seed draws: a failure is the same in every run.
//
// run_grid() runs the blocks one after the other. In run_block(), which schedules the fibers of a
// block, one fiber runs at a time, until it leaves: at its end, at a barrier, or before an atomic
// operation. Then another one goes on. For example, three threads with one barrier may run so:
//
//   1 to the barrier, 0 to the barrier, 2 to the barrier, 2 to its end, 0 to its end, 1 to its end
//
// maxunpool_cuda is the namespace `emulated` here, by a macro (__init__.py). This file is compiled
// without sanitizers. The functions that begin with __tsan tell ThreadSanitizer which fiber runs,
// as it takes each for a thread, and which ones wait for others.
#include "cuda/divider.cuh"
#include "cuda/error_records.cuh"
#include "errors.h"
#include "torch.h"

#include <dlfcn.h>
#include <ucontext.h>

#include <deque>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#ifdef FIBERS
#include <sanitizer/tsan_interface.h>
#else
#define __tsan_get_current_fiber() nullptr
#define __tsan_create_fiber(flags) nullptr
#define __tsan_switch_to_fiber(fiber, flags) static_cast<void>(fiber)
#define __tsan_acquire(address) static_cast<void>(address)
#define __tsan_release(address) static_cast<void>(address)
#endif

namespace shim {
namespace {

constexpr size_t kStackBytes = 256 << 10;
[[maybe_unused]] constexpr unsigned kNoSync = 1; // of a switch: orders nothing

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  void* thread = __tsan_create_fiber(0);
  Dim3 index;
};

struct Block {
  std::unique_ptr<char[]> shared;
  std::vector<Fiber*> ready;
  std::vector<Fiber*> waiting; // at the last of the barriers
  // For each barrier, whether any thread gave it a true predicate. Its address orders the threads.
  std::deque<int64_t> barriers{0};
};

std::mutex one_grid;
std::deque<Fiber> fibers; // kept for later blocks
Fiber* running;
Block* block;
ucontext_t scheduler;
void* scheduler_thread;
int64_t begins; // its address orders the start of a grid before its threads
int64_t ends;   // and this one its threads before the end of the grid
const std::function<void()>* body;
std::mt19937 random;
// A line for each grid that ran: the symbol of its kernel, the blocks that the launch asked for,
// and the threads of a block.
std::string launches;
std::string skipped; // on purpose: "barriers", or "a block" of each grid

unsigned below(unsigned end) {
  return random() % end;
}

std::vector<unsigned> shuffled(unsigned count) {
  std::vector<unsigned> numbers(count);
  std::iota(numbers.begin(), numbers.end(), 0);
  std::shuffle(numbers.begin(), numbers.end(), random);
  return numbers;
}

// To the scheduler, which goes on with any fiber that is ready.
void leave() {
  __tsan_switch_to_fiber(scheduler_thread, kNoSync);
  swapcontext(&running->context, &scheduler);
}

void run_fiber() {
  __tsan_acquire(&begins);
  (*body)();
  __tsan_release(&ends);
  leave();
}

void run_block(unsigned threads, size_t shared_bytes) {
  block->shared.reset(new char[shared_bytes]); // not one byte more
  std::memset(block->shared.get(), 0xa5, shared_bytes);
  __tsan_release(&begins);
  if (fibers.size() < threads) {
    fibers.resize(threads);
  }
  std::vector<Fiber*>& ready = block->ready;
  // ThreadSanitizer sees a race between two fibers, never within one. So that it sees one between
  // thread 0 of two blocks, the threads of each block get their fibers at random.
  for (const unsigned i : shuffled(threads)) {
    Fiber& fiber = fibers[i];
    fiber.index = {static_cast<unsigned>(ready.size())};
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    makecontext(&fiber.context, run_fiber, 0);
    ready.push_back(&fiber);
  }
  while (!ready.empty()) {
    std::swap(ready[below(ready.size())], ready.back());
    running = ready.back();
    ready.pop_back();
    threadIdx = running->index;
    __tsan_switch_to_fiber(running->thread, kNoSync);
    swapcontext(&scheduler, &running->context);
    if (block->waiting.size() == threads) {
      ready.swap(block->waiting);
      block->barriers.push_back(0);
    }
  }
  if (!block->waiting.empty()) {
    maxunpool_cuda::fail(
        block->waiting.size(), " threads wait at a barrier that the others do not reach");
  }
}

} // namespace

void run_grid(
    const void* kernel,
    unsigned blocks,
    unsigned threads,
    size_t shared_bytes,
    const std::function<void()>& thread) {
  const std::lock_guard<std::mutex> lock(one_grid);
  const bool fits = 0 < blocks && blocks < 1u << 31 && 0 < threads && threads <= 1024;
  if (!fits || shared_bytes > 48 << 10) { // a GPU refuses it, too
    maxunpool_cuda::fail(blocks, " blocks of ", threads, " threads, ", shared_bytes, " bytes");
  }
  Dl_info info{};
  dladdr(kernel, &info);
  const std::string symbol = info.dli_sname == nullptr ? "?" : info.dli_sname;
  launches += symbol + ' ' + std::to_string(blocks) + ' ' + std::to_string(threads) + '\n';
  // Half of the launches get four blocks at most: kernels do all of their work under any number.
  blocks = std::min(blocks, below(2) == 0 ? blocks : 1 + below(4));
  gridDim = {blocks};
  blockDim = {threads};
  body = &thread;
  scheduler_thread = __tsan_get_current_fiber();
  std::vector<unsigned> order = shuffled(blocks);
  if (skipped == "a block") {
    order.pop_back();
  }
  // Blocks run one after the other here, but at once on a GPU. So nothing may tell ThreadSanitizer
  // of an order between them: all are kept to the end, so that each has other addresses.
  std::deque<Block> done;
  for (const unsigned number : order) {
    block = &done.emplace_back();
    blockIdx = {number};
    run_block(threads, shared_bytes);
  }
  __tsan_acquire(&ends);
}

bool barrier_or(bool predicate) {
  int64_t& any = block->barriers.back(); // while this thread waits, there may be a later one
  any |= predicate;
  block->waiting.push_back(running);
  __tsan_release(&any);
  leave();
  __tsan_acquire(&any);
  return any != 0;
}

void barrier() {
  if (skipped != "barriers") {
    barrier_or(false);
  }
}

void let_others_run() {
  if (below(4) == 0) {
    block->ready.push_back(running);
    leave();
  }
}

void* shared_memory() {
  return block->shared.get();
}

namespace {

// The operators of this file

void configure(int64_t seed, const std::string& skips) {
  random.seed(static_cast<unsigned>(seed));
  skipped = skips;
}

std::string list_launches() {
  return launches;
}

void forget_launches() {
  launches.clear();
}

int64_t divide(int64_t n, int64_t divisor) {
  return static_cast<int64_t>(maxunpool_cuda::Divider<uint64_t>(divisor).divide(n));
}

STABLE_TORCH_LIBRARY_FRAGMENT(emulated, m) {
  m.def("configure(int seed, str skips) -> ()");
  m.def("launches() -> str");
  m.def("forget_launches() -> ()");
  m.def("divide(int n, int divisor) -> int");
  m.def("check_errors() -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(emulated, CompositeExplicitAutograd, m) {
  m.impl("configure", TORCH_BOX(&configure));
  m.impl("launches", TORCH_BOX(&list_launches));
  m.impl("forget_launches", TORCH_BOX(&forget_launches));
  m.impl("divide", TORCH_BOX(&divide));
  m.impl("check_errors", TORCH_BOX(&maxunpool_cuda::check_errors));
}

} // namespace
} // namespace shim
