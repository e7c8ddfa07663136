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

// StateDesc describes a state; zero in a field means its default.
type StateDesc struct {
	Slots      int // sequences; default 1
	MaxLength  int // longest sequence; default: what the layers' levels allow, at most 2^20
	MaxDraft   int // longest append of which a part may be accepted; default 16
	NodeBlocks int // size of the node pool; default: enough for every slot at its worst
}

// State holds the histories of many sequences (slots) for a group of layers.
type State struct{ handle *C.lla_state }

// NewState creates a state with all slots empty.
func NewState(layers []*Layer, d StateDesc) (*State, error) {
	handles := make([]*C.lla_layer, len(layers)+1)
	for i, layer := range layers {
		handles[i] = layer.handle
	}
	raw := C.lla_state_desc{struct_size: C.sizeof_lla_state_desc}
	raw.slots, raw.max_length = C.int64_t(d.Slots), C.int64_t(d.MaxLength)
	raw.max_draft, raw.node_blocks = C.int64_t(d.MaxDraft), C.int64_t(d.NodeBlocks)
	var handle *C.lla_state
	err := check(func(e *C.lla_error) C.lla_status {
		return C.lla_state_create(&handles[0], C.int64_t(len(layers)), &raw, nil, 0, &handle, e)
	})
	runtime.KeepAlive(layers)
	if err != nil {
		return nil, err
	}
	state := &State{handle}
	runtime.SetFinalizer(state, (*State).Close)
	return state, nil
}

// Close gives the state back. Batches that are planned with it keep it until they are planned again or closed.
func (s *State) Close() {
	C.lla_state_release(s.handle)
	s.handle = nil
	runtime.SetFinalizer(s, nil)
}

// call runs one call on the state.
func (s *State) call(call func(*C.lla_state, *C.lla_error) C.lla_status) error {
	defer runtime.KeepAlive(s)
	return check(func(e *C.lla_error) C.lla_status { return call(s.handle, e) })
}

// Commit makes the rows of a batch part of their sequences, for all layers: all of them, or kept[i] of sequence i.
func (s *State) Commit(b *Batch, kept ...int) error {
	defer runtime.KeepAlive(b)
	if b.handle == nil {
		return fail(NullPointer, "the batch is closed")
	}
	var index C.lla_index
	if len(kept) > 0 {
		if len(kept) != b.sequences {
			return fail(InvalidArgument, "kept: %d numbers for %d sequences", len(kept), b.sequences)
		}
		for i, rows := range kept {
			b.index(accepted)[i] = C.int64_t(rows)
		}
		index = b.indexFor(accepted)
	}
	return s.call(func(h *C.lla_state, e *C.lla_error) C.lla_status {
		return C.lla_state_commit(h, b.handle, index, nil, e)
	})
}

// Length is the position of a slot.
func (s *State) Length(slot int) (int, error) {
	var length C.int64_t
	err := s.call(func(h *C.lla_state, e *C.lla_error) C.lla_status {
		return C.lla_state_length(h, C.int64_t(slot), &length, e)
	})
	return int(length), err
}

// FreeNodeBlocks is the number of node blocks that are free.
func (s *State) FreeNodeBlocks() (int, error) {
	var count C.int64_t
	err := s.call(func(h *C.lla_state, e *C.lla_error) C.lla_status {
		return C.lla_state_query(h, C.LLA_STATE_FREE_NODE_BLOCKS, 0, &count, e)
	})
	return int(count), err
}

// Fork copies a slot's history to another slot. Nodes are shared; it costs about one tail.
func (s *State) Fork(source, target int) error {
	return s.call(func(h *C.lla_state, e *C.lla_error) C.lla_status {
		return C.lla_go_fork(h, C.int64_t(source), C.int64_t(target), e)
	})
}

// Reset empties a slot; it may stand at any position, its past counts as zero.
func (s *State) Reset(slot, position int) error {
	return s.call(func(h *C.lla_state, e *C.lla_error) C.lla_status {
		return C.lla_go_reset(h, C.int64_t(slot), C.int64_t(position), e)
	})
}

// Truncate takes rows back, down to the start of the current chunk.
func (s *State) Truncate(slot, position int) error {
	return s.call(func(h *C.lla_state, e *C.lla_error) C.lla_status {
		return C.lla_state_truncate(h, C.int64_t(slot), C.int64_t(position), nil, e)
	})
}

// ImportLinear takes over the state of another library for one linear layer: a matrix [H, dk, dv] that has seen position rows.
// reset empties the slot first; it is for the first layer that is imported into it.
func (s *State) ImportLinear(slot, layer, position int, matrix *Tensor, reset bool) error {
	if matrix == nil || matrix.block.pointer == nil {
		return fail(NullPointer, "the matrix is nil or closed")
	}
	var first C.int32_t
	if reset {
		first = 1
	}
	defer runtime.KeepAlive(matrix)
	return s.call(func(h *C.lla_state, e *C.lla_error) C.lla_status {
		return C.lla_state_import_linear(h, C.int64_t(slot), C.int64_t(layer), C.int64_t(position), &matrix.raw, first, nil, e)
	})
}

// Save gives a slot as bytes, sealed with a checksum and a tag of up to 64 bytes that names model and prompt.
func (s *State) Save(slot int, tag string) ([]byte, error) {
	var size C.size_t
	err := s.call(func(h *C.lla_state, e *C.lla_error) C.lla_status {
		return C.lla_state_export_size(h, C.int64_t(slot), &size, e)
	})
	if err != nil {
		return nil, err
	}
	image, name := make([]byte, size), tagOf(tag)
	err = s.call(func(h *C.lla_state, e *C.lla_error) C.lla_status {
		return C.lla_state_pack(h, C.int64_t(slot), bytesOf(image), size, nil, e)
	})
	if err == nil {
		err = check(func(e *C.lla_error) C.lla_status { return C.lla_state_seal(bytesOf(image), size, &name[0], e) })
	}
	if err != nil {
		return nil, err
	}
	return image, nil
}

// Load replaces a slot by what Save gave, of a state with the same layers. Damaged bytes or another tag are refused.
func (s *State) Load(slot int, image []byte, tag string) error {
	size, name := C.size_t(len(image)), tagOf(tag)
	err := check(func(e *C.lla_error) C.lla_status { return C.lla_state_check(bytesOf(image), size, &name[0], nil, e) })
	if err != nil {
		return err
	}
	return s.call(func(h *C.lla_state, e *C.lla_error) C.lla_status {
		return C.lla_state_unpack(h, C.int64_t(slot), bytesOf(image), size, nil, e)
	})
}

func tagOf(text string) *[C.LLA_TAG_SIZE]C.char {
	var tag [C.LLA_TAG_SIZE]C.char
	for i := 0; i < len(text) && i < len(tag); i++ {
		tag[i] = C.char(text[i])
	}
	return &tag
}

func bytesOf(bytes []byte) unsafe.Pointer {
	if len(bytes) == 0 {
		return nil
	}
	return unsafe.Pointer(&bytes[0])
}
