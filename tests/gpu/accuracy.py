#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Errors of bf16 mixers on a GPU against float64, beside those of Triton peers on the very same tensors.

    LLA_LIBRARY=liblla.so.0 python3 accuracy.py --json result.json        ... --lengths 2048,16384
    ... --peers DIR --peers-tool FILE --family fla                        a peer too; the tool is described in bench.py

An error is the 2-norm of the difference over the 2-norm of the reference, per tensor: o and the gradients dq, dk, dv, dg
and dlambda of a scalar gate of 48 heads, 128 x 64, on the inputs that the peers' tool draws; o and the gradients of the delta
rule with ordinary keys and with keys that nearly point one way. The references take the rounded inputs and compute in float64.

Passes if dg is within 4e-3 (delta rule: o within 5e-3), and every other error within 1.1 times the worst peer's. A long
sequence with weak decay comes last: gates there are sums over tens of thousands of rows, which drift if they are taken as
differences of sums over the sequence; dg is to be within 6e-3.
"""
import argparse
import importlib.util
import json
import math
import os
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "pytorch"))
import lla_torch as lla  # noqa: E402
import test_lla_torch as check  # noqa: E402
import torch  # noqa: E402

SHAPE = dict(H=48, G=1, K=128, V=64)
PARTS = ["o", "dq", "dk", "dv", "dg", "dlambda"]
GATE_LIMIT, PEER_FACTOR, DELTA_LIMIT = 4e-3, 1.1, 5e-3
SLOW_LENGTH, SLOW_HALF_LIFE, SLOW_LIMIT = 32768, 700, 6e-3  # rows, rows, of dg
PEER_NAMES = {"fla": "FLA log-linear", "hatt": "hattention"}
HATT_LEVELS = 17
STARTED = time.monotonic()


def draw(length, heads, device, half_life=None):
    """q, k, v bf16, g fp32, lambda bf16, as the peers' tool draws them; and the gradient of o. Or with gates around a half-life."""
    def normal(*shape, scale=1.0):
        return torch.randn(*shape, dtype=torch.bfloat16, device=device).mul_(scale)

    q, k = normal(1, length, SHAPE["G"], SHAPE["K"], scale=SHAPE["K"] ** -0.5), normal(1, length, SHAPE["G"], SHAPE["K"])
    v = normal(1, length, heads, SHAPE["V"])
    gate = -(torch.rand(1, length, heads, device=device) * 0.1 + 0.001)
    if half_life is not None:
        gate = -(torch.rand(1, length, heads, device=device) + 0.5) * (math.log(2) / half_life)
    levels = torch.randn(1, length, heads, lla.levels_needed(length), device=device)
    return [q, k, v, gate, torch.nn.functional.softplus(levels).to(torch.bfloat16)], normal(1, length, heads, SHAPE["V"])


def rows_of_levels(products, count):
    """Sums of a lower triangular matrix over the columns of each level: level l > 0 of row t is the 2^(l - 1) columns before its
    last multiple of that size, if bit l - 1 of t is set."""
    length = products.shape[0]
    t = torch.arange(length, device=products.device)
    total = torch.nn.functional.pad(products.cumsum(1), (1, 0))
    sums = torch.zeros(length, count, dtype=products.dtype, device=products.device)
    sums[:, 0] = products.diagonal()
    for level in range(1, count):
        size = 1 << (level - 1)
        begin = (t >> level) << level
        there = (t & size) != 0
        block = total.gather(1, (begin + size).clamp(max=length)[:, None]) - total.gather(1, begin[:, None])
        sums[:, level] = torch.where(there, block[:, 0], torch.zeros_like(block[:, 0]))
    return sums


