// SPDX-License-Identifier: Apache-2.0

// Trains a small model on the text "hello ", then serves it: prompt, decoding, a fork, and a slot that is saved and loaded.
package main

import (
	"errors"
	"fmt"
	"log"
	"math"
	"os"
	"path/filepath"
	"strings"

	"example.org/lla"
)

const (
	alphabet = "helo "
	text     = "hello "
	heads    = 2
	dim      = 8
	output   = heads * dim
	rows     = 192
	steps    = 150
	rate     = 0.3
	tag      = "hello model"
)

func textTokens(start, count int) []int {
	tokens := make([]int, count)
	for i := range tokens {
		tokens[i] = strings.IndexByte(alphabet, text[(start+i)%len(text)])
	}
	return tokens
}

// table holds the rows of one input of the mixer, by token.
type table struct {
	role   lla.Role
	width  int
	values []float32
	input  *lla.Tensor // [rows, heads, width]
	slope  *lla.Tensor // its gradient
}

// model: tables give each token its q, k, v and λ; a mixer looks back; a matrix turns its output into scores of the next token.
type model struct {
	layer       *lla.Layer
	tables      []*table
	head        []float32
	gate, y, dy *lla.Tensor
}

func newModel(context *lla.Context) (*model, error) {
	levels := lla.LevelsNeeded(1024)
	layer, err := context.NewLayer(lla.LayerDesc{Kind: lla.KindMixer, Mixer: lla.ScalarGate, Heads: heads, KeyDim: dim,
		ValueDim: dim, LambdaForm: lla.LambdaReady, Levels: levels})
	if err != nil {
		return nil, err
	}
	seed := uint32(1)
	noise := func(count int) []float32 {
		values := make([]float32, count)
		for i := range values {
			seed = seed*1664525 + 1013904223
			values[i] = float32(seed>>8)/16777216 - 0.5
		}
		return values
	}
	var problems []error
	tensor := func(shape ...int) *lla.Tensor {
		t, err := lla.NewTensor(shape...)
		problems = append(problems, err)
		return t
	}
	m := &model{layer: layer, gate: tensor(rows, heads), y: tensor(rows, heads, dim), dy: tensor(rows, heads, dim)}
	for _, t := range []*table{{role: lla.Q, width: dim}, {role: lla.K, width: dim}, {role: lla.V, width: dim},
		{role: lla.Lambda, width: levels}} {
		t.input, t.slope = tensor(rows, heads, t.width), tensor(rows, heads, t.width)
		t.values = noise(len(alphabet) * heads * t.width)
		if t.role == lla.Lambda {
			fill(t.values, 1)
		}
		m.tables = append(m.tables, t)
	}
	m.head = noise(len(alphabet) * output)
	decay := make([]float32, rows*heads)
	fill(decay, -0.1)
	for _, err := range append(problems, m.gate.Set(decay)) {
		if err != nil {
			return nil, err
		}
	}
	return m, nil
}

func fill(values []float32, value float32) {
	for i := range values {
		values[i] = value
	}
}

// forward looks the tokens' inputs up and computes the mixer's outputs for the rows that the batch has planned.
func (m *model) forward(batch *lla.Batch, tokens []int) (io lla.Tensors, y []float32, err error) {
	first := func(t *lla.Tensor) *lla.Tensor { // as many rows as there are tokens
		part, problem := t.Rows(0, len(tokens))
		if problem != nil {
			err = problem
		}
		return part
	}
	io = lla.Tensors{lla.Gate: first(m.gate), lla.Y: first(m.y)}
	for _, t := range m.tables {
		size := heads * t.width
		values := make([]float32, 0, len(tokens)*size)
		for _, token := range tokens {
			values = append(values, t.values[token*size:(token+1)*size]...)
		}
		io[t.role] = first(t.input)
		if err != nil {
			return nil, nil, err
		}
		if err = io[t.role].Set(values); err != nil {
			return nil, nil, err
		}
	}
	if err = m.layer.Forward(batch, 0, io, nil); err != nil {
		return nil, nil, err
	}
	return io, io[lla.Y].Values(), nil
}

// scores says how likely each letter may follow a row.
func (m *model) scores(y []float32) []float32 {
	scores := make([]float32, len(alphabet))
	for i := range scores {
		for j, x := range y {
			scores[i] += m.head[i*output+j] * x
		}
	}
	return scores
}

func likeliest(scores []float32) int {
	best := 0
	for i, score := range scores {
		if score > scores[best] {
			best = i
		}
	}
	return best
}

// step goes down the gradient of the cross entropy once; it returns the loss before.
func (m *model) step(batch *lla.Batch, tokens, targets []int) (loss float64, err error) {
	io, y, err := m.forward(batch, tokens)
	if err != nil {
		return 0, err
	}
	dy, head := make([]float32, len(y)), append([]float32(nil), m.head...)
	for r, target := range targets {
		row, slope := y[r*output:(r+1)*output], dy[r*output:(r+1)*output]
		scores := m.scores(row)
		largest, sum := float64(scores[likeliest(scores)]), 0.0
		for _, score := range scores {
			sum += math.Exp(float64(score) - largest)
		}
		loss -= (float64(scores[target]) - largest - math.Log(sum)) / float64(len(tokens))
		for i, score := range scores {
			probability := math.Exp(float64(score)-largest) / sum
			if i == target {
				probability--
			}
			gradient := float32(probability / float64(len(tokens)))
			for j := range row {
				slope[j] += gradient * m.head[i*output+j]
				head[i*output+j] -= rate * gradient * row[j]
			}
		}
	}
	m.head = head

	if err := m.dy.Set(dy); err != nil {
		return 0, err
	}
	delete(io, lla.Y) // backward takes the inputs
	wanted := lla.Tensors{}
	for _, t := range m.tables {
		wanted[t.role] = t.slope
	}
	if err := m.layer.Backward(batch, 0, io, nil, lla.Tensors{lla.Y: m.dy}, wanted); err != nil {
		return 0, err
	}
	for _, t := range m.tables {
		size := heads * t.width
		for i, gradient := range t.slope.Values() {
			t.values[tokens[i/size]*size+i%size] -= rate * gradient
		}
	}
	return loss, nil
}

