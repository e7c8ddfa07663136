// SPDX-License-Identifier: Apache-2.0

package main

import "testing"

func TestTrainAndServe(t *testing.T) {
	if err := run(); err != nil {
		t.Fatal(err)
	}
}
