/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file state.h
 * @brief State: the histories of many sequences (slots) for a group of layers.
 *
 * After n rows a slot holds n, for each set bit b of floor(n / grain) a *node* (the content of 2^b chunks, and the decay
 * over them), and a *tail*: the raw k, v, g and write strength of the n mod grain rows since, and the last inputs of the
 * convolutions. All layers of the group share one record per slot, so that they cannot disagree. Nodes never change once
 * linked; slots share them by reference, so that a fork or snapshot costs about one tail.
 *
 * Threads: calls that name disjoint slots may run at once. Creating and releasing are free of that rule.
 */
#ifndef LLA_STATE_H
#define LLA_STATE_H

#include "layer.h"

LLA_BEGIN_DECLS

/** What a state holds. */
typedef int32_t lla_state_kind;
/** Histories. */
#define LLA_STATE_VALUE 0
/** Gradients of histories: the same geometry, in fp32 (reference: fp64). */
#define LLA_STATE_GRADIENT 1

/** @brief Description of a state. Zero in a field means its default. */
typedef struct lla_state_desc {
  size_t struct_size;   /**< sizeof(lla_state_desc). */
  lla_state_kind kind;  /**< default LLA_STATE_VALUE. */
  lla_dtype node_dtype; /**< LLA_F32 (default) or LLA_BF16; reference: also LLA_F64 (its default). Linear and absorbing
                             nodes are always at least LLA_F32. */
  lla_dtype tail_dtype; /**< type of the raw k and v: LLA_F32 (default), LLA_BF16, LLA_F16; reference: also LLA_F64 (its
                             default). Rows of a wider type than this are refused, since rounding would make the numbers
                             depend on how a sequence was cut. Cells and blocks need their inner_dtype or wider. */
  int32_t reserved;     /**< 0. */
  int64_t slots;        /**< sequences, >= 1; default 1. */
  int64_t max_length;   /**< longest sequence; default: what the layers' levels allow, at most 2^20. */
  int64_t max_draft;    /**< longest append of which a part may be accepted; default 16. Longer ones are accepted whole or
                             not at all. */
  int64_t node_blocks;  /**< size of the node pool; default: enough for every slot at its worst. */
} lla_state_desc;

/** Initialiser of @ref lla_state_desc. */
#define LLA_STATE_DESC_INIT {sizeof(lla_state_desc), 0, 0, 0, 0, 0, 0, 0, 0}

/** Kind of a block of state memory. */
typedef int32_t lla_block_kind;
/** Node: per head the content [dk, dv], then its log decay. */
#define LLA_BLOCK_NODE 0
/** Tail: raw k per group, v, g, write strength per head, as a ring. */
#define LLA_BLOCK_TAIL 1
/** Convolution inputs per channel, as a ring; streams in the order q, k, v. */
#define LLA_BLOCK_CONV 2

/** @brief What state memory of one kind and one layer looks like. Filled by lla_state_geometry(). */
typedef struct lla_block_geometry {
  size_t struct_size;     /**< in: sizeof(lla_block_geometry). */
  int64_t count;          /**< blocks of this kind in the pool. */
  int64_t bytes;          /**< bytes of one block (0: this layer has none of the kind). */
  int64_t alignment;      /**< alignment of a block and of the distance between two. */
  int64_t head_bytes;     /**< node: bytes of one head's span; else 0. */
  int64_t blocks_per_fold; /**< node: most blocks that one filled chunk of a sequence writes (1 if nodes are shareable for
                               ever, else the number of live nodes). */
  int64_t record_bytes;   /**< bytes of one slot's record (host memory, the library's). */
  int64_t layout;         /**< number of the order of elements inside a block; equal numbers mean equal order. */
} lla_block_geometry;

/** Initialiser of @ref lla_block_geometry. */
#define LLA_BLOCK_GEOMETRY_INIT {sizeof(lla_block_geometry), 0, 0, 0, 0, 0, 0, 0}

