#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Registers, spills and stack of the Hopper kernels, as ptxas gave them when they were built (keep_ptxas), against those on
record (budgets.txt): no kernel may spill much more, nor take many more of what it starts with, unnoticed.

  budgets.py BUILD_FOLDER            compares
  budgets.py --write BUILD_FOLDER    puts what was built on record

Figures are those of one compiler. With another release only kernels that are not on record, or gone, are faults, and spills
of more than 256 bytes.
"""
import argparse
import pathlib
import re
import sys

MOST_SPILL = 256  # bytes, of any kernel and compiler
SLACK = 32  # bytes that a kernel may spill more: a change of a header elsewhere moves it by a register or two


def kernels_of(folder):
    """{file kernel: (registers, stack, spill stores, spill loads)}, from all *.ptxas below."""
    found = {}
    files = sorted(pathlib.Path(folder).rglob("*.cu.o.ptxas"))
    for path in files:
        name = None
        frame = (0, 0, 0)
        for line in path.read_text(encoding="utf-8").splitlines():
            if match := re.search(r"Function properties for (\S+)|Compiling entry function '(\S+)'", line):
                name = short_name(match.group(1) or match.group(2))
            elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
                frame = tuple(int(x) for x in match.groups())
            elif (match := re.search(r"Used (\d+) registers", line)) and name:
                found[f"{path.name.removesuffix('.cu.o.ptxas')} {name}"] = (int(match.group(1)), *frame)
    return found, len(files)


def short_name(mangled):
    """The kernel's name and template arguments; what stands before names the file's own namespace by a hash."""
    match = re.search(r"_cu_[0-9a-f]{8}_?(\d+)(\D.*)$", mangled)
    if not match:
        return mangled
    digits, rest = match.groups()
    # The hash may end in digits, or a number follow it, that look like the name's length.
    for start in range(len(digits)):
        length = int(digits[start:])
        if length <= len(rest) and re.fullmatch(r"[a-z_0-9]+", rest[:length]) and rest[length:length + 1] in "IEv":
            arguments = re.match(r"I.*?EE", rest[length:])
            return rest[:length] + (arguments.group(0) if arguments else "")
    return mangled


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", default=pathlib.Path(__file__).with_name("budgets.txt"))
    parser.add_argument("--release", default="", help="of the compiler")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("folder")
    options = parser.parse_args()
    record = pathlib.Path(options.record)
    built, files = kernels_of(options.folder)
    if not built:
        print(f"FAULT nothing of ptxas below {options.folder}: build the plugin again")
        return 1
    text = record.read_text(encoding="utf-8") if record.exists() else ""
    if options.write:
        comments = "".join(line + "\n" for line in text.splitlines() if line.startswith("#"))
        lines = "".join(f"{name} {' '.join(map(str, figures))}\n" for name, figures in sorted(built.items()))
        record.write_text(comments + f"release {options.release}\n" + lines, encoding="utf-8")
        return 0
    release = re.search(r"^release (.*)$", text, flags=re.M)
    same = release is not None and release.group(1) == options.release
    on_record = {}
    for line in text.splitlines():
        if match := re.fullmatch(r"(\S+ \S+) (\d+) (\d+) (\d+) (\d+)", line):
            on_record[match.group(1)] = tuple(int(x) for x in match.groups()[1:])
    faults = []
    for name, (registers, stack, stores, loads) in sorted(built.items()):
        before = on_record.get(name)
        if before is None:
            faults.append(f"{name}: not on record")
        elif same and (stores > before[2] + SLACK or loads > before[3] + SLACK):
            faults.append(f"{name}: spills {stores} and {loads} bytes, on record {before[2]} and {before[3]}")
        elif same and (registers > before[0] + 8 or stack > before[1] + SLACK):
            faults.append(f"{name}: {registers} registers and {stack} bytes of stack, on record {before[0]} and {before[1]}")
        if stores > MOST_SPILL:
            faults.append(f"{name}: spills {stores} bytes")
    faults += [f"{name}: on record, but not built" for name in sorted(set(on_record) - set(built))]
    for fault in faults:
        print("FAULT", fault)
    spilling = sum(1 for figures in built.values() if figures[2])
    print(f"{len(built)} kernels of {files} files, {spilling} of them spill; compared {'figure by figure' if same else 'by name'}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
