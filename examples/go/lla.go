// SPDX-License-Identifier: Apache-2.0

// Package lla computes log-linear and linear attention on the CPU, through the C library lla.
//
//	context, err := lla.NewContext(lla.ContextOptions{Threads: 4})
//	layer, err := context.NewLayer(lla.LayerDesc{Kind: lla.KindMixer, Mixer: lla.ScalarGate, Heads: 2, KeyDim: 16, ValueDim: 24})
//	state, err := lla.NewState([]*lla.Layer{layer}, lla.StateDesc{Slots: 4096})
//	batch, err := lla.NewBatch(context, lla.Limits{Sequences: 1, Rows: 100})
//
//	err = batch.Plan(state, lla.Append(slot, 100)) // which rows belong to which slot; once per step, for all layers
//	err = layer.Forward(batch, 0, lla.Tensors{lla.Q: q, lla.K: k, lla.V: v, lla.Y: y}, nil)
//	err = state.Commit(batch)
//
// Contexts and layers are used by any number of goroutines at once. Calls on a State may run at once if they name different
// slots. A Batch and a Tensor belong to one goroutine at a time.
//
// Objects are released by Close or, if that was forgotten, after the garbage collector has found them; in any order, since the
// library keeps what is still needed. Tensors and batches live in C memory, so that the library never sees a Go pointer
// outside a call. Failures are *Error values.
package lla

/*
#cgo pkg-config: lla
#include "arena.h"
*/
import "C"

import (
	"fmt"
	"runtime"
)

// Status is the number of a failure.
type Status int32

// Statuses that callers act on; String knows the others too.
const (
	InvalidArgument   Status = C.LLA_INVALID_ARGUMENT
	NullPointer       Status = C.LLA_NULL_POINTER
	ShapeMismatch     Status = C.LLA_SHAPE_MISMATCH
	MissingRole       Status = C.LLA_MISSING_ROLE
	LevelsExceeded    Status = C.LLA_LEVELS_EXCEEDED
	StateIncompatible Status = C.LLA_STATE_INCOMPATIBLE
	DataCorrupt       Status = C.LLA_DATA_CORRUPT
	Busy              Status = C.LLA_BUSY
	NoBlocks          Status = C.LLA_NO_BLOCKS
	PositionMismatch  Status = C.LLA_POSITION_MISMATCH
	SlotInUse         Status = C.LLA_SLOT_IN_USE
	RollbackLimit     Status = C.LLA_ROLLBACK_LIMIT
	OutOfMemory       Status = C.LLA_OUT_OF_MEMORY
)

// String gives the identifier: "LLA_SHAPE_MISMATCH".
func (s Status) String() string { return C.GoString(C.lla_status_name(C.lla_status(s))) }

// Error says why a call failed. States and outputs are as they were before it.
type Error struct {
	Status Status
	Text   string // names the argument
}

func (e *Error) Error() string { return fmt.Sprintf("%v: %s", e.Status, e.Text) }

// Is makes errors.Is(err, &lla.Error{Status: lla.NoBlocks}) compare statuses alone.
func (e *Error) Is(target error) bool {
	other, ok := target.(*Error)
	return ok && other.Status == e.Status
}

// check runs a call that writes its failure into an lla_error.
func check(call func(*C.lla_error) C.lla_status) error {
	reason := C.lla_error{struct_size: C.sizeof_lla_error}
	if status := call(&reason); status != C.LLA_OK {
		return &Error{Status(status), C.GoString(&reason.text[0])}
	}
	return nil
}

func fail(status Status, format string, arguments ...any) error {
	return &Error{status, fmt.Sprintf(format, arguments...)}
}

// Version of the loaded library.
func Version() string { return C.GoString(C.lla_version_string()) }

// LevelsNeeded is the number of λ columns that a sequence of a given length needs.
func LevelsNeeded(length int) int { return int(C.lla_levels_needed(C.int64_t(length))) }

// Backend says which library computes.
type Backend int32

// Backends that compute in host memory.
const (
	CPU       Backend = C.LLA_BACKEND_CPU
	Reference Backend = C.LLA_BACKEND_REFERENCE // plain loops in double precision: the model of correctness
)

// ContextOptions is what a context is made of; zero means default.
type ContextOptions struct {
	Backend Backend // default CPU
	Threads int     // workers of an own pool, the calling thread included; 0 or 1: no pool
}

