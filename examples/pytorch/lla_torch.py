# SPDX-License-Identifier: Apache-2.0
"""lla for PyTorch: a thin ctypes binding, operators with gradients, and two blocks as modules.

    import lla_torch as lla
    o = lla.scalar_gate(q, k, v, gate, lam)           # q, k [B, T, G, dk]; v [B, T, H, dv]; gate [B, T, H]; lam [B, T, H, L]
    o = lla.delta_rule(q, k, v, gate, write, lam)     # write [B, T, H]; without lam: the linear model

The library is `liblla.so.0`, or the file that the environment variable LLA_LIBRARY or load(path) names. The first half of this
file (up to "torch") does not need torch: it calls the library with plain pointers.
"""
import collections
import contextlib
import ctypes
import functools
import os
import threading

try:
    import torch
except ImportError:  # the first half still works
    torch = None

ABI_VERSION = 0
F32, BF16, F16, F64, I32, I64 = 1, 2, 3, 4, 5, 6
BACKEND_AUTO, BACKEND_CPU, BACKEND_CUDA, BACKEND_REFERENCE = 0, 1, 2, 3
MIXER, CELL, MAMBA2, GATED_DELTANET = 1, 2, 3, 4
SCALAR_GATE, DELTA_RULE = 1, 2
HEAD_MAP_BLOCKED, HEAD_MAP_CYCLIC = 0, 1
LAMBDA_NONE, LAMBDA_READY, LAMBDA_SOFTPLUS, LAMBDA_BOUNDED, LAMBDA_PRODUCT = 0, 1, 2, 3, 4
LEVELS_ERROR, LEVELS_ABSORB = 0, 1
WRITE_NONE, WRITE_READY = 0, 1
FORWARD, BACKWARD = 1, 2
Q, K, V, GATE, WRITE, LAMBDA, Z, X, Y = 1, 2, 3, 4, 5, 6, 7, 8, 9
WEIGHT_CONV, WEIGHT_CONV_BIAS = 100, 101
WEIGHT_CONV_Q, WEIGHT_CONV_K, WEIGHT_CONV_V = 102, 103, 104
WEIGHT_DT_BIAS, WEIGHT_A_LOG, WEIGHT_LAMBDA, WEIGHT_SKIP, WEIGHT_NORM = 108, 109, 110, 111, 112
WEIGHT_IN_PROJ, WEIGHT_OUT_PROJ = 120, 122
WEIGHT_Q_PROJ, WEIGHT_K_PROJ, WEIGHT_V_PROJ, WEIGHT_GATE_PROJ, WEIGHT_WRITE_PROJ = 124, 125, 126, 127, 128
WEIGHT_Z_PROJ, WEIGHT_LAMBDA_PROJ = 129, 130

# -- structs, field by field as in the headers -------------------------------------------------------------------------

_p, _i32, _i64, _size, _f64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_size_t, ctypes.c_double


class _Struct(ctypes.Structure):
    def __init__(self, **fields):
        super().__init__(**fields)
        if self._fields_[0][0] == "struct_size":
            self.struct_size = ctypes.sizeof(self)


class Error(_Struct):
    _fields_ = [("struct_size", _size), ("code", _i32), ("text", ctypes.c_char * 244)]


class Tensor(_Struct):
    _fields_ = [("data", _p), ("dtype", _i32), ("rank", _i32), ("dims", _i64 * 6), ("strides", _i64 * 6)]


class Binding(_Struct):
    _fields_ = [("role", _i32), ("flags", _i32), ("tensor", Tensor)]


class Index(_Struct):
    _fields_ = [("data", _p), ("dtype", _i32), ("location", _i32)]


class ContextOptions(_Struct):
    _fields_ = [("struct_size", _size), ("backend", _i32), ("device", _i32), ("isa", _i32), ("determinism", _i32),
                ("threads", _i32), ("reserved", _i32), ("allocator", _p), ("parallel", _p), ("log", _p)]


class BatchLimits(_Struct):
    _fields_ = [("struct_size", _size), ("max_sequences", _i64), ("max_rows", _i64), ("max_rows_per_sequence", _i64),
                ("max_length", _i64), ("max_snapshots", _i64), ("replay", _i32), ("reserved", _i32)]