/** @brief Caller's memory for one kind of one layer. Frozen. */
typedef struct lla_block_memory {
  int64_t layer_index; /**< layer of the group. */
  lla_block_kind kind; /**< LLA_BLOCK_... */
  int32_t reserved;    /**< 0. */
  void *base;          /**< first block, in memory of the context's device; stays the caller's and must outlive the state. Need not be cleared. */
  int64_t stride;      /**< bytes from one block to the next, >= bytes, a multiple of alignment. */
} lla_block_memory;

/**
 * @brief Geometry of a state's memory, before anything is created.
 * @param layers       the group's layers, all of one context.
 * @param layer_count  1 ... 65536.
 * @param description  NULL = defaults.
 * @param layer_index  which layer.
 * @param kind         which kind of block.
 * @param geometry     filled; struct_size is read.
 * @param error        may be NULL.
 * @return LLA_OK; LLA_NULL_POINTER, LLA_STRUCT_VERSION, LLA_INVALID_ARGUMENT, LLA_WRONG_CONTEXT, LLA_STATE_INCOMPATIBLE (the
 *         layers do not share one grain), LLA_DTYPE_MISMATCH, LLA_SIZE_OVERFLOW; LLA_OUT_OF_MEMORY (of more than 64 layers a list
 *         is made for the call). Any thread. Since 0.1.
 */
LLA_API lla_status lla_state_geometry(lla_layer *const *layers, int64_t layer_count, const lla_state_desc *description,
                                      int64_t layer_index, lla_block_kind kind, lla_block_geometry *geometry,
                                      lla_error *error);
/**
 * @brief Creates a state with all slots empty.
 * @param layers        as for lla_state_geometry(); the state keeps references. Layers without history (parts other than
 *                      CONVOLUTION) are not accepted.
 * @param layer_count   1 ... 65536.
 * @param description   NULL = defaults.
 * @param memory        NULL: the context's allocator gives the blocks. Else one entry for each layer and kind with bytes > 0.
 * @param memory_count  entries of `memory`; 0 if it is NULL.
 * @param state         receives the handle; release it with lla_state_release().
 * @param error         may be NULL.
 * @return as lla_state_geometry(); LLA_MISALIGNED, LLA_MISSING_ROLE (an entry of `memory` is missing), LLA_OUT_OF_MEMORY.
 *         Any thread. Since 0.1.
 */
LLA_API lla_status lla_state_create(lla_layer *const *layers, int64_t layer_count, const lla_state_desc *description,
                                    const lla_block_memory *memory, int64_t memory_count, lla_state **state,
                                    lla_error *error);
/** @brief Takes one more reference. NULL is ignored. Any thread. Since 0.1. @param state  the state. @return state. */
LLA_API lla_state *lla_state_retain(lla_state *state);
/** @brief Gives a reference back; the last one frees. NULL is ignored. Any thread. Since 0.1. @param state  the state. */
LLA_API void lla_state_release(lla_state *state);

/**
 * @brief Makes the appended rows of a batch part of their sequences, for all layers at once: positions advance, new nodes
 *        are linked, snapshots come into being.
 *
 * If the device planned the batch, or `accepted` lies in memory of the device, the commit happens there, in the order of the
 * stream. The host's record of the slots then stays behind until lla_state_settle(): meanwhile forward, commit and plans by the
 * device go on (plans with an index array in device memory), while plans by the host and all other functions that change or read
 * the slots give LLA_BUSY; lla_state_length() and lla_state_query() say what is settled. A bad count leaves the sequence's slots
 * as they were and sets LLA_FAULT_ACCEPTED.
 * @param state     the state that the batch was planned with.
 * @param batch     planned; every layer's forward has run (or the rows are dropped by accepting 0). Spent afterwards: plan
 *                  it again before the next step.
 * @param accepted  [sequences] rows to keep of each sequence, 0 ... its count; not given = all. A part is possible up to
 *                  max_draft rows, of longer appends 0 or all. A snapshot beyond the accepted rows does not come into being.
 *                  In memory of the device they are read by work on the stream.
 * @param stream    stream of the device; NULL on the CPU.
 * @param error     may be NULL; names the entry.
 * @return LLA_OK; LLA_NULL_POINTER, LLA_INVALID_ARGUMENT, LLA_STATE_INCOMPATIBLE, LLA_BUSY (not planned, spent already, or a
 *         slot moved since). On failure nothing is committed. Since 0.1.
 */
