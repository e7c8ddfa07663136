// SPDX-License-Identifier: Apache-2.0
// Single kernels of the scalar gate's Hopper backward against plain sums in double precision: what other kernels would have
// left in scratch comes from here. Also compiles for a device.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cuda/hopper/scalar_gate_backward.h"

namespace hopper_backward_testing {

using namespace lla;
using namespace lla::cuda::hopper;

// Memory that kernels see, and the host's copy. Without values it begins as NaN.
class Memory {
 public:
  explicit Memory(size_t bytes) : host_((bytes + 15) / 16 * 16 + 16, static_cast<char>(0xff)) {
#if defined(LLA_CUDA_EMULATED)
    base_.resize(host_.size() + 256);
    device_ = base_.data() + (256 - reinterpret_cast<uintptr_t>(base_.data()) % 256) % 256;
#else
    cudaMalloc(reinterpret_cast<void**>(&device_), host_.size());
#endif
    to_device();
  }
  Memory(const Memory&) = delete;
#if !defined(LLA_CUDA_EMULATED)
  ~Memory() { cudaFree(device_); }
#endif
  template <class T>
  T* host() {
    return reinterpret_cast<T*>(host_.data());
  }
  template <class T>
  T* device() {
    return reinterpret_cast<T*>(device_);
  }
  void to_device() {
#if defined(LLA_CUDA_EMULATED)
    std::memcpy(device_, host_.data(), host_.size());
#else
    cudaMemcpy(device_, host_.data(), host_.size(), cudaMemcpyHostToDevice);
#endif
  }
  void to_host() {
#if defined(LLA_CUDA_EMULATED)
    std::memcpy(host_.data(), device_, host_.size());
#else
    cudaMemcpy(host_.data(), device_, host_.size(), cudaMemcpyDeviceToHost);
#endif
  }

 private:
  std::vector<char> host_;
#if defined(LLA_CUDA_EMULATED)
  std::vector<char> base_;
#endif
  char* device_ = nullptr;
};

inline double round_to(double x, int32_t dtype) {
  const float f = static_cast<float>(x);
  if (dtype == LLA_F32) return f;
  if (dtype == LLA_F16) return std::isfinite(f) ? std::round(f * 4096) / 4096 : f;  // of small numbers enough
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if (std::isnan(f)) return f;
  bits = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
  float g;
  std::memcpy(&g, &bits, 4);
  return g;
}
inline uint16_t bf16_bits(double x) {
  const float f = static_cast<float>(round_to(x, LLA_BF16));
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return static_cast<uint16_t>(bits >> 16);
}
inline double bf16_value(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
// Of numbers that round_to() leaves as they are, not smaller than 2^-12.
inline uint16_t f16_bits(double x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  x = std::fabs(x);
  if (std::isnan(x)) return 0x7e00;
  if (x == 0) return sign;
  if (std::isinf(x)) return static_cast<uint16_t>(sign | 0x7c00);
  int exponent;
  const double mantissa = std::frexp(x, &exponent);
  return static_cast<uint16_t>(sign | ((exponent + 14) << 10) | (std::lround(mantissa * 2048) - 1024));
}
inline double f16_value(uint16_t x) {
  const double sign = x & 0x8000 ? -1 : 1;
  const int exponent = x >> 10 & 31, mantissa = x & 1023;
  return sign * (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25));
}

// [rows][heads][dim], each row of a head padded to a multiple of 8 elements.
struct Tensor {
  int64_t rows, heads, dim, stride;
  int32_t dtype;
  Memory memory;
  View view;

