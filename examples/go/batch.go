// SPDX-License-Identifier: Apache-2.0

package lla

/*
#include "arena.h"
*/
import "C"

import (
	"runtime"
	"unsafe"
)

// Limits are those of the largest step that a batch will hold; zero in the last three means their default.
type Limits struct {
	Sequences       int // idle ones included
	Rows            int // of all sequences together
	RowsPerSequence int
	Length          int // longest sequence after the step; set it when training
	Snapshots       int // of all sequences together
}

// Sequence is one sequence of a step: its rows follow those of the sequences before it.
type Sequence struct {
	rows, in, out int
	alone         bool
	snapshots     [][2]int
}

// Append continues a slot.
func Append(slot, rows int) Sequence { return Sequence{rows: rows, in: slot, out: slot} }

// Fork continues the history of one slot in another one, which must be empty.
func Fork(from, to, rows int) Sequence { return Sequence{rows: rows, in: from, out: to} }

// Alone has no history and is not kept: training.
func Alone(rows int) Sequence { return Sequence{rows: rows, alone: true} }

// Idle is padding in a step with slots: inputs are not read, outputs are zero.
func Idle(rows int) Sequence { return Sequence{rows: rows, in: -1, out: -1} }

// Snapshot gives an empty slot the history as it stands after row rows of this sequence, when the step is committed.
func (s Sequence) Snapshot(row, slot int) Sequence {
	s.snapshots = append(s.snapshots[:len(s.snapshots):len(s.snapshots)], [2]int{row, slot})
	return s
}

// Batch is C memory in which steps are planned and computed. After the first step it does not allocate.
type Batch struct {
	handle    *C.lla_batch // in block
	context   *C.lla_context
	state     *C.lla_state // of the last plan: lives as long as the plan
	limits    C.lla_batch_limits
	sequences int
	block     *memory
	arguments *memory
	indices   *memory
	workspace *memory
	arena     *C.lla_go_arena // in arguments; its arrays are in indices
	indexSize int
	counts    [C.LLA_GO_GROUPS]int
}

// NewBatch makes a batch for steps up to the limits.
func NewBatch(c *Context, limits Limits) (*Batch, error) {
	b := &Batch{limits: C.lla_batch_limits{struct_size: C.sizeof_lla_batch_limits}, workspace: &memory{}}
	b.limits.max_sequences, b.limits.max_rows = C.int64_t(limits.Sequences), C.int64_t(limits.Rows)
	b.limits.max_rows_per_sequence, b.limits.max_length = C.int64_t(limits.RowsPerSequence), C.int64_t(limits.Length)
	b.limits.max_snapshots = C.int64_t(limits.Snapshots)
	var bytes, alignment C.size_t
	err := check(func(e *C.lla_error) C.lla_status { return C.lla_batch_size(c.handle, &b.limits, &bytes, &alignment, e) })
	if err == nil {
		b.block, err = newMemory(bytes, alignment)
	}
	if err == nil {
		err = check(func(e *C.lla_error) C.lla_status {
			return C.lla_batch_init(c.handle, &b.limits, b.block.pointer, bytes, &b.handle, e)
		})
	}
	if err == nil {
		err = b.newArena(limits)
	}
	if err != nil {
		return nil, err
	}
	b.context = C.lla_context_retain(c.handle)
	runtime.KeepAlive(c)
	runtime.SetFinalizer(b, (*Batch).Close)
	return b, nil
}

// Close drops the plan and releases the memory.
func (b *Batch) Close() {
	runtime.SetFinalizer(b, nil)
	C.lla_batch_discard(b.handle)
	C.lla_state_release(b.state)
	C.lla_context_release(b.context)
	b.handle, b.state, b.context = nil, nil, nil
	for _, m := range []*memory{b.block, b.arguments, b.indices, b.workspace} {
		if m.pointer != nil {
			m.release()
		}
	}
}