LLA_API lla_status lla_state_commit(lla_state *state, lla_batch *batch, lla_index accepted, void *stream, lla_error *error);
/**
 * @brief Lets the host's record catch up with a commit that happened on the device; may come steps later, in the order of the
 *        state's commits. Links what the device linked; node blocks that are not needed any more go back to the pool only here. Touches
 *        nothing on the device. After any other commit the record is up to date and this only checks its arguments. A batch must
 *        not be planned again before it is settled: who settles k steps late takes turns with k + 1 batches, and the pool needs
 *        room for the blocks that k more steps set aside (lla_state_desc::node_blocks).
 * @param state     the state.
 * @param batch     the committed batch. If the device planned it, lla_batch_collect() must have come before.
 * @param accepted  the counts, on the host; the same as the device's. Not needed after lla_batch_collect(); of a commit without
 *                  counts not given.
 * @param released  receives how many node blocks went back to the pool with this commit; may be NULL.
 * @param error     may be NULL.
 * @return as lla_state_commit(); LLA_BUSY also if an earlier commit is not settled. Since 0.1.
 */
LLA_API lla_status lla_state_settle(lla_state *state, lla_batch *batch, lla_index accepted, int64_t *released,
                                    lla_error *error);

/**
 * @brief Empties slots; an empty slot may stand at any position (its past counts as zero).
 * @param state      the state.
 * @param slots      [count] the slots, -1 is skipped; not given = all slots.
 * @param count      number of entries; ignored if `slots` is not given.
 * @param positions  [count] position of each, >= 0; not given = 0.
 * @param stream     stream of the device; NULL on the CPU.
 * @param error      may be NULL.
 * @return LLA_OK; LLA_NULL_POINTER, LLA_INVALID_ARGUMENT, LLA_LEVELS_EXCEEDED. On failure nothing changes. Since 0.1.
 */
LLA_API lla_status lla_state_reset(lla_state *state, lla_index slots, int64_t count, lla_index positions, void *stream,
                                   lla_error *error);
/**
 * @brief Copies committed histories between slots: beams, snapshots, reordering. Sources and targets may overlap: all
 *        sources are read as they were before the call. What targets held is dropped. Nodes are shared, tails copied.
 * @param state    the state.
 * @param sources  [count] slots to copy from.
 * @param targets  [count] slots to copy to, each at most once.
 * @param count    number of entries.
 * @param stream   stream of the device; NULL on the CPU.
 * @param error    may be NULL.
 * @return LLA_OK; LLA_NULL_POINTER, LLA_INVALID_ARGUMENT; LLA_DEVICE_ERROR (on a device). On failure nothing changes, but for
 *         LLA_DEVICE_ERROR, after which targets that are no sources may be empty. Since 0.1.
 */
LLA_API lla_status lla_state_fork(lla_state *state, lla_index sources, lla_index targets, int64_t count, void *stream,
                                  lla_error *error);
/**
 * @brief Takes committed rows back, down to the start of the current chunk (the last linked fold).
 * @param state     the state.
 * @param slot      the slot.
 * @param position  the new position, <= the present one.
 * @param stream    stream of the device; NULL on the CPU.
 * @param error     may be NULL.
 * @return LLA_OK; LLA_NULL_POINTER, LLA_INVALID_ARGUMENT; LLA_ROLLBACK_LIMIT (farther back than the tail reaches; take a
 *         snapshot for that). On failure nothing changes. Since 0.1.
 */
