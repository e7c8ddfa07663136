#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The plugin is built alone, against the installed core.
set -euo pipefail
# shellcheck disable=SC2086
cmake -S src/cuda -B build-conda-cuda -G Ninja ${CMAKE_ARGS:-} -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$PREFIX" \
  -DCMAKE_INSTALL_PREFIX="$PREFIX" -DCMAKE_INSTALL_LIBDIR=lib
cmake --build build-conda-cuda --parallel "${CPU_COUNT:-1}"
cmake --install build-conda-cuda --component cuda
