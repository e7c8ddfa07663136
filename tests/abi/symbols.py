#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Exported symbols of the shared library = functions declared in the headers = entries of the version script."""
import argparse
import subprocess
import sys

from public_interface import declared_functions, map_functions


def exported(nm, library):
    """Defined dynamic symbols with their version node; the nodes' own absolute symbols are left out."""
    output = subprocess.run([nm, "-D", "--defined-only", "--with-symbol-versions", library], check=True,
                            capture_output=True, text=True).stdout
    symbols = {}
    for line in output.splitlines():
        _, kind, name = line.split()
        if kind == "A":
            continue
        name, _, node = name.partition("@")
        symbols[name] = node.lstrip("@")
    return symbols


# Probe J3.
def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nm", default="nm")
    parser.add_argument("--library", required=True)
    parser.add_argument("--map", required=True)
    parser.add_argument("--headers", required=True)
    options = parser.parse_args()

    declared = declared_functions(options.headers)
    nodes = map_functions(options.map)
    listed = {name: node for node, names in nodes.items() for name in names}
    symbols = exported(options.nm, options.library)
    faults = []
    if not declared or not listed or not symbols:
        faults.append("nothing was checked")
    if len(declared) != len(set(declared)):
        faults.append("a function is declared twice")
    if len(listed) != sum(len(names) for names in nodes.values()):
        faults.append("a function is listed twice")
    for name in sorted(set(declared) - set(listed)):
        faults.append(f"{name}: declared, not listed in the version script")
    for name in sorted(set(listed) - set(declared)):
        faults.append(f"{name}: listed in the version script, not declared")
    for name in sorted(set(listed) - set(symbols)):
        faults.append(f"{name}: listed, not exported")
    for name, node in sorted(symbols.items()):
        if name not in listed:
            faults.append(f"{name}: exported, not listed")
        elif listed[name] != node:
            faults.append(f"{name}: exported in node {node}, listed in {listed[name]}")
    for name in listed:
        if "*" in name or not name.startswith("lla_"):
            faults.append(f"{name}: not a name of the library")
    print(f"{len(declared)} declared, {len(listed)} listed, {len(symbols)} exported")
    for fault in faults:
        print("FAULT", fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
