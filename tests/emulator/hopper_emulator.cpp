// SPDX-License-Identifier: Apache-2.0
// The asynchronous parts of the emulated machine: what is on its way, and when it happens.
#include "hopper_emulator.h"

#include <cstdio>
#include <deque>
#include <vector>

#include "plugin/numeric.h"

namespace emulator {

thread_local Order order = Order::kMixed;

namespace {

constexpr uint32_t kDynamicBase = 1024, kStaticBit = 1u << 31;
constexpr int kGroupThreads = 128;

// A barrier's 64 bits.
struct BarrierState {
  uint16_t mark;   // of an initialised one
  uint16_t phase;  // parity of the phase that is running
  uint16_t arrivals, pending;
};
// The announced bytes do not fit in, so they lie beside.
constexpr uint16_t kMark = 0xba55;

// Maps are copied: a kernel's parameter is gone when its thread has ended.
struct Load {
  char* to;
  CUtensorMap map;
  int32_t at[4];
  uint64_t* barrier;
  const char* plain = nullptr;  // not a box, but these bytes
  uint32_t bytes = 0;
};

struct Store {
  CUtensorMap map;
  int32_t at[4];
  const char* from;
  bool done;
};

struct Thread {
  std::deque<Store> stores;
  std::deque<size_t> groups;  // stores in each committed group that was not waited for
  size_t open = 0;            // stores not yet committed
};

struct NumberedBarrier {
  int arrived = 0, threads = 0;
  int64_t generation = 0;
};

struct Product {
  ProductForm form;
  uint64_t a, b;
  bool accumulate, done;
  int arrived;
  float* sums[kGroupThreads];
  uint32_t a_registers[kGroupThreads][4];
};

// Its threads issue the same products in the same order, each when it comes to them.
struct Warpgroup {
  std::deque<Product> products;  // not yet waited for; the first is number `begin`
  int64_t begin = 0;
  std::vector<int64_t> group_ends;  // of all groups that were committed
  int64_t issued[kGroupThreads] = {}, committed[kGroupThreads] = {};
  int waiting = 0, wait_groups = 0;
  int64_t waits = 0;
};

struct BytesOf {
  uint64_t* barrier;
  int64_t outstanding;
};

thread_local struct Hopper {
  std::vector<Thread> threads;
  std::vector<Warpgroup> warpgroups;
  NumberedBarrier numbered[16];
  std::vector<BytesOf> bytes;
  std::deque<Load> loads;
  uint32_t chance = 0;
} hopper;

bool happens_now() {
  if (order != Order::kMixed) return order == Order::kEarly;
  hopper.chance = hopper.chance * 1664525u + 1013904223u;
  return hopper.chance >> 31;
}

uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

// ---- barriers --------------------------------------------------------------------------------------------------------------

BarrierState state_of(const void* barrier) {
  BarrierState state;
  std::memcpy(&state, barrier, sizeof state);
  return state;
}

BarrierState checked_state(const uint64_t* barrier) {
  const BarrierState state = state_of(barrier);
  if (state.mark != kMark) fail("a barrier that was not initialised");
  return state;
}

int64_t& outstanding_bytes(const void* barrier) {
  for (BytesOf& entry : hopper.bytes)
    if (entry.barrier == barrier) return entry.outstanding;
  fail("a barrier that was not initialised in this block");
}

void change_barrier(uint64_t* barrier, int arrivals, int64_t bytes) {
  BarrierState state = checked_state(barrier);
  if (state.pending < arrivals) fail("more arrivals than the barrier's %d in a phase", state.arrivals);
  state.pending = static_cast<uint16_t>(state.pending - arrivals);
  int64_t& outstanding = outstanding_bytes(barrier);
  outstanding += bytes;
  if (state.pending == 0 && outstanding == 0) {
    state.phase ^= 1;
    state.pending = state.arrivals;
  }
  std::memcpy(barrier, &state, sizeof state);
}

// ---- copies ----------------------------------------------------------------------------------------------------------------

// Calls move(bytes of the tensor or null, bytes of shared memory, count) for all of the box, in pieces that the swizzle keeps
// together.
template <class Move>
void each_piece(const CUtensorMap& map, const int32_t* at, uint32_t shared, Move move) {
  const int64_t size = map.strides[0], piece = 16 / size;
  int32_t i[4] = {0, 0, 0, 0};
  for (i[3] = 0; i[3] < map.box[3]; ++i[3])
    for (i[2] = 0; i[2] < map.box[2]; ++i[2])
      for (i[1] = 0; i[1] < map.box[1]; ++i[1], shared += 128) {
        int64_t row = 0;
        bool inside = true;
        for (int axis = 1; axis < map.rank; ++axis) {
          const int64_t place = int64_t{at[axis]} + i[axis];
          inside = inside && place >= 0 && place < map.extents[axis];
          row += place * map.strides[axis];
        }
        for (int64_t begin = 0; begin < map.box[0]; begin += piece) {
          char* here = shared_pointer(swizzled(shared + static_cast<uint32_t>(begin * size)));
          const int64_t first = at[0] + begin;
          if (inside && first >= 0 && first + piece <= map.extents[0]) {
            move(map.data + row + first * size, here, 16);
            continue;
          }
          for (int64_t e = 0; e < piece; ++e) {
            const bool exists = inside && first + e >= 0 && first + e < map.extents[0];
            move(exists ? map.data + row + (first + e) * size : nullptr, here + e * size, static_cast<size_t>(size));
          }
        }
      }
}

int64_t box_bytes(const CUtensorMap& map) {
  return map.strides[0] * map.box[0] * map.box[1] * map.box[2] * map.box[3];
}

void check_copy(const CUtensorMap* map, int rank, const void* shared) {
  if (map->rank != rank) fail("a copy of %d axes by a map of %d", rank, map->rank);
  const uint32_t address = shared_address(shared);
  if (address % 1024 != 0) fail("a copy at shared address %u: not a multiple of 1024", address);
  shared_pointer(address + static_cast<uint32_t>(box_bytes(*map)) - 1);
}

void perform(const Load& load) {
  if (load.plain) {
    std::memcpy(load.to, load.plain, load.bytes);
    change_barrier(load.barrier, 0, -int64_t{load.bytes});
    return;
  }
  each_piece(load.map, load.at, shared_address(load.to), [](const char* tensor, char* here, size_t size) {
    if (tensor)
      std::memcpy(here, tensor, size);
    else
      std::memset(here, 0, size);
  });
  change_barrier(load.barrier, 0, -box_bytes(load.map));
}

void begin(const Load& load) {
  if (happens_now())
    perform(load);
  else
    hopper.loads.push_back(load);
}

void perform(Store* store) {
  if (store->done) return;
  store->done = true;
  each_piece(store->map, store->at, shared_address(store->from), [](char* tensor, const char* here, size_t size) {
    if (tensor) std::memcpy(tensor, here, size);
  });
}

// ---- products --------------------------------------------------------------------------------------------------------------

struct Operand {
  uint32_t start, leading, stride;
  bool outer;
  explicit Operand(uint64_t descriptor, bool outer_major)
      : start(static_cast<uint32_t>(descriptor & 0x3fff) * 16),
        leading(static_cast<uint32_t>(descriptor >> 16 & 0x3fff) * 16),
        stride(static_cast<uint32_t>(descriptor >> 32 & 0x3fff) * 16),
        outer(outer_major) {
    if (descriptor >> 62 != 1) fail("a product's descriptor without the 128-byte swizzle");
    if (descriptor >> 46 & 0xffff) fail("a product's descriptor with bits that nobody sets");
    if (start & 0x380) fail("a product's operand at shared address %u: not the start of an atom", start);
  }
  // Outer index i at depth k.
  uint32_t address(int i, int k) const {
    const auto u = static_cast<uint32_t>(i), d = static_cast<uint32_t>(k);
    return swizzled(outer ? start + u / 64 * leading + d / 8 * stride + d % 8 * 128 + u % 64 * 2
                          : start + u / 8 * stride + u % 8 * 128 + d * 2);
  }
};

float number(uint16_t bits, bool bf16) { return bf16 ? lla::bf16_to_float(bits) : lla::f16_to_float(bits); }
float number_at(const Operand& operand, int i, int k, bool bf16) {
  uint16_t bits;
  std::memcpy(&bits, shared_pointer(operand.address(i, k)), sizeof bits);
  return number(bits, bf16);
}

void perform(Product* product) {
  const ProductForm& form = product->form;
  float a[64][16], b[16][256], row_sum[256];
  if (form.a_registers) {
    for (int t = 0; t < kGroupThreads; ++t)
      for (int i = 0; i < 8; ++i) {
        const uint32_t both = product->a_registers[t][i / 2];
        const int row = 16 * (t / 32) + t % 32 / 4 + 8 * (i / 2 % 2), k = 2 * (t % 4) + i % 2 + 8 * (i / 4);
        a[row][k] = number(static_cast<uint16_t>(i % 2 ? both >> 16 : both), form.bf16);
      }
  } else {
    const Operand from(product->a, form.a_outer);
    for (int row = 0; row < 64; ++row)
      for (int k = 0; k < 16; ++k) a[row][k] = number_at(from, row, k, form.bf16);
  }
  const Operand from(product->b, form.b_outer);
  for (int column = 0; column < form.columns; ++column)
    for (int k = 0; k < 16; ++k) b[k][column] = number_at(from, column, k, form.bf16);
  for (int row = 0; row < 64; ++row) {
    // Of this row, four threads have pairs of columns, eight columns apart.
    float* sums[4];
    for (int q = 0; q < 4; ++q) sums[q] = product->sums[32 * (row / 16) + row % 8 * 4 + q] + 2 * (row / 8 % 2);
    if (product->accumulate) {
      for (int column = 0; column < form.columns; ++column)
        row_sum[column] = sums[column % 8 / 2][column / 8 * 4 + column % 2];
    } else {
      for (int column = 0; column < form.columns; ++column) row_sum[column] = 0;
    }
    for (int k = 0; k < 16; ++k) {
      const float x = a[row][k];
      for (int column = 0; column < form.columns; column += 32)
        for (int i = 0; i < 32; ++i) row_sum[column + i] += x * b[k][column + i];
    }
    for (int column = 0; column < form.columns; ++column) sums[column % 8 / 2][column / 8 * 4 + column % 2] = row_sum[column];
  }
  product->done = true;
}

Warpgroup& my_group() {
  const unsigned group = self.thread.x / kGroupThreads;
  if (kGroupThreads * (group + 1) > self.block_size.x) fail("a product by fewer than 128 threads");
  return hopper.warpgroups[group];
}

// Products happen in their order.
void perform_before(Warpgroup* group, int64_t end) {
  for (int64_t i = group->begin; i < end; ++i) {
    Product& product = group->products[static_cast<size_t>(i - group->begin)];
    if (product.arrived != kGroupThreads) fail("a product by %d threads of a warpgroup", product.arrived);
    if (!product.done) perform(&product);
  }
}

// ---- the life of a block ---------------------------------------------------------------------------------------------------

void begin_block(int threads) {
  hopper.threads.assign(static_cast<size_t>(threads), {});
  hopper.warpgroups.assign(static_cast<size_t>((threads + kGroupThreads - 1) / kGroupThreads), {});
  for (NumberedBarrier& barrier : hopper.numbered) barrier = {};
  hopper.bytes.clear();
  hopper.loads.clear();
  hopper.chance = self.block.x * 2654435761u + 12345;
}

void end_thread() {
  const Thread& me = hopper.threads[self.thread.x];
  if (!me.stores.empty()) fail("ends without having waited for its stores");
  const Warpgroup& group = hopper.warpgroups[self.thread.x / kGroupThreads];
  if (!group.products.empty()) fail("ends before its warpgroup has waited for its products");
}

bool advance() {
  if (hopper.loads.empty()) return false;
  const Load load = hopper.loads.front();
  hopper.loads.pop_front();
  perform(load);
  return true;
}

constexpr Extension kExtension = {begin_block, end_thread, advance};
[[maybe_unused]] const bool kInstalled = (extension = &kExtension, true);

}  // namespace

// ---- addresses and matrix moves --------------------------------------------------------------------------------------------

uint32_t shared_address(const void* pointer) {
  const char* byte = static_cast<const char*>(pointer);
  if (byte >= shared_base && byte < shared_base + kSharedBytes) return static_cast<uint32_t>(byte - shared_base) + kDynamicBase;
  const auto distance = byte - reinterpret_cast<const char*>(&self);  // static shared memory is near, a thread's variable too
  if (distance < -(int64_t{1} << 30) || distance >= int64_t{1} << 30) fail("the shared address of something that is not shared");
  return kStaticBit | static_cast<uint32_t>(distance + (int64_t{1} << 30));
}

char* shared_pointer(uint32_t address) {
  if (address & kStaticBit) return reinterpret_cast<char*>(&self) + (int64_t{address & ~kStaticBit} - (int64_t{1} << 30));
  if (address < kDynamicBase || address >= kDynamicBase + kSharedBytes) fail("shared address %u is outside the memory", address);
  return shared_base + (address - kDynamicBase);
}

uint32_t pack_bf16(float low, float high) {
  return lla::float_to_bf16(low) | static_cast<uint32_t>(lla::float_to_bf16(high)) << 16;
}
uint32_t pack_f16(float low, float high) {
  return lla::float_to_f16(low) | static_cast<uint32_t>(lla::float_to_f16(high)) << 16;
}

namespace {

// What a lane brings to a matrix move.
struct MatrixMove {
  uint32_t* to;
  uint32_t from[4];
  uint32_t row;
  int count;
  bool transposed, load;
};

void move_matrices(const char* contributions) {
  const auto of = [contributions](int lane) {
    MatrixMove move;
    std::memcpy(&move, contributions + 64 * lane, sizeof move);
    return move;
  };
  for (int lane = 0; lane < 32; ++lane) {
    const MatrixMove mine = of(lane);
    for (int matrix = 0; matrix < mine.count; ++matrix) {
      uint16_t both[2];
      if (!mine.load) std::memcpy(both, &mine.from[matrix], sizeof both);
      for (int i = 0; i < 2; ++i) {
        const int row = mine.transposed ? 2 * (lane % 4) + i : lane / 4, column = mine.transposed ? lane / 4 : 2 * (lane % 4) + i;
        char* at = shared_pointer(of(8 * matrix + row).row + static_cast<uint32_t>(column) * 2);
        if (mine.load)
          std::memcpy(&both[i], at, 2);
        else
          std::memcpy(at, &both[i], 2);
      }
      if (mine.load) std::memcpy(&mine.to[matrix], both, sizeof both);
    }
  }
}

void move_matrices(const MatrixMove& move) {
  const bool gives_row = static_cast<int>(self.thread.x % 32) < 8 * move.count;
  if (gives_row && move.row % 16 != 0) fail("a matrix row at shared address %u: not a multiple of 16", move.row);
  warp_act(&move, sizeof move, move_matrices);
}

}  // namespace

void load_matrices(uint32_t* to, int count, bool transposed, uint32_t row) {
  move_matrices({to, {0, 0, 0, 0}, row, count, transposed, true});
}

void store_matrices(uint32_t row, const uint32_t* from, int count, bool transposed) {
  MatrixMove move = {nullptr, {0, 0, 0, 0}, row, count, transposed, false};
  for (int i = 0; i < count; ++i) move.from[i] = from[i];
  move_matrices(move);
}

// ---- barriers --------------------------------------------------------------------------------------------------------------

void init_barrier(uint64_t* barrier, uint32_t arrivals) {
  if (arrivals == 0 || arrivals > 0xffff) fail("a barrier for %u arrivals", arrivals);
  if (reinterpret_cast<uintptr_t>(barrier) % 8 != 0) fail("a barrier that is not aligned");
  const BarrierState state = {kMark, 0, static_cast<uint16_t>(arrivals), static_cast<uint16_t>(arrivals)};
  std::memcpy(barrier, &state, sizeof state);
  for (BytesOf& entry : hopper.bytes) {
    if (entry.barrier != barrier) continue;
    entry.outstanding = 0;
    return;
  }
  hopper.bytes.push_back({barrier, 0});
}

void arrive(uint64_t* barrier, uint32_t bytes) { change_barrier(barrier, 1, bytes); }

void wait_parity(uint64_t* barrier, uint32_t parity) {
  checked_state(barrier);
  if (parity > 1) fail("parity %u of a barrier", parity);
  wait_while({[](const void* object, int64_t value) { return state_of(object).phase == value; },
              [](const void* object, int64_t value, char* text, size_t size) {
                const BarrierState state = state_of(object);
                std::snprintf(text, size, "parity %d at barrier address %u, where %d of %d arrivals and %lld bytes are missing",
                              static_cast<int>(value), shared_address(object), state.pending, state.arrivals,
                              static_cast<long long>(outstanding_bytes(object)));
              },
              barrier, parity});
}

namespace {

NumberedBarrier& come_to(int number, int threads) {
  if (number < 1 || number > 15) fail("barrier number %d", number);
  if (threads < 32 || threads % 32 != 0 || threads > static_cast<int>(self.block_size.x))
    fail("barrier %d for %d threads", number, threads);
  NumberedBarrier& barrier = hopper.numbered[number];
  if (barrier.arrived > 0 && barrier.threads != threads)
    fail("barrier %d for %d threads, where others came for %d", number, threads, barrier.threads);
  barrier.threads = threads;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
  return barrier;
}

}  // namespace

void sync_number(int number, int threads) {
  const int64_t generation = hopper.numbered[number & 15].generation;
  wait_while({[](const void* object, int64_t value) { return static_cast<const NumberedBarrier*>(object)->generation == value; },
              [](const void* object, int64_t, char* text, size_t size) {
                const auto* barrier = static_cast<const NumberedBarrier*>(object);
                std::snprintf(text, size, "barrier %d, where %d of %d have come", static_cast<int>(barrier - hopper.numbered),
                              barrier->arrived, barrier->threads);
              },
              &come_to(number, threads), generation});
}

void arrive_number(int number, int threads) { come_to(number, threads); }

// ---- bulk tensor copies ----------------------------------------------------------------------------------------------------

void load_box(void* to, const CUtensorMap* map, const int32_t* at, int rank, uint64_t* barrier) {
  check_copy(map, rank, to);
  checked_state(barrier);
  Load load = {static_cast<char*>(to), *map, {0, 0, 0, 0}, barrier};
  for (int axis = 0; axis < rank; ++axis) load.at[axis] = at[axis];
  begin(load);
}

void load_bytes(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  const uint32_t address = shared_address(to);
  if (address % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0 || bytes % 16 != 0 || bytes == 0)
    fail("a copy of %u bytes to shared address %u: not all multiples of 16", bytes, address);
  shared_pointer(address + bytes - 1);
  checked_state(barrier);
  begin({static_cast<char*>(to), {}, {0, 0, 0, 0}, barrier, static_cast<const char*>(from), bytes});
}

void store_box(const CUtensorMap* map, const int32_t* at, int rank, const void* from) {
  check_copy(map, rank, from);
  Store store = {*map, {0, 0, 0, 0}, static_cast<const char*>(from), false};
  for (int axis = 0; axis < rank; ++axis) store.at[axis] = at[axis];
  if (happens_now()) perform(&store);
  Thread& me = hopper.threads[self.thread.x];
  me.stores.push_back(store);
  ++me.open;
}

void commit_stores() {
  Thread& me = hopper.threads[self.thread.x];
  me.groups.push_back(me.open);
  me.open = 0;
}

void wait_stores(int groups) {
  Thread& me = hopper.threads[self.thread.x];
  for (; me.groups.size() > static_cast<size_t>(groups); me.groups.pop_front())
    for (size_t i = 0; i < me.groups.front(); ++i) {
      perform(&me.stores.front());
      me.stores.pop_front();
    }
}

// ---- products of a warpgroup -----------------------------------------------------------------------------------------------

void multiply(const ProductForm& form, float* sum, const uint32_t* a_registers, uint64_t a, uint64_t b, bool accumulate) {
  Warpgroup& group = my_group();
  const unsigned thread = self.thread.x % kGroupThreads;
  const auto place = static_cast<size_t>(group.issued[thread]++ - group.begin);
  if (place == group.products.size()) {
    Product& made = group.products.emplace_back();
    made.form = form;
    made.a = a;
    made.b = b;
    made.accumulate = accumulate;
    made.done = false;
    made.arrived = 0;
  }
  Product& product = group.products[place];
  if (product.form != form || product.a != a || product.b != b || product.accumulate != accumulate)
    fail("another product than other threads of the warpgroup");
  product.sums[thread] = sum;
  if (a_registers) std::memcpy(product.a_registers[thread], a_registers, sizeof product.a_registers[thread]);
  if (++product.arrived == kGroupThreads && happens_now()) perform_before(&group, group.begin + static_cast<int64_t>(place) + 1);
}

void commit_products() {
  Warpgroup& group = my_group();
  const unsigned thread = self.thread.x % kGroupThreads;
  const auto number = static_cast<size_t>(group.committed[thread]++);
  if (number == group.group_ends.size()) group.group_ends.push_back(group.issued[thread]);
  if (group.group_ends[number] != group.issued[thread]) fail("a group of other products than other threads of the warpgroup");
}

void wait_products(int groups) {
  Warpgroup& group = my_group();
  const unsigned thread = self.thread.x % kGroupThreads;
  if (group.waiting > 0 && group.wait_groups != groups) fail("another wait for products than other threads of the warpgroup");
  group.wait_groups = groups;
  if (++group.waiting < kGroupThreads) {
    wait_while({[](const void* object, int64_t value) { return static_cast<const Warpgroup*>(object)->waits == value; },
                [](const void* object, int64_t, char* text, size_t size) {
                  std::snprintf(text, size, "products, where %d of 128 threads have come",
                                static_cast<const Warpgroup*>(object)->waiting);
                },
                &group, group.waits});
    return;
  }
  for (int t = 0; t < kGroupThreads; ++t)
    if (group.committed[t] != group.committed[thread]) fail("threads of the warpgroup have committed different groups");
  const int64_t last = group.committed[thread] - groups - 1;
  if (last >= 0) {
    const int64_t end = group.group_ends[static_cast<size_t>(last)];
    perform_before(&group, end);
    for (; group.begin < end; ++group.begin) group.products.pop_front();
  }
  group.waiting = 0;
  ++group.waits;
}

}  // namespace emulator
