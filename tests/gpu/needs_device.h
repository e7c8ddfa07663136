// SPDX-License-Identifier: Apache-2.0
// Base of tests that need a CUDA device: where there is none they skip and say so; under tests/gpu/run (LLA_REQUIRE_DEVICE)
// they fail instead, as does any other fault of the plugin everywhere.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>

#include "lla/lla.h"

class NeedsDevice : public testing::Test {
 protected:
  void SetUp() override {
    char reason[200] = "";
    const lla_status status = lla_backend_available(LLA_BACKEND_CUDA, reason, sizeof reason);
    if (status == LLA_OK) return;
    const bool absent = status == LLA_NO_DEVICE || status == LLA_DRIVER_TOO_OLD;
    if (absent && !std::getenv("LLA_REQUIRE_DEVICE")) GTEST_SKIP() << lla_status_name(status) << ": " << reason;
    FAIL() << reason;
  }
};
