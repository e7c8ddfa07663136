// SPDX-License-Identifier: Apache-2.0
// What the fuzzers share: values drawn from the bytes of an input, an allocator that counts and may refuse, threads that may
// refuse, and promises that end the program when they are broken. An input that has run out reads as zeros, so that every
// prefix is an input too.
#pragma once

#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "../capi/mixer_desc.h"

// The one function of each harness, under the name that libFuzzer calls.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace fuzz {

[[noreturn]] inline void broken(const char* file, int line, const char* promise) {
  std::fprintf(stderr, "%s:%d: broken promise: %s\n", file, line, promise);
  std::abort();
}
#define PROMISE(condition) ((condition) ? (void)0 : ::fuzz::broken(__FILE__, __LINE__, #condition))

class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), left_(size) {}
  bool empty() const { return left_ == 0; }
  size_t left() const { return left_; }
  const uint8_t* rest() const { return data_; }
  uint8_t byte() {
    if (left_ == 0) return 0;
    --left_;
    return *data_++;
  }
  // 0 ... n - 1
  int64_t below(int64_t n) { return byte() % n; }
  bool one_in(int64_t n) { return below(n) == n - 1 && !(calm && n > 4); }
  // While true, rare things do not happen.
  bool calm = false;
  // Mostly small, now and then one of the numbers at which arithmetic breaks.
  int64_t number() {
    static constexpr int64_t kOdd[] = {-1,
                                       INT64_MIN,
                                       INT64_MAX,
                                       INT64_MAX - 1,
                                       int64_t{1} << 31,
                                       INT32_MAX,
                                       int64_t{1} << 32,
                                       int64_t{1} << 40,
                                       int64_t{1} << 61,
                                       int64_t{1} << 62,
                                       -2,
                                       int64_t{1} << 20,
                                       (int64_t{1} << 61) + 1,
                                       INT64_MIN + 1,
                                       4096,
                                       65536};
    const uint8_t b = byte();
    return b < 240 ? b % 80 : kOdd[b - 240];
  }
  // A number around 0 ... n - 1, sometimes anything.
  int64_t index(int64_t n) {
    const uint8_t b = byte();
    return b < 236 ? b % n : b < 246 ? int64_t{b} - 237 : number();
  }

 private:
  const uint8_t* data_;
  size_t left_;
};

// Counts what is out, and refuses the allocation number `fail_at`.
struct Meter {
  int64_t outstanding = 0, count = 0, fail_at = 0;
  size_t most = size_t{1} << 20;  // so that no input can ask for all memory of the machine
  bool fill = false;              // memory for what may be compared before anything was written to it
  lla_allocator hook() {
    lla_allocator a{};
    a.struct_size = sizeof a;
    a.allocate = [](size_t bytes, size_t alignment, void* user) -> void* {
      auto* m = static_cast<Meter*>(user);
      PROMISE(bytes > 0 && alignment > 0 && (alignment & (alignment - 1)) == 0);
      if (++m->count == m->fail_at || bytes > m->most) return nullptr;
      ++m->outstanding;
      void* const memory = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
      return m->fill && memory ? std::memset(memory, 0xa5, bytes) : memory;
    };
    a.release = [](void* memory, size_t, size_t, void* user) {
      PROMISE(memory != nullptr);
      --static_cast<Meter*>(user)->outstanding;
      std::free(memory);
    };
    a.user = this;
    return a;
  }
};

// For one call the allocator may refuse the next but few.
struct ShortOfMemory {
  ShortOfMemory(Meter& m, Input& in) : meter(m), before(m.fail_at) {
    if (in.one_in(3)) meter.fail_at = meter.count + 1 + in.below(3);
  }
  ~ShortOfMemory() { meter.fail_at = before; }
  Meter& meter;
  int64_t before;
};

// The caller's threads: tasks in odd orders, on odd workers, now and then not all of them.
struct Crew {
  int32_t threads = 1;
  int manner = 0;
  int64_t calls = 0, refuse_at = 0;
  static int32_t run(int64_t count, lla_task task, void* argument, void* user) {
    auto* crew = static_cast<Crew*>(user);
    PROMISE(count >= 0);
    const bool refuse = ++crew->calls == crew->refuse_at;
    const int64_t todo = refuse ? count / 2 : count;
    for (int64_t i = 0; i < todo; ++i) {
      const int64_t which = crew->manner == 1 ? count - 1 - i : crew->manner == 2 ? (i % 2 ? count - 1 - i / 2 : i / 2) : i;
      task(which, crew->manner == 3 ? static_cast<int32_t>(i % crew->threads) : crew->threads - 1, argument);
    }
    return refuse;
  }
};

// Memory of exactly so many bytes, aligned to 64: a sanitizer sees the first byte behind it.
class Block {
 public:
  explicit Block(size_t bytes) : bytes_(bytes) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, bytes ? bytes : 1) != 0) std::abort();
    memory_.reset(static_cast<char*>(memory));
    std::memset(memory, 0xa5, bytes);
  }
  char* data() const { return memory_.get(); }
  size_t size() const { return bytes_; }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> memory_;
  size_t bytes_;
};

