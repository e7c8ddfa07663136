/* SPDX-License-Identifier: Apache-2.0 */
/* Stands where the CUDA plugin would: with OTHER_TABLE a table of another build, with OTHER_NOTHING no symbol at all, with
 * OTHER_INTRUDER it ends the process as soon as it is opened. */
#include <stdint.h>
#include <stdlib.h>

#if defined OTHER_TABLE
__attribute__((visibility("default"))) const void *lla_plugin_query(uint32_t number);

const void *lla_plugin_query(uint32_t number) {
  static uint32_t table[512]; /* the number is right, the sizes are not */
  table[0] = number;
  return table;
}
#elif defined OTHER_INTRUDER
__attribute__((constructor)) static void intrude(void) { _Exit(77); }
#else
__attribute__((visibility("default"))) int nothing_of_interest;
#endif