// Context says which backend computes, with how many threads.
type Context struct{ handle *C.lla_context }

// NewContext creates a context.
func NewContext(options ContextOptions) (*Context, error) {
	if options.Backend == 0 {
		options.Backend = CPU
	}
	if options.Backend != CPU && options.Backend != Reference {
		return nil, fail(InvalidArgument, "Backend: this package computes in host memory")
	}
	raw := C.lla_context_options{struct_size: C.sizeof_lla_context_options}
	raw.backend, raw.threads = C.lla_backend(options.Backend), C.int32_t(options.Threads)
	var handle *C.lla_context
	if err := check(func(e *C.lla_error) C.lla_status { return C.lla_context_create(&raw, &handle, e) }); err != nil {
		return nil, err
	}
	context := &Context{handle}
	runtime.SetFinalizer(context, (*Context).Close)
	return context, nil
}

// Close gives the context back. Later calls with it fail; what was made with it goes on working.
func (c *Context) Close() {
	C.lla_context_release(c.handle)
	c.handle = nil
	runtime.SetFinalizer(c, nil)
}

// Layer is a checked description with its kernels chosen. It owns no weight and no sequence.
type Layer struct{ handle *C.lla_layer }

// LayerDesc describes a layer; zero in a field means its default. See lla_layer_desc for each.
type LayerDesc struct {
	Kind, Mixer                                             int32
	Heads, Groups, KeyDim, ValueDim, Hidden, Outputs        int
	Grain, Levels                                           int
	LambdaForm, LevelOverflow, GateForm, WriteForm, HeadMap int32
	QKNorm                                                  bool
	Scale, LambdaScale, QKNormEpsilon, DtMin, DtMax         float64
	ConvWidth                                               int
	ConvActivation, NormForm                                int32
	NormGroup                                               int
	NormEpsilon                                             float64
}

// Values of the fields of LayerDesc.
const (
	KindMixer         = C.LLA_LAYER_MIXER
	KindCell          = C.LLA_LAYER_CELL
	KindMamba2        = C.LLA_LAYER_MAMBA2
	KindGatedDeltaNet = C.LLA_LAYER_GATED_DELTANET
	KindConvolution   = C.LLA_LAYER_CONVOLUTION
	KindGates         = C.LLA_LAYER_GATES
	KindL2Norm        = C.LLA_LAYER_L2_NORM
	KindGatedNorm     = C.LLA_LAYER_GATED_NORM
	KindProjection    = C.LLA_LAYER_PROJECTION
	ScalarGate        = C.LLA_SCALAR_GATE
	DeltaRule         = C.LLA_DELTA_RULE
	HeadMapBlocked    = C.LLA_HEAD_MAP_BLOCKED
	HeadMapCyclic     = C.LLA_HEAD_MAP_CYCLIC
	LambdaNone        = C.LLA_LAMBDA_NONE
	LambdaReady       = C.LLA_LAMBDA_READY
	LambdaSoftplus    = C.LLA_LAMBDA_SOFTPLUS
	LambdaBounded     = C.LLA_LAMBDA_BOUNDED
	LambdaProduct     = C.LLA_LAMBDA_PRODUCT
	LevelsError       = C.LLA_LEVELS_ERROR
	LevelsAbsorb      = C.LLA_LEVELS_ABSORB
	GateLog           = C.LLA_GATE_LOG
	GateSoftplus      = C.LLA_GATE_SOFTPLUS
	WriteNone         = C.LLA_WRITE_NONE
	WriteReady        = C.LLA_WRITE_READY
	WriteSigmoid      = C.LLA_WRITE_SIGMOID
	WriteTwoSigmoid   = C.LLA_WRITE_TWO_SIGMOID
	WriteStep         = C.LLA_WRITE_STEP
	NormNone          = C.LLA_NORM_NONE
	NormGateFirst     = C.LLA_NORM_GATE_FIRST
	NormNormFirst     = C.LLA_NORM_NORM_FIRST
	ActivationSilu    = C.LLA_ACTIVATION_SILU
	ActivationNone    = C.LLA_ACTIVATION_NONE
)

