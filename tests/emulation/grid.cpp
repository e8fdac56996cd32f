// Runs grids on fibers, in an order that a seed draws: a failure is the same in every run. Compiled
// without sanitizers, which are told of the fibers: ThreadSanitizer takes each for a thread.
#include "cuda_shim.h"
#include "errors.h"

#include <dlfcn.h>
#include <ucontext.h>

#include <deque>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#ifdef THREADS
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
  bool any; // what its barrier returns
};

// Blocks run one after the other, but nothing tells ThreadSanitizer so: the addresses that order
// threads at barriers, `turns`, differ from block to block.
struct Block {
  std::unique_ptr<char[]> shared;
  std::vector<Fiber*> ready, waiting; // to run; at a barrier
  bool any = false;                   // of the predicates
  int64_t turns[2];                   // barriers alternate
  unsigned turn = 0;
};

std::mutex one_grid;
std::deque<Fiber> fibers; // kept for later blocks
Fiber* running;
Block* block;
ucontext_t scheduler;
void* scheduler_thread;
int64_t begins, ends; // of the grid, by their addresses
c10::function_ref<void()> body = nullptr;
std::mt19937 random;
std::vector<std::string> launched; // kernels
bool skips_a_block = false;        // a mistake on purpose

unsigned below(unsigned end) {
  return random() % end;
}

// To the scheduler, which goes on with any fiber that is ready.
void leave() {
  __tsan_switch_to_fiber(scheduler_thread, kNoSync);
  swapcontext(&running->context, &scheduler);
}

void run_fiber() {
  __tsan_acquire(&begins);
  body();
  __tsan_release(&ends);
  leave();
}

void start(Fiber& fiber, unsigned thread) {
  fiber.index = {thread};
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStackBytes;
  makecontext(&fiber.context, run_fiber, 0);
  block->ready.push_back(&fiber);
}

std::vector<unsigned> shuffled(unsigned count) {
  std::vector<unsigned> numbers(count);
  std::iota(numbers.begin(), numbers.end(), 0);
  std::shuffle(numbers.begin(), numbers.end(), random);
  return numbers;
}

void run_block(unsigned threads, size_t shared_bytes) {
  block->shared.reset(new char[shared_bytes]); // not one byte more
  std::memset(block->shared.get(), 0xa5, shared_bytes);
  __tsan_release(&begins);
  while (fibers.size() < threads) {
    fibers.emplace_back();
  }
  // A race is seen between two fibers alone, so a thread has another one in each block.
  for (const unsigned i : shuffled(threads)) {
    start(fibers[i], block->ready.size());
  }
  std::vector<Fiber*>& ready = block->ready;
  while (!ready.empty()) {
    std::swap(ready[below(ready.size())], ready.back());
    running = ready.back();
    ready.pop_back();
    threadIdx = running->index;
    __tsan_switch_to_fiber(running->thread, kNoSync);
    swapcontext(&scheduler, &running->context);
    if (block->waiting.size() == threads) {
      for (Fiber* const fiber : block->waiting) {
        fiber->any = block->any;
      }
      ready.swap(block->waiting);
      block->any = false;
      block->turn ^= 1;
    }
  }
  TORCH_CHECK(
      block->waiting.empty(), block->waiting.size(), " of ", threads,
      " threads of a block wait at a barrier that the others do not reach");
}

} // namespace

bool skips_barriers = false;

void run_grid(
    const void* kernel, unsigned blocks, unsigned threads, size_t shared_bytes,
    c10::function_ref<void()> thread) {
  const std::lock_guard<std::mutex> lock(one_grid);
  TORCH_CHECK(blocks > 0 && threads > 0 && threads <= 1024, blocks, " blocks of ", threads);
  Dl_info info{};
  dladdr(kernel, &info);
  launched.emplace_back(info.dli_sname == nullptr ? "" : info.dli_sname);
  // Kernels do all of their work under any number of blocks.
  blocks = std::min(blocks, below(2) == 0 ? blocks : 1 + below(4));
  gridDim = {blocks};
  blockDim = {threads};
  body = thread;
  scheduler_thread = __tsan_get_current_fiber();
  std::vector<unsigned> order = shuffled(blocks);
  order.resize(skips_a_block ? blocks - 1 : blocks);
  std::deque<Block> done;
  for (const unsigned number : order) {
    block = &done.emplace_back();
    blockIdx = {number};
    run_block(threads, shared_bytes);
  }
  __tsan_acquire(&ends);
}

bool barrier(bool predicate) {
  int64_t* const turn = &block->turns[block->turn];
  block->any |= predicate;
  block->waiting.push_back(running);
  __tsan_release(turn);
  leave();
  __tsan_acquire(turn);
  return running->any;
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

// `mistake` is what the grids should skip, or empty.
void configure(int64_t seed, const std::string& mistake) {
  random.seed(static_cast<unsigned>(seed));
  skips_barriers = mistake == "barriers";
  skips_a_block = mistake == "a block";
}

// Symbols of the kernels that ran since the last call.
std::vector<std::string> take_launched() {
  return std::exchange(launched, {});
}

} // namespace

TORCH_LIBRARY_FRAGMENT(LIBRARY, m) {
  m.def("configure", &configure);
  m.def("take_launched", &take_launched);
  m.def("check_errors", &maxunpool_cuda::check_errors);
}

} // namespace shim
