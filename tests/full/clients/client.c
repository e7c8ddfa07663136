/* SPDX-License-Identifier: Apache-2.0 */
/* What a user of the packages writes first, in C: four rows of ones through log-linear attention with weights 1 add up. */
#include <lla/lla.h>
#include <stdio.h>

int main(void) {
  float ones[12], y[4];
  lla_context_options options = LLA_CONTEXT_OPTIONS_INIT;
  lla_layer_desc description = LLA_LAYER_DESC_INIT;
  lla_error error = LLA_ERROR_INIT;
  lla_context *context = NULL;
  lla_layer *layer = NULL;
  lla_state *state = NULL;
  int i;

  for (i = 0; i < 12; ++i) ones[i] = 1;
  options.backend = LLA_BACKEND_CPU;
  description.kind = LLA_LAYER_MIXER;
  description.mixer = LLA_SCALAR_GATE;
  description.heads = description.key_dim = description.value_dim = 1;
  description.lambda_form = LLA_LAMBDA_READY;
  description.levels = lla_levels_needed(4);
  const lla_binding io[] = {lla_bind(LLA_Q, lla_tensor_of(ones, LLA_F32, 4, 1, 1, -1)),
                            lla_bind(LLA_K, lla_tensor_of(ones, LLA_F32, 4, 1, 1, -1)),
                            lla_bind(LLA_V, lla_tensor_of(ones, LLA_F32, 4, 1, 1, -1)),
                            lla_bind(LLA_LAMBDA, lla_tensor_of(ones, LLA_F32, 4, 1, description.levels, -1)),
                            lla_bind(LLA_Y, lla_tensor_of(y, LLA_F32, 4, 1, 1, -1))};
  if (lla_context_create(&options, &context, &error) || lla_layer_create(context, &description, &layer, &error) ||
      lla_state_create(&layer, 1, NULL, NULL, 0, &state, &error) ||
      lla_append(layer, state, 0, io, 5, NULL, 0, NULL, &error)) {
    fprintf(stderr, "%s\n", error.text);
    return 1;
  }
  printf("lla %s: %g %g %g %g\n", lla_version_string(), y[0], y[1], y[2], y[3]);
  lla_state_release(state);
  lla_layer_release(layer);
  lla_context_release(context);
  return 0;
}