def reference(inputs, gradient):
    """o and all gradients in float64, head by head (one matrix of a head is 2 GiB at 16384 rows)."""
    q, k, v, gate, lam = [x[0].double() for x in inputs]
    gradient = gradient[0].double()
    length, heads = gate.shape
    q, k = q[:, 0], k[:, 0]
    levels, causal = check.level_table(length, q.device)
    levels.masked_fill_(~causal, 0)
    scores = (q @ k.T).masked_fill_(~causal, 0)
    out = [torch.zeros_like(x) for x in (v, q, k, v, gate, lam)]
    o, dq, dk, dv, dg, dlam = out
    for h in range(heads):
        total = gate[:, h].cumsum(0)
        decay = (total[:, None] - total[None, :]).masked_fill_(~causal, -math.inf).exp_()
        weights = lam[:, h].gather(1, levels)
        full = decay * weights
        product = full * scores
        o[:, h] = product @ v[:, h]
        dv[:, h] = product.T @ gradient[:, h]
        back = gradient[:, h] @ v[:, h].T
        product *= back  # d of the log of the decay
        both = product.sum(1) - product.sum(0)
        dg[:, h] = both.flip(0).cumsum(0).flip(0)
        dg[0, h] = 0  # the first gate acts on nothing
        full *= back
        dq += full @ k
        dk += full.T @ q
        del full, product
        back *= decay
        back *= scores
        dlam[:, h] = rows_of_levels(back, lam.shape[-1])
    return [o[None], dq[None, :, None], dk[None, :, None], dv[None], dg[None], dlam[None]]


def run(operator, inputs, gradient):
    leaves = [x.detach().requires_grad_() for x in inputs]
    o = operator(*leaves)
    return [o.detach(), *torch.autograd.grad(o, leaves, gradient)]


def compare(who, what, parts, got, expected, rows):
    row = dict(what, who=who, **{p: check.error_of(g, e) for p, g, e in zip(parts, got, expected)})
    show(row, rows)
    return row


def show(row, rows):
    row["at_s"] = round(time.monotonic() - STARTED, 1)
    rows.append(row)
    print(" ".join(f"{key}={value:.2e}" if isinstance(value, float) and key != "at_s" else f"{key}={value}"
                   for key, value in row.items()), flush=True)


def load_peer(family, options):
    spec = importlib.util.spec_from_file_location("peers_tool", options.peers_tool)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    tool.dev_init()
    tool.patch_triton_common()
    {"fla": tool.setup_fla, "hatt": tool.setup_hatt}[family]()
    return tool


def peer_operator(tool, family, length):
    """The peer's function of the five inputs; one wants a fixed number of levels."""
    row = dict(case=f"{family}_ll", B=1, T=length, **SHAPE)
    if family == "fla":
        return tool.fn_fla_ll(row)
    function = tool.fn_hatt_ll(dict(row, L=HATT_LEVELS))
    return lambda q, k, v, g, lam: function(q, k, v, g, torch.nn.functional.pad(lam, (0, HATT_LEVELS - lam.shape[-1])))


def scalar_gate(options, rows, verdicts):
    tool = None
    if options.peers:
        os.environ["PEERS_DIR"] = os.path.abspath(options.peers)
        try:
            tool = load_peer(options.family, options)
        except Exception as error:  # noqa: BLE001  whatever it is, the peer is missing
            show(dict(who=PEER_NAMES[options.family], error=f"{type(error).__name__}: {str(error)[:300]}"), rows)
    for length in options.lengths:
        what = dict(case="scalar gate, log-linear", T=length, **dict(SHAPE, H=options.heads))
        torch.manual_seed(1234)
        inputs, gradient = draw(length, options.heads, options.device)
        expected = reference(inputs, gradient)
        ours = compare("lla", what, PARTS, run(lla.scalar_gate, inputs, gradient), expected, rows)
        show(dict(what, who="float64, o rounded", o=check.error_of(expected[0].to(torch.bfloat16), expected[0])), rows)
        verdicts[f"scalar gate, T {length}: dg"] = ours["dg"] <= GATE_LIMIT
        if tool is not None:
            try:
                got = run(peer_operator(tool, options.family, length), inputs, gradient)
                peer = compare(PEER_NAMES[options.family], what, PARTS, got, expected, rows)
                for part in PARTS:
                    if part != "dg":
                        verdicts[f"scalar gate, T {length}: {part}"] = ours[part] <= PEER_FACTOR * peer[part]
            except Exception as error:  # noqa: BLE001
                show(dict(what, who=PEER_NAMES[options.family], error=f"{type(error).__name__}: {str(error)[:300]}"), rows)
        del inputs, gradient, expected
        if options.device != "cpu":
            torch.cuda.empty_cache()


