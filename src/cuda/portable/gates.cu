// SPDX-License-Identifier: Apache-2.0
// Log gate, write strength and λ from their raw projections, and the gradients (docs/mathematics.md). All in fp32.
#include "cuda/common/reduce.h"
#include "cuda/common/row_blocks.h"
#include "cuda/portable/parts_kernels.h"

namespace lla::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kForwardRowsLog = 4;   // rows of a block
constexpr int kBackwardRowsLog = 7;  // likewise; each block sums its rows' part of the weights' gradients

__device__ __forceinline__ float load(const View& view, int64_t b, int64_t row, int64_t h, int64_t i = 0) {
  return load_element(view.at(b, row, h), view.dtype, i);
}
__device__ __forceinline__ void put(const View& view, int64_t b, int64_t row, int64_t h, int64_t i, float value) {
  put_element(view.at(b, row, h), view.dtype, i, value, view.accumulate);
}
__device__ __forceinline__ float load(const Matrix& matrix, int64_t i, int64_t j) {
  return load_element(matrix.at(i), matrix.dtype, j);
}

// The step dt of one row and head, and how it depends on the raw gate.
struct Step {
  float dt, slope;  // slope: of dt over raw gate or bias; 0 where a limit holds
};

__device__ __forceinline__ Step step(const Gates& p, int64_t b, int64_t row, int64_t h) {
  const float raw = load(p.gate, b, row, h) + (p.dt_bias.present() ? load(p.dt_bias, 0, h) : 0);
  const float free = softplus(raw), least = static_cast<float>(p.dt_min), most = static_cast<float>(p.dt_max);
  if (free < least) return {least, 0};
  if (free > most) return {most, 0};
  return {free, sigmoid(raw)};
}

__device__ __forceinline__ float decay_rate(const Gates& p, int64_t h) {
  return p.a_log.present() ? expf(load(p.a_log, 0, h)) : 1;
}

__device__ __forceinline__ float write_strength(const Gates& p, int64_t b, int64_t row, int64_t h) {
  switch (p.write_form) {
    case LLA_WRITE_SIGMOID:
      return sigmoid(load(p.write, b, row, h));
    case LLA_WRITE_TWO_SIGMOID:
      return 2 * sigmoid(load(p.write, b, row, h));
    case LLA_WRITE_STEP:
      return step(p, b, row, h).dt;
    default:
      return load(p.write, b, row, h);
  }
}

__device__ __forceinline__ float level_weight(const Gates& p, int64_t b, int64_t row, int64_t h, int64_t l) {
  const float raw = load(p.lambda, b, row, h, l), scale = static_cast<float>(p.lambda_scale);
  switch (p.lambda_form) {
    case LLA_LAMBDA_SOFTPLUS:
      return scale * softplus(load(p.lambda_weight, h, l) * raw);
    case LLA_LAMBDA_BOUNDED:
      return scale * expf(-expf(load(p.lambda_weight, h, l)) * softplus(raw));
    case LLA_LAMBDA_PRODUCT:
      return scale * load(p.lambda_weight, h, l) * raw;
    default:
      return scale * raw;
  }
}

// Columns of a row: gates of all heads, write strengths of all heads, λ by heads.
__global__ void __launch_bounds__(kThreads) gates_forward(Gates p, RowBlocks blocks) {
  const unsigned heads = static_cast<unsigned>(p.heads), levels = static_cast<unsigned>(p.levels);
  const unsigned columns = 2 * heads + (p.lambda_out.present() ? heads * levels : 0);
  for (int64_t task = blockIdx.x; task < blocks.tasks; task += gridDim.x) {
    const RowBlock block = blocks.find(p.batch, task);
    for (int64_t i = threadIdx.x; i < static_cast<int64_t>(block.rows) * columns; i += kThreads) {
      const unsigned r = static_cast<unsigned>(i / columns);
      unsigned column = static_cast<unsigned>(i - static_cast<int64_t>(r) * columns);
      const int64_t b = block.sequence->index, row = block.first + r;
      if (column < heads) {
        if (!p.gate_out.present()) continue;
        const bool ready = p.gate_form == LLA_GATE_LOG;
        put(p.gate_out, b, row, column, 0,
            ready ? load(p.gate, b, row, column) : -decay_rate(p, column) * step(p, b, row, column).dt);
      } else if (column < 2 * heads) {
        column -= heads;
        if (p.write_out.present()) put(p.write_out, b, row, column, 0, write_strength(p, b, row, column));
      } else {
        column -= 2 * heads;
        const unsigned h = column / levels, l = column - h * levels;
        put(p.lambda_out, b, row, h, l, level_weight(p, b, row, h, l));
      }
    }
  }
}

