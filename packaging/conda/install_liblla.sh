#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail
for component in runtime development; do cmake --install build-conda --component "$component"; done
