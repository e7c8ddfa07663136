/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file lla.h
 * @brief The whole interface: version, status, types, context, batch, layer, state.
 */
#ifndef LLA_LLA_H
#define LLA_LLA_H

#include "version.h"
#include "status.h"
#include "types.h"
#include "context.h"
#include "device.h"
#include "batch.h"
#include "layer.h"
#include "state.h"

#endif
