// SPDX-License-Identifier: Apache-2.0
// The table that the core finds in this library: devices, memory, copies, and the kernels.
#include <atomic>
#include <cstdio>
#include <cstring>

#if !defined(LLA_CUDA_EMULATED)
#include <cuda.h>
#endif

#include "cuda/backend.h"
#include "cuda/common/platform.h"
#include "cuda/plan_rows.h"
#include "plugin/plugin.h"

#ifndef LLA_SOURCE_ID
#define LLA_SOURCE_ID "unknown"
#endif

namespace lla::cuda {
namespace {

constexpr int kOldest = 80;  // compute capability

#if defined(LLA_CUDA_EMULATED)
int32_t compute_capability(int, char* name, size_t capacity) {
  std::snprintf(name, capacity, "emulated CUDA device");
  return kOldest;
}
int32_t driver_version() { return 1; }
bool is_capturing(void*) { return false; }
void find_context_query() {}
bool has_driver_context() { return true; }
#else
int32_t compute_capability(int device, char* name, size_t capacity) {
  cudaDeviceProp properties;
  if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) return 0;
  if (name) std::snprintf(name, capacity, "%s", properties.name);
  return properties.major * 10 + properties.minor;
}
int32_t driver_version() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

bool is_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
  if (error == cudaSuccess) return status != cudaStreamCaptureStatusNone;
  cudaGetLastError();
  return error == cudaErrorStreamCaptureImplicit;  // the default stream, while another one is captured
}

// The driver's own question, looked up when a device is opened: nothing links with libcuda, which machines without a device
// lack.
std::atomic<decltype(&cuCtxGetCurrent)> context_query{nullptr};
void find_context_query() {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuCtxGetCurrent", &entry, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t error = cudaGetDriverEntryPoint("cuCtxGetCurrent", &entry, cudaEnableDefault, &found);
#endif
  if (status_of(error) != LLA_OK || found != cudaDriverEntryPointSuccess) return;
  context_query.store(reinterpret_cast<decltype(&cuCtxGetCurrent)>(entry), std::memory_order_relaxed);
}
bool has_driver_context() {
  const auto query = context_query.load(std::memory_order_relaxed);
  CUcontext context = nullptr;
  return query && query(&context) == CUDA_SUCCESS && context;
}
#endif

int32_t count_devices(int32_t* devices, char* reason, size_t capacity) {
  int count = 0;
  *devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    cudaGetLastError();
    const int32_t driver = driver_version();
    if (driver == 0) {
      std::snprintf(reason, capacity, "cuda: no NVIDIA driver is installed");
      return LLA_NO_DEVICE;
    }
    std::snprintf(reason, capacity, "cuda: driver for CUDA %d.%d: %s", driver / 1000, driver % 1000 / 10,
                  cudaGetErrorString(error));
    return std::strstr(cudaGetErrorString(error), "insufficient") ? LLA_DRIVER_TOO_OLD : LLA_NO_DEVICE;
  }
  if (count == 0) {
    std::snprintf(reason, capacity, "cuda: there is no device");
    return LLA_NO_DEVICE;
  }
  *devices = count;
  return LLA_OK;
}

int32_t enter(int32_t device, int32_t* previous) {
  int current = 0;
  if (const int32_t status = status_of(cudaGetDevice(&current)); status != LLA_OK) return status;
  *previous = current;
  // A thread that never used a device has a current device but no context of the driver. Until it has one, pointers are not
  // known to be the device's; naming the device makes one.
  return current == device && has_driver_context() ? LLA_OK : status_of(cudaSetDevice(device));
}

void leave(int32_t previous) {
  int current = 0;
  if (cudaGetDevice(&current) == cudaSuccess && current != previous) cudaSetDevice(previous);
}

// A piece of a kernel's parameters: what is uploaded travels in the command itself.
struct Parcel {
  uint4 words[240];
};

__global__ void unpack_parcel(char* to, const __grid_constant__ Parcel parcel, int bytes) {
  const int words = bytes / 4;
  for (int i = threadIdx.x; i < words; i += blockDim.x)
    reinterpret_cast<unsigned*>(to)[i] = reinterpret_cast<const unsigned*>(parcel.words)[i];
}

int32_t load_kernels() {
  const Backend& table = backend();
  for (int64_t i = 0; i < table.kernel_count; ++i) {
    if (!table.kernels[i].load) continue;
    if (const int32_t status = table.kernels[i].load(); status != LLA_OK) return status;
  }
  if (const int32_t status = load_plan_kernels(); status != LLA_OK) return status;
  return load_kernel(unpack_parcel);
}

