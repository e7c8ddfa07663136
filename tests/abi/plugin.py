#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The plugin for NVIDIA GPUs exports its one function and nothing else, and loads where there is no driver and no toolkit: it
needs the libraries of the C and C++ run-time alone."""
import argparse
import re
import subprocess
import sys

EXPORTED = {"lla_plugin_query"}
NEEDED = re.compile(r"lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)\.so\.\d+|ld-linux[\w-]*\.so\.\d+")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nm", default="nm")
    parser.add_argument("--readelf", default="readelf")
    parser.add_argument("--library", required=True)
    options = parser.parse_args()

    def output(*command):
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    symbols = output(options.nm, "-D", "--defined-only", options.library).splitlines()
    exported = {line.split()[-1].split("@")[0] for line in symbols}
    dynamic = output(options.readelf, "-dW", options.library)
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    faults = [f"{name}: exported" for name in sorted(exported - EXPORTED)]
    faults += [f"{name}: not exported" for name in EXPORTED - exported]
    faults += [f"{name}: needed" for name in needed if not NEEDED.fullmatch(name)]
    faults += [f"a path to search: {line.strip()}" for line in dynamic.splitlines() if "RUNPATH" in line or "RPATH" in line]
    if not needed:
        faults.append("no dynamic section was read")
    print(f"{len(exported)} exported, {len(needed)} needed: {', '.join(needed)}")
    for fault in faults:
        print("FAULT", fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