class Rows(_Struct):
    _fields_ = [("struct_size", _size), ("sequences", _i64), ("rows_per_sequence", _i64), ("total_rows", _i64),
                ("offsets", Index), ("counts", Index), ("slot_in", Index), ("slot_out", Index),
                ("expected_positions", Index), ("snapshots", _i64), ("snapshot_sequences", Index),
                ("snapshot_rows", Index), ("snapshot_slots", Index), ("gradient_state", _p),
                ("initial_gradient_slots", Index), ("final_gradient_slots", Index)]


class LayerDesc(_Struct):
    _fields_ = [("struct_size", _size), ("kind", _i32), ("mixer", _i32), ("heads", _i64), ("groups", _i64),
                ("key_dim", _i64), ("value_dim", _i64), ("hidden", _i64), ("outputs", _i64), ("grain", _i64),
                ("levels", _i64), ("lambda_form", _i32), ("level_overflow", _i32), ("gate_form", _i32),
                ("write_form", _i32), ("head_map", _i32), ("qk_norm", _i32), ("scale", _f64), ("lambda_scale", _f64),
                ("qk_norm_epsilon", _f64), ("dt_min", _f64), ("dt_max", _f64), ("conv_width", _i64),
                ("conv_activation", _i32), ("norm_form", _i32), ("norm_group", _i64), ("norm_epsilon", _f64),
                ("inner_dtype", _i32), ("reserved", _i32)]


class ForwardArgs(_Struct):
    _fields_ = [("struct_size", _size), ("batch", _p), ("state", _p), ("layer_index", _i64), ("io", _p),
                ("io_count", _i64), ("weights", _p), ("weight_count", _i64), ("workspace", _p),
                ("workspace_bytes", _size), ("saved", _p), ("saved_bytes", _size), ("stream", _p)]


class BackwardArgs(_Struct):
    _fields_ = [("struct_size", _size), ("batch", _p), ("state", _p), ("layer_index", _i64), ("io", _p),
                ("io_count", _i64), ("weights", _p), ("weight_count", _i64), ("outputs", _p), ("output_count", _i64),
                ("gradients", _p), ("gradient_count", _i64), ("workspace", _p), ("workspace_bytes", _size),
                ("saved", _p), ("saved_bytes", _size), ("stream", _p)]


class StateDesc(_Struct):
    _fields_ = [("struct_size", _size), ("kind", _i32), ("node_dtype", _i32), ("tail_dtype", _i32), ("reserved", _i32),
                ("slots", _i64), ("max_length", _i64), ("max_draft", _i64), ("node_blocks", _i64)]


_SIZES = {Error: 256, Tensor: 112, Binding: 120, Index: 16, ContextOptions: 56, BatchLimits: 56, Rows: 208, LayerDesc: 184,
          ForwardArgs: 104, BackwardArgs: 136, StateDesc: 56}
for _struct, _bytes in _SIZES.items():
    if ctypes.sizeof(_struct) != _bytes:
        raise ImportError(f"{_struct.__name__} has {ctypes.sizeof(_struct)} bytes here, {_bytes} in the library")

# -- the library -------------------------------------------------------------------------------------------------------


class LlaError(RuntimeError):
    """A call failed; `status` is its number, `name` its identifier."""

    def __init__(self, status, name, text):
        super().__init__(f"{name}: {text}")
        self.status, self.name = status, name


_library = None
_lock = threading.RLock()  # batches and workspaces belong to one thread at a time

_STATUS_FUNCTIONS = {
    "lla_context_create": [_p, _p], "lla_context_query": [_p, _i32, _p, _p],
    "lla_layer_create": [_p, _p, _p], "lla_layer_query": [_p, _i32, _i64, _p, _p],
    "lla_layer_workspace": [_p, _p, _i32, _p, _p], "lla_layer_saved_size": [_p, _p, _p, _p],
    "lla_layer_forward": [_p, _p], "lla_layer_backward": [_p, _p],
    "lla_batch_size": [_p, _p, _p, _p], "lla_batch_init": [_p, _p, _p, _size, _p],
    "lla_batch_device_size": [_p, _p, _p, _p], "lla_batch_bind_device": [_p, _p, _size],
    "lla_batch_plan": [_p, _p, _p, _p],
    "lla_state_create": [_p, _i64, _p, _p, _i64, _p], "lla_state_commit": [_p, _p, Index, _p],
    "lla_state_reset": [_p, Index, _i64, Index, _p], "lla_state_length": [_p, _i64, _p],
}


