/* SPDX-License-Identifier: Apache-2.0 */
/* What the library does with things that stand where its CUDA plugin would: a context for CUDA is asked for, and the status
 * and a word of the text must be those expected.   usage: cuda_plugin LIBRARY STATUS_NAME WORD */
#include "first_result.h"

int main(int count, char **words) {
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  lla_error error = LLA_ERROR_INIT;
  lla_context *context = NULL;
  const char *(*status_name)(lla_status);
  functions f;
  handles h;
  void *library;
  int again;
  if (count != 4) return 2;
  library = open_library(words[1], &f);
  if (library == NULL || find_function(library, "lla_status_name", &status_name)) return 1;
  options.backend = LLA_BACKEND_CUDA;
  for (again = 0; again < 2; ++again) {
    const lla_status status = f.context_create(&options, &context, &error);
    printf("%s: %s\n", status_name(status), error.text);
    if (strcmp(status_name(status), words[2]) != 0 || strstr(error.text, words[3]) == NULL || context != NULL) return 1;
  }
  return first_result(&f, 3, &h); /* and the CPU works as if nothing had been */
}
