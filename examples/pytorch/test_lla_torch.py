# SPDX-License-Identifier: Apache-2.0
"""Forward and all gradients of lla_torch against float64 references: python3 test_lla_torch.py --device cuda (or cpu)."""
import argparse
import ctypes
import pathlib
import re
import sys
import threading

import lla_torch as lla
import torch

options = None
failures = []


def level_table(length, device):
    """level(t, s) = bit_length(t xor s), and s <= t."""
    t = torch.arange(length, device=device)
    xor, levels = t[:, None] ^ t[None, :], torch.zeros(length, length, dtype=torch.int64, device=device)
    for bit in range(32):
        levels += xor >= 2 ** bit
    return levels, t[:, None] >= t[None, :]


def reference(rule, q, k, v, gate, write, lam, scale=1.0, absorb=False):
    """The parallel form in float64: q, k [B, T, G, dk], v [B, T, H, dv], gate, write [B, T, H], lam [B, T, H, L]."""
    heads = v.shape[2]
    levels, causal = level_table(v.shape[1], v.device)
    q, k = (x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2) for x in (q, k))
    v = v.transpose(1, 2)
    scores = (scale * q @ k.transpose(-1, -2)).tril()
    if rule == lla.DELTA_RULE:
        identity = torch.eye(v.shape[2], dtype=v.dtype, device=v.device)
        system = identity + (write.transpose(1, 2)[..., None] * (k @ k.transpose(-1, -2))).tril(-1)
        scores = torch.linalg.solve_triangular(system, scores, upper=False, left=False, unitriangular=True)
    if gate is not None:
        # exp of the sum of the gates of s + 1 ... t; the gate of the first row acts on nothing
        total = gate.transpose(1, 2).clone()
        total[..., 0] = 0
        total = total.cumsum(-1)
        scores = scores * (total[..., :, None] - total[..., None, :]).masked_fill(~causal, float("-inf")).exp()
    if lam is not None:
        index = (levels.clamp(max=lam.shape[-1] - 1) if absorb else levels).expand(*scores.shape)
        scores = scores * torch.gather(lam.transpose(1, 2), -1, index.masked_fill(~causal, 0))
    if write is not None:
        v = write.transpose(1, 2)[..., None] * v
    return (scores @ v).transpose(1, 2)


