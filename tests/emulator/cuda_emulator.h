// SPDX-License-Identifier: Apache-2.0
// Runs CUDA kernels on the CPU, one block after the other, each thread of a block as a fiber, so that the logic of kernels
// is tested on machines without a GPU. Barriers, shuffles and matrix instructions are real meeting points. Speed, races and
// memory spaces are not emulated; shared memory and fresh device memory begin as NaN.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__
#define __shared__ static thread_local
#define __align__(n) alignas(n)

namespace emulator {

struct Dim {
  unsigned x = 1, y = 1, z = 1;
};

// What a thread of a kernel sees of itself. Changed at every switch of fibers.
struct Self {
  Dim thread, block, block_size, grid;
};
extern thread_local Self self;

constexpr size_t kSharedBytes = 232448;
extern thread_local char* shared_base;

void run_kernel(Dim grid, Dim block, const std::function<void()>& body);
// What a thread waits for. `holds`: whether it must go on waiting; describe: in words, for the report of a deadlock.
struct Wait {
  bool (*holds)(const void* object, int64_t value) = nullptr;
  void (*describe)(const void* object, int64_t value, char* text, size_t size) = nullptr;
  const void* object = nullptr;
  int64_t value = 0;
};
void wait_while(const Wait& wait);
// A kernel's mistake: says where and what, and aborts.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
// Parts of the machine that only some programs have (hopper_emulator.cpp) hook in here.
struct Extension {
  void (*begin_block)(int threads);
  void (*end_thread)();
  bool (*advance)();  // no thread can go on: does one of the things that run by themselves; false if there is none
};
extern const Extension* extension;
void block_barrier();
int block_barrier_or(int value);
// A meeting point of a warp: every lane gives `bytes` (<= 64) and gets the 32 contributions, 64 bytes apart; valid until the
// lane's next but one meeting.
const char* warp_meet(const void* give, size_t bytes);
// The same; the last lane to come does `act` for the warp before any lane goes on.
void warp_act(const void* give, size_t bytes, void (*act)(const char* contributions));
inline int lane() { return static_cast<int>(self.thread.x % 32); }

template <class T>
T shuffle(T value, int source) {
  const char* all = warp_meet(&value, sizeof value);
  T result;
  std::memcpy(&result, all + 64 * (source & 31), sizeof result);
  return result;
}

}  // namespace emulator

#define threadIdx (emulator::self.thread)
#define blockIdx (emulator::self.block)
#define blockDim (emulator::self.block_size)
#define gridDim (emulator::self.grid)

inline void __syncthreads() { emulator::block_barrier(); }
inline int __syncthreads_or(int value) { return emulator::block_barrier_or(value); }
inline void __syncwarp(unsigned = 0xffffffffu) {
  const char nothing = 0;
  emulator::warp_meet(&nothing, 1);
}
template <class T>
T __shfl_sync(unsigned, T value, int source) {
  return emulator::shuffle(value, source);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulator::shuffle(value, emulator::lane() ^ mask);
}
template <class T>
T __shfl_up_sync(unsigned, T value, unsigned delta) {
  const int source = emulator::lane() - static_cast<int>(delta);
  const T other = emulator::shuffle(value, source < 0 ? emulator::lane() : source);
  return source < 0 ? value : other;
}
template <class T>
T __shfl_down_sync(unsigned, T value, unsigned delta) {
  const int source = emulator::lane() + static_cast<int>(delta);
  const T other = emulator::shuffle(value, source > 31 ? emulator::lane() : source);
  return source > 31 ? value : other;
}
inline unsigned __ballot_sync(unsigned, int predicate) {
  const char vote = predicate != 0;
  const char* all = emulator::warp_meet(&vote, 1);
  unsigned votes = 0;
  for (int i = 0; i < 32; ++i) votes |= static_cast<unsigned>(all[64 * i]) << i;
  return votes;
}
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline float __uint_as_float(unsigned x) {
  float f;
  std::memcpy(&f, &x, 4);
  return f;
}
inline unsigned __float_as_uint(float f) {
  unsigned x;
  std::memcpy(&x, &f, 4);
  return x;
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
using std::max;
using std::min;

// ---- the part of the run-time library that the backend uses
// ----------------------------------------------------------------

using cudaStream_t = struct EmulatedStream*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
constexpr cudaError_t cudaErrorMemoryAllocation = 2;
enum cudaMemcpyKind {
  cudaMemcpyHostToHost,
  cudaMemcpyHostToDevice,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice,
  cudaMemcpyDefault
};
cudaError_t cudaMalloc(void** memory, size_t bytes);
cudaError_t cudaFree(void* memory);
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memmove(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "emulated"; }
