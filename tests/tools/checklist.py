#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The table of docs/sdk-checklist.md has all its rows, and what they name is there: tests of this build, files of this tree.
So are the parts of tests/full that are on record."""
import argparse
import pathlib
import re
import subprocess
import sys

ROWS = 40


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", required=True)
    parser.add_argument("--build", required=True)
    parser.add_argument("--ctest", default="ctest")
    options = parser.parse_args()
    root = pathlib.Path(options.root)
    listed = subprocess.run([options.ctest, "--test-dir", options.build, "-N"], check=True, capture_output=True, text=True).stdout
    tests = re.findall(r"Test +#\d+: (\S+)", listed)
    rows = re.findall(r"^\| (\d+) \| (.+) \| (.+) \| (.+) \|$", (root / "docs/sdk-checklist.md").read_text(encoding="utf-8"),
                      flags=re.M)
    faults = []
    total = 0
    if [int(number) for number, *_ in rows] != list(range(1, ROWS + 1)):
        faults.append(f"the table has the rows {[number for number, *_ in rows]}")
    for number, _, proof, state in rows:
        commands = 0
        for command in re.findall(r"`([^`]+)`", proof):
            commands += 1
            pattern = re.fullmatch(r"ctest -R \"(.+)\"", command)
            if pattern:
                if not any(re.search(pattern[1], test) for test in tests):
                    faults.append(f"row {number}: no test matches {pattern[1]}")
            elif not (root / command.split()[0]).is_file():
                faults.append(f"row {number}: {command.split()[0]} does not exist")
        for path in re.findall(r"`((?:tests|src|docs|packaging)/[\w./-]+)`", state):
            if not (root / path).exists():
                faults.append(f"row {number}: {path} does not exist")
        total += commands
        if not commands and not state.startswith("to be read, "):
            faults.append(f"row {number} has no command")
        if not state.startswith(("shown", "in part: ", "not shown: ", "to be read, ")):
            faults.append(f"row {number}: is it shown?")
    parts = re.findall(r"^part_(\w+)\(\)", (root / "tests/full/run").read_text(encoding="utf-8"), flags=re.M)
    runs = (root / "tests/full/results.txt").read_text(encoding="utf-8").splitlines()
    runs = [line for line in runs if not line.startswith("#")]
    for line in runs:
        run = re.fullmatch(r"(\w+) +[0-9a-f]{7,}\+? +\d{4}-\d\d-\d\d +\d+ s  \w+, \d+ processors", line)
        if not run or run[1] not in parts:
            faults.append(f"tests/full/results.txt: what is that? {line}")
    if not runs:
        faults.append("no run of tests/full is on record")
    print(f"{len(rows)} rows, {total} commands, {len(tests)} tests; {len(runs)} parts of tests/full on record")
    for fault in faults:
        print("FAULT", fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
