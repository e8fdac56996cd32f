// Runs grids on fibers, in an order that a seed draws: a failure is the same in every run. Compiled
// without sanitizers, which are told of the fibers: ThreadSanitizer takes each for a thread.
#include "cuda/limits.h"
#include "cuda_shim.h"
#include "errors.h"

#include <dlfcn.h>
#include <ucontext.h>

#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <vector>

#ifdef THREADS
#include <sanitizer/tsan_interface.h>
#else
static void* __tsan_get_current_fiber() {
  return nullptr;
}
static void* __tsan_create_fiber(unsigned) {
  return nullptr;
}
static void __tsan_switch_to_fiber(void*, unsigned) {}
static void __tsan_acquire(void*) {}
static void __tsan_release(void*) {}
#endif

namespace shim {
namespace {

constexpr size_t kStackBytes = 256 << 10;
constexpr unsigned kResident = 4; // blocks at once
constexpr unsigned kNoSync = 1;   // of a switch: orders nothing

struct Fiber;

struct Block {
  Dim3 index;
  size_t shared_bytes;
  std::unique_ptr<char[]> shared;
  std::vector<Fiber*> waiting;       // at a barrier
  bool any = false;                  // of the predicates
  unsigned turn = 0;                 // of two barriers that alternate
  int64_t barriers[2], begins, ends; // what ThreadSanitizer takes them for, by their addresses
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  void* thread = __tsan_create_fiber(0);
  Block* block;
  Dim3 index;
  enum { ready, waits, ended } state;
  bool any;
};

std::mutex one_grid;
std::deque<Fiber> fibers; // those of a block are kept for the next
Fiber* running;
ucontext_t scheduler;
void* scheduler_thread;
c10::function_ref<void()> body = nullptr;
std::mt19937 random;
std::vector<const void*> launched; // kernels
bool skips_a_block = false;        // a mistake on purpose

unsigned below(unsigned end) {
  return random() % end;
}

// To the scheduler, which may go on with any fiber.
void leave() {
  __tsan_switch_to_fiber(scheduler_thread, kNoSync);
  swapcontext(&running->context, &scheduler);
}

void run_fiber() {
  __tsan_acquire(&running->block->begins);
  body();
  __tsan_release(&running->block->ends);
  running->state = Fiber::ended;
  leave();
}

void start(Fiber& fiber, Block& block, unsigned thread) {
  fiber.block = &block;
  fiber.index = {thread};
  fiber.state = Fiber::ready;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStackBytes;
  makecontext(&fiber.context, run_fiber, 0);
}

void go_on(Fiber& fiber) {
  running = &fiber;
  threadIdx = fiber.index;
  blockIdx = fiber.block->index;
  __tsan_switch_to_fiber(fiber.thread, kNoSync);
  swapcontext(&scheduler, &fiber.context);
}

// Runs blocks that are resident together.
void run_blocks(std::deque<Block*> blocks, unsigned threads) {
  std::vector<Fiber*> ready;
  for (Block* const block : blocks) {
    for (unsigned thread = 0; thread < threads; ++thread) {
      if (fibers.size() == ready.size()) {
        fibers.emplace_back();
      }
      Fiber& fiber = fibers[ready.size()];
      start(fiber, *block, thread);
      ready.push_back(&fiber);
    }
  }
  while (!ready.empty()) {
    std::swap(ready[below(ready.size())], ready.back());
    Fiber& fiber = *ready.back();
    go_on(fiber);
    if (fiber.state == Fiber::ready) {
      continue;
    }
    ready.pop_back();
    Block& block = *fiber.block;
    if (fiber.state == Fiber::waits) {
      block.waiting.push_back(&fiber);
    }
    if (block.waiting.size() == threads) {
      for (Fiber* const each : block.waiting) {
        each->state = Fiber::ready;
        each->any = block.any;
        ready.push_back(each);
      }
      block.waiting.clear();
      block.any = false;
      block.turn ^= 1;
    }
  }
  for (Block* const block : blocks) {
    TORCH_CHECK(
        block->waiting.empty(), block->waiting.size(), " of ", threads,
        " threads of a block wait at a barrier that the others do not reach");
  }
}

} // namespace

bool skips_barriers = false;

void run_grid(
    const void* kernel, unsigned blocks, unsigned threads, size_t shared_bytes,
    c10::function_ref<void()> thread) {
  const std::lock_guard<std::mutex> lock(one_grid);
  TORCH_CHECK(blocks > 0 && threads > 0 && threads <= 1024, blocks, " blocks of ", threads);
  launched.push_back(kernel);
  // Kernels do all of their work under any number of blocks.
  blocks = std::min(blocks, below(2) == 0 ? blocks : 1 + below(kResident));
  gridDim = {blocks};
  blockDim = {threads};
  body = thread;
  scheduler_thread = __tsan_get_current_fiber();
  std::deque<Block> all(blocks);
  std::deque<Block*> rest;
  for (unsigned i = 0; i < blocks; ++i) {
    Block& block = all[i];
    block.index = {i};
    block.shared.reset(new char[shared_bytes]); // not one byte more
    std::memset(block.shared.get(), 0xa5, shared_bytes);
    __tsan_release(&block.begins);
    rest.push_back(&block);
  }
  std::shuffle(rest.begin(), rest.end(), random);
  if (skips_a_block) {
    rest.pop_back();
  }
  while (!rest.empty()) {
    std::deque<Block*> resident;
    while (!rest.empty() && resident.size() < kResident) {
      resident.push_back(rest.back());
      rest.pop_back();
    }
    run_blocks(std::move(resident), threads);
  }
  for (Block& block : all) {
    __tsan_acquire(&block.ends);
  }
}

bool barrier(bool predicate) {
  Block& block = *running->block;
  int64_t* const turn = &block.barriers[block.turn];
  block.any |= predicate;
  running->state = Fiber::waits;
  __tsan_release(turn);
  leave();
  __tsan_acquire(turn);
  return running->any;
}

void let_others_run() {
  if (below(4) == 0) {
    leave();
  }
}

void* shared_memory() {
  return running->block->shared.get();
}

namespace {

// Limits are in the order of their declaration. `mistake` is what the grids should skip, or empty.
void configure(int64_t seed, const std::vector<int64_t>& limits, const std::string& mistake) {
  maxunpool_cuda::Limits& to = maxunpool_cuda::limits();
  TORCH_CHECK(limits.size() * sizeof(int64_t) == sizeof(to));
  std::copy(limits.begin(), limits.end(), reinterpret_cast<int64_t*>(&to));
  random.seed(static_cast<unsigned>(seed));
  skips_barriers = mistake == "barriers";
  skips_a_block = mistake == "a block";
}

// Kernels that ran since the last call, as addresses in the library's file.
std::vector<int64_t> take_launched() {
  Dl_info library{};
  dladdr(reinterpret_cast<const void*>(&take_launched), &library);
  std::vector<int64_t> found;
  for (const void* const kernel : launched) {
    found.push_back(static_cast<const char*>(kernel) - static_cast<char*>(library.dli_fbase));
  }
  launched.clear();
  return found;
}

} // namespace

TORCH_LIBRARY_FRAGMENT(LIBRARY, m) {
  m.def("configure", &configure);
  m.def("take_launched", &take_launched);
  m.def("check_errors", &maxunpool_cuda::check_errors);
}

} // namespace shim