// Plan says which rows belong to which slot, once per step for all layers. state is nil if all sequences are Alone. What was
// planned before and not committed is dropped.
func (b *Batch) Plan(state *State, sequences ...Sequence) error {
	if b.handle == nil {
		return fail(NullPointer, "the batch is closed")
	}
	if len(sequences) > int(b.limits.max_sequences) {
		return fail(InvalidArgument, "%d sequences, the batch was made for %d", len(sequences), int64(b.limits.max_sequences))
	}
	ends, in, out := b.index(offsets), b.index(slotsIn), b.index(slotsOut)
	snapshots, offset := 0, 0
	for i, s := range sequences {
		if s.rows < 0 || s.alone != (state == nil) {
			return fail(InvalidArgument, "sequence %d: rows below 0, or Alone in a step with a state, or not without", i)
		}
		offset += s.rows
		ends[i+1], in[i], out[i] = C.int64_t(offset), C.int64_t(s.in), C.int64_t(s.out)
		for _, snapshot := range s.snapshots {
			if snapshots >= int(b.limits.max_snapshots) {
				return fail(InvalidArgument, "the batch was made for %d snapshots", int64(b.limits.max_snapshots))
			}
			b.index(snapshotSequences)[snapshots] = C.int64_t(i)
			b.index(snapshotRows)[snapshots] = C.int64_t(snapshot[0])
			b.index(snapshotSlots)[snapshots] = C.int64_t(snapshot[1])
			snapshots++
		}
	}
	rows := &b.arena.rows
	*rows = C.lla_rows{struct_size: C.sizeof_lla_rows, sequences: C.int64_t(len(sequences)), snapshots: C.int64_t(snapshots)}
	rows.offsets = b.indexFor(offsets)
	var handle *C.lla_state
	if state != nil {
		handle = state.handle
		rows.slot_in, rows.slot_out = b.indexFor(slotsIn), b.indexFor(slotsOut)
	}
	if snapshots > 0 {
		rows.snapshot_sequences = b.indexFor(snapshotSequences)
		rows.snapshot_rows = b.indexFor(snapshotRows)
		rows.snapshot_slots = b.indexFor(snapshotSlots)
	}
	err := check(func(e *C.lla_error) C.lla_status { return C.lla_batch_plan(b.handle, handle, rows, nil, e) })
	if err != nil {
		handle = nil
	}
	old := b.state
	b.state, b.sequences = C.lla_state_retain(handle), len(sequences)
	C.lla_state_release(old)
	keep(b, state)
	return err
}

// Discard drops the plan.
func (b *Batch) Discard() {
	C.lla_batch_discard(b.handle)
	runtime.KeepAlive(b)
}

// Reserve makes room for a layer's calls now, so that the first step need not.
func (b *Batch) Reserve(l *Layer, pass Pass) error {
	var bytes, alignment C.size_t
	err := check(func(e *C.lla_error) C.lla_status {
		return C.lla_layer_workspace(l.handle, &b.limits, C.lla_pass(pass), &bytes, &alignment, e)
	})
	runtime.KeepAlive(l)
	if err != nil || b.workspace.pointer != nil && bytes <= b.workspace.bytes {
		return err
	}
	if alignment < 64 {
		alignment = 64
	}
	grown, err := newMemory(bytes, alignment)
	if err != nil {
		return err
	}
	if b.workspace.pointer != nil {
		b.workspace.release()
	}
	b.workspace = grown
	return nil
}

// newArena makes the C memory for arguments.
func (b *Batch) newArena(limits Limits) error {
	var err error
	if b.arguments, err = newMemory(C.sizeof_lla_go_arena, 64); err != nil {
		return err
	}
	b.arena, b.indexSize = (*C.lla_go_arena)(b.arguments.pointer), limits.Sequences+1
	if b.indexSize < limits.Snapshots {
		b.indexSize = limits.Snapshots
	}
	if b.indices, err = newMemory(C.size_t(b.indexSize)*C.LLA_GO_INDICES*8, 64); err != nil {
		return err
	}
	for i := range b.arena.indices {
		b.arena.indices[i] = (*C.int64_t)(unsafe.Add(b.indices.pointer, i*b.indexSize*8))
	}
	b.index(offsets)[0] = 0
	return nil
}

// Arrays of the arena.
const (
	offsets = iota
	slotsIn
	slotsOut
	accepted
	snapshotSequences
	snapshotRows
	snapshotSlots
)

// index is one of the index arrays.
func (b *Batch) index(number int) []C.int64_t {
	return unsafe.Slice(b.arena.indices[number], b.indexSize)
}

// indexFor is the same for the library.
func (b *Batch) indexFor(number int) C.lla_index { return C.lla_go_index(b.arena.indices[number]) }

// group is one of the arrays of bindings, with its length.
func (b *Batch) group(number int) (*C.lla_binding, C.int64_t) {
	return &b.arena.bindings[number][0], C.int64_t(b.counts[number])
}

// prepare writes the tensors of a call into C memory and sees to its workspace.
func (b *Batch) prepare(l *Layer, pass Pass, groups ...Tensors) error {
	if b.handle == nil {
		return fail(NullPointer, "the batch is closed")
	}
	if err := b.Reserve(l, pass); err != nil {
		return err
	}
	for number, tensors := range groups {
		if len(tensors) > C.LLA_GO_BINDINGS {
			return fail(InvalidArgument, "%d tensors", len(tensors))
		}
		count := 0
		for role, tensor := range tensors {
			if tensor == nil || tensor.block.pointer == nil {
				return fail(NullPointer, "the tensor of role %d is nil or closed", role)
			}
			b.arena.bindings[number][count] = C.lla_binding{role: C.lla_role(role), flags: tensor.flags, tensor: tensor.raw}
			count++
		}
		b.counts[number] = count
	}
	return nil
}