  Tensor(int64_t rows_, int64_t heads_, int64_t dim_, int32_t dtype_, bool padded = true)
      : rows(rows_),
        heads(heads_),
        dim(dim_),
        stride(padded ? (dim_ + 7) / 8 * 8 : dim_),
        dtype(dtype_),
        memory(static_cast<size_t>(rows_ * heads_ * stride * (dtype_ == LLA_F32 ? 4 : 2))) {
    view.data = memory.device<char>();
    view.dtype = dtype;
    view.row_stride = heads * stride;
    view.head_stride = stride;
  }
  size_t at(int64_t row, int64_t head, int64_t i) const { return static_cast<size_t>((row * heads + head) * stride + i); }
  void set(int64_t row, int64_t head, int64_t i, double x) {
    x = round_to(x, dtype);
    if (dtype == LLA_F32)
      memory.host<float>()[at(row, head, i)] = static_cast<float>(x);
    else
      memory.host<uint16_t>()[at(row, head, i)] = dtype == LLA_BF16 ? bf16_bits(x) : f16_bits(x);
  }
  double get(int64_t row, int64_t head, int64_t i) {
    if (dtype == LLA_F32) return memory.host<float>()[at(row, head, i)];
    const uint16_t bits = memory.host<uint16_t>()[at(row, head, i)];
    return dtype == LLA_BF16 ? bf16_value(bits) : f16_value(bits);
  }
};

struct Part {
  int64_t rows, position = 0;
  bool padding = false;
};

struct Options {
  int heads = 2, groups = 1, key_dim = 128, value_dim = 64, levels = 0;
  std::vector<Part> parts;
  bool absorb = false, cyclic = false, gate = true, write = true, accumulate = false;
  bool boxes = true;  // dv by the copy engine, unless it accumulates
  double hard = 0;    // share of gates that are -inf or -700
  int32_t factor_type = LLA_F32;
  int part_begin = 0, part_count = -1;  // of the slice
  uint64_t seed = 1;
};

class Problem {
 public:
  Options o;
  BackwardParameters in;
  int key_dim;
  int64_t rows = 0;
  std::vector<Sequence> sequences;
  std::vector<std::unique_ptr<Memory>> memories;
  std::unique_ptr<Tensor> q, k, v, dy, gate, write, lambda, dk, dv, dwrite;
  Memory *factors, *totals, *up, *nodes, *grads, *reads, *through, *pieces, *dk_parts;
  std::mt19937_64 random;

