#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the figures of times against length from results of bench.py: JSON and SVG for docs/figures.

    python3 tests/gpu/figures.py                of tests/gpu/results; later files count where two have the same line and length

Lines are the full calls of the scalar gate: 48 heads, 128 x 64, one group, 131 072 rows."""
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS, FIGURES = ROOT / "tests/gpu/results", ROOT / "docs/figures"
FILES = ["bench_hatt.json", "bench_fla.json", "bench_scalar.json"]
NAMES = {("lla", "scalar-log"): "lla, log-linear", ("lla", "scalar-linear"): "lla, linear",
         ("FLA log-linear", "scalar-log"): "flash-linear-attention, log-linear",
         ("hattention", "scalar-log"): "the paper's authors, log-linear",
         ("mamba_ssm SSD", "scalar-linear"): "mamba_ssm, linear",
         ("cuDNN attention", "scalar-log"): "softmax attention, cuDNN"}
PASSES = {"forward": ("gpu_forward", "Forward"), "forward+backward": ("gpu_training", "Forward + backward")}


def main():
    rows = [row for name in FILES if (RESULTS / name).exists() for row in json.loads((RESULTS / name).read_text())["rows"]]
    for op, (stem, title) in PASSES.items():
        lines = {}
        for row in rows:
            name = NAMES.get((row.get("who"), row.get("case")))
            if name and row.get("op") == op and row.get("G") == 1 and row["B"] * row["T"] == 131072 and "ms" in row:
                lines.setdefault(name, {})[row["T"]] = round(row["ms"], 3)
        x = sorted({T for line in lines.values() for T in line})
        data = {"x": x, "lines": {name: [lines[name].get(T) for T in x] for name in NAMES.values() if name in lines}}
        source = FIGURES / f"{stem}.json"
        source.write_text(json.dumps(data, ensure_ascii=False) + "\n", encoding="utf-8")
        subprocess.run([sys.executable, ROOT / "tests/bench/plot.py", source, "--out", FIGURES / f"{stem}.svg", "--title",
                        f"{title} of 131 072 rows, one H200", "--x-label", "rows of a sequence", "--y-label", "ms"], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
