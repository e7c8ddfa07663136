/* SPDX-License-Identifier: Apache-2.0 */
/* One process, two copies of the library: the shared one, and one inside a plugin of the host (second_copy.c). Both compute,
 * each keeps to its own handles, and the plugin shows nothing of its copy.   usage: two_copies LIBRARY PLUGIN */
#include "first_result.h"

int main(int count, char **words) {
  functions f;
  handles first, again;
  void *library, *plugin;
  int (*compute)(void);
  if (count != 3) return 2;
  library = open_library(words[1], &f);
  plugin = dlopen(words[2], RTLD_NOW | RTLD_GLOBAL); /* the ruder way: its symbols are offered to everybody */
  if (library == NULL || plugin == NULL || find_function(plugin, "second_copy_computes", &compute)) return 1;
  if (dlsym(RTLD_DEFAULT, "lla_version") != NULL) {
    fprintf(stderr, "the plugin's copy is visible\n");
    return 1;
  }
  if (first_result(&f, 3, &first) || compute() || append_ones(&f, &first, 4)) return 1;
  if (dlclose(plugin) || first_result(&f, 0, &again) || append_ones(&f, &first, 8)) return 1;
  release_handles(&f, &first);
  release_handles(&f, &again);
  printf("two copies compute side by side\n");
  return dlclose(library);
}