  explicit Problem(const Options& options) : o(options), random(options.seed) {
    key_dim = o.key_dim <= 64 ? 64 : 128;
    in.linear = o.levels == 0;
    MixerShape& shape = in.shape;
    shape.heads = o.heads;
    shape.groups = o.groups;
    shape.key_dim = o.key_dim;
    shape.value_dim = o.value_dim;
    shape.levels = o.levels;
    shape.absorb = o.absorb;
    shape.head_map = o.cyclic ? LLA_HEAD_MAP_CYCLIC : LLA_HEAD_MAP_BLOCKED;
    shape.scale = 0.25;
    constexpr int64_t kSlack = 3;  // rows of no sequence
    int64_t most_rows = 0, most_length = 0;
    for (const Part& part : o.parts) {
      Sequence s;
      s.row_begin = rows;
      s.rows = part.rows;
      s.position = part.position;
      s.padding = part.padding;
      sequences.push_back(s);
      rows += part.rows + kSlack;
      most_rows = std::max(most_rows, part.rows);
      most_length = std::max(most_length, part.rows + part.position);
    }
    in.batch.count = static_cast<int64_t>(sequences.size());
    in.batch.total_rows = rows;
    in.batch.most_rows = most_rows;
    in.batch.most_length = most_length;
    Memory* list = memory(sequences.size() * sizeof(Sequence));
    std::memcpy(list->host<char>(), sequences.data(), sequences.size() * sizeof(Sequence));
    list->to_device();
    in.batch.sequences = list->device<Sequence>();

    make(q, o.groups, o.key_dim, LLA_BF16, 0.3);
    make(k, o.groups, o.key_dim, LLA_BF16, 0.3);
    make(v, o.heads, o.value_dim, LLA_BF16, 1);
    make(dy, o.heads, o.value_dim, LLA_BF16, 1);
    make(dk, o.groups, o.key_dim, LLA_BF16, 1);
    make(dv, o.heads, o.value_dim, LLA_BF16, 1);
    dwrite.reset(new Tensor(rows, o.heads, 1, o.factor_type, false));
    fill(*dwrite, [&] { return normal(); });
    for (Tensor* t : {dk.get(), dv.get(), dwrite.get()}) t->view.accumulate = o.accumulate;
    in.dk = dk->view;
    in.dv = dv->view;
    in.dwrite = dwrite->view;
    if (o.gate) {
      gate.reset(new Tensor(rows, o.heads, 1, o.factor_type, false));
      fill(*gate, [&] {
        const double x = uniform();
        return x < o.hard ? (x < o.hard / 2 ? -INFINITY : -700) : -0.05 * uniform();
      });
      in.gate = gate->view;
    }
    if (o.write) {
      write.reset(new Tensor(rows, o.heads, 1, o.factor_type, false));
      fill(*write, [&] { return 0.1 + uniform(); });
      in.write = write->view;
    }
    if (o.levels > 0) {
      lambda.reset(new Tensor(rows, o.heads, o.levels, o.factor_type, false));
      fill(*lambda, [&] { return 0.1 + uniform(); });
      for (size_t b = 0; b < sequences.size(); ++b) {  // what no row reads
        for (int64_t r = 0; r < sequences[b].rows; ++r) {
          for (int l = 0; l < o.levels; ++l) {
            bool read = l == 0;
            for (int level = 1; level < 40; ++level)
              read |= ((sequences[b].position + r) >> (level - 1) & 1) && shape.column(level) == l;
            for (int h = 0; h < o.heads && !read; ++h) lambda->set(sequences[b].row_begin + r, h, l, NAN);
          }
        }
      }
      lambda->memory.to_device();
      in.lambda = lambda->view;
    }
    in.q = map_of(*q);
    in.k = map_of(*k);
    in.v = map_of(*v);
    in.dy = map_of(*dy);
    in.dv_boxes = o.boxes && !o.accumulate;
    in.dv_rows = map_of(*dv, kWarpRows);

    in.blocks = 1;
    for (const Sequence& s : sequences) {
      if (!s.padding && s.rows > 0) in.blocks = std::max(in.blocks, end_of(s) - first_of(s));
    }
    in.members = o.heads / o.groups;
    in.bundle = std::min(in.members, kBundle);
    in.parts_of_group = (in.members + in.bundle - 1) / in.bundle;
    in.part_begin = o.part_begin;
    in.part_count = o.part_count < 0 ? o.groups * in.parts_of_group - in.part_begin : o.part_count;
    in.head_begin = in.part_first(in.part_begin);
    in.head_count = in.part_end(in.part_begin + in.part_count - 1) - in.head_begin;
    in.places = (rows >> kBlockLog) + 2 * in.batch.count;
    in.entries = in.linear ? 1 : 0;
    for (int64_t n = (most_length - 1) >> kBlockLog; n > 0 && !in.linear; n >>= 1) ++in.entries;
    in.factor_bytes = BlockFactors::bytes(in.entries, in.linear);
    in.piece_levels = BackwardParameters::piece_levels_of(most_length, in.linear);
    const size_t slots = static_cast<size_t>(in.places * in.head_count), node = static_cast<size_t>(key_dim * kColumns);
    factors = memory(slots * static_cast<size_t>(in.factor_bytes));
    totals = memory(slots * 4);
    up = memory(slots * 4);
    nodes = memory(slots * node * 2);
    grads = memory(slots * node * 2);
    reads = memory(slots * kMostEntries * 4);
    through = memory(slots * 4);
    pieces = memory(
        static_cast<size_t>(BackwardParameters::piece_places(rows, in.batch.count) * in.piece_levels * in.head_count) *
        node * 4);
    dk_parts = memory(static_cast<size_t>(in.part_count * in.places * kBlock * key_dim * 4));
    in.factors_memory = factors->device<char>();
    in.totals = totals->device<float>();
    in.up = up->device<float>();
    in.nodes_memory = nodes->device<unsigned short>();
    in.grads_memory = grads->device<unsigned short>();
    in.reads = reads->device<float>();
    in.through = through->device<float>();
    in.node_pieces = pieces->device<float>();
    in.dk_parts = dk_parts->device<float>();
    in.nodes = map_of_nodes(in.nodes_memory, key_dim);
    in.grads = map_of_nodes(in.grads_memory, key_dim);
    in.node_halves = map_of_nodes(in.nodes_memory, 64);
    in.grad_halves = map_of_nodes(in.grads_memory, 64);
  }

