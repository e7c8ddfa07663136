// SPDX-License-Identifier: Apache-2.0
// The same in C++, with the header that comes with the library.
#include <cstdio>
#include <lla/lla.hpp>
#include <vector>

int main() {
  try {
    lla::context_options options;
    options.backend = LLA_BACKEND_CPU;
    lla::context context(options);
    lla::layer_desc description;
    description.kind = LLA_LAYER_MIXER;
    description.mixer = LLA_SCALAR_GATE;
    description.heads = description.key_dim = description.value_dim = 1;
    description.lambda_form = LLA_LAMBDA_READY;
    description.levels = lla_levels_needed(4);
    lla::layer layer(context, description);
    lla::state state({&layer, 1}, lla::state_desc());
    std::vector<float> ones(4 * description.levels, 1.0f), y(4);
    const lla_binding io[] = {lla::bind(LLA_Q, ones.data(), {4, 1, 1}), lla::bind(LLA_K, ones.data(), {4, 1, 1}),
                              lla::bind(LLA_V, ones.data(), {4, 1, 1}),
                              lla::bind(LLA_LAMBDA, ones.data(), {4, 1, description.levels}),
                              lla::bind(LLA_Y, y.data(), {4, 1, 1})};
    state.append(layer, 0, io);
    std::printf("lla %s: %g %g %g %g\n", lla_version_string(), y[0], y[1], y[2], y[3]);
  } catch (const lla::failure &reason) {
    std::fprintf(stderr, "%s: %s\n", reason.name(), reason.what());
    return 1;
  }
}