LLA_API lla_status lla_state_truncate(lla_state *state, int64_t slot, int64_t position, void *stream, lla_error *error);
/** @brief Position of a slot. Since 0.1. @param state  the state. @param slot  the slot. @param length  receives it.
 *  @param error  may be NULL. @return LLA_OK; LLA_NULL_POINTER, LLA_INVALID_ARGUMENT. */
LLA_API lla_status lla_state_length(const lla_state *state, int64_t slot, int64_t *length, lla_error *error);
/** @brief Lowest position that lla_state_truncate() reaches; as far as the host knows, as lla_state_length(). Since 0.1. @param state  the state. @param slot  the slot.
 *  @param length  receives it. @param error  may be NULL. @return LLA_OK; LLA_NULL_POINTER, LLA_INVALID_ARGUMENT. */
LLA_API lla_status lla_state_min_length(const lla_state *state, int64_t slot, int64_t *length, lla_error *error);

/** Keys of lla_state_query(). */
typedef int32_t lla_state_key;
/** Slots of the state. */
#define LLA_STATE_SLOTS 1
/** Longest sequence. */
#define LLA_STATE_MAX_LENGTH 2
/** Node blocks of the pool. */
#define LLA_STATE_NODE_BLOCKS 3
/** Node blocks that are neither linked nor reserved. */
#define LLA_STATE_FREE_NODE_BLOCKS 4
/** Layers of the group. */
#define LLA_STATE_LAYERS 5
/** Rows of a chunk. */
#define LLA_STATE_GRAIN 6
/** Nodes that slot `slot` holds. */
#define LLA_STATE_SLOT_NODES 7
/** Bytes that slot `slot` occupies in all layers: its nodes (shared ones counted fully) and its tails. */
#define LLA_STATE_SLOT_BYTES 8
/** Bytes of all pools together. */
#define LLA_STATE_POOL_BYTES 9
/** Longest append of which a part may be accepted. */
#define LLA_STATE_MAX_DRAFT 10

/**
 * @brief Reads a number about a state. Since 0.1.
 * @param state  the state.
 * @param key    LLA_STATE_...
 * @param slot   for the keys about a slot, else 0.
 * @param value  receives the number.
 * @param error  may be NULL.
 * @return LLA_OK; LLA_NULL_POINTER, LLA_INVALID_ARGUMENT.
 */
LLA_API lla_status lla_state_query(const lla_state *state, lla_state_key key, int64_t slot, int64_t *value, lla_error *error);

/* -- contents --------------------------------------------------------------------------------------------------------- */

/** A part of one layer's history in one slot. */
typedef int32_t lla_state_part;
/** Content of node `index` (the bit b of floor(n / grain); of a linear or absorbing layer: see LLA_PART_ABSORBED)
 *  [H, dk, dv], as it stands at the node's own end. */
#define LLA_PART_NODE 1
/** Log decay of node `index` over its own span [H] (scalar gate; the delta rule's nodes carry every decay already). */
#define LLA_PART_NODE_DECAY 2
/** Content of the one node of a linear layer, or of the absorbing node [H, dk, dv]; index 0. */
#define LLA_PART_ABSORBED 3
/** Raw keys of the tail [m, G, dk], m = n mod grain; index 0. */
#define LLA_PART_TAIL_K 4
/** Raw values of the tail [m, H, dv]; index 0. */
#define LLA_PART_TAIL_V 5
/** Log gates of the tail [m, H]; index 0. */
#define LLA_PART_TAIL_GATE 6
/** Write strengths of the tail [m, H]; index 0. */
#define LLA_PART_TAIL_WRITE 7
/** Last W - 1 inputs of the convolutions [W - 1, channels], streams in the order q, k, v; index 0. After writing it the slot
 *  cannot be truncated below its present position, since earlier inputs are unknown. */
#define LLA_PART_CONV 8

