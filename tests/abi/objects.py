#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the library needs and does without being asked: its dynamic section, its start-up code, and what its own objects
refer to. Nothing in lla prints, exits, aborts, throws, or runs at load time."""
import argparse
import re
import sys

from forbidden import ALLOCATION, output, section_sizes, undefined, why_forbidden

# Probe J3.
NEEDED = re.compile(r"lib(stdc\+\+|c\+\+|c\+\+abi|m|gcc_s|c|unwind)\.so[.\d]*|ld-linux[\w-]*\.so[.\d]*|libpthread\.so[.\d]*")
# The only objects that may call the C or C++ allocator: the context's default, and its own threads.
ALLOCATION_OBJECTS = re.compile(r"/core/(context|allocator|thread_pool|threads|pool)\w*\.cpp\.o$")


def check_library(options, faults):
    dynamic = output(options.readelf, "-dW", options.library)
    needed = re.findall(r"\(NEEDED\).*\[(.+?)\]", dynamic)
    print("needed:", " ".join(needed))
    if not needed:
        faults.append("the library needs nothing: was it read?")
    for name in needed:
        if not NEEDED.fullmatch(name):
            faults.append(f"the library needs {name}")
    soname = re.search(r"\(SONAME\).*\[(.+?)\]", dynamic)
    if not soname or not re.fullmatch(r"liblla\.so\.\d+", soname[1]):
        faults.append(f"soname is {soname and soname[1]}")
    for tag in ("TEXTREL", "RPATH", "RUNPATH"):
        if f"({tag})" in dynamic:
            faults.append(f"the dynamic section has {tag}")
    if not re.search(r"BIND_NOW|FLAGS_1.*NOW", dynamic):
        faults.append("the library is not bound at load time")
    stack = re.search(r"GNU_STACK.*", output(options.readelf, "-lW", options.library))
    if stack and re.search(r"RWE", stack[0]):
        faults.append("the stack is executable")
    ours = section_sizes(options.readelf, options.library)
    plain = section_sizes(options.readelf, options.plain)
    for section in (".init_array", ".fini_array", ".ctors", ".dtors", ".preinit_array"):
        print(f"{section}: {ours.get(section, 0)} bytes; of the tool chain: {plain.get(section, 0)}")
        if ours.get(section, 0) != plain.get(section, 0):
            faults.append(f"{section} holds code of the library")


def check_objects(options, faults):
    references = 0
    for path in options.objects:
        for symbol in undefined(options.nm, path):
            references += 1
            why = why_forbidden(symbol)
            if why:
                faults.append(f"{path}: refers to {symbol}, which {why}")
            if ALLOCATION.fullmatch(symbol) and not ALLOCATION_OBJECTS.search(path):
                faults.append(f"{path}: refers to {symbol}, not to the context's allocator")
        for section in section_sizes(options.readelf, path):
            if re.match(r"\.(init_array|fini_array|ctors|dtors|tbss|tdata)", section):
                faults.append(f"{path}: has a section {section}")
    print(f"{len(options.objects)} objects, {references} references")
    if not options.objects or not references:
        faults.append("no object was checked")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nm", default="nm")
    parser.add_argument("--readelf", default="readelf")
    parser.add_argument("--library", required=True)
    parser.add_argument("--plain", required=True, help="a shared library with start-up code of the tool chain only")
    parser.add_argument("--objects", required=True, help="objects of the library, separated by semicolons")
    options = parser.parse_args()
    options.objects = [path for path in options.objects.split(";") if path.endswith(".o")]
    faults = []
    check_library(options, faults)
    check_objects(options, faults)
    for fault in faults:
        print("FAULT", fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
