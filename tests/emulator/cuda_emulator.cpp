// SPDX-License-Identifier: Apache-2.0
// Fibers, barriers and device memory of the emulator.
#include "cuda_emulator.h"

#include <ucontext.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define LLA_EMULATOR_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define LLA_EMULATOR_ASAN 1
#endif
#endif
#if LLA_EMULATOR_ASAN
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulator {

thread_local Self self;
thread_local char* shared_base = nullptr;
const Extension* extension = nullptr;

namespace {

constexpr size_t kStackBytes = 256 * 1024;

#if defined(__x86_64__)
// Saves the callee-saved registers on the stack and swaps stacks.
asm(R"(
.text
.type lla_emulator_switch, @function
lla_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq (%rsi), %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size lla_emulator_switch, .-lla_emulator_switch
)");
extern "C" void lla_emulator_switch(void** save, void** load) asm("lla_emulator_switch");

struct Machine {
  void* stack_pointer = nullptr;
};
void switch_machine(Machine* from, Machine* to) { lla_emulator_switch(&from->stack_pointer, &to->stack_pointer); }
void make_machine(Machine* machine, char* stack, size_t bytes, void (*entry)()) {
  uintptr_t top = (reinterpret_cast<uintptr_t>(stack) + bytes) & ~uintptr_t{15};
  void** at = reinterpret_cast<void**>(top) - 2;
  at[0] = reinterpret_cast<void*>(entry);  // entered by `ret` with the stack as a call leaves it
  at[1] = nullptr;
  machine->stack_pointer = at - 6;
  for (int i = 1; i <= 6; ++i) at[-i] = nullptr;
}
#else
struct Machine {
  ucontext_t context;
};
void switch_machine(Machine* from, Machine* to) { swapcontext(&from->context, &to->context); }
void make_machine(Machine* machine, char* stack, size_t bytes, void (*entry)()) {
  getcontext(&machine->context);
  machine->context.uc_stack.ss_sp = stack;
  machine->context.uc_stack.ss_size = bytes;
  machine->context.uc_link = nullptr;
  makecontext(&machine->context, entry, 0);
}
#endif

struct Fiber {
  Machine machine;
  std::unique_ptr<char[]> stack;
  Dim thread;
  bool finished = false;
  Wait wait;
  int64_t meetings = 0;  // of the warp, that this lane has come to
};

struct Warp {
  alignas(64) char slots[2][32][64];
  int arrived = 0, live = 0;
  bool whole = false;    // the meeting needs all 32 lanes
  int64_t complete = 0;  // meetings that all lanes have come to
};

struct Block {
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<std::unique_ptr<Warp>> warps;
  Machine scheduler;
  const void* scheduler_stack = nullptr;
  size_t scheduler_stack_bytes = 0;
  const std::function<void()>* body = nullptr;
  Fiber* current = nullptr;
  int live = 0, arrived = 0;
  int64_t generation = 0;
  int or_value = 0, or_result = 0;
  std::unique_ptr<char[]> shared;
};
thread_local Block block;

void begin_switch(void** fake, const void* bottom, size_t bytes) {
#if LLA_EMULATOR_ASAN
  __sanitizer_start_switch_fiber(fake, bottom, bytes);
#else
  (void)fake, (void)bottom, (void)bytes;
#endif
}
void end_switch(void* fake, const void** bottom, size_t* bytes) {
#if LLA_EMULATOR_ASAN
  __sanitizer_finish_switch_fiber(fake, bottom, bytes);
#else
  (void)fake, (void)bottom, (void)bytes;
#endif
}

// Lets the other fibers run.
void yield() {
  Fiber* me = block.current;
  void* fake = nullptr;
  begin_switch(me->finished ? nullptr : &fake, block.scheduler_stack, block.scheduler_stack_bytes);
  switch_machine(&me->machine, &block.scheduler);
  end_switch(fake, &block.scheduler_stack, &block.scheduler_stack_bytes);
}

void complete_block_barrier() {
  block.arrived = 0;
  block.or_result = block.or_value;
  block.or_value = 0;
  ++block.generation;
}

void complete_meeting(Warp* warp) {
  warp->arrived = 0;
  ++warp->complete;
}

void enter() {
  end_switch(nullptr, &block.scheduler_stack, &block.scheduler_stack_bytes);
  (*block.body)();
  if (extension) extension->end_thread();
  Fiber* me = block.current;
  me->finished = true;
  Warp* warp = block.warps[me->thread.x / 32].get();
  if (warp->whole) fail("ends while its warp waits for it at an instruction of the whole warp");
  if (--block.live > 0 && block.arrived == block.live) complete_block_barrier();
  if (--warp->live > 0 && warp->arrived == warp->live) complete_meeting(warp);
  yield();
  std::abort();
}

// Every thread waits for another: says what for, and gives up.
[[noreturn]] void report_deadlock(unsigned threads) {
  std::fprintf(stderr, "emulator: deadlock in block (%u, %u, %u)\n", self.block.x, self.block.y, self.block.z);
  for (unsigned begin = 0, end; begin < threads; begin = end) {
    char text[160] = "finished", next[160];
    const auto say = [](const Fiber& fiber, char(&to)[160]) {
      std::snprintf(to, sizeof to, "finished");
      if (!fiber.finished) fiber.wait.describe(fiber.wait.object, fiber.wait.value, to, sizeof to);
    };
    say(*block.fibers[begin], text);
    for (end = begin + 1; end < threads; ++end) {
      say(*block.fibers[end], next);
      if (std::strcmp(text, next) != 0) break;
    }
    std::fprintf(stderr, "  threads %u-%u: %s\n", begin, end - 1, text);
  }
  std::abort();
}

void run_block(Dim size) {
  const unsigned threads = size.x;
  while (block.fibers.size() < threads) {
    block.fibers.push_back(std::make_unique<Fiber>());
    block.fibers.back()->stack = std::make_unique<char[]>(kStackBytes);
  }
  const unsigned warps = (threads + 31) / 32;
  while (block.warps.size() < warps) block.warps.push_back(std::make_unique<Warp>());
  for (unsigned w = 0; w < warps; ++w) {
    Warp& warp = *block.warps[w];
    warp.arrived = 0;
    warp.whole = false;
    warp.complete = 0;
    warp.live = static_cast<int>(threads - 32 * w < 32 ? threads - 32 * w : 32);
  }
  block.live = static_cast<int>(threads);
  block.arrived = 0;
  block.or_value = 0;
  for (unsigned t = 0; t < threads; ++t) {
    Fiber& fiber = *block.fibers[t];
    fiber.thread = {t, 0, 0};
    fiber.finished = false;
    fiber.meetings = 0;
    fiber.wait = {};
    make_machine(&fiber.machine, fiber.stack.get(), kStackBytes, enter);
  }
  if (extension) extension->begin_block(static_cast<int>(threads));
  while (block.live > 0) {
    bool ran = false;
    for (unsigned t = 0; t < threads; ++t) {
      Fiber& fiber = *block.fibers[t];
      if (fiber.finished || (fiber.wait.holds && fiber.wait.holds(fiber.wait.object, fiber.wait.value))) continue;
      ran = true;
      block.current = &fiber;
      self.thread = fiber.thread;
      void* fake = nullptr;
      begin_switch(&fake, fiber.stack.get(), kStackBytes);
      switch_machine(&block.scheduler, &fiber.machine);
      end_switch(fake, nullptr, nullptr);
    }
    if (!ran && !(extension && extension->advance())) report_deadlock(threads);
  }
}

}  // namespace

void run_kernel(Dim grid, Dim size, const std::function<void()>& body) {
  if (!block.shared) block.shared = std::make_unique<char[]>(kSharedBytes + 1024);
  shared_base = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(block.shared.get()) + 1023) & ~uintptr_t{1023});
  block.body = &body;
  self.grid = grid;
  self.block_size = size;
  // A device runs blocks in any order: every second launch goes backwards.
  static thread_local bool backwards = false;
  backwards = !backwards;
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  for (uint64_t i = 0; i < blocks; ++i) {
    const uint64_t n = backwards ? blocks - 1 - i : i;
    self.block = {static_cast<unsigned>(n % grid.x), static_cast<unsigned>(n / grid.x % grid.y),
                  static_cast<unsigned>(n / grid.x / grid.y)};
    std::memset(shared_base, 0xff, kSharedBytes);
    run_block(size);
  }
}