def slow_decay(options, rows, verdicts):
    heads, length = 2, SLOW_LENGTH
    torch.manual_seed(4321)
    inputs, gradient = draw(length, heads, options.device, SLOW_HALF_LIFE)
    what = dict(case=f"scalar gate, log-linear, half-life {SLOW_HALF_LIFE}", T=length, **dict(SHAPE, H=heads))
    ours = compare("lla", what, PARTS, run(lla.scalar_gate, inputs, gradient), reference(inputs, gradient), rows)
    verdicts[f"scalar gate, T {length}, half-life {SLOW_HALF_LIFE}: dg"] = ours["dg"] <= SLOW_LIMIT


def delta_rule(options, rows, verdicts):
    heads, key, value, device = 4, 128, 128, options.device
    for length in (256, 2048):
        if length > max(options.lengths):
            continue
        for name, spread in (("ordinary keys", None), ("near-parallel keys", 0.05), ("nearly equal keys", 0.01)):
            torch.manual_seed(99)
            k = torch.randn(1, length, heads, key, device=device)
            if spread is not None:
                k = torch.randn(1, 1, heads, key, device=device) + spread * k
            k = torch.nn.functional.normalize(k, dim=-1).to(torch.bfloat16)
            q = torch.nn.functional.normalize(torch.randn(1, length, heads, key, device=device), dim=-1).to(torch.bfloat16)
            v = torch.randn(1, length, heads, value, device=device).to(torch.bfloat16)
            gate = -(torch.rand(1, length, heads, device=device) * 0.1 + 0.001)
            write = torch.rand(1, length, heads, device=device) * 0.9 + 0.05
            lam = torch.nn.functional.softplus(torch.randn(1, length, heads, lla.levels_needed(length), device=device))
            gradient = torch.randn(1, length, heads, value, device=device).to(torch.bfloat16)
            for linear in (False, True):
                inputs = [q, k, v, gate, write] + ([] if linear else [lam])
                parts = ["o", "dq", "dk", "dv", "dg", "dwrite"] + ([] if linear else ["dlambda"])
                what = dict(case=f"delta rule, {'linear' if linear else 'log-linear'}, {name}", T=length, H=heads, K=key,
                            V=value)
                exact = run(lambda *xs: check.reference(lla.DELTA_RULE, *xs, *([None] if linear else [])),
                            [x.double() for x in inputs], gradient.double())
                row = compare("lla", what, parts, run(lla.delta_rule, inputs, gradient), exact, rows)
                verdicts[f"{what['case']}, T {length}: o"] = row["o"] <= DELTA_LIMIT


def selftest():
    """The reference here against the one of the tests and its derivatives."""
    torch.manual_seed(0)
    inputs, gradient = draw(96, 3, "cpu")
    q, k, v, gate, lam = [x.double() for x in inputs]
    exact = run(lambda *xs: check.reference(lla.SCALAR_GATE, *xs[:4], None, xs[4]), [q, k, v, gate, lam], gradient.double())
    return {p: check.error_of(mine, theirs) for p, mine, theirs in zip(PARTS, reference(inputs, gradient), exact)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lengths", default="2048,4096,8192,16384")
    parser.add_argument("--heads", type=int, default=SHAPE["H"])
    parser.add_argument("--peers")
    parser.add_argument("--peers-tool")
    parser.add_argument("--family", default="fla", choices=sorted(PEER_NAMES), help="which peer; two do not fit into one process")
    parser.add_argument("--only", default="scalar,delta,slow")
    parser.add_argument("--json")
    options = parser.parse_args()
    options.lengths = [int(x) for x in options.lengths.split(",")]
    torch.backends.cuda.matmul.allow_tf32 = False
    rows, verdicts, own = [], {}, selftest()
    verdicts["the reference itself"] = max(own.values()) < 1e-10
    if "scalar" in options.only:
        scalar_gate(options, rows, verdicts)
    if "delta" in options.only:
        delta_rule(options, rows, verdicts)
    if "slow" in options.only:  # needs 90 GB
        slow_decay(options, rows, verdicts)
    failed = [name for name, passed in verdicts.items() if not passed]
    if options.json:
        facts = dict(source=lla.source_id(), device=lla.context_of(options.device).query(6), torch=torch.__version__)
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(dict(facts, passed=not failed, failed=failed, checked=len(verdicts), rows=rows), file, indent=1)
            file.write("\n")
    print(f"{len(verdicts) - len(failed)} passed, {len(failed)} failed" + "".join(f"\n  {name}" for name in failed), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