def load(path=None):
    """Loads the library once; later calls return it. `path`: default LLA_LIBRARY, then liblla.so.0."""
    global _library
    if _library is None or path is not None:
        library = ctypes.CDLL(path or os.environ.get("LLA_LIBRARY") or "liblla.so.0")
        for name, arguments in _STATUS_FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = _i32, arguments + [_p]  # the last one is the lla_error
        for name in ("lla_context_release", "lla_layer_release", "lla_state_release"):
            getattr(library, name).restype, getattr(library, name).argtypes = None, [_p]
        for name, arguments in (("lla_status_name", [_i32]), ("lla_source_id", []), ("lla_version_string", [])):
            getattr(library, name).restype, getattr(library, name).argtypes = ctypes.c_char_p, arguments
        library.lla_levels_needed.restype, library.lla_levels_needed.argtypes = _i64, [_i64]
        if library.lla_abi_version() != ABI_VERSION:
            raise ImportError(f"binary interface {library.lla_abi_version()}, wanted {ABI_VERSION}")
        _library = library
    return _library


def call(name, *arguments):
    """Calls a function that returns an lla_status; raises LlaError with the text of its lla_error."""
    library, error = load(), Error()
    status = getattr(library, name)(*arguments, ctypes.byref(error))
    if status:
        raise LlaError(status, library.lla_status_name(status).decode(), error.text.decode(errors="replace"))


def levels_needed(length):
    return load().lla_levels_needed(length)


def source_id():
    return load().lla_source_id().decode()


def view(pointer, dtype, dims, strides):
    """A tensor of the caller's memory; strides in elements."""
    if len(dims) > 6:
        raise ValueError("more than 6 dimensions")
    return Tensor(data=pointer, dtype=dtype, rank=len(dims), dims=(_i64 * 6)(*dims), strides=(_i64 * 6)(*strides))


def bind(role, tensor, flags=0):
    return Binding(role=role, flags=flags, tensor=tensor)


def _array(bindings):
    return ctypes.cast((Binding * max(1, len(bindings)))(*bindings), _p)  # keeps the array alive


