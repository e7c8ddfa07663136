#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds all outputs but the plugin; the other scripts install the components.
set -euo pipefail
# shellcheck disable=SC2086
cmake -S . -B build-conda -G Ninja ${CMAKE_ARGS:-} -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_PREFIX="$PREFIX" -DCMAKE_INSTALL_LIBDIR=lib \
  -DLLA_BUILD_STATIC=OFF -DLLA_BUILD_TESTS=OFF -DLLA_BUILD_TOOLS=ON -DLLA_BUILD_CUDA=OFF
cmake --build build-conda --parallel "${CPU_COUNT:-1}"
if [ "${CONDA_BUILD_CROSS_COMPILATION:-0}" != 1 ]; then ctest --test-dir build-conda --output-on-failure; fi
