/* SPDX-License-Identifier: Apache-2.0 */
/* A plugin of a host that contains the static library: see two_copies.c. */
#include "first_result.h"

__attribute__((visibility("default"))) int second_copy_computes(void);

int second_copy_computes(void) {
  const functions f = {lla_context_create,  lla_layer_create,  lla_state_create, lla_append,
                       lla_context_release, lla_layer_release, lla_state_release};
  handles h;
  const int failed = first_result(&f, 3, &h) || append_ones(&f, &h, 4);
  if (!failed) release_handles(&f, &h);
  return failed;
}