  Memory* memory(size_t bytes) {
    memories.emplace_back(new Memory(bytes));
    return memories.back().get();
  }
  double normal() { return std::normal_distribution<double>()(random); }
  double uniform() { return std::uniform_real_distribution<double>()(random); }
  // Rows of no sequence stay NaN.
  template <class Value>
  void fill(Tensor& t, Value value) {
    for (const Sequence& s : sequences) {
      for (int64_t r = s.row_begin; r < s.row_begin + s.rows; ++r) {
        for (int64_t h = 0; h < t.heads; ++h) {
          for (int64_t i = 0; i < t.dim; ++i) t.set(r, h, i, value());
        }
      }
    }
    t.memory.to_device();
  }
  void make(std::unique_ptr<Tensor>& t, int64_t heads, int64_t dim, int32_t dtype, double size) {
    t.reset(new Tensor(rows, heads, dim, dtype));
    fill(*t, [&] { return size * normal(); });
  }
  CUtensorMap map_of(const Tensor& t, int32_t box_rows = kBlock) {
    TensorView<3> view{TensorType::kBf16,
                       t.view.data,
                       {t.dim, t.rows, t.heads},
                       {2 * t.view.row_stride, 2 * t.view.head_stride},
                       {64, box_rows, 1}};
    CUtensorMap map;
    check(make_map(view, &map));
    return map;
  }
  CUtensorMap map_of_nodes(unsigned short* data, int32_t box_rows) {
    TensorView<2> view{
        TensorType::kBf16, data, {kColumns, in.places * in.head_count * key_dim}, {2 * kColumns}, {64, box_rows}};
    CUtensorMap map;
    check(make_map(view, &map));
    return map;
  }
  void check(int32_t status) {
    if (status != LLA_OK) failed = true;
  }
  bool failed = false;

  static int64_t first_of(const Sequence& s) { return s.position >> kBlockLog; }
  static int64_t end_of(const Sequence& s) { return (s.position + s.rows + kBlock - 1) >> kBlockLog; }

  // Everything of one block and head, in double precision.
  struct Rows {
    int64_t place, slot, row;
    int lo, hi, block, first, end, i, head;
    bool makes;
    std::vector<double> gate, write;        // of the 128 rows; of those that are not the call's 0
    double decay(int from, int to) const {  // over rows [from, to)
      double sum = 0;
      for (int r = from; r < to; ++r) sum += gate[static_cast<size_t>(r)];
      return std::exp(sum);
    }
    bool live(int r) const { return r >= lo && r < hi; }
    // Into the row from the start of its aligned block of 2^d, or from the row to the end of it.
    double prefix(int d, int r) const { return decay(r >> d << d, r + 1); }
    double suffix(int d, int r) const { return decay(r + 1, ((r >> d) + 1) << d); }
  };
  Rows rows_of(size_t b, int block, int i) {
    const Sequence& s = sequences[b];
    Rows rows;
    rows.i = i;
    rows.head = in.head_of(i);
    rows.block = block;
    rows.first = static_cast<int>(first_of(s));
    rows.end = static_cast<int>(end_of(s));
    rows.makes = block + 1 < rows.end;
    rows.place = (s.row_begin >> kBlockLog) + 2 * static_cast<int64_t>(b) + block - rows.first;
    rows.slot = in.slot(rows.place, i);
    const int64_t before = s.position - (static_cast<int64_t>(block) << kBlockLog);
    rows.lo = static_cast<int>(std::max<int64_t>(before, 0));
    rows.hi = static_cast<int>(std::min<int64_t>(before + s.rows, kBlock));
    rows.row = s.row_begin - before;
    rows.gate.assign(kBlock, 0);
    rows.write.assign(kBlock, 0);
    for (int r = rows.lo; r < rows.hi; ++r) {
      if (gate) rows.gate[static_cast<size_t>(r)] = gate->get(rows.row + r, rows.head, 0);
      rows.write[static_cast<size_t>(r)] = write ? write->get(rows.row + r, rows.head, 0) : 1;
    }
    return rows;
  }
  double lambda_of(const Rows& rows, int r, int level) {
    return !lambda ? 1 : lambda->get(rows.row + r, rows.head, in.shape.column(level));
  }
  // f(b, block, head's number) for all blocks of the slice.
  template <class F>
  void each(F f) {
    for (size_t b = 0; b < sequences.size(); ++b) {
      if (sequences[b].padding || sequences[b].rows == 0) continue;
      for (int64_t block = first_of(sequences[b]); block < end_of(sequences[b]); ++block) {
        for (int i = in.head_begin; i < in.head_begin + in.head_count; ++i) f(b, static_cast<int>(block), i);
      }
    }
  }
  // Levels of the nodes that a block reads.
  std::vector<int> reads_of(const Rows& rows) const {
    std::vector<int> levels;
    if (in.linear) {
      if (rows.block > rows.first) levels.push_back(0);
      return levels;
    }
    for (int u = 0; u < 24; ++u) {
      if ((rows.block >> u & 1) && node_end(rows.block, u) >= rows.first) levels.push_back(u);
    }
    return levels;
  }
  int node_end(int block, int u) const { return in.linear ? block - 1 : ((block >> u) << u) - 1; }
  int level_of(int block) const {
    int u = 0;
    while (block >> u & 1) ++u;
    return u;
  }
  double block_decay(size_t b, int from, int to, int i) {  // over blocks [from, to)
    double decay = 1;
    for (int c = from; c < to; ++c) decay *= rows_of(b, c, i).decay(0, kBlock);
    return decay;
  }
  int parent(int block) const { return in.linear ? block + 1 : block + (1 << level_of(block)); }