int32_t open_device(int32_t device, char* name, size_t name_capacity, char* reason, size_t capacity) {
  const int32_t capability = compute_capability(device, name, name_capacity);
  if (capability < kOldest) {
    std::snprintf(reason, capacity, "cuda: device %d has compute capability %d.%d, needed is %d.%d", device, capability / 10,
                  capability % 10, kOldest / 10, kOldest % 10);
    return LLA_NO_DEVICE;
  }
  int32_t previous = 0;
  find_context_query();
  if (const int32_t status = enter(device, &previous); status != LLA_OK) {
    std::snprintf(reason, capacity, "cuda: device %d cannot be used", device);
    return status;
  }
  const int32_t status = load_kernels();
  if (status != LLA_OK) std::snprintf(reason, capacity, "cuda: the kernels cannot be loaded onto device %d", device);
  leave(previous);
  return status;
}

void* allocate(size_t bytes) {
  void* memory = nullptr;
  return status_of(cudaMalloc(&memory, bytes ? bytes : 1)) == LLA_OK ? memory : nullptr;
}

void release(void* memory) { static_cast<void>(status_of(cudaFree(memory))); }

int32_t copy(void* to, const void* from, size_t bytes, void* stream) {
  if (bytes == 0) return LLA_OK;
  return status_of(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)));
}

int32_t clear(void* at, size_t bytes, void* stream) {
  return bytes == 0 ? LLA_OK : status_of(cudaMemsetAsync(at, 0, bytes, static_cast<cudaStream_t>(stream)));
}

int32_t upload(void* to, const void* from, size_t bytes, void* stream) {
  for (size_t done = 0; done < bytes; done += sizeof(Parcel)) {
    Parcel parcel;
    const size_t count = bytes - done < sizeof parcel ? bytes - done : sizeof parcel;
    std::memcpy(&parcel, static_cast<const char*>(from) + done, count);
    const int32_t status =
        launch(unpack_parcel, 1, 256, 0, stream, static_cast<char*>(to) + done, parcel, static_cast<int>(count));
    if (status != LLA_OK) return status;
  }
  return LLA_OK;
}

int32_t wait(void* stream) { return status_of(cudaStreamSynchronize(static_cast<cudaStream_t>(stream))); }

bool reaches(const void* memory) {
#if defined(LLA_CUDA_EMULATED)
  return memory != nullptr;
#else
  cudaPointerAttributes attributes;
  if (status_of(cudaPointerGetAttributes(&attributes, memory)) != LLA_OK) return false;
  if (attributes.type != cudaMemoryTypeUnregistered) return attributes.devicePointer != nullptr;
  int device = 0, pageable = 0;  // some systems let a device read all memory of the host
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, device) == cudaSuccess && pageable != 0;
#endif
}

void describe_error(char* text, size_t capacity) { std::snprintf(text, capacity, "%s", last_error_text); }

}  // namespace

const Backend& backend() {
  // Families one after the other; filled on first use, which the core's loader does once under its lock.
  static Kernel kernels[64];
  static Backend made = {"cuda", "sm_80", LLA_F32, nullptr, 0};
  if (!made.kernels) {
    int64_t count = 0;
    for (const KernelTable& table : {scalar_gate_kernels(), delta_rule_kernels(), part_kernels(), projection_kernels()}) {
      for (int64_t i = 0; i < table.count && count < 64; ++i) kernels[count++] = table.kernels[i];
    }
    made.kernel_count = count;
    made.kernels = kernels;
  }
  return made;
}

}  // namespace lla::cuda

extern "C" __attribute__((visibility("default"))) const lla::Plugin* lla_plugin_query(uint32_t abi) {
  using namespace lla::cuda;
  if (abi != lla::kPluginAbi) return nullptr;
  static lla::Plugin plugin = {lla::kPluginAbi,
                               lla::plugin_sizes(),
                               "cuda",
                               LLA_SOURCE_ID,
                               nullptr,
                               count_devices,
                               open_device,
                               enter,
                               leave,
                               allocate,
                               release,
                               copy,
                               clear,
                               upload,
                               wait,
                               is_capturing,
                               reaches,
                               put_records,
                               plan,
                               commit,
                               copy_forks,
                               describe_error};
  plugin.backend = &backend();
  return &plugin;
}
