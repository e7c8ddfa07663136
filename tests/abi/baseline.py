#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The binary interface of the headers, as debug information describes it, is the one on record (liblla.abi): libabigail's abidiff sees
no change, harmless or not. From the headers and the version script a C file is written that defines every function; what it is
compiled to has the types, fields, parameters and symbol versions of the interface and nothing of the library's own.

  baseline.py            checks; 77 where libabigail is not installed
  baseline.py --write    puts the interface of the headers on record
"""
import argparse
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from public_interface import declared_functions

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECORD = pathlib.Path(__file__).with_name("liblla.abi")
HEADERS = ROOT / "include/lla"
LICENCE = "<!-- SPDX-License-Identifier: Apache-2.0 -->\n<!-- Written by baseline.py. -->\n"


def definitions():
    """C text with a definition of each declared function."""
    lines = ["#include <lla/lla.h>"]
    for header in sorted(HEADERS.glob("*.h")):
        text = re.sub(r"/\*.*?\*/", "", header.read_text(encoding="utf-8"), flags=re.S)
        text = re.sub(r"^\s*#.*$", "", text, flags=re.M)
        for head, name, parameters in re.findall(r"\bLLA_API\b([^;(]*?)\b(\w+)\s*\(([^;]*)\)\s*;", text):
            lines.append(f"{head} {name}({parameters}) {{ {'' if head.strip() == 'void' else 'return 0;'} }}")
    return "\n".join(lines) + "\n"


def described(folder, compiler):
    """Compiles the definitions in a folder and has libabigail write what they are."""
    (folder / "definitions.c").write_text(definitions(), encoding="utf-8")
    # A name without a folder, which the record would keep otherwise.
    subprocess.run([compiler, "-std=c99", "-w", "-g", "-gdwarf-4", "-O0", "-fPIC", "-shared", f"-I{ROOT / 'include'}",
                    "-Wl,-soname,liblla.so.0", f"-Wl,--version-script={ROOT / 'capi/lla.map'}", "definitions.c", "-o", "liblla.so.0"],
                   check=True, cwd=folder)
    subprocess.run(["abidw", "--type-id-style", "hash", "--no-show-locs", "--no-corpus-path", "--no-comp-dir-path",
                    "--no-elf-needed", "--out-file", "liblla.abi", "liblla.so.0"], check=True, cwd=folder)
    text = folder / "liblla.abi"
    first, rest = text.read_text(encoding="utf-8").split("\n", 1)
    text.write_text(f"{first}\n{LICENCE}{rest}", encoding="utf-8")
    return text


def faults_of(text):
    """What a description must hold for a comparison with it to mean anything."""
    structs = set()
    for header in HEADERS.glob("*.h"):
        structs |= set(re.findall(r"^\} (lla_\w+);", header.read_text(encoding="utf-8"), flags=re.M))
    functions = declared_functions(HEADERS)
    faults = [f"no description of {name}" for name in functions if f"<function-decl name='{name}'" not in text]
    faults += [f"no description of {name}" for name in sorted(structs) if f"<class-decl name='{name}' size-in-bits=" not in text]
    if len(functions) < 40 or len(structs) < 15:
        faults.append("the headers were not read")
    return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cc", default="cc")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    for program in ("abidw", "abidiff"):
        if shutil.which(program) is None:
            print(f"{program} is not installed: install abigail-tools")
            return 77
    with tempfile.TemporaryDirectory() as folder:
        text = described(pathlib.Path(folder), options.cc)
        faults = faults_of(text.read_text(encoding="utf-8"))
        if options.write and not faults:
            shutil.copyfile(text, RECORD)
        faults += [f"on record: {fault}" for fault in faults_of(RECORD.read_text(encoding="utf-8"))]
        compared = subprocess.run(["abidiff", "--harmless", RECORD, text], check=False, capture_output=True, text=True)
    print(compared.stdout + compared.stderr, end="")
    if compared.returncode != 0:
        faults.append("the binary interface is not the one on record. If it is meant to change: CHANGELOG.md, then "
                      "tests/abi/baseline.py --write")
    print(f"{len(declared_functions(HEADERS))} functions with all that they take")
    for fault in faults:
        print("FAULT", fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
