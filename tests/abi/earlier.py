#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Programs that were compiled with the headers of earlier revisions run with this library: the example programs of those
revisions, which prove themselves. They are taken from the clone's history; exit code 77 if it is not there.

The oldest revision is where the interface is promised from; before it structs were still shorter. Each one at which the
interface has grown may be added, none removed before the soname changes."""
import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

REVISIONS = {"6159c8f524": "the first whole interface", "528132f466": "plans on the device, inner types of cells"}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", required=True)
    parser.add_argument("--cc", default="cc")
    parser.add_argument("--library", required=True, help="liblla.so.0")
    options = parser.parse_args()
    library = pathlib.Path(options.library).resolve()
    ran, faults = 0, []
    for revision, what in REVISIONS.items():
        archive = subprocess.run(["git", "-C", options.root, "archive", revision, "include", "examples/c"], capture_output=True)
        if archive.returncode:
            print(f"skipped: revision {revision} is not in this clone")
            return 77
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["tar", "-xf", "-", "-C", folder], input=archive.stdout, check=True)
            os.symlink(library, f"{folder}/liblla.so.0")
            for source in sorted(pathlib.Path(folder, "examples/c").glob("*.c")):
                compiled = subprocess.run([options.cc, "-std=c99", f"-I{folder}/include", str(source), "-o", f"{folder}/program",
                                           f"{folder}/liblla.so.0", "-lpthread", "-lm"], capture_output=True, text=True)
                result = compiled if compiled.returncode else subprocess.run(
                    [f"{folder}/program"], cwd=folder, env={**os.environ, "LD_LIBRARY_PATH": folder},
                    capture_output=True, text=True)
                ran += 1
                if result.returncode:
                    faults.append(f"{revision} ({what}), {source.stem}: {result.stderr.strip() or result.returncode}")
    print(f"{ran} programs of {len(REVISIONS)} revisions, {len(faults)} faults")
    for fault in faults:
        print("FAULT", fault)
    return 1 if faults or ran < 2 * len(REVISIONS) else 0


if __name__ == "__main__":
    sys.exit(main())
