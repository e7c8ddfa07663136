#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times the mixers on a GPU, with the rates of the machine measured in the same run, and other libraries beside them.

    LLA_LIBRARY=liblla.so python3 bench.py --json result.json
    ... --only scalar-log,delta-log --lengths 2048,16384         ... --quick
    ... --peers DIR --peers-tool FILE                            Triton peers in the same process

Inputs are random: bf16 (or --rows fp16) q, k, v and output gradients, fp32 gates and lambda. A time is the median of CUDA
events after a warm-up, over so many input sets that none stays in the L2 cache. Forward + backward is one forward call that saves what backward can use,
and one backward call for all gradients.

The floor of a call: the larger of its products at the rate of a bf16 matrix product and its bytes at the rate of a copy, both
measured here. Counts per token and head, for chunks of 64: whole diagonal tiles, live levels only, each tensor moved once
(lambda counted in bf16), nothing computed twice. A sum of two passes is the sum of their floors.

The peers tool is a Python file with dev_init(), patch_triton_common(), setup_fla(), setup_hatt(), build(row), inputs and the
functions fn_<case>(row), which finds the peers' folders by the environment variable PEERS_DIR.
"""
import argparse
import importlib.util
import json
import math
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "pytorch"))
import lla_torch as lla  # noqa: E402
import test_lla_torch as check  # noqa: E402
import torch  # noqa: E402

STARTED = time.time()
LENGTHS = [16384, 131072, 2048, 8192, 65536, 4096, 32768]  # the most important first
SHAPES = {"scalar": dict(H=48, G=1, K=128, V=64), "delta": dict(H=16, G=16, K=128, V=128)}
RULES = {"scalar": lla.SCALAR_GATE, "delta": lla.DELTA_RULE}
CASES = ["scalar-log", "scalar-linear", "delta-log", "delta-linear"]
# family -> case -> (name, name of its row in the tool)
OTHERS = ["ceilings", "prefill", "steps", "accuracy"]
PEERS = {
    "fla": {"scalar-log": ("FLA log-linear", "fla_ll"), "scalar-linear": ("mamba_ssm SSD", "mamba"),
            "delta-linear": ("FLA gated delta rule", "fla_gdn")},
    "hatt": {"scalar-log": ("hattention", "hatt_ll"), "delta-log": ("hattention", "hatt_hgdn")},
}
# family -> (suite, task of the tool's list of compilations, share of the workers, case)
COMPILE_JOBS = {
    "fla": [("A", 0, 0.4, "scalar-log"), ("A", 1, 0, "scalar-log"), ("A", 2, 0.4, "scalar-linear"),
            ("B", 0, 0.3, "delta-linear")],
    "hatt": [("A", 0, 0.6, "scalar-log"), ("B", 0, 0.4, "delta-log")],
}
# Decoding: mixer -> (name of the peer's step, name of its row in the tool); both keep one fp32 state.
STEPS = {"scalar": ("mamba_ssm step", "ssu"), "delta": ("FLA step", "gdn_step")}
CHUNK = 64
L2_BYTES = 160 << 20


def now():
    return time.time() - STARTED


# -- floors ------------------------------------------------------------------------------------------------------------


def floor_counts(mixer, linear, backward, T, H, G, K, V):
    """(FLOP, bytes) per token and head."""
    c, live = min(CHUNK, T), 1.0 if linear else max(0.0, math.log2(T / CHUNK) / 2)
    levels, shared, node = 0 if linear else math.ceil(math.log2(T)) + 1, G / H, 2 * K * V
    if mixer == "scalar":
        if not backward:
            return 2 * c * (K + V) + node + live * node, 4 * V + 4 * K * shared + 4 + 2 * levels
        return 2 * c * (3 * K + 2 * V) + 3 * node + 2 * live * node, 6 * V + 8 * K * shared + 8 + 4 * levels
    if not backward:
        intra = 2 * c * (4 * K + 2 * V + 2 * c) + node
        sweep = intra + 3 * live * node
        tree = intra + node + 2 * K * K * (K + V) / c + (2 * live - 1) * node
        return sweep if linear else min(sweep, tree), 4 * V + 4 * K * shared + 8 + 2 * levels
    sweep, tree = (12 + 6.5 * live) * node, (24 + 5 * live) * node
    return sweep if linear else min(sweep, tree), 6 * V + 8 * K * shared + 16 + 4 * levels


def floor_ms(row, rates):
    if not rates:
        return None, None
    total, by = 0.0, []
    for backward in [False] if row["op"] == "forward" else [False, True]:
        flops, moved = floor_counts(row["mixer"], row["linear"], backward, row["T"], row["H"], row["G"], row["K"], row["V"])
        units = row["B"] * row["T"] * row["H"]
        products, memory = units * flops / rates["matmul_flops"] * 1e3, units * moved / rates["copy_bytes"] * 1e3
        total += max(products, memory)
        by.append("products" if products > memory else "memory")
    return total, "/".join(by)


# -- timing ------------------------------------------------------------------------------------------------------------


class Bench:
    def __init__(self, options):
        self.options, self.device = options, torch.device(options.device)
        self.cuda = self.device.type == "cuda"
        self.context = lla.context_of(self.device)
        self.half, self.half_type = (torch.float16, lla.F16) if options.rows == "fp16" else (torch.bfloat16, lla.BF16)
        self.rows, self.rates, self.tool, self.missing = [], {}, None, {}
        self.facts = dict(
            command=" ".join([os.path.basename(sys.executable), *sys.argv]), source=lla.source_id(),
            version=lla.load().lla_version_string().decode(), backend=self.context.query(1), device=self.context.query(6),
            torch=torch.__version__, cuda=torch.version.cuda, python=platform.python_version(),
            date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), driver=driver())

    def wait(self):
        if self.cuda:
            torch.cuda.synchronize()

    def left(self):
        return self.options.budget - now()

    def add(self, **row):
        row["at_s"] = round(now(), 1)
        self.rows.append(row)
        show = {k: v for k, v in row.items() if k not in ("kernels", "at_s", "linear", "ms_min", "ms_max", "sets", "first_ms")}
        print(f"[{row['at_s']:6.1f}] " + " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}"
                                                  for k, v in show.items()), flush=True)
        self.write()

    def write(self):
        if self.options.json:
            data = dict(self.facts, rates=self.rates, missing_peers=self.missing, seconds=round(now(), 1), rows=self.rows)
            path = pathlib.Path(self.options.json)
            path.with_suffix(".part").write_text(json.dumps(data, indent=1))
            path.with_suffix(".part").replace(path)

    def time(self, calls):
        """Median over calls that are made in turn."""
        self.wait()
        started = time.perf_counter()
        calls[0]()
        self.wait()
        first = time.perf_counter() - started
        started = time.perf_counter()
        calls[-1]()
        self.wait()
        once = time.perf_counter() - started
        count = int(max(3 if once > 0.1 else 7, min(60, self.options.repeat / max(once, 1e-6))))
        for call in calls[:3] if once < 0.1 else []:
            call()
        if self.cuda:
            events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
            self.wait()
            for i, (begin, end) in enumerate(events):
                begin.record()
                calls[i % len(calls)]()
                end.record()
            self.wait()
            times = sorted(begin.elapsed_time(end) for begin, end in events)
        else:
            times = []
            for i in range(count):
                started = time.perf_counter()
                calls[i % len(calls)]()
                times.append((time.perf_counter() - started) * 1e3)
            times.sort()
        return dict(ms=statistics.median(times), ms_min=times[0], ms_max=times[-1], repeats=count, sets=len(calls),
                    first_ms=first * 1e3)

    def release(self):
        if self.cuda:
            torch.cuda.empty_cache()

    # -- the machine ---------------------------------------------------------------------------------------------------

    def ceilings(self):
        side, size = (8192, 4 << 30) if self.cuda else (512, 64 << 20)
        a, b = (torch.randn(side, side, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        product = self.time([lambda: torch.matmul(a, b)])
        source = torch.empty(size, dtype=torch.uint8, device=self.device).random_()
        target = torch.empty_like(source)
        copy = self.time([lambda: target.copy_(source)])
        self.rates = dict(matmul_flops=2 * side ** 3 / product["ms"] * 1e3, copy_bytes=2 * size / copy["ms"] * 1e3,
                          matmul=f"bf16 {side}^3, {product['ms']:.4f} ms", copy=f"{size >> 20} MiB, {copy['ms']:.4f} ms")
        print(f"[{now():6.1f}] bf16 matrix product {self.rates['matmul_flops'] / 1e12:.1f} TFLOP/s, "
              f"copy {self.rates['copy_bytes'] / 1e9:.0f} GB/s", flush=True)
        del a, b, source, target
        self.release()

    # -- lla -----------------------------------------------------------------------------------------------------------

    def inputs(self, mixer, linear, B, T, H, G, K, V):
        def normal(*shape, dtype=self.half):
            return torch.randn(*shape, dtype=dtype, device=self.device)

        def uniform(low, high):
            return torch.rand(B, T, H, device=self.device) * (high - low) + low

        q, k, v, gate = normal(B, T, G, K) * K ** -0.5, normal(B, T, G, K), normal(B, T, H, V), -uniform(0.001, 0.101)
        given = [(lla.Q, q), (lla.K, k), (lla.V, v), (lla.GATE, gate)]
        if mixer == "delta":
            given[1] = (lla.K, torch.nn.functional.normalize(k.float(), dim=-1).to(k.dtype))
            given.append((lla.WRITE, uniform(0.05, 0.95)))
        if not linear:
            lam = torch.nn.functional.softplus(normal(B, T, H, lla.levels_needed(T), dtype=torch.float32))
            given.append((lla.LAMBDA, lam))
        return given

    def time_lla(self, case, B, T):
        mixer, linear = case.split("-")[0], case.endswith("linear")
        shape = SHAPES[mixer]
        row = dict(kind="time", who="lla", case=case, mixer=mixer, linear=linear, B=B, T=T, **shape)
        try:
            levels = 0 if linear else lla.levels_needed(T)
            layer = lla.mixer_layer(self.context, RULES[mixer], (shape["G"], shape["K"]), (shape["H"], shape["V"]), levels,
                                    mixer == "delta", grain=self.options.grain)
            sets = [self.inputs(mixer, linear, B, T, **shape)]
            size = sum(t.numel() * t.element_size() for _, t in sets[0])
            count = 1 if size >= L2_BYTES or not self.cuda else min(32, -(-L2_BYTES // size))
            sets += [self.inputs(mixer, linear, B, T, **shape) for _ in range(count - 1)]
            stream, offsets = lla.stream_of(self.device), tuple(range(0, B * T + 1, T))
            batch = lla.batch_of(self.context, self.device, offsets)
            workspaces = [layer.workspace(batch.limits), layer.workspace(batch.limits, backward=True)]
            workspace = lla.workspace_of(self.device, max(w[0] for w in workspaces), max(w[1] for w in workspaces))
            saved_size, alignment = layer.saved(batch.limits)
            saved = lla._TorchMemory(saved_size, alignment, self.device) if saved_size and self.options.saved else None
            forward, training, gradients = [], [], [torch.empty_like(t) for _, t in sets[0]]
            targets = [lla.bind(role, lla.view_of(g)) for (role, _), g in zip(sets[0], gradients)]
            for given in sets:
                v = given[2][1]
                o, do = torch.empty_like(v), torch.randn_like(v)
                io = [lla.bind(role, lla.view_of(t)) for role, t in given]
                outputs = io + [lla.bind(lla.Y, lla.view_of(o))]
                given.append((None, o))
                given.append((None, do))  # both must live
                forward.append(layer.prepare_forward(batch, outputs, workspace=workspace, stream=stream))
                first = layer.prepare_forward(batch, outputs, workspace=workspace, saved=saved, stream=stream)
                second = layer.prepare_backward(batch, io, [lla.bind(lla.Y, lla.view_of(do))], targets, workspace=workspace,
                                                saved=saved, stream=stream)
                training.append(lambda first=first, second=second: (first(), second()))
        except (lla.LlaError, RuntimeError) as error:
            self.add(**row, op="setup", error=str(error)[:300])
            return
        for op, calls in (("forward", forward), ("forward+backward", training)):
            if op not in self.options.passes:
                continue
            try:
                measured = self.time(calls)
            except (lla.LlaError, RuntimeError) as error:
                self.add(**row, op=op, error=str(error)[:300])
                continue
            floor, by = floor_ms(dict(row, op=op), self.rates)
            self.add(**row, op=op, **measured, floor_ms=floor, floor_by=by, to_floor=floor and measured["ms"] / floor,
                     workspace_mib=workspace.size / 2 ** 20, saved_mib=(saved.size / 2 ** 20 if saved else 0.0),
                     kernels=layer.kernels() + (layer.kernels(True) if op != "forward" else []))

    # -- serving -------------------------------------------------------------------------------------------------------

    def time_prefill(self, mixer, B, T, linear=False, past=0):
        """T rows of B sequences with a state, the first ones or those after `past` others, and what is stored of them: the same
        plan again and again, never committed."""
        shape = SHAPES[mixer]
        row = dict(kind="prefill", who="lla", case=f"{mixer}-{'linear' if linear else 'log'}", B=B, T=T, past=past,
                   nodes=self.options.nodes, **shape)
        nodes = lla.F32 if self.options.nodes == "fp32" else lla.BF16
        try:
            levels = 0 if linear else lla.levels_needed(past + T)
            layer = lla.mixer_layer(self.context, RULES[mixer], (shape["G"], shape["K"]), (shape["H"], shape["V"]), levels,
                                    mixer == "delta")
            state = lla.State([layer], slots=B, max_length=past + T, node_dtype=nodes, tail_dtype=self.half_type)
            stream = lla.stream_of(self.device)

            def prepare(rows):
                batch = lla.Batch(self.context, tuple(range(0, B * rows + 1, rows)), stream, state, past + T)
                workspace = lla.workspace_of(self.device, *layer.workspace(batch.limits))
                given = self.inputs(mixer, linear, B, rows, **shape)
                if not linear:  # as many columns as the state's length wants
                    lam = torch.randn(B, rows, shape["H"], levels, device=self.device)
                    given[-1] = (lla.LAMBDA, torch.nn.functional.softplus(lam))
                y = torch.empty_like(given[2][1])
                io = [lla.bind(role, lla.view_of(t)) for role, t in given] + [lla.bind(lla.Y, lla.view_of(y))]
                call = layer.prepare_forward(batch, io, workspace=workspace, state=state, stream=stream)
                return batch, workspace, call, (given, y)

            if past:
                first = prepare(past)
                first[2]()
                state.commit(first[0], stream)
                self.wait()
                del first
            batch, workspace, call, kept = prepare(T)
            self.add(**row, op="prefill", **self.time([call]), workspace_mib=workspace.size / 2 ** 20)
            del batch, kept
        except (lla.LlaError, RuntimeError) as error:
            self.add(**row, op="prefill", error=str(error)[:300])
        lla._batches.clear()
        self.release()

    def prefills(self):
        for T in self.options.lengths:
            self.time_prefill("scalar", max(1, self.options.tokens // T), T)
        self.time_prefill("scalar", 1, 16384)
        self.time_prefill("scalar", 8, 8192, past=8192)
        self.time_prefill("scalar", 64, 600, past=5000)
        self.time_prefill("scalar", 64, 2048, past=14336)
        self.time_prefill("scalar", 1, 8192, past=122880)
        self.time_prefill("scalar", 8, 16384, linear=True)
        self.time_prefill("delta", 8, 16384)

    def replayed(self, calls):
        """Median time of one of the calls, which are captured together in a graph."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            prepared = [call(stream.cuda_stream) for call in calls]
            for step in prepared:
                step()
        self.wait()
        with torch.cuda.graph(graph, stream=stream):
            for step in prepared:
                step()
        times = []
        for _ in range(25):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            self.wait()
            times.append(begin.elapsed_time(end) / len(calls))
        return statistics.median(times[5:])

    def time_step(self, mixer, B, low, high, dtype, linear=False):
        """One row for each of B sequences, at positions that are uniform in [low, high)."""
        shape, length = SHAPES[mixer], high
        H, G, K, V = (shape[n] for n in "HGKV")
        row = dict(kind="step", who="lla", case=f"{mixer}-{'linear' if linear else 'log'}", B=B, T=length, positions=[low, high],
                   nodes="fp32" if dtype == lla.F32 else "bf16", **shape)
        try:
            levels = 0 if linear else lla.levels_needed(length)
            layer = lla.mixer_layer(self.context, RULES[mixer], (G, K), (H, V), levels, mixer == "delta")
            state = lla.State([layer], slots=B, max_length=length, node_dtype=dtype, tail_dtype=self.half_type)
            generator = torch.Generator().manual_seed(7)
            positions = torch.randint(low, high, (B,), generator=generator).tolist()
            given = self.inputs(mixer, linear, 1, max(positions + [1]), H, G, K, V)
            given = [(role, t.flatten(0, 1)) for role, t in given]
            y = torch.empty_like(given[2][1])
            stream = lla.stream_of(self.device)
            for slot, count in enumerate(positions):
                if not count:
                    continue
                batch = lla.Batch(self.context, (0, count), stream, state, length, slots=[slot])
                io = [lla.bind(role, lla.view_of(t[:count])) for role, t in given] + [lla.bind(lla.Y, lla.view_of(y[:count]))]
                layer.forward(batch, io, workspace=lla.workspace_of(self.device, *layer.workspace(batch.limits)), state=state,
                              stream=stream)
                state.commit(batch, stream)
            self.wait()
            del given, y
            new = [(role, t.flatten(0, 1)) for role, t in self.inputs(mixer, linear, B, 1, H, G, K, V)]
            if not linear:  # as many columns as the state's length wants
                lam = torch.nn.functional.softplus(torch.randn(B, H, levels, device=self.device))
                new[-1] = (lla.LAMBDA, lam)
            out = torch.empty_like(new[2][1])
            batch = lla.Batch(self.context, tuple(range(B + 1)), stream, state, length, replay=True)
            workspace = lla.workspace_of(self.device, *layer.workspace(batch.limits))
            io = [lla.bind(role, lla.view_of(t)) for role, t in new] + [lla.bind(lla.Y, lla.view_of(out))]
            self.wait()
            call = lambda s: layer.prepare_forward(batch, io, workspace=workspace, state=state, stream=s)  # noqa: E731
            ms = self.replayed([call] * 10)
            nodes = sum(bin(n // CHUNK).count("1") if not linear else 1 for n in positions)
            moved = H * (nodes * K * V * (4 if dtype == lla.F32 else 2) + sum(n % CHUNK for n in positions) * V * 2)
            moved += G * sum(n % CHUNK for n in positions) * K * 2
            self.add(**row, op="step", ms=ms, moved_mib=moved / 2 ** 20,
                     of_copy=moved / ms * 1e3 / self.rates["copy_bytes"] if self.rates else None)
        except (lla.LlaError, RuntimeError) as error:
            self.add(**row, op="step", error=str(error)[:300])
        lla._batches.clear()
        self.release()

    def steps(self):
        for mixer in SHAPES:
            high = 131072
            self.time_step(mixer, 64, high // 2, high - 1, lla.BF16)
            self.time_step(mixer, 64, high // 2, high - 1, lla.F32)
            self.time_step(mixer, 64, high // 2, high - 1, lla.F32, linear=True)
            for B in (1, 8, 256) if not self.options.quick else (1,):
                self.time_step(mixer, B, high // 2, high - 1, lla.BF16)
            for B in (1, 64):  # the row after which every level is merged
                self.time_step(mixer, B, high - 1, high, lla.BF16)
            name, case = STEPS[mixer]
            for B in (1, 64) if self.tool is not None else ():
                row = dict(kind="step", who=name, case=f"{mixer}-linear", B=B, nodes="fp32", **SHAPES[mixer])
                try:
                    calls, moved, _ = self.tool.decode_fns(dict(case=case, B=B, state="fp32", **SHAPES[mixer]))
                    ms = self.tool.graph_ms(calls)
                    self.add(**row, op="step", ms=ms, moved_mib=moved / 2 ** 20,
                             of_copy=moved / ms * 1e3 / self.rates["copy_bytes"] if self.rates else None)
                except Exception as error:  # noqa: BLE001
                    self.add(**row, op="step", error=f"{type(error).__name__}: {str(error)[:200]}")
                self.release()

    # -- peers ---------------------------------------------------------------------------------------------------------

    def start_compilers(self):
        """Processes of the tool that fill Triton's cache, many at a time, and launch nothing."""
        options, jobs = self.options, []
        folder = tempfile.mkdtemp(prefix="lla_bench_")
        wanted = [job[:3] for job in COMPILE_JOBS[options.family] if job[3] in options.cases]
        for suite, task, share in wanted:
            count = max(1, round(share * options.compile_workers))
            where = f"{folder}/{suite}{task}"
            os.makedirs(where)
            for shard in range(count):
                command = [sys.executable, options.peers_tool, "--role", "compile", "--suite", suite, "--group", options.family,
                           "--phase", "1", "--task", str(task), "--shard", str(shard), "--nshard", str(count), "--dir", where,
                           "--deadline", repr(time.time() + options.compile_limit)]
                with open(f"{where}/{shard}.log", "w", encoding="utf-8") as log:
                    jobs.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
        return jobs

    def wait_for_compilers(self, jobs):
        until = time.time() + self.options.compile_limit + 5
        for job in jobs:
            try:
                job.wait(max(0.1, until - time.time()))
            except subprocess.TimeoutExpired:
                job.kill()
        if jobs:
            print(f"[{now():6.1f}] Triton compilers ended: {[job.poll() for job in jobs]}", flush=True)

    def load_peers(self):
        options = self.options
        if not options.peers:
            return
        try:
            spec = importlib.util.spec_from_file_location("peers_tool", options.peers_tool)
            tool = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(tool)
            tool.DEADLINE = STARTED + options.budget
            tool.dev_init()
            tool.patch_triton_common()
            {"fla": tool.setup_fla, "hatt": tool.setup_hatt}[options.family]()
            self.tool = tool
            self.facts["peers"] = pathlib.Path(options.peers, "VERSIONS").read_text().split("\n")
            self.facts["triton"] = sys.modules["triton"].__version__
        except Exception as error:  # noqa: BLE001  whatever it is, the peer is missing
            self.missing["all"] = f"{type(error).__name__}: {str(error)[:300]}"
            print(f"no peers: {self.missing['all']}", flush=True)

    def peer_row(self, case, B, T):
        row = dict(case=PEERS[self.options.family][case][1], B=B, T=T, **SHAPES[case.split("-")[0]])
        if self.options.family == "hatt":
            row["L"] = self.tool.HATT_L if case.startswith("scalar") else self.tool.HGDN_L
        return row

    def time_peer(self, case, B, T, reserve):
        known = PEERS[self.options.family].get(case)
        if self.tool is None or known is None or known[0] in self.missing:
            return
        mixer = case.split("-")[0]
        row = dict(kind="time", who=known[0], case=case, mixer=mixer, linear=case.endswith("linear"), B=B, T=T, **SHAPES[mixer])
        if self.peer_row(case, B, T)["case"] in getattr(self.tool, "GUARDED", ()):
            row["note"] = "the peer refuses its backward pass on some versions of Triton; that check is bypassed, time only"
        if self.left() < reserve + 25:
            self.add(**row, op="all", skipped="no time left")
            return
        try:
            forward, training, _ = self.tool.build(self.peer_row(case, B, T))
        except ImportError as error:
            self.missing[known[0]] = str(error)[:300]
            self.add(**row, op="all", error=f"missing: {str(error)[:200]}")
            return
        except Exception as error:  # noqa: BLE001
            self.add(**row, op="all", error=f"{type(error).__name__}: {str(error)[:200]}")
            return
        for op, calls in (("forward", forward), ("forward+backward", training)):
            if op not in self.options.passes:
                continue
            try:
                measured = self.time(calls)
                floor, by = floor_ms(dict(row, op=op), self.rates)
                self.add(**row, op=op, **measured, floor_ms=floor, floor_by=by, to_floor=floor and measured["ms"] / floor)
            except Exception as error:  # noqa: BLE001
                self.add(**row, op=op, error=f"{type(error).__name__}: {str(error)[:200]}")
                if "illegal" in str(error):
                    raise SystemExit("the device is lost") from error
        del forward, training
        self.release()

    def time_attention(self, B, T):
        """Causal softmax attention of as many heads of V columns, by cuDNN through PyTorch: what log-linear attention replaces."""
        row = dict(kind="time", who="cuDNN attention", case="scalar-log", mixer="scalar", linear=False, B=B, T=T, **SHAPES["scalar"])
        if self.left() < 15:
            self.add(**row, op="all", skipped="no time left")
            return
        from torch.nn.attention import SDPBackend, sdpa_kernel
        xs = [torch.randn(B, row["H"], T, row["V"], device=self.device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        do = torch.randn_like(xs[0])

        def forward():
            with torch.no_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                torch.nn.functional.scaled_dot_product_attention(*xs, is_causal=True)

        def training():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                torch.autograd.grad(torch.nn.functional.scaled_dot_product_attention(*xs, is_causal=True), xs, do)

        for op, call in (("forward", forward), ("forward+backward", training)):
            if op in self.options.passes:
                try:
                    self.add(**row, op=op, **self.time([call]))
                except RuntimeError as error:
                    self.add(**row, op=op, error=str(error)[:200])
        self.release()

    # -- accuracy ------------------------------------------------------------------------------------------------------

    def accuracy(self, mixer, with_peer):
        """Relative errors (2-norm per tensor) against float64, of bf16 tensors, lambda and gates exact in fp32."""
        T, shape = self.options.accuracy_length, dict(SHAPES[mixer])
        if self.options.accuracy_heads:
            shape.update(H=self.options.accuracy_heads, G=1 if mixer == "scalar" else self.options.accuracy_heads)
        torch.manual_seed(1234)
        given = self.inputs(mixer, False, 1, T, **shape)
        names = {lla.Q: "q", lla.K: "k", lla.V: "v", lla.GATE: "gate", lla.WRITE: "write", lla.LAMBDA: "lam"}
        tensors = {names[role]: t for role, t in given}
        tensors["lam"] = tensors["lam"].to(torch.bfloat16).float()  # the peers take bf16
        if "write" in tensors:
            tensors["write"] = tensors["write"].to(torch.bfloat16).float()
        do = torch.randn_like(tensors["v"])

        def run(forward, xs):
            leaves = {n: t.detach().requires_grad_() for n, t in xs.items() if t is not None}
            o = forward(leaves)
            return [o, *torch.autograd.grad(o, list(leaves.values()), do.to(o.dtype))], ["o", *["d" + n for n in leaves]]

        def reference(leaves):
            full = {n: leaves.get(n) for n in ("q", "k", "v", "gate", "write", "lam")}
            return check.reference(RULES[mixer], **full)

        for linear in (False, True):
            xs = {n: t for n, t in tensors.items() if not (linear and n == "lam")}
            case = f"{mixer}-{'linear' if linear else 'log'}"
            if case not in self.options.cases:
                continue
            row = dict(kind="accuracy", case=case, B=1, T=T, **shape)
            expected, parts = run(reference, {n: t.double() for n, t in xs.items()})
            if not with_peer:
                try:
                    got, _ = run(lambda leaves: lla.mixer(RULES[mixer], **leaves, grain=self.options.grain), xs)
                    self.add(**row, who="lla", **{p: check.error_of(g, e) for p, g, e in zip(parts, got, expected)},
                             o_rounding=check.error_of(expected[0].to(torch.bfloat16), expected[0]))
                except (lla.LlaError, RuntimeError) as error:
                    self.add(**row, who="lla", error=str(error)[:300])
                continue
            known = PEERS[self.options.family].get(case)
            if known is None or known[1] not in ("fla_ll", "hatt_ll"):
                continue  # the others want other inputs
            try:
                ys = dict(xs, lam=xs["lam"].to(torch.bfloat16))
                peer_row = dict(self.peer_row(case, 1, T), **shape)
                if "L" in peer_row:  # this peer wants a fixed number of levels
                    ys["lam"] = torch.nn.functional.pad(ys["lam"], (0, peer_row["L"] - ys["lam"].shape[-1]))
                function = getattr(self.tool, "fn_" + known[1])(peer_row)
                got, _ = run(lambda leaves: function(*leaves.values()), ys)
                got[-1] = got[-1][..., :xs["lam"].shape[-1]]
                self.add(**row, who=known[0], **{p: check.error_of(g, e) for p, g, e in zip(parts, got, expected)})
            except Exception as error:  # noqa: BLE001
                self.add(**row, who=known[0], error=f"{type(error).__name__}: {str(error)[:200]}")
        self.release()

    # -- all of it -----------------------------------------------------------------------------------------------------

    def run(self):
        options = self.options
        compilers = []
        if options.peers and options.compile_workers:
            compilers = self.start_compilers()
        self.load_peers()
        mixers = [m for m in SHAPES if any(case.startswith(m) for case in options.cases)]
        if "accuracy" in options.only:  # not timed: the compilers may use the CPU meanwhile
            for mixer in mixers:
                self.accuracy(mixer, False)
        self.wait_for_compilers(compilers)
        if "ceilings" in options.only:
            self.ceilings()
        work = [(max(1, options.tokens // T), T) for T in options.lengths] + [(1, T) for T in options.single]
        todo = [(case, B, T) for mixer in mixers for B, T in work for case in options.timed if case.startswith(mixer)]
        for i, (case, B, T) in enumerate(todo):
            if self.left() < 5:
                print("no time left", flush=True)
                break
            self.time_lla(case, B, T)
            lla._batches.clear()
            self.time_peer(case, B, T, reserve=3 * (len(todo) - i - 1))
            if options.attention and case == "scalar-log":
                self.time_attention(B, T)
        if "prefill" in options.only and self.left() > 10:
            self.prefills()
        if "steps" in options.only and self.left() > 20:
            self.steps()
        if "accuracy" in options.only and self.tool is not None and self.left() > 25:
            for mixer in mixers:
                self.accuracy(mixer, True)
        self.write()
        self.table()

    def table(self):
        rows = [row for row in self.rows if row["kind"] == "time" and "ms" in row]
        for mixer in SHAPES:
            mine = [row for row in rows if row["mixer"] == mixer]
            columns = sorted({(row["op"], row["linear"], row["who"] != "lla", row["who"]) for row in mine})
            if not columns:
                continue
            print(f"\n{mixer}, H={SHAPES[mixer]['H']} G={SHAPES[mixer]['G']} dk={SHAPES[mixer]['K']} dv={SHAPES[mixer]['V']}: "
                  "ms (times the floor)")
            for op in ("forward", "forward+backward"):
                shown = [column for column in columns if column[0] == op]
                if not shown:
                    continue
                print(f"{op:>18} " + " ".join(f"{(c[3] + (' linear' if c[1] else ' log'))[:25]:>25}" for c in shown))
                sizes = {(row["B"], row["T"]) for row in mine}
                for B, T in sorted(sizes, key=lambda size: (size[0] * size[1] != self.options.tokens, size[1])):
                    cells = []
                    for column in shown:
                        found = [r for r in mine if (r["op"], r["linear"], r["who"]) == (op, column[1], column[3])
                                 and (r["B"], r["T"]) == (B, T)]
                        cells.append(f"{found[0]['ms']:14.3f} ({found[0].get('to_floor') or 0:7.2f})" if found else "-")
                    print(f"B {B:4d}  T {T:8d} " + " ".join(f"{cell:>25}" for cell in cells))
        for row in self.rows:
            if "error" in row or "skipped" in row:
                print(f"{row['who']} {row['case']} B{row['B']} T{row['T']}: {row.get('error') or row.get('skipped')}")
        print(f"{len(rows)} times, {sum('error' in row for row in self.rows)} errors, {now():.0f} s")


def driver():
    try:
        result = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,power.limit", "--format=csv,noheader"],
                                capture_output=True, text=True, timeout=20, check=False)
        return result.stdout.strip().split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return ""


def numbers(text):
    return [int(part) for part in text.split(",") if part]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"of {','.join([*CASES, *OTHERS])}; default: all")
    parser.add_argument("--lengths", type=numbers, default=None, help="T of the full calls")
    parser.add_argument("--single", type=numbers, default=None, help="T of the calls with batch 1; default 2048,16384")
    parser.add_argument("--tokens", type=int, default=131072, help="tokens of a full call")
    parser.add_argument("--groups", type=int, default=0, help="query/key heads of the scalar gate; default 1")
    parser.add_argument("--passes", default="forward,forward+backward")
    parser.add_argument("--rows", choices=["bf16", "fp16"], default="bf16", help="type of q, k, v, outputs and their gradients")
    parser.add_argument("--nodes", choices=["bf16", "fp32"], default="bf16", help="type of a state's nodes in prefills")
    parser.add_argument("--grain", type=int, default=0)
    parser.add_argument("--no-saved", dest="saved", action="store_false", help="backward repeats the forward sweep")
    parser.add_argument("--quick", action="store_true", help="T = 2048, 16384, 131072, few repeats")
    parser.add_argument("--repeat", type=float, default=0.4, help="seconds for one time")
    parser.add_argument("--budget", type=float, default=450, help="seconds for the whole run")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--accuracy-length", type=int, default=2048)
    parser.add_argument("--accuracy-heads", type=int, default=0, help="default: those of the timed shapes")
    parser.add_argument("--attention", action="store_true", help="cuDNN's causal softmax attention beside them")
    parser.add_argument("--peers", help="folder with the peers")
    parser.add_argument("--peers-tool", help="Python file that calls the peers")
    parser.add_argument("--family", choices=list(PEERS), default="fla", help="which peers; one family a process")
    parser.add_argument("--compile-workers", type=int, default=0, help="processes that fill Triton's cache first")
    parser.add_argument("--compile-limit", type=float, default=130, help="seconds for them")
    options = parser.parse_args()
    options.only = options.only.split(",") if options.only else [*CASES, *OTHERS]
    unknown = [name for name in options.only if name not in [*CASES, *OTHERS]]
    if unknown:
        parser.error(f"unknown: {unknown}")
    options.timed = [case for case in CASES if case in options.only]
    options.cases = options.timed or CASES  # of the accuracy
    options.passes = options.passes.split(",")
    if options.groups:
        SHAPES["scalar"]["G"] = options.groups
    if options.lengths is None:
        options.lengths = [T for T in LENGTHS if not options.quick or T in (2048, 16384, 131072)]
    if options.single is None:
        options.single = [2048, 16384]
    if options.quick:
        options.repeat = min(options.repeat, 0.15)
    if options.peers:
        if not options.peers_tool:
            parser.error("--peers needs --peers-tool")
        # The tool and Triton read these when they are imported, its compilers inherit them.
        os.environ["PEERS_DIR"] = options.peers = os.path.abspath(options.peers)
        options.peers_tool = os.path.abspath(options.peers_tool)
        os.environ.setdefault("TRITON_CACHE_DIR", "/tmp/lla_bench_triton")
        os.environ.update(FLA_CACHE_RESULTS="0", TRITON_ALLOW_NON_CONSTEXPR_GLOBALS="1", TOKENIZERS_PARALLELISM="false")
    bench = Bench(options)
    print(json.dumps(bench.facts, indent=1), flush=True)
    bench.run()
    return 1 if any("error" in row and row["who"] == "lla" for row in bench.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
