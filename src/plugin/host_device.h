// SPDX-License-Identifier: Apache-2.0
// Marks functions that device code calls too.
#pragma once

#if defined(__CUDACC__)
#define LLA_HOST_DEVICE __host__ __device__
#else
#define LLA_HOST_DEVICE
#endif
