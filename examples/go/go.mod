// SPDX-License-Identifier: Apache-2.0
// Go binding of an installed lla 0.1: no module but the standard library.

module example.org/lla

go 1.19