void wait_while(const Wait& wait) {
  Fiber* me = block.current;
  while (wait.holds(wait.object, wait.value)) {
    me->wait = wait;
    yield();
  }
  me->wait = {};
}

void fail(const char* format, ...) {
  std::fprintf(stderr, "emulator: block (%u, %u, %u), thread %u: ", self.block.x, self.block.y, self.block.z, self.thread.x);
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputc('\n', stderr);
  std::abort();
}

void block_barrier() { block_barrier_or(0); }

int block_barrier_or(int value) {
  block.or_value |= value;
  if (++block.arrived == block.live) {
    complete_block_barrier();
  } else {
    wait_while({[](const void*, int64_t generation) { return block.generation == generation; },
                [](const void*, int64_t, char* text, size_t size) {
                  std::snprintf(text, size, "__syncthreads, where %d of %d have come", block.arrived, block.live);
                },
                nullptr, block.generation});
  }
  return block.or_result;
}

namespace {

// Returns the contributions, and through `last` whether this lane was the last one; then complete_meeting is its duty.
char* meet(const void* give, size_t bytes, bool* last) {
  Fiber* me = block.current;
  Warp* warp = block.warps[me->thread.x / 32].get();
  char(*slots)[64] = warp->slots[me->meetings & 1];
  std::memcpy(slots[me->thread.x % 32], give, bytes);
  const int64_t mine = me->meetings++;
  *last = ++warp->arrived == warp->live;
  if (!*last) {
    wait_while({[](const void* object, int64_t value) { return static_cast<const Warp*>(object)->complete == value; },
                [](const void* object, int64_t, char* text, size_t size) {
                  const Warp* there = static_cast<const Warp*>(object);
                  std::snprintf(text, size, "a meeting of the warp, where %d of %d have come", there->arrived, there->live);
                },
                warp, mine});
  }
  return slots[0];
}

}  // namespace

const char* warp_meet(const void* give, size_t bytes) {
  bool last = false;
  const char* contributions = meet(give, bytes, &last);
  if (last) complete_meeting(block.warps[block.current->thread.x / 32].get());
  return contributions;
}

void warp_act(const void* give, size_t bytes, void (*act)(const char* contributions)) {
  Warp* warp = block.warps[block.current->thread.x / 32].get();
  if (warp->live != 32) fail("an instruction of a whole warp by %d lanes", warp->live);
  warp->whole = true;
  bool last = false;
  const char* contributions = meet(give, bytes, &last);
  if (!last) return;
  act(contributions);
  warp->whole = false;
  complete_meeting(warp);
}

}  // namespace emulator

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  *memory = std::aligned_alloc(256, (bytes + 255) & ~size_t{255});
  if (!*memory) return cudaErrorMemoryAllocation;
  std::memset(*memory, 0xff, bytes);
  return cudaSuccess;
}

cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