def error_of(value, expected):
    value, expected = value.detach().double(), expected.detach().double()
    return ((value - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def check(name, errors, limit):
    bad = [part for part, error in errors.items() if not error <= limit]
    figures = " ".join(f"{part} {error:.1e}" for part, error in errors.items())
    print(f"{'FAIL' if bad else 'ok  '} {name}: {figures}", flush=True)
    if bad:
        failures.append(name)


def make(rule, batch, length, groups, heads, key_dim, value_dim, levels, dtype, strided=False):
    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, device=options.device)

    q, k, v = normal(batch, length, groups, key_dim) * key_dim ** -0.5, normal(batch, length, groups, key_dim), \
        normal(batch, length, heads, value_dim)
    if rule == lla.DELTA_RULE:
        k = torch.nn.functional.normalize(k, dim=-1)
    gate = -0.2 * torch.rand(batch, length, heads, dtype=torch.float64, device=options.device)
    write = 0.1 + 0.8 * torch.rand_like(gate) if rule == lla.DELTA_RULE else None
    lam = torch.nn.functional.softplus(normal(batch, length, heads, levels)) if levels else None
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    given = dict(q=q.to(dtype), k=k.to(dtype), v=v.to(dtype), gate=gate.to(wide), write=write, lam=lam)
    given["write"] = write if write is None else write.to(wide)
    given["lam"] = lam if lam is None else lam.to(wide)
    if strided:  # heads before rows, and q beside k in one tensor
        both = torch.cat([given["q"], given["k"]], -1)
        given["q"], given["k"] = both[..., :key_dim], both[..., key_dim:]
        given["v"] = given["v"].transpose(1, 2).contiguous().transpose(1, 2)
    return given


def compare(name, rule, given, limit, offsets=None, **fields):
    """Forward and every gradient. offsets: the rows of the only sequence are several packed ones."""
    try:
        compare_once(name, rule, given, limit, offsets, **fields)
    except lla.LlaError as error:
        check(f"{name} ({error})", {"error": 1.0}, 0)


def compare_once(name, rule, given, limit, offsets, **fields):
    absorb = fields.get("level_overflow", 0) == lla.LEVELS_ABSORB
    leaves = {n: t.detach().requires_grad_() for n, t in given.items() if t is not None}
    if any(leaves[n].stride() != given[n].stride() for n in leaves):
        raise RuntimeError("strides changed")
    exact = {n: (t.detach().double().requires_grad_() if t is not None else None) for n, t in given.items()}
    if offsets is None:
        o = lla.mixer(rule, **leaves, **fields)
        expected = reference(rule, **exact, scale=fields.get("scale", 1.0), absorb=absorb)
    else:
        o = lla.mixer(rule, **{n: t[0] for n, t in leaves.items()}, offsets=offsets, **fields)[None]
        expected = torch.cat([reference(rule, **{n: t[:, a:b] if t is not None else None for n, t in exact.items()},
                                        scale=fields.get("scale", 1.0))
                              for a, b in zip(offsets, offsets[1:]) if b > a], 1)
    gradient = torch.randn_like(expected).to(o.dtype)
    got = torch.autograd.grad(o, list(leaves.values()), gradient)
    wanted = torch.autograd.grad(expected, [exact[n] for n in leaves], gradient.double())
    for n, g in zip(leaves, got):
        if g.dtype != leaves[n].dtype or g.shape != leaves[n].shape:
            raise RuntimeError(f"gradient of {n} has another type or shape")
    errors = {"o": error_of(o, expected)}
    errors.update({"d" + n: error_of(g, w) for n, g, w in zip(leaves, got, wanted)})
    check(name, errors, limit)


def mixers():
    for rule, rule_name in ((lla.SCALAR_GATE, "scalar gate"), (lla.DELTA_RULE, "delta rule")):
        for dtype, limit in ((torch.float32, 2e-5), (torch.bfloat16, 1e-2), (torch.float16, 5e-3)):
            type_name = str(dtype)[6:]
            for levels in (0, 10):
                for batch, length, groups, heads, key_dim, value_dim in (
                        (2, 300, 1, 4, 32, 16), (3, 65, 2, 4, 24, 40), (1, 1, 1, 1, 8, 8), (2, 512, 2, 2, 64, 64),
                        (1, 200, 1, 2, 128, 64)):
                    if options.quick and batch * length > 200:
                        continue
                    given = make(rule, batch, length, groups, heads, key_dim, value_dim, levels, dtype)
                    compare(f"{rule_name} {type_name} {'log-linear' if levels else 'linear'} "
                            f"B{batch} T{length} G{groups} H{heads} {key_dim}x{value_dim}", rule, given, limit)
        length = 70 if options.quick else 200
        compare(f"{rule_name} strides", rule, make(rule, 2, length, 2, 4, 16, 24, 9, torch.bfloat16, True), 1e-2)
        compare(f"{rule_name} scale, grain 16", rule, make(rule, 2, length, 2, 2, 16, 16, 9, torch.float32), 2e-5,
                scale=0.25, grain=16)
        compare(f"{rule_name} absorbing levels", rule, make(rule, 2, length, 2, 2, 16, 16, 4, torch.float32), 2e-5,
                level_overflow=lla.LEVELS_ABSORB)
        compare(f"{rule_name} packed sequences", rule, make(rule, 1, length, 1, 2, 16, 16, 9, torch.float32), 2e-5,
                offsets=(0, 17, 17, 60, length))
        given = make(rule, 2, 70, 1, 2, 16, 16, 8, torch.float32)
        given["gate"] = None
        compare(f"{rule_name} no gate", rule, given, 2e-5)
    # Only some gradients, an expanded gradient of the output, and no gradient at all.
    given = make(lla.SCALAR_GATE, 2, 70, 1, 2, 16, 16, 8, torch.float32)
    given["v"].requires_grad_()
    o = lla.scalar_gate(given["q"], given["k"], given["v"], given["gate"], given["lam"])
    o.sum().backward()
    exact = {n: None if t is None else t.detach().double() for n, t in given.items()}
    exact["v"].requires_grad_()
    reference(lla.SCALAR_GATE, **exact).sum().backward()
    check("only dv", {"dv": error_of(given["v"].grad, exact["v"].grad)}, 2e-5)
    with torch.no_grad():
        again = lla.scalar_gate(given["q"], given["k"], given["v"], given["gate"], given["lam"])
    check("the same bits without gradients", {"o": float(not torch.equal(again, o))}, 0)
    try:
        lla.scalar_gate(given["q"], given["k"], given["v"], given["gate"], given["lam"][..., :3])
        check("too few levels are refused", {"refused": 1.0}, 0)
    except lla.LlaError as error:
        check(f"too few levels are refused ({error})", {}, 0)


def streams():
    if torch.device(options.device).type != "cuda":
        return
    given = {n: t for n, t in make(lla.SCALAR_GATE, 2, 300, 1, 4, 32, 16, 10, torch.bfloat16).items() if t is not None}
    first = lla.scalar_gate(**given)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        second = lla.scalar_gate(**given)
    side.synchronize()
    check("the same bits on another stream", {"o": float(not torch.equal(first, second))}, 0)


def threads():
    """Calls on threads that never used the device before, as torch's own for gradients may be."""
    given = {n: t for n, t in make(lla.SCALAR_GATE, 2, 300, 1, 4, 32, 16, 10, torch.bfloat16).items() if t is not None}
    first, results = lla.scalar_gate(**given), []

    def work():
        try:
            results.append(lla.scalar_gate(**given))
        except lla.LlaError as error:
            results.append(error)

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    if torch.device(options.device).type == "cuda":
        torch.cuda.synchronize()
    wrong = [r for r in results if isinstance(r, lla.LlaError) or not torch.equal(r, first)]
    check(f"the same bits on new threads {[r for r in wrong if isinstance(r, lla.LlaError)] or ''}", {"o": float(len(wrong))}, 0)


def states():
    """A sequence cut into appends of a state gives the outputs of one call."""
    given = {n: t for n, t in make(lla.SCALAR_GATE, 2, 150, 1, 2, 16, 16, 9, torch.float32).items() if t is not None}
    whole = lla.scalar_gate(**given)
    device = whole.device
    context = lla.context_of(device)
    layer = lla.mixer_layer(context, lla.SCALAR_GATE, given["q"].shape, given["v"].shape, 9, False)
    state, stream, parts, at = lla.State([layer], slots=2, max_length=256), lla.stream_of(device), [], 0
    for count in (70, 57, 1, 1, 1, 20):
        batch = lla.Batch(context, (0, count, 2 * count), stream, state, max_length=256)
        part = {n: t[:, at:at + count] for n, t in given.items()}
        parts.append(torch.empty_like(part["v"]))
        io = [lla.bind(role, lla.view_of(part[n])) for n, role in (("q", lla.Q), ("k", lla.K), ("v", lla.V), ("gate", lla.GATE),
                                                                   ("lam", lla.LAMBDA))]
        layer.forward(batch, io + [lla.bind(lla.Y, lla.view_of(parts[-1]))], stream=stream, state=state,
                      workspace=lla.workspace_of(device, *layer.workspace(batch.limits)))
        state.commit(batch, stream)
        at += count
    if device.type == "cuda":
        torch.cuda.synchronize()
    check("appends to a state", {"o": error_of(torch.cat(parts, 1), whole), "length": abs(state.length(1) - 150)}, 2e-5)


def blocks():
    """The gradients of the blocks against differences of their own loss, along one direction."""
    for name, kind, levels in (("Mamba-2", lla.Mamba2, 8), ("Gated DeltaNet", lla.GatedDeltaNet, 8),
                               ("linear Mamba-2", lla.Mamba2, 0), ("linear Gated DeltaNet", lla.GatedDeltaNet, 0)):
        block = kind(32, 2, 16, 16, levels=levels).to(options.device)
        x = torch.randn(2, 90, 32, device=options.device, requires_grad=True)
        target = torch.randn(2, 90, 32, device=options.device)
        tensors = [x, *block.parameters()]
        gradients = torch.autograd.grad((block(x) * target).sum(), tensors)
        directions = [torch.randn_like(t) * (t.norm() / t.numel() ** 0.5).clamp(min=0.1) for t in tensors]
        # Longer steps meet the curvature of the norms (seen: 2e-2 with 1e-3), shorter ones drown in rounding.
        along, step = sum((g.double() * d).sum() for g, d in zip(gradients, directions)), 3e-4
        with torch.no_grad():
            ends = []
            for sign in (1, -2):
                for t, d in zip(tensors, directions):
                    t += sign * step * d
                ends.append((block(x).double() * target).sum())
        difference = (ends[0] - ends[1]) / (2 * step)
        scale = sum((g.double() * d).square().sum() for g, d in zip(gradients, directions)).sqrt()
        check(f"{name} block", {"along a direction": (abs(along - difference) / scale).item()}, 1e-2)


def layout():
    """Every struct of the binding against the offsets that tests/abi pins, where that file is at hand."""
    path = pathlib.Path(__file__).resolve().parents[2] / "tests" / "abi" / "layout.c"
    if not path.exists():
        return
    text, checked = path.read_text(), 0
    for struct in lla._SIZES:
        name = "lla_" + re.sub(r"(?<!^)([A-Z])", r"_\1", struct.__name__).lower()
        offsets = dict(re.findall(rf"LLA_AT\({name}, (\w+), (\d+)\)", text))
        size = re.search(rf"LLA_SIZE\({name}, (\d+)\)", text)
        mine = {field: str(getattr(struct, field).offset) for field, _ in struct._fields_}
        if mine != offsets or ctypes.sizeof(struct) != int(size[1]):
            failures.append(f"layout of {name}")
        checked += 1
    for constant, number in re.findall(r"LLA_IS\(LLA_(\w+), (\d+)\)", text):
        number_here = getattr(lla, constant, None)
        if isinstance(number_here, int) and number_here != int(number):
            failures.append(f"LLA_{constant}")
    print(f"ok   layout of {checked} structs")


def gradcheck():
    """torch's own gradcheck, with the reference backend in float64."""
    if torch.device(options.device).type != "cpu" or options.backend is not None:
        return
    lla.set_context("cpu", lla.new_context("cpu", lla.BACKEND_REFERENCE))
    for rule in (lla.SCALAR_GATE, lla.DELTA_RULE):
        given = {n: t.requires_grad_() for n, t in make(rule, 2, 11, 1, 2, 3, 4, 5, torch.float64).items() if t is not None}
        names = list(given)
        fine = torch.autograd.gradcheck(lambda *ts: lla.mixer(rule, **dict(zip(names, ts)), grain=4), list(given.values()))
        check(f"gradcheck {rule}", {"failed": float(not fine)}, 0)


def main():
    global options
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", type=int, help="number of the backend, if not the one of the device")
    parser.add_argument("--quick", action="store_true", help="small shapes only")
    options = parser.parse_args()
    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    if options.backend is not None:
        lla.set_context(options.device, lla.new_context(options.device, options.backend))
    context = lla.context_of(options.device)
    print(f"lla {lla.source_id()}, {context.query(1)}, {context.query(6)}; torch {torch.__version__}")
    for part in (layout, mixers, streams, threads, states, blocks, gradcheck):
        try:
            part()
        except lla.LlaError as error:
            check(f"{part.__name__} ({error})", {"error": 1.0}, 0)
    if torch.device(options.device).type == "cuda":
        torch.cuda.synchronize()
    print(f"{len(failures)} failures" + "".join(f"\n  {name}" for name in failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