// Gradients of one row and column, and what they add to the weights'. A result whose gradient is 0 sends back 0, whatever it
// is: columns of dead levels may hold anything.
struct Sums {
  float first = 0, second = 0;  // dt_bias and a_log, or λ's weight
};

__device__ __forceinline__ void reverse_gate(const Gates& p, int64_t b, int64_t row, int64_t h, Sums* sums) {
  const float dgate = p.dgate_out.present() ? load(p.dgate_out, b, row, h) : 0;
  float draw = dgate;
  if (p.gate_form != LLA_GATE_LOG) {
    const Step s = step(p, b, row, h);
    const float rate = decay_rate(p, h);
    float ddt = dgate == 0 ? 0 : -rate * dgate;
    if (p.write_form == LLA_WRITE_STEP && p.dwrite_out.present()) ddt += load(p.dwrite_out, b, row, h);
    draw = ddt == 0 ? 0 : ddt * s.slope;
    if (dgate != 0) sums->second += -rate * s.dt * dgate;
    sums->first += draw;
  }
  if (p.dgate.present()) put(p.dgate, b, row, h, 0, draw);
}

__device__ __forceinline__ void reverse_write(const Gates& p, int64_t b, int64_t row, int64_t h) {
  const float dwrite = p.dwrite_out.present() ? load(p.dwrite_out, b, row, h) : 0;
  float draw = dwrite;
  if (dwrite != 0 && (p.write_form == LLA_WRITE_SIGMOID || p.write_form == LLA_WRITE_TWO_SIGMOID)) {
    const float s = sigmoid(load(p.write, b, row, h));
    draw = dwrite * s * (1 - s) * (p.write_form == LLA_WRITE_TWO_SIGMOID ? 2 : 1);
  }
  put(p.dwrite, b, row, h, 0, draw);
}

__device__ __forceinline__ void reverse_lambda(const Gates& p, int64_t b, int64_t row, int64_t h, int64_t l, Sums* sums) {
  const float dlambda = p.dlambda_out.present() ? static_cast<float>(p.lambda_scale) * load(p.dlambda_out, b, row, h, l) : 0;
  float draw = 0;
  if (dlambda != 0) {
    const float raw = load(p.lambda, b, row, h, l);
    const float weight = p.lambda_weight.present() ? load(p.lambda_weight, h, l) : 1;
    switch (p.lambda_form) {
      case LLA_LAMBDA_SOFTPLUS: {
        const float slope = sigmoid(weight * raw);
        draw = dlambda * slope * weight;
        sums->first += dlambda * slope * raw;
        break;
      }
      case LLA_LAMBDA_BOUNDED: {
        const float rate = expf(weight), soft = softplus(raw), value = expf(-rate * soft);
        draw = -dlambda * value * rate * sigmoid(raw);
        sums->first += -dlambda * value * rate * soft;
        break;
      }
      case LLA_LAMBDA_PRODUCT:
        draw = dlambda * weight;
        sums->first += dlambda * raw;
        break;
      default:
        draw = dlambda;
    }
  }
  if (p.dlambda.present()) put(p.dlambda, b, row, h, l, draw);
}

