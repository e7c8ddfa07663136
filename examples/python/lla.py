# SPDX-License-Identifier: Apache-2.0
"""lla for NumPy: one file over ctypes, on the CPU. Tensors are NumPy arrays, named by their roles:

    context = lla.Context(threads=2)
    layer = context.layer(kind=lla.MIXER, mixer=lla.SCALAR_GATE, heads=2, key_dim=16, value_dim=16)
    y = layer.forward(lla.Batch(context, [100]), q=q, k=k, v=v, gate=gate)["y"]        # 100 rows, no history

    state = lla.State([layer], slots=4)
    y = state.append(0, q=q, k=k, v=v, gate=gate)["y"]                                # rows for slot 0, which keeps them

Inputs may be anything that speaks DLPack and lies in host memory, such as a tensor of PyTorch or JAX; it is read where it lies.
What comes back is a NumPy array, which their from_dlpack() takes the same way.

The library is liblla.so.0, or the file that the environment variable LLA_LIBRARY names.
"""
import ctypes
import os

import numpy as np

BACKEND_CPU, BACKEND_REFERENCE = 1, 3  # the tensors of a CUDA context would lie in device memory
MIXER, CELL, MAMBA2, GATED_DELTANET, CONVOLUTION, GATES, L2_NORM, GATED_NORM, PROJECTION = range(1, 10)
SCALAR_GATE, DELTA_RULE = 1, 2
LAMBDA_NONE, LAMBDA_READY, LAMBDA_SOFTPLUS, LAMBDA_BOUNDED, LAMBDA_PRODUCT = range(5)
LEVELS_ERROR, LEVELS_ABSORB = 0, 1
GATE_LOG, GATE_SOFTPLUS = 0, 1
WRITE_NONE, WRITE_READY, WRITE_SIGMOID, WRITE_TWO_SIGMOID, WRITE_STEP = range(5)
NORM_NONE, NORM_GATE_FIRST, NORM_NORM_FIRST = range(3)
STATE_VALUE, STATE_GRADIENT = 0, 1
PART_NODE, PART_NODE_DECAY, PART_ABSORBED, PART_TAIL_K, PART_TAIL_V, PART_TAIL_GATE, PART_TAIL_WRITE, PART_CONV = range(1, 9)
FORWARD, BACKWARD = 1, 2
TAG_SIZE = 64

# Names and numbers of the roles; weights begin at 100. "lam" is LLA_LAMBDA, whose name Python keeps for itself.
ROLES = dict(zip("q k v gate write lam z x y skip_input gate_out write_out lam_out".split(), range(1, 14)))
ROLES.update(zip("conv conv_bias conv_q conv_k conv_v conv_q_bias conv_k_bias conv_v_bias dt_bias a_log lam_weight skip "
                 "norm".split(), range(100, 113)))
ROLES.update(zip("in_proj in_proj_bias out_proj out_proj_bias q_proj k_proj v_proj gate_proj write_proj z_proj lam_proj proj "
                 "proj_bias".split(), range(120, 133)))

_DTYPES = {"float32": 1, "float16": 3, "float64": 4}
_p, _i32, _i64, _size, _f64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_size_t, ctypes.c_double


def _struct(name, **fields):
    """A struct of the headers; one that begins with struct_size sets it itself."""

    def initialise(self, **values):
        ctypes.Structure.__init__(self, **values)
        if "struct_size" in fields:
            self.struct_size = ctypes.sizeof(self)

    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items()), "__init__": initialise})


_Error = _struct("Error", struct_size=_size, code=_i32, text=ctypes.c_char * 244)
_Tensor = _struct("Tensor", data=_p, dtype=_i32, rank=_i32, dims=_i64 * 6, strides=_i64 * 6)
_Binding = _struct("Binding", role=_i32, flags=_i32, tensor=_Tensor)
_Index = _struct("Index", data=_p, dtype=_i32, location=_i32)
_ContextOptions = _struct("ContextOptions", struct_size=_size, backend=_i32, device=_i32, isa=_i32, determinism=_i32,
                          threads=_i32, reserved=_i32, allocator=_p, parallel=_p, log=_p)
_BatchLimits = _struct("BatchLimits", struct_size=_size, max_sequences=_i64, max_rows=_i64, max_rows_per_sequence=_i64,
                       max_length=_i64, max_snapshots=_i64, replay=_i32, reserved=_i32)