// What every call keeps: a status that has a name and is no bug of lla's, and an error that says the same.
inline lla_status kept(lla_status status, const lla_error& error) {
  PROMISE(status != LLA_INTERNAL);
  // The last one that had a name: comparing texts at every call is a fifth of the time. Servers call from several threads.
  thread_local lla_status named = LLA_OK;
  if (status != named) PROMISE(std::strcmp(lla_status_name(status), "LLA_UNKNOWN_STATUS") != 0);
  named = status;
  if (status == LLA_OK) {
    PROMISE(error.code == LLA_OK && error.text[0] == 0);
  } else {
    PROMISE(error.code == status && error.text[0] != 0);
    PROMISE(std::memchr(error.text, 0, sizeof error.text) != nullptr);
  }
  return status;
}
// FUZZ_CALL(lla_state_length(state, slot, &length, &error)): the status, after what every call promises was looked at.
#define FUZZ_CALL(call)               \
  [&] {                               \
    lla_error error = LLA_ERROR_INIT; \
    const lla_status got = (call);    \
    return ::fuzz::kept(got, error);  \
  }()
// A call that cannot fail here.
#define FUZZ_OK(call) PROMISE(FUZZ_CALL(call) == LLA_OK)

// An array of integers in a block of its own, so that reading one entry too many is seen.
class Numbers {
 public:
  Numbers() = default;
  Numbers(const std::vector<int64_t>& values, bool narrow)
      : narrow_(narrow), block_(new Block(values.size() * (narrow ? 4 : 8))) {
    for (size_t i = 0; i < values.size(); ++i) {
      if (narrow) {
        const int32_t value = static_cast<int32_t>(values[i]);
        std::memcpy(block_->data() + 4 * i, &value, 4);
      } else {
        std::memcpy(block_->data() + 8 * i, &values[i], 8);
      }
    }
  }
  lla_index index() const { return block_ ? lla_index{block_->data(), narrow_ ? LLA_I32 : LLA_I64, LLA_HOST} : lla_index{}; }
  bool given() const { return block_ != nullptr; }
  // As the library reads it.
  int64_t at(size_t i) const {
    if (narrow_) {
      int32_t value;
      std::memcpy(&value, block_->data() + 4 * i, 4);
      return value;
    }
    int64_t value;
    std::memcpy(&value, block_->data() + 8 * i, 8);
    return value;
  }

 private:
  bool narrow_ = false;
  std::unique_ptr<Block> block_;
};

inline lla_layer_desc mixer(lla_mixer kind, int64_t heads, int64_t groups, int64_t dk, int64_t dv, int64_t levels,
                            int64_t grain) {
  lla_layer_desc d = mixer_desc(kind, heads, groups, dk, dv, levels);
  d.grain = grain;
  d.write_form = LLA_WRITE_READY;
  return d;
}

// Tensors of one layer's rows, all elements from one cycle of harmless numbers.
class Rows {
 public:
  // Mixers and convolutions of fp32 inputs; `rows` may be 0.
  Rows(const lla_layer_desc& d, int64_t rows) {
    if (d.kind == LLA_LAYER_CONVOLUTION) {
      add(LLA_X, rows, d.hidden, -1);
      add(LLA_Y, rows, d.hidden, -1);
      weights_.push_back(lla_bind(LLA_WEIGHT_CONV, tensor(d.hidden, d.conv_width, -1, 0.5f)));
      return;
    }
    add(LLA_Q, rows, d.groups, d.key_dim);
    add(LLA_K, rows, d.groups, d.key_dim);
    add(LLA_V, rows, d.heads, d.value_dim);
    add(LLA_GATE, rows, d.heads, -1, -0.25f);
    add(LLA_WRITE, rows, d.heads, -1);
    if (d.levels) add(LLA_LAMBDA, rows, d.heads, d.levels);
    add(LLA_Y, rows, d.heads, d.value_dim);
  }
  std::vector<lla_binding>& io() { return io_; }
  std::vector<lla_binding>& weights() { return weights_; }

 private:
  void add(lla_role role, int64_t d0, int64_t d1, int64_t d2, float scale = 0.5f) {
    io_.push_back(lla_bind(role, tensor(d0, d1, d2, scale)));
  }
  lla_tensor tensor(int64_t d0, int64_t d1, int64_t d2, float scale) {
    const size_t count = static_cast<size_t>(d0 * d1 * (d2 < 0 ? 1 : d2));
    blocks_.emplace_back(count * sizeof(float));
    auto* data = reinterpret_cast<float*>(blocks_.back().data());
    for (size_t i = 0; i < count; ++i) data[i] = scale * static_cast<float>((i * 7 + blocks_.size()) % 5) / 4;
    return lla_tensor_of(data, LLA_F32, d0, d1, d2, -1);
  }
  std::vector<Block> blocks_;
  std::vector<lla_binding> io_, weights_;
};

}  // namespace fuzz