// A warp has 32 columns (as above) of every eighth row of a place. Partial sums are [place][column]; the columns of the
// write strengths hold the sums of a_log.
__global__ void __launch_bounds__(kThreads, 4)
    gates_backward(Gates p, RowBlocks blocks, int64_t column_blocks, float* partials) {
  __shared__ float sums_of_warps[2][kThreads / 32][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool gate = p.dgate.present() || p.ddt_bias.present() || p.da_log.present();
  const bool lambda = p.dlambda.present() || p.dlambda_weight.present();
  const int64_t columns = p.heads * (2 + p.levels);
  for (int64_t task = blockIdx.x; task < blocks.tasks * column_blocks; task += gridDim.x) {
    const int64_t place = task / column_blocks, column = (task - place * column_blocks) * 32 + lane;
    const RowBlock block = blocks.find(p.batch, place);
    Sums sums;
    const int64_t of_lambda = column - 2 * p.heads;
    const int64_t h = of_lambda >= 0 && column < columns ? of_lambda / p.levels : 0;
    for (int r = warp; r < block.rows && column < columns; r += kThreads / 32) {
      const int64_t b = block.sequence->index, row = block.first + r;
      if (column < p.heads) {
        if (gate) reverse_gate(p, b, row, column, &sums);
      } else if (of_lambda < 0) {
        if (p.dwrite.present()) reverse_write(p, b, row, column - p.heads);
      } else if (lambda) {
        reverse_lambda(p, b, row, h, of_lambda - h * p.levels, &sums);
      }
    }
    if (!partials) continue;
    sums_of_warps[0][warp][lane] = sums.first;
    sums_of_warps[1][warp][lane] = sums.second;
    __syncthreads();
    if (warp == 0 && column < columns) {
      for (int w = 1; w < kThreads / 32; ++w) {
        sums.first += sums_of_warps[0][w][lane];
        sums.second += sums_of_warps[1][w][lane];
      }
      if (column < p.heads || of_lambda >= 0) partials[place * columns + column] = sums.first;
      if (column < p.heads) partials[place * columns + p.heads + column] = sums.second;
    }
    __syncthreads();
  }
}

struct StoreWeights {
  Matrix dt_bias, a_log, lambda;
  int64_t heads, levels;

  __device__ void operator()(int64_t column, float sum) const {
    if (column < heads) {
      if (dt_bias.present()) put_element(dt_bias.data, dt_bias.dtype, column, sum, dt_bias.accumulate);
    } else if (column < 2 * heads) {
      if (a_log.present()) put_element(a_log.data, a_log.dtype, column - heads, sum, a_log.accumulate);
    } else if (lambda.present()) {
      const int64_t h = (column - 2 * heads) / levels;
      put_element(lambda.at(h), lambda.dtype, column - 2 * heads - h * levels, sum, lambda.accumulate);
    }
  }
};

bool accepts_types(const Gates& p) {
  return narrow_types(p.gate, p.write, p.lambda, p.gate_out, p.write_out, p.lambda_out, p.dgate_out, p.dwrite_out,
                      p.dlambda_out, p.dgate, p.dwrite, p.dlambda, p.dt_bias, p.a_log, p.lambda_weight, p.ddt_bias, p.da_log,
                      p.dlambda_weight) &&
         p.heads * (2 + p.levels) < kMostColumns;
}

float* partials_of(FloatCarver* carver, const Gates& p, int64_t rows, int64_t sequences) {
  return carver->take((Size(rows >> kBackwardRowsLog) + Size(sequences)) * Size(p.heads * (2 + p.levels)));
}

}  // namespace

bool GatesForward::accepts(const void* problem) { return accepts_types(*static_cast<const Gates*>(problem)); }

void GatesForward::measure(const void* problem, const Limits& limits, Need* need) { needs_nothing(problem, limits, need); }

int32_t GatesForward::launch(const void* problem, const Limits&, char*, void* stream) {
  const Gates& p = *static_cast<const Gates*>(problem);
  const RowBlocks blocks(p.batch, kForwardRowsLog, false);
  return cuda::launch(gates_forward, blocks.tasks, kThreads, 0, stream, p, blocks);
}

int32_t GatesForward::load() { return load_kernel(gates_forward); }

bool GatesBackward::accepts(const void* problem) { return accepts_types(*static_cast<const Gates*>(problem)); }

void GatesBackward::measure(const void* problem, const Limits& limits, Need* need) {
  FloatCarver carver;
  partials_of(&carver, *static_cast<const Gates*>(problem), limits.rows, limits.sequences);
  *need = carver.need();
}

int32_t GatesBackward::launch(const void* problem, const Limits&, char* scratch, void* stream) {
  const Gates& p = *static_cast<const Gates*>(problem);
  FloatCarver carver(scratch);
  float* partials = partials_of(&carver, p, p.batch.total_rows, p.batch.count);
  if (!p.ddt_bias.present() && !p.da_log.present() && !p.dlambda_weight.present()) partials = nullptr;
  const RowBlocks blocks(p.batch, kBackwardRowsLog, true);
  const int64_t columns = p.heads * (2 + p.levels), column_blocks = (columns + 31) / 32;
  const int32_t status =
      cuda::launch(gates_backward, blocks.tasks * column_blocks, kThreads, 0, stream, p, blocks, column_blocks, partials);
  if (status != LLA_OK || !partials) return status;
  const StoreWeights store{p.ddt_bias, p.da_log, p.dlambda_weight, p.heads, p.levels};
  return launch_sum_partials(partials, blocks.tasks, columns, store, stream);
}

int32_t GatesBackward::load() {
  return first_failure([] { return load_kernel(gates_backward); }, [] { return load_kernel(sum_partials<StoreWeights>); });
}

}  // namespace lla::cuda
