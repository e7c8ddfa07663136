#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Sizes against those on record (sizes.txt): no file may grow by more than 5 % unnoticed, nor stay on record 10 % too large.

  sizes.py NAME=FILE...            a shared library is stripped first; anything else counts as it is
  sizes.py --write NAME=FILE...    puts these sizes on record instead
"""
import argparse
import pathlib
import re
import subprocess
import sys
import tempfile

GROWTH, SLACK = 1.05, 0.90


def size_of(path, strip):
    if ".so" not in path.name:
        return path.stat().st_size
    with tempfile.TemporaryDirectory() as folder:
        stripped = pathlib.Path(folder) / path.name
        subprocess.run([strip, "--strip-unneeded", "-o", stripped, path], check=True)
        return stripped.stat().st_size


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", default=pathlib.Path(__file__).with_name("sizes.txt"))
    parser.add_argument("--strip", default="strip")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("files", nargs="+", metavar="NAME=FILE")
    options = parser.parse_args()
    record = pathlib.Path(options.record)
    text = record.read_text(encoding="utf-8")
    on_record = {name: int(size) for name, size in re.findall(r"^([\w.+-]+) (\d+)$", text, flags=re.M)}
    faults = []
    for word in options.files:
        name, _, path = word.partition("=")
        size = size_of(pathlib.Path(path).resolve(), options.strip)
        before = on_record.get(name)
        print(f"{name}: {size} bytes, on record {before}")
        if options.write:
            on_record[name] = size
        elif before is None:
            faults.append(f"{name} has no size on record")
        elif size > before * GROWTH:
            faults.append(f"{name} has grown by {100 * size / before - 100:.1f} %: make it smaller, or put the new size on record")
        elif size < before * SLACK:
            faults.append(f"{name} has become {100 - 100 * size / before:.1f} % smaller: put the new size on record")
    if options.write:
        comments = "".join(line + "\n" for line in text.splitlines() if line.startswith("#"))
        lines = "".join(f"{name} {size}\n" for name, size in sorted(on_record.items()))
        record.write_text(comments + lines, encoding="utf-8")
    for fault in faults:
        print("FAULT", fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
