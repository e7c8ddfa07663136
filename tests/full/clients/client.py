# SPDX-License-Identifier: Apache-2.0
"""The same in Python, without the module: ctypes and nothing else."""
import ctypes as c


class Tensor(c.Structure):
    _fields_ = [("data", c.c_void_p), ("dtype", c.c_int32), ("rank", c.c_int32), ("dims", c.c_int64 * 6),
                ("strides", c.c_int64 * 6)]


class Binding(c.Structure):
    _fields_ = [("role", c.c_int32), ("flags", c.c_int32), ("tensor", Tensor)]


class ContextOptions(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("backend", c.c_int32), ("rest", c.c_int32 * 5), ("hooks", c.c_void_p * 3)]


class LayerDescription(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("kind", c.c_int32), ("mixer", c.c_int32), ("heads", c.c_int64),
                ("groups", c.c_int64), ("key_dim", c.c_int64), ("value_dim", c.c_int64), ("other", c.c_int64 * 3),
                ("levels", c.c_int64), ("lambda_form", c.c_int32), ("rest", c.c_int32 * 5), ("numbers", c.c_double * 5),
                ("convolution", c.c_int64 * 2), ("norm", c.c_int64 * 3)]


class Error(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("code", c.c_int32), ("text", c.c_char * 244)]


lla = c.CDLL("liblla.so.0")
lla.lla_version_string.restype = c.c_char_p
lla.lla_levels_needed.restype, lla.lla_levels_needed.argtypes = c.c_int64, [c.c_int64]
for kind in "context", "layer", "state":
    getattr(lla, f"lla_{kind}_release").argtypes = [c.c_void_p]
error = Error(struct_size=c.sizeof(Error))


def call(function, *arguments):
    if function(*arguments, c.byref(error)):
        raise SystemExit(error.text.decode())


context, layer, state = c.c_void_p(), c.c_void_p(), c.c_void_p()
options = ContextOptions(struct_size=c.sizeof(ContextOptions), backend=1)
call(lla.lla_context_create, c.byref(options), c.byref(context))
levels = lla.lla_levels_needed(4)
description = LayerDescription(struct_size=c.sizeof(LayerDescription), kind=1, mixer=1, heads=1, key_dim=1, value_dim=1,
                               levels=levels, lambda_form=1)
call(lla.lla_layer_create, context, c.byref(description), c.byref(layer))
call(lla.lla_state_create, c.byref(layer), c.c_int64(1), None, None, c.c_int64(0), c.byref(state))
ones, y = (c.c_float * (4 * levels))(*[1.0] * (4 * levels)), (c.c_float * 4)()


def bind(role, data, last):
    return Binding(role, 0, Tensor(c.addressof(data), 1, 3, (c.c_int64 * 6)(4, 1, last), (c.c_int64 * 6)(last, last, 1)))


io = (Binding * 5)(bind(1, ones, 1), bind(2, ones, 1), bind(3, ones, 1), bind(6, ones, levels), bind(9, y, 1))
call(lla.lla_append, layer, state, c.c_int64(0), io, c.c_int64(5), None, c.c_int64(0), None)
print(f"lla {lla.lla_version_string().decode()}: " + " ".join(f"{value:g}" for value in y))
lla.lla_state_release(state)
lla.lla_layer_release(layer)
lla.lla_context_release(context)
