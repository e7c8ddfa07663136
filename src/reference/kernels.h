// SPDX-License-Identifier: Apache-2.0
// The functions of the reference kernels, one set for each operation; backend.cpp puts them into a table.
#pragma once

#include "plugin/backend.h"

namespace lla::reference {

struct MixerForwardKernel {
  static void measure(const void* problem, const Limits& limits, Need* need);
  static int64_t tasks(const void* problem, int32_t phase);
  static void run(const void* problem, const Limits& limits, const Scratch& scratch, int32_t phase, int64_t task);
};

struct MixerBackwardKernel {
  static void measure(const void* problem, const Limits& limits, Need* need);
  static int64_t tasks(const void* problem, int32_t phase);
  static void run(const void* problem, const Limits& limits, const Scratch& scratch, int32_t phase, int64_t task);
};

struct ConvolutionForwardKernel {
  static void measure(const void* problem, const Limits& limits, Need* need);
  static int64_t tasks(const void* problem, int32_t phase);
  static void run(const void* problem, const Limits& limits, const Scratch& scratch, int32_t phase, int64_t task);
};

struct ConvolutionBackwardKernel {
  static void measure(const void* problem, const Limits& limits, Need* need);
  static int64_t tasks(const void* problem, int32_t phase);
  static void run(const void* problem, const Limits& limits, const Scratch& scratch, int32_t phase, int64_t task);
};

struct GatesForwardKernel {
  static int64_t tasks(const void* problem, int32_t phase);
  static void run(const void* problem, const Limits& limits, const Scratch& scratch, int32_t phase, int64_t task);
};

struct GatesBackwardKernel {
  static void measure(const void* problem, const Limits& limits, Need* need);
  static int64_t tasks(const void* problem, int32_t phase);
  static void run(const void* problem, const Limits& limits, const Scratch& scratch, int32_t phase, int64_t task);
};

struct L2NormForwardKernel {
  static int64_t tasks(const void* problem, int32_t phase);
  static void run(const void* problem, const Limits& limits, const Scratch& scratch, int32_t phase, int64_t task);
};

struct L2NormBackwardKernel {
  static int64_t tasks(const void* problem, int32_t phase);
  static void run(const void* problem, const Limits& limits, const Scratch& scratch, int32_t phase, int64_t task);
};

struct GatedNormForwardKernel {
  static void measure(const void* problem, const Limits& limits, Need* need);
  static int64_t tasks(const void* problem, int32_t phase);
  static void run(const void* problem, const Limits& limits, const Scratch& scratch, int32_t phase, int64_t task);
};

struct GatedNormBackwardKernel {
  static void measure(const void* problem, const Limits& limits, Need* need);
  static int64_t tasks(const void* problem, int32_t phase);
  static void run(const void* problem, const Limits& limits, const Scratch& scratch, int32_t phase, int64_t task);
};

struct ProjectionForwardKernel {
  static void measure(const void* problem, const Limits& limits, Need* need);
  static int64_t tasks(const void* problem, int32_t phase);
  static void run(const void* problem, const Limits& limits, const Scratch& scratch, int32_t phase, int64_t task);
};

struct ProjectionBackwardKernel {
  static void measure(const void* problem, const Limits& limits, Need* need);
  static int64_t tasks(const void* problem, int32_t phase);
  static void run(const void* problem, const Limits& limits, const Scratch& scratch, int32_t phase, int64_t task);
};

struct RowsFillKernel {
  static int64_t tasks(const void* problem, int32_t phase);
  static void run(const void* problem, const Limits& limits, const Scratch& scratch, int32_t phase, int64_t task);
};

}  // namespace lla::reference
