#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The plugin for NVIDIA GPUs exports its one function and nothing else, and loads where there is no driver and no toolkit: it
needs the libraries of the C and C++ run-time alone. Its own objects refer to nothing that throws, exits, aborts, prints or
allocates, and run nothing at load time, but for what nvcc puts into each of them; the rest of what the plugin refers to comes with
NVIDIA's run-time library, which is linked into it, and is listed here."""
import argparse
import re
import sys

from forbidden import ALLOCATION, output, section_sizes, undefined, why_forbidden

EXPORTED = {"lla_plugin_query"}
NEEDED = re.compile(r"lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)\.so\.\d+|ld-linux[\w-]*\.so\.\d+")
# nvcc has each object hand its kernels to the run-time library at load time, and take them back at the end.
OF_NVCC, REGISTERS = {"atexit"}, "__cudaRegisterFatBinary"
# libcudart_static.a, as of CUDA 13.0: exchanges handles of memory and events with other processes, keeps a cache in files, and reads
# and sets its variables of the environment. Nothing of it ends the process or throws.
OF_RUNTIME = {"__cxa_atexit": "ends its threads", "setenv": "its variables", "fopen": "facts about the system", "fdopen": "cache",
              "fwrite": "cache", "write": "pipes between processes", "sendmsg": "handles between processes",
              "kill": "is another process alive", "pthread_kill": "is a thread alive"}


def check_objects(options, faults):
    references = registering = 0
    for path in options.objects:
        symbols = undefined(options.nm, path)
        references += len(symbols)
        registers = REGISTERS in symbols
        registering += registers
        for symbol in symbols:
            if why_forbidden(symbol) and not (registers and symbol in OF_NVCC):
                faults.append(f"{path}: refers to {symbol}, which {why_forbidden(symbol)}")
            if ALLOCATION.fullmatch(symbol):
                faults.append(f"{path}: refers to {symbol}, not to the context's allocator")
        # A constructor of ours would be a second entry, a destructor with it.
        sizes = section_sizes(options.readelf, path)
        if sizes.get(".init_array", 0) > (8 if registers else 0) or sizes.keys() & {".fini_array", ".ctors", ".dtors"}:
            faults.append(f"{path}: runs code of its own at load time or at the exit")
    print(f"{len(options.objects)} objects, {references} references, {registering} with kernels")
    if not references or not registering:
        faults.append("no object was checked")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nm", default="nm")
    parser.add_argument("--readelf", default="readelf")
    parser.add_argument("--library", required=True)
    parser.add_argument("--objects", required=True, nargs="+", help="objects of the plugin, separated by spaces or semicolons")
    options = parser.parse_args()
    options.objects = [path for word in options.objects for path in word.split(";") if path.endswith(".o")]

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
    faults += [f"the plugin refers to {symbol}, which {why_forbidden(symbol)}"
               for symbol in undefined(options.nm, options.library, "-D") if why_forbidden(symbol) and symbol not in OF_RUNTIME]
    print(f"{len(exported)} exported, {len(needed)} needed: {', '.join(needed)}")
    check_objects(options, faults)
    for fault in faults:
        print("FAULT", fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
