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

// Role says what a tensor is to a layer. Shapes: N rows, H heads, G groups, dk and dv key and value size, L λ columns.
type Role int32

// Roles. Weights have the names of the headers.
const (
	Q         Role = C.LLA_Q          // queries [N, G, dk]
	K         Role = C.LLA_K          // keys [N, G, dk]
	V         Role = C.LLA_V          // values [N, H, dv]
	Gate      Role = C.LLA_GATE       // log gate [N, H], or what the gate form makes it from
	Write     Role = C.LLA_WRITE      // write strength [N, H], or what the write form makes it from
	Lambda    Role = C.LLA_LAMBDA     // level weights [N, H, L], or what the λ form makes them from
	Z         Role = C.LLA_Z          // output gate [N, H*dv]
	X         Role = C.LLA_X          // input of a block or part [N, hidden]
	Y         Role = C.LLA_Y          // output: mixer [N, H, dv], cell [N, H*dv], block [N, hidden]
	SkipInput Role = C.LLA_SKIP_INPUT // value of the skip connection of a gated norm [N, H, dv]
	GateOut   Role = C.LLA_GATE_OUT   // output of KindGates
	WriteOut  Role = C.LLA_WRITE_OUT  // output of KindGates
	LambdaOut Role = C.LLA_LAMBDA_OUT // output of KindGates

	WeightConv        Role = C.LLA_WEIGHT_CONV
	WeightConvBias    Role = C.LLA_WEIGHT_CONV_BIAS
	WeightConvQ       Role = C.LLA_WEIGHT_CONV_Q
	WeightConvK       Role = C.LLA_WEIGHT_CONV_K
	WeightConvV       Role = C.LLA_WEIGHT_CONV_V
	WeightConvQBias   Role = C.LLA_WEIGHT_CONV_Q_BIAS
	WeightConvKBias   Role = C.LLA_WEIGHT_CONV_K_BIAS
	WeightConvVBias   Role = C.LLA_WEIGHT_CONV_V_BIAS
	WeightDtBias      Role = C.LLA_WEIGHT_DT_BIAS
	WeightALog        Role = C.LLA_WEIGHT_A_LOG
	WeightLambda      Role = C.LLA_WEIGHT_LAMBDA
	WeightSkip        Role = C.LLA_WEIGHT_SKIP
	WeightNorm        Role = C.LLA_WEIGHT_NORM
	WeightInProj      Role = C.LLA_WEIGHT_IN_PROJ
	WeightInProjBias  Role = C.LLA_WEIGHT_IN_PROJ_BIAS
	WeightOutProj     Role = C.LLA_WEIGHT_OUT_PROJ
	WeightOutProjBias Role = C.LLA_WEIGHT_OUT_PROJ_BIAS
	WeightQProj       Role = C.LLA_WEIGHT_Q_PROJ
	WeightKProj       Role = C.LLA_WEIGHT_K_PROJ
	WeightVProj       Role = C.LLA_WEIGHT_V_PROJ
	WeightGateProj    Role = C.LLA_WEIGHT_GATE_PROJ
	WeightWriteProj   Role = C.LLA_WEIGHT_WRITE_PROJ
	WeightZProj       Role = C.LLA_WEIGHT_Z_PROJ
	WeightLambdaProj  Role = C.LLA_WEIGHT_LAMBDA_PROJ
	WeightProj        Role = C.LLA_WEIGHT_PROJ
	WeightProjBias    Role = C.LLA_WEIGHT_PROJ_BIAS
)

// memory is a block of C memory.
type memory struct {
	pointer unsafe.Pointer
	bytes   C.size_t
}

func newMemory(bytes, alignment C.size_t) (*memory, error) {
	pointer := C.lla_go_allocate(bytes, alignment)
	if pointer == nil {
		return nil, fail(OutOfMemory, "no memory for %d bytes", uint64(bytes))
	}
	m := &memory{pointer, bytes}
	runtime.SetFinalizer(m, (*memory).release)
	return m, nil
}

func (m *memory) release() {
	C.free(m.pointer)
	m.pointer, m.bytes = nil, 0
	runtime.SetFinalizer(m, nil)
}

// Tensor is a contiguous array of float32 in C memory. Go values are copied in and out.
type Tensor struct {
	block *memory
	raw   C.lla_tensor
	flags C.int32_t
	size  int
}

// Tensors are the arguments of a call.
type Tensors map[Role]*Tensor

// NewTensor makes a tensor of zeros.
func NewTensor(shape ...int) (*Tensor, error) {
	if len(shape) < 1 || len(shape) > C.LLA_MAX_RANK {
		return nil, fail(ShapeMismatch, "a tensor of %d dimensions", len(shape))
	}
	const most = 1 << 48
	t := &Tensor{size: 1}
	t.raw.dtype, t.raw.rank = C.LLA_F32, C.int32_t(len(shape))
	for axis := len(shape) - 1; axis >= 0; axis-- {
		if shape[axis] < 0 || shape[axis] > most || t.size > most/(shape[axis]+1) {
			return nil, fail(ShapeMismatch, "a tensor of %v", shape)
		}
		t.raw.dims[axis], t.raw.strides[axis] = C.int64_t(shape[axis]), C.int64_t(t.size)
		t.size *= shape[axis]
	}
	var err error
	if t.block, err = newMemory(C.size_t(t.size)*4, 64); err != nil {
		return nil, err
	}
	t.raw.data = t.block.pointer
	for i := range t.values() {
		t.values()[i] = 0
	}
	return t, nil
}

// TensorOf makes a tensor with the given values.
func TensorOf(values []float32, shape ...int) (*Tensor, error) {
	t, err := NewTensor(shape...)
	if err == nil {
		err = t.Set(values)
	}
	if err != nil {
		return nil, err
	}
	return t, nil
}

// values is a window on C memory; it must not outlive the tensor.
func (t *Tensor) values() []float32 {
	if t.block.pointer == nil {
		return nil
	}
	return unsafe.Slice((*float32)(t.raw.data), t.size)
}

// Len is the number of elements.
func (t *Tensor) Len() int { return t.size }

// Set copies values in: exactly as many as there are elements.
func (t *Tensor) Set(values []float32) error {
	defer runtime.KeepAlive(t.block)
	if to := t.values(); len(to) == len(values) {
		copy(to, values)
		return nil
	}
	return fail(ShapeMismatch, "%d values for a tensor of %d elements", len(values), t.size)
}

// Values copies the elements out.
func (t *Tensor) Values() []float32 {
	defer runtime.KeepAlive(t.block)
	return append([]float32(nil), t.values()...)
}

// Rows is the part of a tensor from one row up to another; it shares the memory.
func (t *Tensor) Rows(from, to int) (*Tensor, error) {
	if from < 0 || to < from || C.int64_t(to) > t.raw.dims[0] {
		return nil, fail(ShapeMismatch, "rows %d to %d of %d", from, to, int64(t.raw.dims[0]))
	}
	part := *t
	part.raw.dims[0] = C.int64_t(to - from)
	part.raw.data = unsafe.Add(t.raw.data, from*int(t.raw.strides[0])*4)
	part.size = (to - from) * int(t.raw.strides[0])
	return &part, nil
}

// Accumulate is the same tensor as a gradient that is added to what it holds, instead of overwriting it.
func (t *Tensor) Accumulate() *Tensor {
	added := *t
	added.flags = C.LLA_ACCUMULATE
	return &added
}

// Close releases the memory, also that of parts.
func (t *Tensor) Close() { t.block.release() }