/**
 * @brief Copies a part of a slot out, converting the type. A node that is not there reads as zero (log decay 0).
 * @param state        the state.
 * @param slot         the slot.
 * @param layer_index  the layer of the group.
 * @param part         LLA_PART_...
 * @param index        see the part.
 * @param tensor       receives it; host memory, shape as the part says, any float type and strides.
 * @param stream       stream of the device, for which the call waits; NULL on the CPU.
 * @param error        may be NULL.
 * @return LLA_OK; LLA_NULL_POINTER, LLA_INVALID_ARGUMENT, LLA_SHAPE_MISMATCH, LLA_DTYPE_MISMATCH. Since 0.1.
 */
LLA_API lla_status lla_state_read(const lla_state *state, int64_t slot, int64_t layer_index, lla_state_part part,
                                  int64_t index, const lla_tensor *tensor, void *stream, lla_error *error);
/**
 * @brief Overwrites a part of a slot, converting the type: states of other libraries, gradients of final states. The node
 *        must be one that the slot's position has (its bit is set); nodes that other slots share are replaced by an own
 *        copy first. Arguments as lla_state_read(); `tensor` is read.
 * @param state        the state.
 * @param slot         the slot.
 * @param layer_index  the layer of the group.
 * @param part         LLA_PART_...
 * @param index        see the part.
 * @param tensor       read; host memory.
 * @param stream       stream of the device, for which the call waits; NULL on the CPU.
 * @param error        may be NULL.
 * @return as lla_state_read(); LLA_NO_BLOCKS. On failure nothing changes, but for LLA_DEVICE_ERROR, after which the part may
 *         hold some of both. Since 0.1.
 */
LLA_API lla_status lla_state_write(lla_state *state, int64_t slot, int64_t layer_index, lla_state_part part, int64_t index,
                                   const lla_tensor *tensor, void *stream, lla_error *error);
/**
 * @brief Makes a slot a plain linear state at a position, as other libraries keep it: one matrix per head and no tail (its
 *        raw rows count as zero). Linear layers only; other layers of the group start empty at that position.
 * @param state        the state.
 * @param slot         the slot; emptied first if `reset` is not 0.
 * @param layer_index  the layer of the group.
 * @param position     rows that the matrix has seen.
 * @param matrix       [H, dk, dv].
 * @param reset        1 for the first layer that is imported into the slot, 0 for the others.
 * @param stream       stream of the device, for which the call waits; NULL on the CPU.
 * @param error        may be NULL.
 * @return as lla_state_write(); LLA_UNSUPPORTED (the layer is not linear); LLA_POSITION_MISMATCH (reset is 0 and the slot
 *         stands elsewhere). On failure nothing changes, but for LLA_DEVICE_ERROR, after which the slot may be emptied and
 *         the matrix written in part. Since 0.1.
 */
LLA_API lla_status lla_state_import_linear(lla_state *state, int64_t slot, int64_t layer_index, int64_t position,
                                           const lla_tensor *matrix, int32_t reset, void *stream,
                                           lla_error *error);

/* -- export and import ------------------------------------------------------------------------------------------------ */

/** Bytes of the caller's tag in an exported image. */
#define LLA_TAG_SIZE 64

/** @brief What lla_state_check() found in an image. */
typedef struct lla_image_info {
  size_t struct_size;    /**< in: sizeof(lla_image_info). */
  int64_t bytes;         /**< bytes of the image. */
  int64_t position;      /**< rows that the sequence has. */
  int64_t layers;        /**< layers of the group. */
  int64_t grain;         /**< rows of a chunk. */
  int32_t format;        /**< version of the format. */
  int32_t reserved;      /**< 0. */
  char tag[LLA_TAG_SIZE]; /**< the caller's tag, all its bytes; not NUL-ended. */
} lla_image_info;

/** Initialiser of @ref lla_image_info. */
#define LLA_IMAGE_INFO_INIT {sizeof(lla_image_info), 0, 0, 0, 0, 0, 0, {0}}

