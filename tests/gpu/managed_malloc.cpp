// SPDX-License-Identifier: Apache-2.0
// Preloaded beside device_shim: malloc and its kin give memory that host and device share, so that a program's ordinary
// tensors can be read by kernels. So does an mmap() of the program itself that asks for inaccessible memory, to open a part
// of it later: its guard pages stay open. Blocks of powers of two from one region; slow, small, and for tests only.
#include <cuda_runtime.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

extern "C" {
void* __libc_malloc(size_t);
void __libc_free(void*);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
}

namespace {

constexpr size_t kHeader = 64;  // before each block: its class
char* region = nullptr;
size_t region_bytes = 0, region_used = 0;
void* free_blocks[48] = {};
std::atomic_flag lock = ATOMIC_FLAG_INIT;

struct Lock {
  Lock() {
    while (lock.test_and_set(std::memory_order_acquire)) {
    }
  }
  ~Lock() { lock.clear(std::memory_order_release); }
};

bool is_ours(const void* p) { return region && p >= region && p < region + region_bytes; }

void* allocate(size_t bytes) {
  int order = 6;
  while ((size_t{1} << order) < bytes) ++order;
  const Lock guard;
  if (void* block = free_blocks[order]) {
    free_blocks[order] = *static_cast<void**>(block);
    return block;
  }
  const size_t size = kHeader + (size_t{1} << order);
  if (region_used + size > region_bytes) return nullptr;
  char* block = region + region_used + kHeader;
  region_used += size;
  *reinterpret_cast<int*>(block - kHeader) = order;
  return block;
}

size_t size_of(void* block) { return size_t{1} << *reinterpret_cast<int*>(static_cast<char*>(block) - kHeader); }

void give_back(void* block) {
  const int order = *reinterpret_cast<int*>(static_cast<char*>(block) - kHeader);
  const Lock guard;
  *static_cast<void**>(block) = free_blocks[order];
  free_blocks[order] = block;
}

// Where the program's own code lies: the driver's use of mmap() must stay what it is.
uintptr_t program_begin = UINTPTR_MAX, program_end = 0;
int find_program(dl_phdr_info* info, size_t, void*) {
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
    const uintptr_t begin = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr, end = begin + info->dlpi_phdr[i].p_memsz;
    program_begin = begin < program_begin ? begin : program_begin;
    program_end = end > program_end ? end : program_end;
  }
  return 1;  // the first object is the program
}

constexpr size_t kPage = 4096;

// Pages from the region; the block that they came from is noted before them.
void* allocate_pages(size_t bytes) {
  char* block = static_cast<char*>(allocate(bytes + 2 * kPage));
  if (!block) return nullptr;
  char* pages = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(block) + sizeof(void*) + kPage - 1) / kPage * kPage);
  reinterpret_cast<void**>(pages)[-1] = block;
  std::memset(pages, 0, bytes);
  return pages;
}

__attribute__((constructor)) void open_region() {
  dl_iterate_phdr(find_program, nullptr);
  const char* gigabytes = std::getenv("LLA_MANAGED_GIB");
  const size_t bytes = size_t(gigabytes ? std::atoi(gigabytes) : 4) << 30;
  void* memory = nullptr;
  if (cudaMallocManaged(&memory, bytes) != cudaSuccess) {
    std::fprintf(stderr, "managed_malloc: %s\n", cudaGetErrorString(cudaGetLastError()));
    return;
  }
  region_bytes = bytes;
  region = static_cast<char*>(memory);
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) void* malloc(size_t bytes) {
  if (!region) return __libc_malloc(bytes);
  void* block = allocate(bytes);
  if (!block) errno = ENOMEM;
  return block;
}
__attribute__((visibility("default"))) void free(void* p) {
  if (!p) return;
  if (is_ours(p))
    give_back(p);
  else
    __libc_free(p);
}
__attribute__((visibility("default"))) void* calloc(size_t count, size_t size) {
  size_t bytes;
  if (__builtin_mul_overflow(count, size, &bytes)) return nullptr;
  void* block = malloc(bytes);
  if (block) std::memset(block, 0, bytes);
  return block;
}
__attribute__((visibility("default"))) void* realloc(void* p, size_t bytes) {
  if (!p) return malloc(bytes);
  if (!is_ours(p)) return __libc_realloc(p, bytes);
  if (bytes == 0) {
    free(p);
    return nullptr;
  }
  if (bytes <= size_of(p)) return p;
  void* block = malloc(bytes);
  if (!block) return nullptr;
  std::memcpy(block, p, size_of(p));
  free(p);
  return block;
}
__attribute__((visibility("default"))) void* memalign(size_t alignment, size_t bytes) {
  if (!region || alignment > 64) return __libc_memalign(alignment, bytes);
  return malloc(bytes);
}
__attribute__((visibility("default"))) void* aligned_alloc(size_t alignment, size_t bytes) {
  return memalign(alignment, bytes);
}
__attribute__((visibility("default"))) int posix_memalign(void** memory, size_t alignment, size_t bytes) {
  void* block = memalign(alignment, bytes);
  if (!block) return ENOMEM;
  *memory = block;
  return 0;
}
__attribute__((visibility("default"))) void* mmap(void* at, size_t bytes, int access, int flags, int file,
                                                  off_t offset) noexcept {
  const uintptr_t caller = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  const bool guarded = !at && access == PROT_NONE && file == -1 && caller >= program_begin && caller < program_end;
  if (region && guarded) {
    if (void* pages = allocate_pages(bytes)) return pages;
  }
  return reinterpret_cast<void*>(syscall(SYS_mmap, at, bytes, access, flags, file, offset));
}
__attribute__((visibility("default"))) int mprotect(void* at, size_t bytes, int access) noexcept {
  return is_ours(at) ? 0 : static_cast<int>(syscall(SYS_mprotect, at, bytes, access));
}
__attribute__((visibility("default"))) int munmap(void* at, size_t bytes) noexcept {
  if (!is_ours(at)) return static_cast<int>(syscall(SYS_munmap, at, bytes));
  give_back(static_cast<void**>(at)[-1]);
  return 0;
}
__attribute__((visibility("default"))) size_t malloc_usable_size(void* p) { return p && is_ours(p) ? size_of(p) : 0; }

}  // extern "C"
