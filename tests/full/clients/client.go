// SPDX-License-Identifier: Apache-2.0

// The same in Go, without the module: cgo reads the headers.
package main

/*
#cgo pkg-config: lla
#include <lla/lla.h>
#include <stdlib.h>

static lla_binding rows(lla_role role, float *data, int64_t last) {
  return lla_bind(role, lla_tensor_of(data, LLA_F32, 4, 1, last, -1));
}
*/
import "C"

import (
	"fmt"
	"os"
	"unsafe"
)

func main() {
	var problem C.lla_error
	problem.struct_size = C.sizeof_lla_error
	check := func(status C.lla_status) {
		if status != C.LLA_OK {
			fmt.Fprintln(os.Stderr, C.GoString(&problem.text[0]))
			os.Exit(1)
		}
	}
	options := C.lla_context_options{struct_size: C.sizeof_lla_context_options, backend: C.LLA_BACKEND_CPU}
	var context *C.lla_context
	check(C.lla_context_create(&options, &context, &problem))
	defer C.lla_context_release(context)

	levels := C.lla_levels_needed(4)
	description := C.lla_layer_desc{struct_size: C.sizeof_lla_layer_desc, kind: C.LLA_LAYER_MIXER, mixer: C.LLA_SCALAR_GATE,
		heads: 1, key_dim: 1, value_dim: 1, lambda_form: C.LLA_LAMBDA_READY, levels: levels}
	var layer *C.lla_layer
	check(C.lla_layer_create(context, &description, &layer, &problem))
	defer C.lla_layer_release(layer)

	var state *C.lla_state
	check(C.lla_state_create(&layer, 1, nil, nil, 0, &state, &problem))
	defer C.lla_state_release(state)

	// Tensors lie in C memory: a binding may not hold a pointer to Go's.
	count := 4 * (int(levels) + 1)
	memory := (*C.float)(C.calloc(C.size_t(count), C.sizeof_float))
	defer C.free(unsafe.Pointer(memory))
	values := unsafe.Slice(memory, count)
	y := &values[count-4]
	for i := range values {
		values[i] = 1
	}
	io := []C.lla_binding{C.rows(C.LLA_Q, memory, 1), C.rows(C.LLA_K, memory, 1), C.rows(C.LLA_V, memory, 1),
		C.rows(C.LLA_LAMBDA, memory, C.int64_t(levels)), C.rows(C.LLA_Y, y, 1)}
	check(C.lla_append(layer, state, 0, &io[0], 5, nil, 0, nil, &problem))
	fmt.Printf("lla %s:", C.GoString(C.lla_version_string()))
	for _, value := range values[count-4:] {
		fmt.Printf(" %g", float32(value))
	}
	fmt.Println()
}
