#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Includes point down only: capi -> cells -> core <- backends, with plugin/ as the one interface between core and backends.

Kernels never see handles (contexts, states, batches), and no backend sees another one. Public headers stand alone; examples
and tests of the interface see nothing but public headers."""
import argparse
import pathlib
import re
import sys

# Files of the core that backends may include too: no handle in them, and they include nothing else of the core.
SHARED = {"core/checked.h", "core/contract.h", "core/fenwick.h", "core/mutex.h"}
PUBLIC_C = {"stddef.h", "stdint.h"}

# Folder -> folders that it may include from (besides itself and system headers).
ALLOWED = {
    "include/lla": set(),
    "capi": {"include/lla", "src/plugin", "src/core", "src/cells"},
    "src/plugin": {"include/lla"},
    "src/core": {"include/lla", "src/plugin"},
    "src/cells": {"include/lla", "src/plugin", "src/core"},
    "src/reference": {"include/lla", "src/plugin"},
    "src/cpu": {"include/lla", "src/plugin"},
    "src/cuda": {"include/lla", "src/plugin"},
    "examples/c": {"include/lla"},
    "tests/capi": {"include/lla"},
}
REQUIRED = ["include/lla", "capi", "src/plugin", "src/core", "src/cells", "src/reference", "src/cpu"]
BACKENDS = {"src/reference", "src/cpu", "src/cuda"}
# Handles, by header and by name: kernels see values only (context.h also names the instruction sets).
HANDLE_HEADERS = {"lla/batch.h", "lla/state.h", "lla/lla.h"}
HANDLES = re.compile(r"\blla_(?:context|layer|state|batch|tasks)\s*\*")
# Printing, throwing and containers that allocate behind the context's back.
FORBIDDEN_SYSTEM = {"iostream", "ostream", "istream", "fstream", "sstream", "iomanip", "syncstream", "stdexcept", "vector",
                    "string", "map", "unordered_map", "set", "list", "deque", "regex", "locale", "filesystem"}
LIBRARY = {"capi", "src/plugin", "src/core", "src/cells", "src/reference", "src/cpu", "src/cuda"}
INCLUDE = re.compile(r'^\s*#\s*include(?:_next)?\s*([<"])([^>"]+)[>"]', re.M)


def resolve(root, file, quote, name):
    """Path below the root that an include names, or None for a system header."""
    places = [file.parent] if quote == '"' else []
    places += [root / "include", root / "src", root]
    for place in places:
        candidate = (place / name).resolve()
        if candidate.is_file() and candidate.is_relative_to(root):
            return candidate.relative_to(root)
    return None


def folder_of(path):
    """The layer that a file belongs to."""
    for folder in sorted(ALLOWED, key=len, reverse=True):
        if path.is_relative_to(folder):
            return folder
    return str(path.parent)


def check(root, file, folder, faults):
    count = 0
    text = file.read_text(encoding="utf-8")
    if folder in BACKENDS:
        faults += [f"{file.relative_to(root)}: a kernel sees the handle {name.strip()}" for name in HANDLES.findall(text)]
    for quote, name in INCLUDE.findall(text):
        count += 1
        place = file.relative_to(root)
        target = resolve(root, file, quote, name)
        if target is None:
            if quote == '"' and not name.startswith("hwy/"):
                faults.append(f'{place}: "{name}" is no file of the tree')
            elif folder == "include/lla" and name not in PUBLIC_C:
                faults.append(f"{place}: <{name}> in a public header")
            elif folder in LIBRARY and name in FORBIDDEN_SYSTEM:
                faults.append(f"{place}: <{name}> is not for the library")
            continue
        target_folder = folder_of(target)
        short = str(target).removeprefix("src/").removeprefix("include/")
        if target_folder == folder:
            if str(place).removeprefix("src/") in SHARED and short not in SHARED:
                faults.append(f"{place}: backends include it, and it includes {target}")
            continue
        if folder in BACKENDS and short in SHARED:
            continue
        if target_folder not in ALLOWED[folder]:
            faults.append(f"{place}: includes {target}, which lies not below")
        elif folder in BACKENDS and short in HANDLE_HEADERS:
            faults.append(f"{place}: a kernel includes {target}, which declares handles")
    return count


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", required=True)
    root = pathlib.Path(parser.parse_args().root).resolve()
    faults = []
    total = 0
    for folder in ALLOWED:
        files = sorted(f for f in (root / folder).rglob("*") if f.suffix in {".h", ".cpp", ".c", ".cu", ".cuh", ".inc"})
        includes = sum(check(root, file, folder, faults) for file in files)
        total += includes
        print(f"{folder}: {len(files)} files, {includes} includes")
        if folder in REQUIRED and not includes:
            faults.append(f"{folder}: nothing was checked")
    print(f"{total} includes checked, {len(faults)} faults")
    for fault in faults:
        print("FAULT", fault)
    return 1 if faults or not total else 0


if __name__ == "__main__":
    sys.exit(main())