// server appends rows to the slots of a state.
type server struct {
	model *model
	state *lla.State
	batch *lla.Batch
}

func newServer(context *lla.Context, m *model, slots int) (*server, error) {
	state, err := lla.NewState([]*lla.Layer{m.layer}, lla.StateDesc{Slots: slots})
	if err != nil {
		return nil, err
	}
	batch, err := lla.NewBatch(context, lla.Limits{Sequences: 1, Rows: rows})
	if err != nil {
		return nil, err
	}
	return &server{m, state, batch}, nil
}

// append appends tokens to a slot; it returns the scores of what may follow the last one.
func (s *server) append(slot int, tokens []int) ([]float32, error) {
	if err := s.batch.Plan(s.state, lla.Append(slot, len(tokens))); err != nil {
		return nil, err
	}
	_, y, err := s.model.forward(s.batch, tokens)
	if err != nil {
		return nil, err
	}
	if err := s.state.Commit(s.batch); err != nil {
		return nil, err
	}
	return s.model.scores(y[len(y)-output:]), nil
}

// decode continues a slot by its likeliest tokens; it returns the text and the last scores.
func (s *server) decode(slot int, scores []float32, count int) (string, []float32, error) {
	var continued strings.Builder
	for i := 0; i < count; i++ {
		token := likeliest(scores)
		continued.WriteByte(alphabet[token])
		var err error
		if scores, err = s.append(slot, []int{token}); err != nil {
			return "", nil, err
		}
	}
	return continued.String(), scores, nil
}

func run() error {
	context, err := lla.NewContext(lla.ContextOptions{Threads: 2})
	if err != nil {
		return err
	}
	defer context.Close()
	m, err := newModel(context)
	if err != nil {
		return err
	}
	batch, err := lla.NewBatch(context, lla.Limits{Sequences: 1, Rows: rows, Length: rows})
	if err != nil {
		return err
	}
	defer batch.Close()
	if err := batch.Plan(nil, lla.Alone(rows)); err != nil { // once: every step has the same rows
		return err
	}
	var first, last float64
	for i := 0; i < steps; i++ {
		if last, err = m.step(batch, textTokens(0, rows), textTokens(1, rows)); err != nil {
			return err
		}
		if i == 0 {
			first = last
		}
	}
	fmt.Printf("lla %s: loss %.3f, after %d steps %.3f\n", lla.Version(), first, steps, last)
	if last > 0.1*first {
		return errors.New("the loss does not fall")
	}

	one, err := newServer(context, m, 2)
	if err != nil {
		return err
	}
	scores, err := one.append(0, textTokens(0, 100))
	if err != nil {
		return err
	}
	if err := one.state.Fork(0, 1); err != nil {
		return err
	}
	other, err := loaded(context, one)
	if err != nil {
		return err
	}
	continued, end, err := one.decode(0, scores, 30)
	if err != nil {
		return err
	}
	fmt.Printf("\"...hell\" goes on: %q\n", continued)
	if continued != "o hello hello hello hello hell" {
		return errors.New("it was taught otherwise")
	}
	for name, twin := range map[string]func() (string, []float32, error){
		"the fork":                        func() (string, []float32, error) { return one.decode(1, scores, 30) },
		"what was saved and loaded again": func() (string, []float32, error) { return other.decode(0, scores, 30) },
	} {
		again, endAgain, err := twin()
		if err != nil {
			return err
		}
		if again != continued || fmt.Sprint(endAgain) != fmt.Sprint(end) {
			return fmt.Errorf("%s differs", name)
		}
		fmt.Printf("%s: the same, bit by bit\n", name)
	}
	return nil
}

// loaded saves slot 0 to a file, and loads it into the first slot of another state.
func loaded(context *lla.Context, from *server) (*server, error) {
	image, err := from.state.Save(0, tag)
	if err != nil {
		return nil, err
	}
	folder, err := os.MkdirTemp("", "lla")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(folder)
	path := filepath.Join(folder, "slot")
	if err := os.WriteFile(path, image, 0o600); err != nil {
		return nil, err
	}
	if image, err = os.ReadFile(path); err != nil {
		return nil, err
	}
	to, err := newServer(context, from.model, 1)
	if err != nil {
		return nil, err
	}
	if err := to.state.Load(0, image, tag); err != nil {
		return nil, err
	}
	image[len(image)/2] ^= 1
	if err := to.state.Load(0, image, tag); !errors.Is(err, &lla.Error{Status: lla.DataCorrupt}) {
		return nil, fmt.Errorf("a damaged image is not refused: %v", err)
	}
	return to, nil
}

func main() {
	if err := run(); err != nil {
		log.Fatal(err)
	}
}