/**
 * @brief Bytes of the image of a slot as it stands; grows with the number of live nodes, not with the length. Since 0.1.
 * @param state  the state.
 * @param slot   the slot.
 * @param bytes  receives the size.
 * @param error  may be NULL.
 * @return LLA_OK; LLA_NULL_POINTER, LLA_INVALID_ARGUMENT.
 */
LLA_API lla_status lla_state_export_size(const lla_state *state, int64_t slot, size_t *bytes, lla_error *error);
/**
 * @brief First half of an export: writes the slot's contents for all layers. The image is not valid before lla_state_seal().
 * @param state   the state.
 * @param slot    the slot.
 * @param buffer  receives the image; host memory. On a device the call waits for the stream.
 * @param bytes   at least lla_state_export_size().
 * @param stream  stream of the device; NULL on the CPU.
 * @param error   may be NULL.
 * @return LLA_OK; LLA_NULL_POINTER, LLA_INVALID_ARGUMENT, LLA_BUFFER_TOO_SMALL. Since 0.1.
 */
LLA_API lla_status lla_state_pack(const lla_state *state, int64_t slot, void *buffer, size_t bytes, void *stream,
                                  lla_error *error);
/**
 * @brief Second half of an export, on the host: adds the tag and the checksum. Pure function of its arguments. Since 0.1.
 * @param buffer  a packed image.
 * @param bytes   its size.
 * @param tag     exactly LLA_TAG_SIZE readable bytes that name model and prompt (a hash, for instance), not a C string: write
 *                `char tag[LLA_TAG_SIZE] = "..."`. NULL = zeros.
 * @param error   may be NULL.
 * @return LLA_OK; LLA_NULL_POINTER, LLA_DATA_CORRUPT (not a packed image), LLA_BUFFER_TOO_SMALL.
 */
LLA_API lla_status lla_state_seal(void *buffer, size_t bytes, const char tag[LLA_TAG_SIZE], lla_error *error);
/**
 * @brief First half of an import, on the host: checks magic, format, sizes and checksum of untrusted bytes. Since 0.1.
 * @param buffer  the image, any alignment.
 * @param bytes   its size.
 * @param tag     exactly LLA_TAG_SIZE bytes that the image must carry, or NULL = any.
 * @param info    filled; may be NULL.
 * @param error   may be NULL.
 * @return LLA_OK; LLA_NULL_POINTER, LLA_STRUCT_VERSION; LLA_DATA_CORRUPT; LLA_STATE_INCOMPATIBLE (newer format, other byte
 *         order, other tag).
 */
LLA_API lla_status lla_state_check(const void *buffer, size_t bytes, const char tag[LLA_TAG_SIZE], lla_image_info *info,
                                   lla_error *error);
/**
 * @brief Second half of an import: replaces what a slot holds. Checks the layers' description (not the checksum again).
 * @param state   the state; layers, grain, types and widths must equal those of the exporting state.
 * @param slot    the slot.
 * @param buffer  a checked image, in host memory. On a device the call waits for the stream.
 * @param bytes   its size.
 * @param stream  stream of the device; NULL on the CPU.
 * @param error   may be NULL.
 * @return LLA_OK; LLA_NULL_POINTER, LLA_INVALID_ARGUMENT, LLA_DATA_CORRUPT, LLA_STATE_INCOMPATIBLE, LLA_LEVELS_EXCEEDED,
 *         LLA_NO_BLOCKS; LLA_CAPTURE_UNSAFE, LLA_OUT_OF_MEMORY, LLA_DEVICE_ERROR (on a device). On failure nothing changes,
 *         but for LLA_DEVICE_ERROR, after which the slot is empty. Since 0.1.
 */
LLA_API lla_status lla_state_unpack(lla_state *state, int64_t slot, const void *buffer, size_t bytes, void *stream,
                                    lla_error *error);

LLA_END_DECLS

#endif
