/* SPDX-License-Identifier: Apache-2.0 */
/* The description of a mixer, for tests of every folder, in C and C++. */
#ifndef LLA_MIXER_DESC_H
#define LLA_MIXER_DESC_H

#include <lla/lla.h>

/* Linear without levels. Write strengths are bound if the rule cannot do without. */
static inline lla_layer_desc mixer_desc(lla_mixer mixer, int64_t heads, int64_t groups, int64_t key_dim, int64_t value_dim,
                                        int64_t levels) {
  lla_layer_desc d = LLA_LAYER_DESC_INIT;
  d.kind = LLA_LAYER_MIXER;
  d.mixer = mixer;
  d.heads = heads;
  d.groups = groups;
  d.key_dim = key_dim;
  d.value_dim = value_dim;
  d.levels = levels;
  d.lambda_form = levels ? LLA_LAMBDA_READY : LLA_LAMBDA_NONE;
  d.write_form = mixer == LLA_DELTA_RULE ? LLA_WRITE_READY : LLA_WRITE_NONE;
  return d;
}

#endif