_Rows = _struct("Rows", struct_size=_size, sequences=_i64, rows_per_sequence=_i64, total_rows=_i64, offsets=_Index,
                counts=_Index, slot_in=_Index, slot_out=_Index, expected_positions=_Index, snapshots=_i64,
                snapshot_sequences=_Index, snapshot_rows=_Index, snapshot_slots=_Index, gradient_state=_p,
                initial_gradient_slots=_Index, final_gradient_slots=_Index)
_LayerDesc = _struct("LayerDesc", struct_size=_size, kind=_i32, mixer=_i32, heads=_i64, groups=_i64, key_dim=_i64,
                     value_dim=_i64, hidden=_i64, outputs=_i64, grain=_i64, levels=_i64, lambda_form=_i32,
                     level_overflow=_i32, gate_form=_i32, write_form=_i32, head_map=_i32, qk_norm=_i32, scale=_f64,
                     lambda_scale=_f64, qk_norm_epsilon=_f64, dt_min=_f64, dt_max=_f64, conv_width=_i64,
                     conv_activation=_i32, norm_form=_i32, norm_group=_i64, norm_epsilon=_f64, inner_dtype=_i32,
                     reserved=_i32)
_ForwardArgs = _struct("ForwardArgs", struct_size=_size, batch=_p, state=_p, layer_index=_i64, io=_p, io_count=_i64,
                       weights=_p, weight_count=_i64, workspace=_p, workspace_bytes=_size, saved=_p, saved_bytes=_size,
                       stream=_p)
_BackwardArgs = _struct("BackwardArgs", struct_size=_size, batch=_p, state=_p, layer_index=_i64, io=_p, io_count=_i64,
                        weights=_p, weight_count=_i64, outputs=_p, output_count=_i64, gradients=_p, gradient_count=_i64,
                        workspace=_p, workspace_bytes=_size, saved=_p, saved_bytes=_size, stream=_p)
_StateDesc = _struct("StateDesc", struct_size=_size, kind=_i32, node_dtype=_i32, tail_dtype=_i32, reserved=_i32,
                     slots=_i64, max_length=_i64, max_draft=_i64, node_blocks=_i64)

_library = ctypes.CDLL(os.environ.get("LLA_LIBRARY", "liblla.so.0"))
_library.lla_status_name.restype = _library.lla_version_string.restype = ctypes.c_char_p
_library.lla_levels_needed.restype, _library.lla_levels_needed.argtypes = _i64, [_i64]
for _name in ("lla_context_release", "lla_layer_release", "lla_state_release", "lla_batch_discard"):
    getattr(_library, _name).restype, getattr(_library, _name).argtypes = None, [_p]
if _library.lla_abi_version() != 0:
    raise ImportError(f"lla with binary interface {_library.lla_abi_version()}, wanted 0")

version = _library.lla_version_string().decode()
levels_needed = _library.lla_levels_needed


class Error(Exception):
    """A call failed: `status` is its number, `name` its identifier ("LLA_SHAPE_MISMATCH")."""

    def __init__(self, status, text):
        self.status, self.name = status, _library.lla_status_name(status).decode()
        super().__init__(f"{self.name}: {text}")


def _call(name, *arguments):
    """Calls a function that returns a status and takes an lla_error last."""
    error = _Error()
    status = getattr(_library, name)(*arguments, ctypes.byref(error))
    if status:
        raise Error(status, error.text.decode(errors="replace"))


def _handle(name, *arguments):
    handle = _p()
    _call(name, *arguments, ctypes.byref(handle))
    return handle


