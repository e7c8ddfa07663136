#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The interface of the tree is the one on record (interface.txt), so that no commit changes it without saying so; and layout.c, from
which the record's sizes and numbers come, pins every struct, every field and every constant of the headers.

  interface.py            checks
  interface.py --write    puts the interface of the tree on record
"""
import argparse
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECORD = pathlib.Path(__file__).with_name("interface.txt")
# Neither bits nor numbers of the interface: what the version says, and how headers are written.
NOT_PINNED = re.compile(r"LLA_(VERSION_\w+|ABI_VERSION|API|STATIC|BUILDING|\w+_H|\w+_DECLS|\w+_INIT)")


def bare(text):
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)


def declared(text):
    """What layout.c must pin: the structs, fields and constants that a header declares."""
    names = set()
    for body, struct in re.findall(r"typedef struct \w+ \{(.*?)\n\} (\w+);", text, flags=re.S):
        for bits in ("", "32"):
            names.add(f"LLA_SIZE{bits}({struct}")
            for field in re.findall(r"(\w+)(?:\[\w+\])?;|\(\*(\w+)\)\(", body):
                names.add(f"LLA_AT{bits}({struct}, {field[0] or field[1]}")
    names |= {f"LLA_SIZE({name}" for name in re.findall(r"^typedef u?int\d+_t (\w+);", text, flags=re.M)}
    names |= {f"LLA_IS({name}" for name in re.findall(r"^#define (LLA_\w+) [(\-0-9]", text, flags=re.M)
              if not NOT_PINNED.fullmatch(name)}
    return names


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    lines = subprocess.run([sys.executable, ROOT / "packaging/release_check", "--list"], check=True, capture_output=True,
                           text=True).stdout
    if options.write:
        RECORD.write_text(lines, encoding="utf-8")
    faults = []
    now, before = lines.splitlines(), RECORD.read_text(encoding="utf-8").splitlines()
    faults += [f"not on record: {line}" for line in now if line not in before]
    faults += [f"on record, no longer there: {line}" for line in before if line not in now]
    layout = (ROOT / "tests/abi/layout.c").read_text(encoding="utf-8")
    wanted = set()
    for header in sorted((ROOT / "include/lla").glob("*.h")):
        wanted |= declared(bare(header.read_text(encoding="utf-8")))
    faults += [f"layout.c lacks {name}, ...)" for name in sorted(wanted) if name + "," not in layout]
    if len(now) < 100 or len(wanted) < 100:
        faults.append("nothing was checked")
    print(f"{len(now)} lines of the interface, {len(wanted)} structs, fields and constants must be pinned")
    for fault in faults:
        print("FAULT", fault)
    if faults:
        print("If the interface is meant to change: CHANGELOG.md, then tests/abi/interface.py --write")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
