/* SPDX-License-Identifier: Apache-2.0 */
/* The library is opened, used with a pool of threads and closed 400 times: each time it is really gone, and neither memory,
 * nor mappings, nor threads are left behind.   usage: loading LIBRARY */
#include <malloc.h>

#include "first_result.h"

enum { TIMES = 400, WARM = 200 };

static int lines_of(const char *path) {
  FILE *file = fopen(path, "r");
  int lines = 0, c;
  if (file == NULL) return -1;
  while ((c = fgetc(file)) != EOF) lines += c == '\n';
  fclose(file);
  return lines;
}

static int threads_of_this_process(void) {
  FILE *file = fopen("/proc/self/status", "r");
  char line[256];
  int threads = -1;
  if (file == NULL) return -1;
  while (fgets(line, sizeof line, file) != NULL) sscanf(line, "Threads: %d", &threads);
  fclose(file);
  return threads;
}

int main(int count, char **words) {
  size_t bytes_after_warm_up = 0, bytes = 0;
  int mappings_after_warm_up = 0, mappings = 0, i;
  if (count != 2) return 2;
  for (i = 0; i < TIMES; ++i) {
    functions f;
    handles h;
    void *library = open_library(words[1], &f);
    if (library == NULL || first_result(&f, 3, &h)) return 1;
    release_handles(&f, &h);
    if (dlclose(library)) {
      fprintf(stderr, "%s\n", dlerror());
      return 1;
    }
    if (dlopen(words[1], RTLD_NOW | RTLD_NOLOAD) != NULL) {
      fprintf(stderr, "the library is still there after dlclose() number %d\n", i + 1);
      return 1;
    }
    bytes = mallinfo2().uordblks;
    mappings = lines_of("/proc/self/maps");
    if (i + 1 == WARM) bytes_after_warm_up = bytes, mappings_after_warm_up = mappings;
  }
  printf("%d times: heap %zu bytes after %d times, %zu at the end; mappings %d and %d; %d thread\n", TIMES,
         bytes_after_warm_up, WARM, bytes, mappings_after_warm_up, mappings, threads_of_this_process());
  return mappings_after_warm_up <= 0 || mappings > mappings_after_warm_up + 4 || bytes > bytes_after_warm_up + 1024 ||
         threads_of_this_process() != 1;
}