// NewLayer creates a layer.
func (c *Context) NewLayer(d LayerDesc) (*Layer, error) {
	raw := C.lla_layer_desc{struct_size: C.sizeof_lla_layer_desc}
	raw.kind, raw.mixer = C.lla_layer_kind(d.Kind), C.lla_mixer(d.Mixer)
	raw.heads, raw.groups = C.int64_t(d.Heads), C.int64_t(d.Groups)
	raw.key_dim, raw.value_dim = C.int64_t(d.KeyDim), C.int64_t(d.ValueDim)
	raw.hidden, raw.outputs = C.int64_t(d.Hidden), C.int64_t(d.Outputs)
	raw.grain, raw.levels = C.int64_t(d.Grain), C.int64_t(d.Levels)
	raw.lambda_form, raw.level_overflow = C.lla_lambda_form(d.LambdaForm), C.lla_level_overflow(d.LevelOverflow)
	raw.gate_form, raw.write_form = C.lla_gate_form(d.GateForm), C.lla_write_form(d.WriteForm)
	raw.head_map = C.lla_head_map(d.HeadMap)
	if d.QKNorm {
		raw.qk_norm = 1
	}
	raw.scale, raw.lambda_scale = C.double(d.Scale), C.double(d.LambdaScale)
	raw.qk_norm_epsilon, raw.norm_epsilon = C.double(d.QKNormEpsilon), C.double(d.NormEpsilon)
	raw.dt_min, raw.dt_max = C.double(d.DtMin), C.double(d.DtMax)
	raw.conv_width, raw.conv_activation = C.int64_t(d.ConvWidth), C.lla_activation(d.ConvActivation)
	raw.norm_form, raw.norm_group = C.lla_norm_form(d.NormForm), C.int64_t(d.NormGroup)
	var handle *C.lla_layer
	err := check(func(e *C.lla_error) C.lla_status { return C.lla_layer_create(c.handle, &raw, &handle, e) })
	runtime.KeepAlive(c)
	if err != nil {
		return nil, err
	}
	layer := &Layer{handle}
	runtime.SetFinalizer(layer, (*Layer).Close)
	return layer, nil
}

// Close gives the layer back. States of it go on working.
func (l *Layer) Close() {
	C.lla_layer_release(l.handle)
	l.handle = nil
	runtime.SetFinalizer(l, nil)
}

// Pass is the direction of a call.
type Pass int32

// Directions.
const (
	ForwardPass  Pass = C.LLA_PASS_FORWARD
	BackwardPass Pass = C.LLA_PASS_BACKWARD
)

// Forward computes the outputs of a planned batch's rows. io holds inputs and outputs, index says which layer of the state's
// group this is (0 without a state). States do not move: State.Commit does that, once for all layers.
func (l *Layer) Forward(b *Batch, index int, io, weights Tensors) error {
	if err := b.prepare(l, ForwardPass, io, weights, nil, nil); err != nil {
		return err
	}
	raw := &b.arena.forward
	*raw = C.lla_forward_args{struct_size: C.sizeof_lla_forward_args}
	raw.batch, raw.state, raw.layer_index = b.handle, b.state, C.int64_t(index)
	raw.io, raw.io_count = b.group(0)
	raw.weights, raw.weight_count = b.group(1)
	raw.workspace, raw.workspace_bytes = b.workspace.pointer, b.workspace.bytes
	err := check(func(e *C.lla_error) C.lla_status { return C.lla_layer_forward(l.handle, raw, e) })
	keep(l, b, io, weights)
	return err
}

// Backward computes the gradients that are listed, from the inputs and weights of Forward and the gradients of its outputs.
func (l *Layer) Backward(b *Batch, index int, io, weights, outputs, gradients Tensors) error {
	if err := b.prepare(l, BackwardPass, io, weights, outputs, gradients); err != nil {
		return err
	}
	raw := &b.arena.backward
	*raw = C.lla_backward_args{struct_size: C.sizeof_lla_backward_args}
	raw.batch, raw.state, raw.layer_index = b.handle, b.state, C.int64_t(index)
	raw.io, raw.io_count = b.group(0)
	raw.weights, raw.weight_count = b.group(1)
	raw.outputs, raw.output_count = b.group(2)
	raw.gradients, raw.gradient_count = b.group(3)
	raw.workspace, raw.workspace_bytes = b.workspace.pointer, b.workspace.bytes
	err := check(func(e *C.lla_error) C.lla_status { return C.lla_layer_backward(l.handle, raw, e) })
	keep(l, b, io, weights, outputs, gradients)
	return err
}

// keep stops the garbage collector from finalising what a call uses before the call has returned.
func keep(objects ...any) {
	for _, object := range objects {
		runtime.KeepAlive(object)
	}
}
