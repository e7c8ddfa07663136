// SPDX-License-Identifier: Apache-2.0

package lla

import (
	"bytes"
	"errors"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"testing"
)

const (
	heads = 2
	dim   = 4
	width = heads * dim
)

// must ends a test at an error; it takes what a call returned.
func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func refused(t *testing.T, status Status, err error) {
	t.Helper()
	if !errors.Is(err, &Error{Status: status}) {
		t.Errorf("wanted %v, got %v", status, err)
	}
}

func setUp(slots int) (*Context, *Layer, *State, *Batch) {
	context := must(NewContext(ContextOptions{Threads: 2}))
	layer := must(context.NewLayer(LayerDesc{Kind: KindMixer, Mixer: ScalarGate, Heads: heads, KeyDim: dim, ValueDim: dim}))
	state := must(NewState([]*Layer{layer}, StateDesc{Slots: slots}))
	return context, layer, state, newBatch(context)
}

func newBatch(context *Context) *Batch {
	return must(NewBatch(context, Limits{Sequences: 4, Rows: 256, Snapshots: 1}))
}

// values are rows first ... first + count - 1 of one endless sequence.
func values(first, count int) []float32 {
	x := make([]float32, count*width)
	for i := range x {
		x[i] = float32((first*width+i)*31%101)/250 - 0.2
	}
	return x
}

func forward(layer *Layer, batch *Batch, x []float32) []float32 {
	tokens, y := must(TensorOf(x, len(x)/width, heads, dim)), must(NewTensor(len(x)/width, heads, dim))
	if err := layer.Forward(batch, 0, Tensors{Q: tokens, K: tokens, V: tokens, Y: y}, nil); err != nil {
		panic(err)
	}
	return y.Values()
}

func add(layer *Layer, state *State, batch *Batch, slot, first, count int) {
	must(0, batch.Plan(state, Append(slot, count)))
	forward(layer, batch, values(first, count))
	must(0, state.Commit(batch))
}

func same(state *State, a, b int) bool {
	return bytes.Equal(must(state.Save(a, "")), must(state.Save(b, "")))
}

func TestStatesOfOtherLibraries(t *testing.T) {
	_, layer, state, batch := setUp(1)
	theirs := values(5, dim)
	matrix := must(TensorOf(theirs, heads, dim, dim))
	must(0, state.ImportLinear(0, 0, 70, matrix, true))
	x := values(3, 1)
	must(0, batch.Plan(state, Append(0, 1)))
	y := forward(layer, batch, x)
	must(0, state.Commit(batch))
	for h := 0; h < heads; h++ {
		for j := 0; j < dim; j++ {
			expected := float32(0)
			for i := 0; i < dim; i++ {
				expected += x[h*dim+i] * (theirs[(h*dim+i)*dim+j] + x[h*dim+i]*x[h*dim+j])
			}
			if difference := expected - y[h*dim+j]; difference > 1e-6 || difference < -1e-6 {
				t.Errorf("head %d, %d: %v, not %v", h, j, y[h*dim+j], expected)
			}
		}
	}
	refused(t, PositionMismatch, state.ImportLinear(0, 0, 3, matrix, false))
	refused(t, ShapeMismatch, state.ImportLinear(0, 0, 3, must(NewTensor(dim, dim)), true))
	refused(t, NullPointer, state.ImportLinear(0, 0, 3, nil, true))
	if length := must(state.Length(0)); length != 71 {
		t.Errorf("stands at %d", length)
	}
}

func TestDraftsForksAndSnapshots(t *testing.T) {
	_, layer, state, batch := setUp(4)
	add(layer, state, batch, 0, 0, 100)
	add(layer, state, batch, 1, 0, 102)
	must(0, batch.Plan(state, Fork(0, 2, 5)))
	forward(layer, batch, append(values(100, 2), values(900, 3)...)) // three of five are wrong
	refused(t, InvalidArgument, state.Commit(batch, 2, 0))
	must(0, state.Commit(batch, 2))
	if !same(state, 1, 2) || must(state.Length(0)) != 100 {
		t.Error("two accepted of five drafted")
	}
	must(0, state.Truncate(2, 100))
	if !same(state, 0, 2) {
		t.Error("rolled back")
	}
	refused(t, RollbackLimit, state.Truncate(2, 50))

	must(0, state.Reset(1, 0))
	must(0, batch.Plan(state, Append(1, 150).Snapshot(100, 3), Idle(2)))
	y := forward(layer, batch, values(0, 152))
	must(0, state.Commit(batch))
	if !reflect.DeepEqual(y[150*width:], make([]float32, 2*width)) || !same(state, 0, 3) {
		t.Error("snapshot or padding")
	}
	must(0, state.Fork(0, 1))
	if !same(state, 0, 1) {
		t.Error("fork")
	}
}

