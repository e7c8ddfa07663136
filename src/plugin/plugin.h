// SPDX-License-Identifier: Apache-2.0
// What a device plugin exports: one plain table, found by one symbol. Core and plugin are matched by a number and by the sizes
// of everything that crosses between them, so that a plugin of another build is refused instead of misread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plugin/backend.h"
#include "plugin/device_plan.h"

namespace lla {

constexpr uint32_t kPluginAbi = 6;
constexpr char kPluginSymbol[] = "lla_plugin_query";

struct PluginSizes {
  uint32_t plugin, backend, kernel, limits, view, sequence, nodes_to_store, rows_to_store, slot_memory;
  uint32_t mixer_forward, mixer_backward, convolution, gates, l2_norm, gated_norm, projection, rows_fill;
  uint32_t plan_request, commit_request, planned_sequence, planned_snapshot, allotment;
};

// A stream is the device's own handle; nullptr is its default stream. Functions return an lla_status and put nothing on a
// stream but what they say. `device`: its number.
struct Plugin {
  uint32_t abi;
  PluginSizes sizes;
  const char* name;    // "cuda"
  const char* source;  // revision that it was built from
  const Backend* backend;
  // Counts the devices that can be used. Otherwise says why there is none.
  int32_t (*count_devices)(int32_t* devices, char* reason, size_t capacity);
  // Gets a device ready: loads the kernels onto it. `name` receives what it is called.
  int32_t (*open_device)(int32_t device, char* name, size_t name_capacity, char* reason, size_t capacity);
  // Makes the device the calling thread's current one, and back.
  int32_t (*enter)(int32_t device, int32_t* previous);
  void (*leave)(int32_t previous);
  // Memory of the current device; null if there is none.
  void* (*allocate)(size_t bytes);
  void (*release)(void* memory);
  // Work on a stream of the current device. copy(): any two places that the device can reach; pageable host memory makes it
  // wait. upload(): from host memory of any kind, which may be reused at once; never waits, and can be captured.
  int32_t (*copy)(void* to, const void* from, size_t bytes, void* stream);
  int32_t (*clear)(void* at, size_t bytes, void* stream);
  int32_t (*upload)(void* to, const void* from, size_t bytes, void* stream);
  int32_t (*wait)(void* stream);
  // Whether a graph is made of what the stream is given.
  bool (*is_capturing)(void* stream);
  // Whether kernels can read and write memory at this address.
  bool (*reaches)(const void* memory);
  // Records of slots, and plans and commits that are made on the device. put_records() writes images[i] to records[slots[i]];
  // the arrays are host memory that may be reused at once. copy_forks() copies the rows of one layer to those destinations of
  // a commit that add no row to a history. None of them waits, and all can be captured.
  int32_t (*put_records)(SlotImage* records, const int32_t* slots, const SlotImage* images, int64_t count, void* stream);
  int32_t (*plan)(const PlanRequest* request, void* stream);
  int32_t (*commit)(const CommitRequest* request, void* stream);
  int32_t (*copy_forks)(const CommitRequest* request, const SlotMemory* layer, void* stream);
  // Text of the last error that a call of this thread met.
  void (*describe_error)(char* text, size_t capacity);
};

constexpr PluginSizes plugin_sizes() {
  return {sizeof(Plugin),        sizeof(Backend),     sizeof(Kernel),     sizeof(Limits),       sizeof(View),
          sizeof(Sequence),      sizeof(NodesToStore), sizeof(RowsToStore), sizeof(SlotMemory),   sizeof(MixerForward),
          sizeof(MixerBackward), sizeof(Convolution), sizeof(Gates),      sizeof(L2Norm),       sizeof(GatedNorm),
          sizeof(Projection),    sizeof(RowsFill),    sizeof(PlanRequest), sizeof(CommitRequest), sizeof(PlannedSequence),
          sizeof(PlannedSnapshot), sizeof(Allotment)};
}

// Type of the exported function. Null if the plugin does not know the number.
using PluginQuery = const Plugin* (*)(uint32_t abi);

}  // namespace lla
