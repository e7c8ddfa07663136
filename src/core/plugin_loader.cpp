// SPDX-License-Identifier: Apache-2.0
// Loading of the plugin by absolute path: lla/liblla-cuda.so in the folder of the library, or of the program that contains
// the library statically.
#include "core/plugin_loader.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/mutex.h"

namespace lla {

namespace {

constexpr char kFile[] = "lla/liblla-cuda.so";

Mutex mutex;
const Plugin* loaded = nullptr;

// Writes the path of the plugin beside the object that contains this function. False: it cannot be told.
bool own_folder_path(char (&path)[PATH_MAX]) noexcept {
  Dl_info info;
  char resolved[PATH_MAX];
  if (!dladdr(reinterpret_cast<const void*>(&cuda_plugin), &info) || !info.dli_fname || !realpath(info.dli_fname, resolved))
    return false;
  char* slash = std::strrchr(resolved, '/');
  if (!slash) return false;
  *slash = 0;
  const int length = std::snprintf(path, sizeof path, "%s/%s", resolved, kFile);
  return length > 0 && static_cast<size_t>(length) < sizeof path;
}

// Whether the file reaches to the end of its table of sections, which is the last thing in it. The loader would map a file
// that was cut short, by a full disk say, and the process would die of SIGBUS.
bool is_whole(const char* path) noexcept {
  ElfW(Ehdr) header;
  struct stat facts;
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  const bool known = fstat(file, &facts) == 0 && read(file, &header, sizeof header) == static_cast<ssize_t>(sizeof header) &&
                     std::memcmp(header.e_ident, ELFMAG, SELFMAG) == 0;
  close(file);
  if (!known || header.e_shoff > static_cast<uint64_t>(facts.st_size)) return false;
  return uint64_t{header.e_shnum} * header.e_shentsize <= static_cast<uint64_t>(facts.st_size) - header.e_shoff;
}

lla_status open_plugin(const Plugin** plugin, char* reason, size_t capacity) noexcept {
  char path[PATH_MAX];
  if (!own_folder_path(path) || access(path, R_OK) != 0) {
    std::snprintf(reason, capacity, "cuda: the plugin is not installed (%s beside the library)", kFile);
    return LLA_BACKEND_MISSING;
  }
  if (!is_whole(path)) {
    std::snprintf(reason, capacity, "cuda: the plugin cannot be opened: %.120s is not a whole library", path);
    return LLA_BACKEND_MISMATCH;
  }
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (!handle) {
    std::snprintf(reason, capacity, "cuda: the plugin cannot be opened: %.120s", dlerror());
    return LLA_BACKEND_MISMATCH;
  }
  PluginQuery query;
  void* symbol = dlsym(handle, kPluginSymbol);
  static_assert(sizeof query == sizeof symbol);
  std::memcpy(&query, &symbol, sizeof query);
  const Plugin* found = symbol ? query(kPluginAbi) : nullptr;
  constexpr PluginSizes sizes = plugin_sizes();
  if (!found || found->abi != kPluginAbi || std::memcmp(&found->sizes, &sizes, sizeof sizes) != 0) {
    std::snprintf(reason, capacity, "cuda: the plugin is of another version of the library");
    return LLA_BACKEND_MISMATCH;
  }
  *plugin = found;
  return LLA_OK;
}

}  // namespace

lla_status cuda_plugin(const Plugin** plugin, char* reason, size_t capacity) noexcept {
  const Lock lock(mutex);
  if (!loaded) {
    const lla_status status = open_plugin(&loaded, reason, capacity);
    if (status != LLA_OK) return status;
  }
  *plugin = loaded;
  return LLA_OK;
}

}  // namespace lla