def _memory(name, *arguments):
    """Aligned memory of the size that a query says: (the array that owns it, address, bytes)."""
    size, alignment = _size(), _size()
    _call(name, *arguments, ctypes.byref(size), ctypes.byref(alignment))
    block = np.empty(size.value + max(1, alignment.value), np.uint8)
    return block, _p(-(-block.ctypes.data // max(1, alignment.value)) * max(1, alignment.value)), _size(size.value)


def _array(tensor):
    """A NumPy array of the same memory."""
    return tensor if isinstance(tensor, np.ndarray) or not hasattr(tensor, "__dlpack__") else np.from_dlpack(tensor)


def _arrays(tensors):
    return {name: _array(tensor) for name, tensor in tensors.items()}


def _bindings(arrays):
    """A C array of bindings; `arrays` must stay alive while it is used."""
    bindings = (_Binding * max(1, len(arrays)))()
    for binding, (name, array) in zip(bindings, arrays.items()):
        if array.dtype.name not in _DTYPES or not array.dtype.isnative:
            raise TypeError(f"{name}: arrays of {array.dtype} are not supported")
        if array.ndim > 6:
            raise ValueError(f"{name}: more than 6 dimensions")
        if any(stride % array.itemsize for stride in array.strides):
            raise ValueError(f"{name}: strides must be multiples of the element's size")
        strides = [stride // array.itemsize for stride in array.strides]
        binding.role = ROLES[name]
        binding.tensor = _Tensor(data=array.ctypes.data, dtype=_DTYPES[array.dtype.name], rank=array.ndim,
                                 dims=(_i64 * 6)(*array.shape), strides=(_i64 * 6)(*strides))
    return bindings


def _index(values):
    """(array that owns the integers, lla_index); None gives "not given"."""
    if values is None:
        return None, _Index()
    array = np.ascontiguousarray(values, np.int64)
    return array, _Index(data=array.ctypes.data, dtype=6)


class Context:
    """Which backend computes, with how many threads."""

    def __init__(self, backend=BACKEND_CPU, threads=1):
        if backend not in (BACKEND_CPU, BACKEND_REFERENCE):
            raise ValueError("this module computes in host memory")
        self._as_parameter_ = _handle("lla_context_create", ctypes.byref(_ContextOptions(backend=backend, threads=threads)))

    def layer(self, **description):
        """A layer, by the fields of lla_layer_desc."""
        return Layer(self, **description)

    def __del__(self):
        if hasattr(self, "_as_parameter_"):
            _library.lla_context_release(self)


class Layer:
    """A mixer, cell, block or part. Tensors are given by role: q=, k=, v=, gate=, ... and, for weights, in_proj=, conv=, ..."""

    def __init__(self, context, **description):
        self.context, self.description = context, _LayerDesc(**description)
        self._as_parameter_ = _handle("lla_layer_create", context, ctypes.byref(self.description))

    def output_shape(self, rows):
        """Shape of y, of every kind that has one."""
        d = self.description
        return {MIXER: (rows, d.heads, d.value_dim), CELL: (rows, d.heads * d.value_dim), PROJECTION: (rows, d.outputs),
                L2_NORM: (rows, d.heads, d.key_dim)}.get(d.kind, (rows, d.hidden))

    def forward(self, batch, layer_index=0, outputs=None, **inputs):
        """Outputs by role: the NumPy arrays given, or a new "y" of the type of the first input."""
        inputs = _arrays(inputs)
        if outputs is None:
            outputs = {"y": np.empty(self.output_shape(batch.rows), next(iter(inputs.values())).dtype)}
        io, weights = _split(inputs)
        self._run("lla_layer_forward", FORWARD, _ForwardArgs, batch, layer_index, io={**io, **outputs}, weight=weights)
        return outputs

    def backward(self, batch, output_gradients, wanted, layer_index=0, **inputs):
        """Gradients of the inputs and weights named in `wanted`, each of the type and shape of its tensor."""
        inputs, output_gradients = _arrays(inputs), _arrays(output_gradients)
        gradients = {name: np.empty(inputs[name].shape, inputs[name].dtype) for name in wanted}
        io, weights = _split(inputs)
        self._run("lla_layer_backward", BACKWARD, _BackwardArgs, batch, layer_index, io=io, weight=weights,
                  output=output_gradients, gradient=gradients)
        return gradients

    def _run(self, function, direction, arguments, batch, layer_index, **groups):
        fields = {}
        for name, arrays in groups.items():
            plural = "io" if name == "io" else name + "s"
            fields[plural] = ctypes.cast(_bindings(arrays), _p)
            fields[name + "_count"] = len(arrays)
        workspace = batch.workspace(self, direction)
        call = arguments(batch=batch._as_parameter_, state=batch.state and batch.state._as_parameter_,
                         layer_index=layer_index, workspace=workspace[1], workspace_bytes=workspace[2].value, **fields)
        _call(function, self, ctypes.byref(call))

    def __del__(self):
        if hasattr(self, "_as_parameter_"):
            _library.lla_layer_release(self)


def _split(inputs):
    return ({n: a for n, a in inputs.items() if ROLES[n] < 100}, {n: a for n, a in inputs.items() if ROLES[n] >= 100})


class Batch:
    """The rows of a step, planned: counts[b] rows of sequence b, one after the other. With a state they continue slots[b]
    (-1 = padding), or targets[b] receives the history of slots[b] and the rows."""

    def __init__(self, context, counts, state=None, slots=None, targets=None):
        for name, values in (("slots", slots), ("targets", targets)):
            if values is not None and len(values) != len(counts):
                raise ValueError(f"{len(values)} {name} for {len(counts)} sequences")
        self.context, self.state, self.rows, self.count = context, state, int(sum(counts)), len(counts)
        self.limits = _BatchLimits(max_sequences=len(counts), max_rows=self.rows,
                                   max_rows_per_sequence=max([1, *counts]), max_length=0 if state else max([1, *counts]))
        self._memory = _memory("lla_batch_size", context, ctypes.byref(self.limits))
        self._as_parameter_ = _handle("lla_batch_init", context, ctypes.byref(self.limits), *self._memory[1:])
        self._workspaces = {}
        kept = [_index(values) for values in (np.cumsum([0, *counts]), slots, targets)]
        rows = _Rows(sequences=len(counts), total_rows=self.rows, offsets=kept[0][1], slot_in=kept[1][1],
                     slot_out=kept[2][1])
        _call("lla_batch_plan", self, state, ctypes.byref(rows), None)

    def workspace(self, layer, direction):
        key = (layer, direction)
        if key not in self._workspaces:
            self._workspaces[key] = _memory("lla_layer_workspace", layer, ctypes.byref(self.limits), direction)
        return self._workspaces[key]

    def commit(self, accepted=None):
        """Makes the rows part of their sequences, for all layers; accepted[b] of them, or all."""
        if accepted is not None and len(accepted) != self.count:
            raise ValueError(f"{len(accepted)} accepted counts for {self.count} sequences")
        kept = _index(accepted)
        _call("lla_state_commit", self.state, self, kept[1], None)

    def __del__(self):
        if hasattr(self, "_as_parameter_"):
            _library.lla_batch_discard(self)


class State:
    """The histories of many sequences (slots) for a group of layers."""

    def __init__(self, layers, **description):
        self.layers = list(layers)
        handles = (_p * len(self.layers))(*[layer._as_parameter_ for layer in self.layers])
        self._as_parameter_ = _handle("lla_state_create", handles, _i64(len(self.layers)),
                                      ctypes.byref(_StateDesc(**description)), None, _i64(0))

    def append(self, slot, **inputs):
        """Appends rows to one slot of a state of one layer; their number is the first dimension of the first input."""
        inputs = _arrays(inputs)
        rows = len(next(iter(inputs.values())))
        batch = Batch(self.layers[0].context, [rows], state=self, slots=[slot])
        outputs = self.layers[0].forward(batch, **inputs)
        batch.commit()
        return outputs

    def length(self, slot):
        length = _i64()
        _call("lla_state_length", self, _i64(slot), ctypes.byref(length))
        return length.value

    def fork(self, source, target):
        sources, targets = _index([source]), _index([target])
        _call("lla_state_fork", self, sources[1], targets[1], _i64(1), None)

    def reset(self, slot):
        slots = _index([slot])
        _call("lla_state_reset", self, slots[1], _i64(1), _Index(), None)

    def truncate(self, slot, position):
        _call("lla_state_truncate", self, _i64(slot), _i64(position), None)

    def import_linear(self, slot, position, matrix, layer_index=0, reset=True):
        """A state as other libraries keep it: matrix [H, dk, dv] of a linear layer that has seen `position` rows. `reset` empties
        the slot first; it is for the first layer that is imported into it."""
        matrix = _array(matrix)
        binding = _bindings({"x": matrix})
        _call("lla_state_import_linear", self, _i64(slot), _i64(layer_index), _i64(position), ctypes.byref(binding[0].tensor),
              _i32(reset), None)

    def read(self, slot, part, shape, index=0, layer_index=0, dtype=np.float32):
        """A part LLA_PART_... of a slot's history as a new array of the shape that state.h says."""
        array = np.empty(shape, dtype)
        binding = _bindings({"x": array})
        _call("lla_state_read", self, _i64(slot), _i64(layer_index), _i32(part), _i64(index), ctypes.byref(binding[0].tensor), None)
        return array

    def save(self, slot, tag=b""):
        """The slot as bytes, with a tag that names model and prompt."""
        size = _size()
        _call("lla_state_export_size", self, _i64(slot), ctypes.byref(size))
        image = ctypes.create_string_buffer(size.value)
        _call("lla_state_pack", self, _i64(slot), image, size, None)
        _call("lla_state_seal", image, size, ctypes.create_string_buffer(tag, TAG_SIZE))
        return image.raw

    def load(self, slot, image, tag=b""):
        """Replaces a slot by what save() gave; bytes that are damaged or of another model or tag are refused."""
        _call("lla_state_check", image, _size(len(image)), ctypes.create_string_buffer(tag, TAG_SIZE), None)
        _call("lla_state_unpack", self, _i64(slot), image, _size(len(image)), None)

    def __del__(self):
        if hasattr(self, "_as_parameter_"):
            _library.lla_state_release(self)
