// SPDX-License-Identifier: Apache-2.0
// status.h: names and sentences of the status codes.
#include "lla/status.h"

namespace {

struct Entry {
  lla_status status;
  const char* name;
  const char* message;
};

#define LLA_ENTRY(status, message) \
  { status, #status, message }
constexpr Entry kEntries[] = {
    LLA_ENTRY(LLA_OK, "Success."),
    LLA_ENTRY(LLA_INVALID_ARGUMENT, "A value is outside its domain."),
    LLA_ENTRY(LLA_NULL_POINTER, "A pointer that must not be NULL is NULL."),
    LLA_ENTRY(LLA_STRUCT_VERSION,
              "A struct is smaller than its first version, or sets fields that this version does not know."),
    LLA_ENTRY(LLA_SHAPE_MISMATCH, "The rank, a dimension or a stride of a tensor does not fit."),
    LLA_ENTRY(LLA_DTYPE_MISMATCH, "The element type of a tensor is not accepted here."),
    LLA_ENTRY(LLA_MISALIGNED, "A pointer or a stride breaks an alignment rule."),
    LLA_ENTRY(LLA_BUFFER_TOO_SMALL, "A buffer is smaller than its query said."),
    LLA_ENTRY(LLA_WRONG_CONTEXT, "Handles of different contexts were mixed."),
    LLA_ENTRY(LLA_SIZE_OVERFLOW, "A size does not fit into 64 bits or into the address space."),
    LLA_ENTRY(LLA_MISSING_ROLE, "A tensor, weight or memory entry that is needed was not given, or was given twice."),
    LLA_ENTRY(LLA_LEVELS_EXCEEDED, "The sequence would need more levels or more length than there are."),
    LLA_ENTRY(LLA_STATE_INCOMPATIBLE, "A state, batch or exported image does not belong to these layers."),
    LLA_ENTRY(LLA_DATA_CORRUPT, "An exported image is damaged."),
    LLA_ENTRY(LLA_BUSY, "A batch is not in the right phase, or its slots moved since it was planned."),
    LLA_ENTRY(LLA_NO_BLOCKS, "The pool of node blocks is exhausted."),
    LLA_ENTRY(LLA_POSITION_MISMATCH, "A slot does not stand at the expected position."),
    LLA_ENTRY(LLA_SLOT_IN_USE, "A slot that must be empty is not."),
    LLA_ENTRY(LLA_ROLLBACK_LIMIT, "The wanted position lies before the last linked fold."),
    LLA_ENTRY(LLA_UNSUPPORTED, "This build can never do it."),
    LLA_ENTRY(LLA_NOT_IMPLEMENTED, "The combination is valid, but this backend has no kernel for it."),
    LLA_ENTRY(LLA_NO_DEVICE, "There is no usable device."),
    LLA_ENTRY(LLA_DRIVER_TOO_OLD, "The driver of the device is too old."),
    LLA_ENTRY(LLA_BACKEND_MISSING, "The plugin of the backend is not installed."),
    LLA_ENTRY(LLA_BACKEND_MISMATCH, "The plugin of the backend has another plugin interface."),
    LLA_ENTRY(LLA_FORKED, "The process was forked; the object belongs to the parent."),
    LLA_ENTRY(LLA_OUT_OF_MEMORY, "The allocator gave no memory."),
    LLA_ENTRY(LLA_OUT_OF_DEVICE_MEMORY, "The memory of the device is exhausted."),
    LLA_ENTRY(LLA_THREADS_FAILED, "The thread hook did not run every task."),
    LLA_ENTRY(LLA_DEVICE_ERROR, "The device reported an error."),
    LLA_ENTRY(LLA_CAPTURE_UNSAFE, "The stream is being captured into a graph, and the call would wait for it."),
    LLA_ENTRY(LLA_INTERNAL, "A bug in lla; please report it."),
};
#undef LLA_ENTRY

const Entry* find_entry(lla_status status) {
  for (const Entry& entry : kEntries) {
    if (entry.status == status) return &entry;
  }
  return nullptr;
}

}  // namespace

const char* lla_status_name(lla_status status) {
  const Entry* entry = find_entry(status);
  return entry ? entry->name : "LLA_UNKNOWN_STATUS";
}

const char* lla_status_message(lla_status status) {
  const Entry* entry = find_entry(status);
  return entry ? entry->message : "This number is no status of this version.";
}