func TestSlotsAreUsedAtOnce(t *testing.T) {
	context, layer, state, _ := setUp(8)
	var group sync.WaitGroup
	for slot := 0; slot < 8; slot++ {
		group.Add(1)
		go func(slot int) {
			defer group.Done()
			batch := newBatch(context)
			for i := 0; i < 50; i++ {
				add(layer, state, batch, slot, 3*i, 3)
			}
		}(slot)
	}
	group.Wait()
	for slot := 1; slot < 8; slot++ {
		if !same(state, 0, slot) {
			t.Errorf("slot %d differs", slot)
		}
	}
}

func TestClosedInAnyOrder(t *testing.T) {
	context, layer, state, batch := setUp(1)
	context.Close()
	add(layer, state, batch, 0, 0, 70)
	must(0, batch.Plan(state, Append(0, 1))) // planned, not committed
	layer.Close()
	state.Close()
	refused(t, NullPointer, state.Truncate(0, 70))
	batch.Discard()
	batch.Close()
	batch.Close()
	refused(t, NullPointer, batch.Plan(nil, Alone(1)))
	refused(t, NullPointer, state.Commit(batch))
	closed := must(NewTensor(1, heads, dim))
	closed.Close()
	refused(t, ShapeMismatch, closed.Set(values(0, 1)))
}

func TestCollectedInAnyOrder(t *testing.T) {
	for i := 0; i < 50; i++ {
		_, layer, state, batch := setUp(2)
		add(layer, state, batch, 0, 0, 70)
		if i%3 == 0 {
			must(0, batch.Plan(state, Append(0, 1)))
		}
		if i%2 == 0 {
			runtime.GC()
		}
	}
	runtime.GC()
}

func TestErrors(t *testing.T) {
	context, layer, state, batch := setUp(1)
	_, err := context.NewLayer(LayerDesc{Kind: KindMixer, Mixer: ScalarGate, Heads: 1})
	refused(t, InvalidArgument, err)
	var reason *Error
	if !errors.As(err, &reason) || !strings.Contains(reason.Text, "key_dim") || reason.Status.String() != "LLA_INVALID_ARGUMENT" {
		t.Error(err)
	}
	_, err = NewContext(ContextOptions{Backend: 2})
	refused(t, InvalidArgument, err)
	_, err = NewTensor(1<<40, 1<<40)
	refused(t, ShapeMismatch, err)
	x := must(TensorOf(values(0, 3), 3, heads, dim))
	_, err = x.Rows(2, 4)
	refused(t, ShapeMismatch, err)
	must(0, batch.Plan(state, Append(0, 3)))
	refused(t, MissingRole, layer.Forward(batch, 0, Tensors{Q: x}, nil))
	refused(t, ShapeMismatch, layer.Forward(batch, 0, Tensors{Q: x, K: x, V: x, Y: must(x.Rows(0, 2))}, nil))
	refused(t, NullPointer, layer.Forward(batch, 0, Tensors{Q: nil}, nil))
	refused(t, InvalidArgument, batch.Plan(state, Append(0, 1), Alone(1)))
	refused(t, InvalidArgument, batch.Plan(state, Append(0, 1), Append(0, 1), Append(0, 1), Append(0, 1), Append(0, 1)))
	refused(t, InvalidArgument, batch.Plan(state, Append(7, 1)))
	refused(t, DataCorrupt, state.Load(0, []byte("no image"), ""))
	refused(t, StateIncompatible, state.Load(0, must(state.Save(0, "a")), "b"))
}

func TestGradientsAreAddedWhereAsked(t *testing.T) {
	_, layer, _, batch := setUp(1)
	x, dy := must(TensorOf(values(0, 70), 70, heads, dim)), must(TensorOf(values(5, 70), 70, heads, dim))
	written, added := must(NewTensor(70, heads, dim)), must(TensorOf(values(9, 70), 70, heads, dim))
	must(0, batch.Plan(nil, Alone(70)))
	for _, dk := range []*Tensor{written, added.Accumulate()} {
		must(0, layer.Backward(batch, 0, Tensors{Q: x, K: x, V: x}, nil, Tensors{Y: dy}, Tensors{K: dk}))
	}
	sum := written.Values()
	for i, start := range values(9, 70) {
		sum[i] += start
	}
	if !reflect.DeepEqual(sum, added.Values()) {
		t.Error("not the sum")
	}
}