  // What factors are of a block and head; `to` has in.factor_bytes.
  void factors_of(size_t b, const Rows& rows, BlockFactors* to, double* total_decay, double* up_decay) {
    std::memset(static_cast<void*>(to), 0, static_cast<size_t>(in.factor_bytes));
    const double scale = in.shape.scale;
    for (int r = 0; r < kBlock; ++r) {
      const size_t at = static_cast<size_t>(r);
      const bool live = rows.live(r);
      for (int l = 1; l <= kInnerLevels; ++l) {
        const bool upper = r >> (l - 1) & 1;
        const double decay = upper ? rows.prefix(l - 1, r) : rows.suffix(l - 1, r);
        to->level[l - 1][r] = static_cast<float>(!live ? 0 : upper ? scale * decay : decay);
        if (!in.linear) to->lambda(l)[r] = static_cast<float>(live && upper ? lambda_of(rows, r, l) : 0);
      }
      if (!in.linear) to->lambda(0)[r] = static_cast<float>(live ? lambda_of(rows, r, 0) : 0);
      to->start[r] = static_cast<float>(live ? scale * rows.decay(0, r + 1) : 0);
      to->write[r] = static_cast<float>(rows.write[at]);
      to->fold[r] = static_cast<float>(live ? rows.decay(r + 1, kBlock) : 0);
    }
    int entry = 0;
    for (int u : reads_of(rows)) {
      to->newer[entry] = static_cast<float>(block_decay(b, node_end(rows.block, u) + 1, rows.block, rows.i));
      for (int r = 0; r < kBlock && !in.linear; ++r)
        to->lambda(kInnerLevels + 1 + entry)[r] =
            static_cast<float>(rows.live(r) ? lambda_of(rows, r, kInnerLevels + 1 + u) : 0);
      ++entry;
    }
    *total_decay = rows.decay(0, kBlock);
    const int p = parent(rows.block);
    *up_decay = p < rows.end ? block_decay(b, rows.block + 1, p + 1, rows.i) : 0;
  }
  BlockFactors* factors_at(int64_t slot) {
    return reinterpret_cast<BlockFactors*>(factors->host<char>() + slot * in.factor_bytes);
  }
  void fill_factors() {
    each([&](size_t b, int block, int i) {
      const Rows rows = rows_of(b, block, i);
      double total, up_decay;
      factors_of(b, rows, factors_at(rows.slot), &total, &up_decay);
      totals->host<float>()[rows.slot] = static_cast<float>(std::log(total));
      up->host<float>()[rows.slot] = static_cast<float>(up_decay);
    });
    for (Memory* m : {factors, totals, up}) m->to_device();
  }
  void fill_nodes(Memory* of) {
    each([&](size_t b, int block, int i) {
      const Rows rows = rows_of(b, block, i);
      for (int e = 0; rows.makes && e < key_dim * kColumns; ++e)
        of->host<uint16_t>()[rows.slot * key_dim * kColumns + e] =
            bf16_bits(e / kColumns < o.key_dim && e % kColumns < o.value_dim ? normal() : 0);
    });
    of->to_device();
  }
  double node(Memory* of, int64_t slot, int row, int column) const {
    return bf16_value(of->host<uint16_t>()[(slot * key_dim + row) * kColumns + column]);
  }
};

// The error of many numbers, relative to their size.
struct Error {
  double difference = 0, size = 0;
  void add(double got, double want) {
    if (!(std::fabs(got - want) < 1e30)) difference = INFINITY;
    difference += (got - want) * (got - want);
    size += want * want;
  }
  double value() const { return difference == 0 ? 0 : std::sqrt(difference / size); }
};

// The largest error of the factors.
inline double factors_error(Problem& p) {
  p.check(launch_factors(p.in, nullptr));
  for (Memory* m : {p.factors, p.totals, p.up}) m->to_host();
  double most = p.failed ? INFINITY : 0;
  const auto compare = [&](double got, double want) {
    const double error = std::fabs(got - want);
    if (!(error <= most)) most = std::isnan(error) ? INFINITY : error;
  };
  p.each([&](size_t b, int block, int i) {
    const auto rows = p.rows_of(b, block, i);
    std::vector<float> want(static_cast<size_t>(p.in.factor_bytes / 4));
    double total, up;
    p.factors_of(b, rows, reinterpret_cast<BlockFactors*>(want.data()), &total, &up);
    const auto* got = reinterpret_cast<const float*>(p.factors_at(rows.slot));
    const auto written = BlockFactors::bytes(static_cast<int64_t>(p.reads_of(rows).size()), p.in.linear) / 4;
    for (int64_t e = 0; e < written; ++e) compare(got[e], want[static_cast<size_t>(e)]);
    compare(std::exp(p.totals->host<float>()[rows.slot]), total);
    compare(p.up->host<float>()[rows.slot], up);
  });
  return most;
}

// What a node's readers give to its gradient.
inline std::vector<double> read_gradient(Problem& p, size_t b, const Problem::Rows& rows) {
  const int u = p.level_of(rows.block);
  const int to = std::min(rows.end, p.in.linear ? rows.block + 2 : rows.block + 1 + (1 << u));
  std::vector<double> sum(static_cast<size_t>(p.key_dim * kColumns), 0);
  for (int c = rows.block + 1; c < to; ++c) {
    const auto reader = p.rows_of(b, c, rows.i);
    const double newer = p.block_decay(b, rows.block + 1, c, rows.i);
    for (int r = reader.lo; r < reader.hi; ++r) {
      const double weight = p.in.shape.scale * reader.decay(0, r + 1) * newer * p.lambda_of(reader, r, kInnerLevels + 1 + u);
      for (int x = 0; x < p.o.key_dim; ++x) {
        const double wq = weight * p.q->get(reader.row + r, p.in.group_of(rows.i), x);
        for (int y = 0; y < p.o.value_dim; ++y)
          sum[static_cast<size_t>(x * kColumns + y)] += wq * p.dy->get(reader.row + r, reader.head, y);
      }
    }
  }
  return sum;
}

inline double readers_error(Problem& p) {
  p.fill_factors();
  p.check(launch_node_readers(p.in, p.key_dim, nullptr));
  p.grads->to_host();
  Error error;
  p.each([&](size_t b, int block, int i) {
    const auto rows = p.rows_of(b, block, i);
    if (!rows.makes) return;
    const std::vector<double> want = read_gradient(p, b, rows);
    for (int x = 0; x < p.key_dim; ++x)
      for (int y = 0; y < kColumns; ++y)
        error.add(p.node(p.grads, rows.slot, x, y), want[static_cast<size_t>(x * kColumns + y)]);
  });
  return p.failed ? INFINITY : error.value();
}

// Of the gradients, and of the flows. Linear: with what readers give.
inline double down_error(Problem& p, double* flow_error) {
  p.fill_factors();
  p.fill_nodes(p.nodes);
  if (!p.in.linear) p.fill_nodes(p.grads);
  const size_t size = static_cast<size_t>(p.key_dim * kColumns);
  std::vector<std::vector<double>> want(static_cast<size_t>(p.in.places * p.in.head_count));
  std::vector<double> flows(want.size());
  for (size_t b = 0; b < p.sequences.size(); ++b) {
    const Sequence& s = p.sequences[b];
    if (s.padding || s.rows == 0) continue;
    for (int i = p.in.head_begin; i < p.in.head_begin + p.in.head_count; ++i) {
      for (int block = static_cast<int>(Problem::end_of(s)) - 2; block >= Problem::first_of(s); --block) {
        const auto rows = p.rows_of(b, block, i);
        std::vector<double>& sum = want[static_cast<size_t>(rows.slot)];
        sum.resize(size);
        if (p.in.linear) sum = read_gradient(p, b, rows);
        for (size_t e = 0; e < size && !p.in.linear; ++e)
          sum[e] = p.node(p.grads, rows.slot, static_cast<int>(e) / kColumns, static_cast<int>(e) % kColumns);
        const int parent = p.parent(block);
        if (parent + 1 >= rows.end) continue;
        const auto& above = want[static_cast<size_t>(p.rows_of(b, parent, i).slot)];
        const double up = p.up->host<float>()[rows.slot];
        for (size_t e = 0; e < size; ++e) {
          sum[e] += up * above[e];
          flows[static_cast<size_t>(rows.slot)] +=
              p.node(p.nodes, rows.slot, static_cast<int>(e) / kColumns, static_cast<int>(e) % kColumns) * up * above[e];
        }
      }
    }
  }
  if (p.in.linear) p.check(launch_node_readers(p.in, p.key_dim, nullptr));
  p.check(launch_node_gradients(p.in, p.key_dim, nullptr));
  p.grads->to_host();
  p.through->to_host();
  Error error, flow;
  p.each([&](size_t b, int block, int i) {
    const auto rows = p.rows_of(b, block, i);
    if (!rows.makes) return;
    flow.add(p.through->host<float>()[rows.slot], flows[static_cast<size_t>(rows.slot)]);
    for (size_t e = 0; e < size; ++e)
      error.add(p.node(p.grads, rows.slot, static_cast<int>(e) / kColumns, static_cast<int>(e) % kColumns),
                want[static_cast<size_t>(rows.slot)][e]);
  });
  *flow_error = flow.value();
  return p.failed ? INFINITY : error.value();
}

struct ColumnErrors {
  double dk = 0, dv = 0, dwrite = 0, others = 0;
};

inline ColumnErrors columns_errors(Problem& p) {
  p.fill_factors();
  p.fill_nodes(p.grads);
  const int keys = p.o.key_dim, columns = p.o.value_dim;
  std::vector<double> dk(static_cast<size_t>(p.rows * p.o.groups * keys), 0),
      dv(static_cast<size_t>(p.rows * p.o.heads * columns), 0);
  std::vector<double> dk_parts(static_cast<size_t>(p.in.part_count * p.in.places * kBlock * p.key_dim), 0);
  std::vector<double> dwrite(static_cast<size_t>(p.rows * p.o.heads), 0),
      others(static_cast<size_t>(p.in.places * p.in.head_count * kBlock), 0);
  p.each([&](size_t b, int block, int i) {
    const auto rows = p.rows_of(b, block, i);
    const int group = p.in.group_of(i), head = rows.head;
    int part = p.in.part_begin;
    while (i >= p.in.part_end(part)) ++part;
    const BlockFactors& factors = *p.factors_at(rows.slot);
    for (int j = rows.lo; j < rows.hi; ++j) {
      const double write = rows.write[static_cast<size_t>(j)];
      double self = 0, other = 0;
      std::vector<double> gv(static_cast<size_t>(columns), 0), gk(static_cast<size_t>(keys), 0);
      for (int t = j; t < rows.hi; ++t) {
        double score = 0, read = 0;
        for (int x = 0; x < keys; ++x) score += p.q->get(rows.row + t, group, x) * p.k->get(rows.row + j, group, x);
        for (int y = 0; y < columns; ++y) read += p.dy->get(rows.row + t, head, y) * p.v->get(rows.row + j, head, y);
        int level = 0;
        while ((t ^ j) >> level) ++level;
        const double mask =
            p.lambda_of(rows, t, level) *
            (level == 0 ? p.in.shape.scale : double{factors.level[level - 1][t]} * factors.level[level - 1][j]);
        (t == j ? self : other) += mask * score * read;
        for (int x = 0; x < keys; ++x) gk[static_cast<size_t>(x)] += mask * read * p.q->get(rows.row + t, group, x);
        for (int y = 0; y < columns; ++y) gv[static_cast<size_t>(y)] += mask * score * p.dy->get(rows.row + t, head, y);
      }
      const double fold = factors.fold[j];
      for (int x = 0; rows.makes && x < keys; ++x) {
        const double key = p.k->get(rows.row + j, group, x);
        for (int y = 0; y < columns; ++y) {
          const double gradient = p.node(p.grads, rows.slot, x, y), value = p.v->get(rows.row + j, head, y);
          gv[static_cast<size_t>(y)] += fold * key * gradient;
          gk[static_cast<size_t>(x)] += fold * value * gradient;
          other += fold * key * gradient * value;
        }
      }
      for (int x = 0; x < keys; ++x) {
        dk[static_cast<size_t>(((rows.row + j) * p.o.groups + group) * keys + x)] += write * gk[static_cast<size_t>(x)];
        dk_parts[static_cast<size_t>((((part - p.in.part_begin) * p.in.places + rows.place) * kBlock + j) * p.key_dim +
                                     x)] += write * gk[static_cast<size_t>(x)];
      }
      for (int y = 0; y < columns; ++y)
        dv[static_cast<size_t>(((rows.row + j) * p.o.heads + head) * columns + y)] = write * gv[static_cast<size_t>(y)];
      dwrite[static_cast<size_t>((rows.row + j) * p.o.heads + head)] = other + self;
      others[static_cast<size_t>(rows.slot * kBlock + j)] = write * other;
    }
  });
  // Before: what is added to, or must stay as it is.
  const auto values = [](Tensor& t) {
    std::vector<double> x;
    for (int64_t r = 0; r < t.rows; ++r)
      for (int64_t h = 0; h < t.heads; ++h)
        for (int64_t i = 0; i < t.dim; ++i) x.push_back(t.get(r, h, i));
    return x;
  };
  const auto before_dk = values(*p.dk), before_dv = values(*p.dv), before_dwrite = values(*p.dwrite);
  p.check(launch_column_gradients(p.in, p.key_dim, nullptr));
  for (Tensor* t : {p.dk.get(), p.dv.get(), p.dwrite.get()}) t->memory.to_host();
  p.factors->to_host();
  p.dk_parts->to_host();
  const auto after_dk = values(*p.dk), after_dv = values(*p.dv), after_dwrite = values(*p.dwrite);
  Error error[4];
  bool untouched = true;
  const auto same = [&](double a, double b) { untouched = untouched && (a == b || (std::isnan(a) && std::isnan(b))); };
  std::vector<bool> touched(static_cast<size_t>(p.rows * p.o.heads), false),
      touched_group(static_cast<size_t>(p.rows * p.o.groups), false);
  p.each([&](size_t b, int block, int i) {
    const auto rows = p.rows_of(b, block, i);
    const int group = p.in.group_of(i);
    int part = p.in.part_begin;
    while (i >= p.in.part_end(part)) ++part;
    for (int j = 0; j < kBlock; ++j) {
      error[3].add(p.factors_at(rows.slot)->start[j], others[static_cast<size_t>(rows.slot * kBlock + j)]);
      for (int x = 0; p.in.parts_of_group > 1 && x < p.key_dim; ++x) {
        const auto at =
            static_cast<size_t>((((part - p.in.part_begin) * p.in.places + rows.place) * kBlock + j) * p.key_dim + x);
        error[0].add(p.dk_parts->host<float>()[at], dk_parts[at]);
      }
      if (!rows.live(j)) continue;
      touched[static_cast<size_t>((rows.row + j) * p.o.heads + rows.head)] = true;
      if (p.in.parts_of_group == 1) touched_group[static_cast<size_t>((rows.row + j) * p.o.groups + group)] = true;
    }
  });
  for (size_t n = 0; n < touched.size(); ++n) {
    const double add = p.o.accumulate ? 1 : 0;
    if (!touched[n]) {
      same(after_dwrite[n], before_dwrite[n]);
    } else {
      error[2].add(after_dwrite[n], dwrite[n] + (add != 0 ? before_dwrite[n] : 0));
    }
    for (size_t y = n * static_cast<size_t>(columns); y < (n + 1) * static_cast<size_t>(columns); ++y) {
      if (!touched[n])
        same(after_dv[y], before_dv[y]);
      else
        error[1].add(after_dv[y], dv[y] + (add != 0 ? before_dv[y] : 0));
    }
  }
  for (size_t n = 0; n < touched_group.size(); ++n) {
    for (size_t x = n * static_cast<size_t>(keys); x < (n + 1) * static_cast<size_t>(keys); ++x) {
      if (!touched_group[n])
        same(after_dk[x], before_dk[x]);
      else
        error[0].add(after_dk[x], dk[x] + (p.o.accumulate ? before_dk[x] : 0));
    }
  }
  if (!untouched || p.failed) return {INFINITY, INFINITY, INFINITY, INFINITY};
  return {error[0].value(), error[1].value(), error[2].value(), error[3].value()};
}

}  // namespace hopper_backward_testing