def _text(query, *arguments):
    size = _size(0)
    call(query, *arguments, None, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    call(query, *arguments, text, ctypes.byref(size))
    return text.value.decode()


class HostMemory:
    """Aligned host memory."""

    def __init__(self, size, alignment):
        self._buffer = ctypes.create_string_buffer(size + alignment)
        self.size, self.pointer = size, -(-ctypes.addressof(self._buffer) // alignment) * alignment


class Context:
    """backend: BACKEND_...; device: number of the GPU; threads: workers of the CPU backends.
    allocate(bytes, alignment) gives an object with `pointer` and `size`, in memory of the device."""

    def __init__(self, backend=BACKEND_AUTO, device=0, threads=0, allocate=HostMemory):
        self.handle, self.backend, self.allocate, self._layers = _p(), backend, allocate, {}
        options = ContextOptions(backend=backend, device=device, threads=threads)
        call("lla_context_create", ctypes.byref(options), ctypes.byref(self.handle))

    def query(self, key):
        """1 name of the backend, 2 instruction set, 5 why AUTO took no better one, 6 name of the device."""
        return _text("lla_context_query", self.handle, key)

    def layer(self, **description):
        """A layer by the fields of lla_layer_desc; the same description gives the same layer."""
        key = tuple(sorted(description.items()))
        if key not in self._layers:
            self._layers[key] = Layer(self, **description)
        return self._layers[key]

    def __del__(self):
        if _library is not None and self.handle:
            _library.lla_context_release(self.handle)


class Layer:
    def __init__(self, context, **description):
        self.handle, self.context, self.description = _p(), context, LayerDesc(**description)
        call("lla_layer_create", context.handle, ctypes.byref(self.description), ctypes.byref(self.handle))

    def kernels(self, backward=False):
        count, size = _i64(0), _size(8)
        call("lla_layer_query", self.handle, 3 if backward else 1, 0, ctypes.byref(count), ctypes.byref(size))
        return [_text("lla_layer_query", self.handle, 4 if backward else 2, i) for i in range(count.value)]

    def workspace(self, limits, backward=False):
        return _sizes("lla_layer_workspace", self.handle, ctypes.byref(limits), BACKWARD if backward else FORWARD)

    def saved(self, limits):
        return _sizes("lla_layer_saved_size", self.handle, ctypes.byref(limits))

    def prepare_forward(self, batch, io, weights=(), workspace=None, saved=None, state=None, layer_index=0, stream=None):
        """A forward call that may be made again and again, with the same pointers."""
        arrays = [_array(io), _array(weights)]
        arguments = ForwardArgs(
            batch=batch.handle, state=state.handle if state else None, layer_index=layer_index, io=arrays[0], io_count=len(io),
            weights=arrays[1], weight_count=len(weights), workspace=workspace.pointer,
            workspace_bytes=workspace.size, saved=saved.pointer if saved else None,
            saved_bytes=saved.size if saved else 0, stream=stream)
        return _Prepared("lla_layer_forward", self, arguments, (arrays, batch, workspace, saved, state))

    def prepare_backward(self, batch, io, outputs, gradients, weights=(), workspace=None, saved=None, stream=None):
        """As prepare_forward(); `outputs` are the gradients of the outputs, `gradients` those wanted of inputs and weights."""
        arrays = [_array(bindings) for bindings in (io, weights, outputs, gradients)]
        arguments = BackwardArgs(
            batch=batch.handle, io=arrays[0], io_count=len(io), weights=arrays[1], weight_count=len(weights),
            outputs=arrays[2], output_count=len(outputs), gradients=arrays[3], gradient_count=len(gradients),
            workspace=workspace.pointer, workspace_bytes=workspace.size, saved=saved.pointer if saved else None,
            saved_bytes=saved.size if saved else 0, stream=stream)
        return _Prepared("lla_layer_backward", self, arguments, (arrays, batch, workspace, saved))

    def forward(self, *arguments, **named):
        self.prepare_forward(*arguments, **named)()

    def backward(self, *arguments, **named):
        self.prepare_backward(*arguments, **named)()

    def __del__(self):
        if _library is not None and self.handle:
            _library.lla_layer_release(self.handle)


class _Prepared:
    """A call with its arguments, and all that they point to."""

    def __init__(self, name, layer, arguments, kept):
        self._name, self._layer, self._arguments, self._kept = name, layer, arguments, kept
        self._pointer = ctypes.byref(arguments)

    def __call__(self):
        call(self._name, self._layer.handle, self._pointer)


def _sizes(name, *arguments):
    size, alignment = _size(), _size()
    call(name, *arguments, ctypes.byref(size), ctypes.byref(alignment))
    return size.value, max(1, alignment.value)


class Batch:
    """The rows of a call, planned: `offsets` = the first row of each sequence and the number of rows. With a state, sequence b
    belongs to slot b, or to slots[b]. replay: launches serve later plans, see lla_batch_limits. Host and device memory are kept
    here."""

    def __init__(self, context, offsets, stream=None, state=None, max_length=0, slots=None, replay=False):
        counts = [b - a for a, b in zip(offsets, offsets[1:])]
        if any(count < 0 for count in counts):
            raise ValueError("offsets must rise")
        longest = max(counts, default=0)
        self.context, self.handle, self.offsets = context, _p(), (_i64 * len(offsets))(*offsets)
        self.limits = BatchLimits(max_sequences=len(counts), max_rows=offsets[-1], max_rows_per_sequence=longest,
                                  max_length=max_length if state else longest, replay=int(replay))
        size, alignment = _sizes("lla_batch_size", context.handle, ctypes.byref(self.limits))
        self._host = HostMemory(size, alignment)
        call("lla_batch_init", context.handle, ctypes.byref(self.limits), self._host.pointer, self._host.size,
             ctypes.byref(self.handle))
        size, alignment = _sizes("lla_batch_device_size", context.handle, ctypes.byref(self.limits))
        if size:
            self._device = context.allocate(size, alignment)
            call("lla_batch_bind_device", self.handle, self._device.pointer, self._device.size)
        self.rows = Rows(sequences=len(counts), total_rows=offsets[-1])
        if offsets[-1] == len(counts) * longest:
            self.rows.rows_per_sequence = longest  # uniform: tensors [B, T, ...] are accepted
        else:
            self.rows.offsets = Index(data=ctypes.addressof(self.offsets), dtype=I64)
        if slots is not None:
            self.slots = (_i64 * len(counts))(*slots)
            self.rows.slot_in = Index(data=ctypes.addressof(self.slots), dtype=I64)
        self.plan(state, stream)

    def plan(self, state=None, stream=None):
        call("lla_batch_plan", self.handle, state.handle if state else None, ctypes.byref(self.rows), stream)


class State:
    """Histories of `slots` sequences in the layers, for decoding."""

    def __init__(self, layers, slots=1, max_length=0, node_dtype=F32, tail_dtype=F32):
        self.handle, self.layers, self.slots, self.max_length = _p(), layers, slots, max_length
        array = (_p * len(layers))(*[layer.handle for layer in layers])
        description = StateDesc(node_dtype=node_dtype, tail_dtype=tail_dtype, slots=slots, max_length=max_length)
        call("lla_state_create", array, len(layers), ctypes.byref(description), None, 0, ctypes.byref(self.handle))

    def commit(self, batch, stream=None):
        call("lla_state_commit", self.handle, batch.handle, Index(), stream)

    def length(self, slot):
        length = _i64()
        call("lla_state_length", self.handle, slot, ctypes.byref(length))
        return length.value

    def __del__(self):
        if _library is not None and self.handle:
            _library.lla_state_release(self.handle)


# -- torch -------------------------------------------------------------------------------------------------------------

if torch is not None:
    _DTYPES = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16, torch.float64: F64}


class _TorchMemory:
    """Aligned memory from torch's allocator of a device."""

    def __init__(self, size, alignment, device):
        self._tensor = torch.empty(size + alignment, dtype=torch.uint8, device=device)
        self.size, self.pointer = size, -(-self._tensor.data_ptr() // alignment) * alignment


_contexts, _batches, _workspaces = {}, collections.OrderedDict(), {}


def context_of(device):
    """The context of a torch device: CUDA's, or the CPU's with torch's number of threads."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    with _lock:
        if device not in _contexts:
            allocate = functools.partial(_TorchMemory, device=device)
            if device.type == "cuda":
                _contexts[device] = Context(BACKEND_CUDA, device.index, allocate=allocate)
            elif device.type == "cpu":
                _contexts[device] = Context(BACKEND_CPU, threads=torch.get_num_threads(), allocate=allocate)
            else:
                raise ValueError(f"lla has no backend for {device}")
        return _contexts[device]


def set_context(device, context):
    """Uses another context for a device, the reference backend for instance."""
    with _lock:
        _contexts[torch.device(device)] = context
        _batches.clear()


def new_context(device, backend, threads=0):
    """A context that allocates with torch on `device`."""
    return Context(backend, torch.device(device).index or 0, threads, functools.partial(_TorchMemory, device=device))


def stream_of(device):
    return torch.cuda.current_stream(device).cuda_stream or None if device.type == "cuda" else None


def batch_of(context, device, offsets):
    """The planned batch of these rows on torch's current stream; the last 64 are kept."""
    stream = stream_of(device)
    key = (id(context), device, stream, offsets)
    if key not in _batches:
        if len(_batches) >= 64:
            _batches.popitem(last=False)
        _batches[key] = Batch(context, offsets, stream)
    _batches.move_to_end(key)
    return _batches[key]


def workspace_of(device, size, alignment):
    """One workspace per stream; it grows. Work on a stream is in order, so all layers share it."""
    key = (device, stream_of(device))
    held = _workspaces.get(key)
    if held is None or held.size < size or held.pointer % alignment:
        _workspaces[key] = held = None  # the old one goes back first
        _workspaces[key] = held = _TorchMemory(max(size, 1), alignment, device)
    return held


def _rows_of(tensor):
    """A tensor whose last axis is contiguous."""
    return tensor if tensor.shape[-1] == 1 or tensor.stride(-1) == 1 else tensor.contiguous()


def view_of(tensor):
    return view(tensor.data_ptr(), _DTYPES[tensor.dtype], tensor.shape, tensor.stride())


def _bindings(roles, tensors):
    return [bind(role, view_of(tensor)) for role, tensor in zip(roles, tensors)]


def _split(roles, tensors):
    pairs = list(zip(roles, tensors))
    return [_bindings(*zip(*part)) if part else [] for part in
            ([p for p in pairs if p[0] < 100], [p for p in pairs if p[0] >= 100])]


class Apply(torch.autograd.Function if torch is not None else object):
    """See apply(). `keep`: let forward save what spares backward work."""

    @staticmethod
    def forward(ctx, layer, offsets, shape, dtype, keep, roles, *tensors):
        tensors = [_rows_of(tensor.detach()) for tensor in tensors]
        device = tensors[0].device
        if any(tensor.device != device for tensor in tensors):
            raise ValueError("the tensors are on different devices")
        output, saved = torch.empty(shape, dtype=dtype, device=device), None
        with _lock, _on(device):
            batch = batch_of(layer.context, device, offsets)
            if keep:
                size, alignment = layer.saved(batch.limits)
                saved = _TorchMemory(size, alignment, device) if size else None
            io, weights = _split(roles, tensors)
            layer.forward(batch, io + [bind(Y, view_of(output))], weights,
                          workspace_of(device, *layer.workspace(batch.limits)), saved, stream=stream_of(device))
        ctx.save_for_backward(*tensors)
        ctx.call = layer, offsets, roles, saved
        return output

    @staticmethod
    def backward(ctx, gradient):
        layer, offsets, roles, saved = ctx.call
        tensors, gradient = ctx.saved_tensors, _rows_of(gradient)
        device, wanted = gradient.device, ctx.needs_input_grad[6:]
        gradients = [torch.empty(t.shape, dtype=t.dtype, device=device) if w else None for t, w in zip(tensors, wanted)]
        with _lock, _on(device):
            batch = batch_of(layer.context, device, offsets)
            io, weights = _split(roles, tensors)
            targets = [bind(role, view_of(g)) for role, g in zip(roles, gradients) if g is not None]
            layer.backward(batch, io, [bind(Y, view_of(gradient))], targets, weights,
                           workspace_of(device, *layer.workspace(batch.limits, backward=True)), saved,
                           stream=stream_of(device))
        return (None, None, None, None, None, None, *gradients)


def apply(layer, offsets, shape, dtype, roles, *tensors):
    """Any layer with one output of this shape and type; the tensors are in these roles."""
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return Apply.apply(layer, offsets, tuple(shape), dtype, keep, roles, *tensors)


def _on(device):
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _offsets(shape, axes, offsets):
    """Row offsets of [B, T, ...], or of [N, ...] with the offsets given. `axes`: axes after the rows."""
    if offsets is not None:
        return tuple(int(row) for row in offsets)
    if len(shape) != axes + 2:
        raise ValueError("tensors [N, ...] need offsets; others are [B, T, ...]")
    return tuple(range(0, shape[0] * shape[1] + 1, shape[1])) if shape[1] else (0,) * (shape[0] + 1)


def mixer_layer(context, rule, q_shape, v_shape, levels, write, **fields):
    """The layer of a mixer call. Further fields of lla_layer_desc: scale, grain, head_map, level_overflow."""
    return context.layer(kind=MIXER, mixer=rule, heads=v_shape[-2], groups=q_shape[-2], key_dim=q_shape[-1],
                         value_dim=v_shape[-1], levels=levels, lambda_form=LAMBDA_READY if levels else LAMBDA_NONE,
                         write_form=WRITE_READY if write else WRITE_NONE, **fields)


def mixer(rule, q, k, v, gate=None, write=None, lam=None, offsets=None, **fields):
    """o [B, T, H, dv] in v's type. Packed sequences: tensors [N, ...] and offsets, a list of row numbers from 0 to N."""
    given = [(role, t) for role, t in ((Q, q), (K, k), (V, v), (GATE, gate), (WRITE, write), (LAMBDA, lam)) if t is not None]
    levels = 0 if lam is None else lam.shape[-1]
    layer = mixer_layer(context_of(v.device), rule, q.shape, v.shape, levels, write is not None, **fields)
    roles, tensors = zip(*given)
    return apply(layer, _offsets(v.shape, 2, offsets), v.shape, v.dtype, roles, *tensors)


def scalar_gate(q, k, v, gate=None, lam=None, write=None, **options):
    """Linear attention, RetNet, Mamba-2: S <- exp(gate) S + write k v^T. lam: log-linear attention."""
    return mixer(SCALAR_GATE, q, k, v, gate, write, lam, **options)


def delta_rule(q, k, v, gate=None, write=None, lam=None, **options):
    """(Gated) DeltaNet: S <- exp(gate) (I - write k k^T) S + write k v^T; normalise k before. lam: log-linear."""
    return mixer(DELTA_RULE, q, k, v, gate, write, lam, **options)


if torch is not None:

    class _Block(torch.nn.Module):
        """A block [B, T, hidden] -> [B, T, hidden]; `roles` maps parameter names to weight roles. With 16-bit input the rows
        between its steps have that type, too."""
        roles = {}

        def _weight(self, name, *shape, scale=None, value=None):
            data = torch.empty(*shape)
            if value is None:
                torch.nn.init.normal_(data, std=scale if scale is not None else shape[-1] ** -0.5)
            else:
                data.copy_(torch.as_tensor(value))
            setattr(self, name, torch.nn.Parameter(data))

        def forward(self, x, offsets=None):
            names = [name for name in self.roles if hasattr(self, name)]
            inner = _DTYPES[x.dtype] if x.dtype in (torch.bfloat16, torch.float16) else 0
            layer = context_of(x.device).layer(**self.description, inner_dtype=inner)
            return apply(layer, _offsets(x.shape, 1, offsets), x.shape, x.dtype,
                         (X, *[self.roles[name] for name in names]), x, *[getattr(self, name) for name in names])

        def _gates(self, heads):
            step = torch.exp(torch.empty(heads).uniform_(-6.9, -2.3))  # time steps from 0.001 to 0.1
            self._weight("dt_bias", heads, value=step + torch.log(-torch.expm1(-step)))
            self._weight("A_log", heads, value=torch.empty(heads).uniform_(1, 16).log())

    class Mamba2(_Block):
        """Mamba-2 block; levels > 0: log-linear, with lambda = softplus(L * projection)."""
        roles = dict(in_proj=WEIGHT_IN_PROJ, conv=WEIGHT_CONV, conv_bias=WEIGHT_CONV_BIAS, dt_bias=WEIGHT_DT_BIAS,
                     A_log=WEIGHT_A_LOG, L=WEIGHT_LAMBDA, D=WEIGHT_SKIP, norm=WEIGHT_NORM, out_proj=WEIGHT_OUT_PROJ)

        def __init__(self, hidden, heads, key_dim, value_dim, groups=1, levels=0):
            super().__init__()
            inner, channels = heads * value_dim, heads * value_dim + 2 * groups * key_dim
            self.description = dict(kind=MAMBA2, heads=heads, groups=groups, key_dim=key_dim, value_dim=value_dim,
                                    hidden=hidden, levels=levels, lambda_form=LAMBDA_SOFTPLUS if levels else LAMBDA_NONE)
            self._weight("in_proj", inner + channels + heads + heads * levels, hidden)
            self._weight("conv", channels, 4)
            self._weight("conv_bias", channels, value=torch.zeros(channels))
            self._gates(heads)
            if levels:
                self._weight("L", heads, levels, value=torch.ones(heads, levels))
            self._weight("D", heads, value=torch.ones(heads))
            self._weight("norm", inner, value=torch.ones(inner))
            self._weight("out_proj", hidden, inner)

    class GatedDeltaNet(_Block):
        """Gated DeltaNet block; levels > 0: log-linear."""
        roles = dict(q_proj=WEIGHT_Q_PROJ, k_proj=WEIGHT_K_PROJ, v_proj=WEIGHT_V_PROJ, a_proj=WEIGHT_GATE_PROJ,
                     b_proj=WEIGHT_WRITE_PROJ, q_conv=WEIGHT_CONV_Q, k_conv=WEIGHT_CONV_K, v_conv=WEIGHT_CONV_V,
                     dt_bias=WEIGHT_DT_BIAS, A_log=WEIGHT_A_LOG, l_proj=WEIGHT_LAMBDA_PROJ, L=WEIGHT_LAMBDA,
                     g_proj=WEIGHT_Z_PROJ, norm=WEIGHT_NORM, o_proj=WEIGHT_OUT_PROJ)

        def __init__(self, hidden, heads, key_dim, value_dim, levels=0):
            super().__init__()
            self.description = dict(kind=GATED_DELTANET, heads=heads, groups=heads, key_dim=key_dim, value_dim=value_dim,
                                    hidden=hidden, levels=levels, lambda_form=LAMBDA_SOFTPLUS if levels else LAMBDA_NONE)
            for name, size in (("q", heads * key_dim), ("k", heads * key_dim), ("v", heads * value_dim)):
                self._weight(name + "_proj", size, hidden)
                self._weight(name + "_conv", size, 4)
            self._weight("a_proj", heads, hidden)
            self._weight("b_proj", heads, hidden)
            self._weight("g_proj", heads * value_dim, hidden)
            self._gates(heads)
            if levels:
                self._weight("l_proj", heads * levels, hidden)
                self._weight("L", heads, levels, value=torch.ones(heads, levels))
            self._weight("norm", value_dim, value=torch.ones(value_dim))
            self._weight("o_proj", hidden, heads * value_dim)
