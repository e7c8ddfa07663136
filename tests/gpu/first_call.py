#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How long a new process waits for its first results on a GPU, from its start: lla from C, lla from PyTorch, and a Triton peer
with an empty compile cache (and once more with the cache that it left).

    LLA_LIBRARY=liblla.so.0 python3 first_call.py --program first_call --json result.json
    ... --peers DIR --peers-tool FILE         the peer too; the tool is described in bench.py

Each runs the forward and backward pass of a log-linear Mamba-2 mixer of 48 heads, 128 x 64, one sequence. Seconds.
"""
import argparse
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "pytorch"))
SHAPE = dict(H=48, G=1, K=128, V=64)


def child(options):
    """In a process of its own: the same calls, through torch. `started` is the parent's clock before it began."""
    started, at = options.started, {}

    def mark(name):
        at[name] = time.monotonic() - started

    mark("main_s")
    import torch
    mark("torch_s")
    length, device = options.length, options.device
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    if options.child == "lla":
        import lla_torch as lla
        lla.context_of(device)
        mark("context_s")
        levels = lla.levels_needed(length)
        operator = lla.scalar_gate
    else:
        spec = importlib.util.spec_from_file_location("peers_tool", options.peers_tool)
        tool = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(tool)
        tool.dev_init()
        tool.patch_triton_common()
        tool.setup_fla()
        operator = tool.fn_fla_ll(dict(case="fla_ll", B=1, T=length, **SHAPE))
        mark("context_s")
        levels = tool.nlev(length)

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, device=device) * scale).to(torch.bfloat16).requires_grad_()

    q, k = normal(1, length, 1, SHAPE["K"], scale=SHAPE["K"] ** -0.5), normal(1, length, 1, SHAPE["K"])
    v, gradient = normal(1, length, SHAPE["H"], SHAPE["V"]), normal(1, length, SHAPE["H"], SHAPE["V"]).detach()
    gate = (-0.1 * torch.rand(1, length, SHAPE["H"], device=device)).requires_grad_()
    lam = torch.nn.functional.softplus(normal(1, length, SHAPE["H"], levels).detach()).requires_grad_()
    wait()
    mark("inputs_s")
    for name in ("", "second_"):
        o = operator(q, k, v, gate, lam)
        wait()
        mark(name + "forward_s")
        torch.autograd.grad(o, [q, k, v, gate, lam], gradient)
        wait()
        mark(name + "backward_s")
    at["second_backward_s"] -= at["second_forward_s"]
    at["second_forward_s"] -= at["backward_s"]
    if options.child != "lla":
        at["compiled_kernels"] = len(tool.COMPILES)
    at["mean_output"] = o.float().abs().mean().item()
    print(json.dumps(at), flush=True)


def measure(who, command, limit, environment=None):
    """Runs a command whose last argument is the clock now; its last line is the result."""
    started = time.monotonic()
    try:
        done = subprocess.run([*command, repr(started)], env=dict(os.environ, **(environment or {})), timeout=limit,
                              check=False, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        lines = done.stdout.strip().split("\n")
        row = json.loads(lines[-1]) if done.returncode == 0 else {"error": done.stderr[-400:]}
    except subprocess.TimeoutExpired:
        row = {"error": f"no result after {limit} s"}
    except ValueError as error:
        row = {"error": str(error)}
    row = {**row, "who": who, "process_s": time.monotonic() - started}
    print(" ".join(f"{key}={value:.3f}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items()),
          flush=True)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", help="the compiled first_call.c")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--peers")
    parser.add_argument("--peers-tool")
    parser.add_argument("--cache", help="an empty folder for Triton; default: a new one")
    parser.add_argument("--limit", type=float, default=120, help="seconds for a process")
    parser.add_argument("--skip-own", action="store_true", help="the peer alone")
    parser.add_argument("--json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("started", nargs="?", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return 0
    rows, here = [], [sys.executable, os.path.abspath(__file__), "--device", options.device, "--length", str(options.length)]
    if options.program and not options.skip_own:
        command = [os.path.abspath(options.program), options.device, str(options.length)]
        rows += [measure("lla, C", command, options.limit), measure("lla, C, again", command, options.limit)]
    if not options.skip_own:
        command = [*here, "--child", "lla"]
        rows += [measure("lla, PyTorch", command, options.limit), measure("lla, PyTorch, again", command, options.limit)]
    if options.peers:
        cache = options.cache or tempfile.mkdtemp(prefix="lla_first_call_")
        if os.path.isdir(cache) and os.listdir(cache):
            sys.exit(f"{cache} is not empty")
        environment = dict(TRITON_CACHE_DIR=cache, PEERS_DIR=os.path.abspath(options.peers))
        command = [*here, "--child", "peer", "--peers-tool", options.peers_tool]
        rows += [measure("FLA log-linear, empty cache", command, options.limit, environment),
                 measure("FLA log-linear, filled cache", command, options.limit, environment)]
    failed = [row["who"] for row in rows if "error" in row]
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"shape": dict(SHAPE, B=1, T=options.length), "rows": rows}, file, indent=1)
            file.write("\n")
    return 1 if any(who.startswith("lla") for who in failed) else 0


if __name__ == "__main__":
    sys.exit(main())
