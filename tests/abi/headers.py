#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compiles each public header alone, included twice, in every supported dialect of C and C++, with pedantic warnings; the one for
C++ with and without exceptions and run-time type information."""
import argparse
import pathlib
import subprocess
import sys

C_DIALECTS = ["c99", "c11", "c17", "c2x"]
CXX_DIALECTS = ["c++11", "c++14", "c++17", "c++20", "c++2b"]
HPP_DIALECTS = ["c++17", "c++20", "c++2b"]
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-pedantic-errors", "-Werror", "-Wundef", "-Wshadow", "-Wconversion"]
C_WARNINGS = ["-Wstrict-prototypes", "-Wc++-compat"]
CXX_WARNINGS = ["-Wold-style-cast"]


def compiles(command, text):
    result = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        print(" ".join(command))
        print(result.stderr)
    return result.returncode == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cc", required=True)
    parser.add_argument("--cxx", required=True)
    parser.add_argument("--include", required=True, help="folder that holds lla/")
    options = parser.parse_args()
    checked = failed = 0
    for header in sorted((pathlib.Path(options.include) / "lla").glob("*.h")):
        text = f"#include <lla/{header.name}>\n" * 2
        for defines in ([], ["-DLLA_STATIC"]):
            common = WARNINGS + defines + ["-fsyntax-only", f"-I{options.include}"]
            for dialect in C_DIALECTS:
                checked += 1
                source = text + "int main(void) { return 0; }\n"
                failed += not compiles([options.cc, f"-std={dialect}", *common, *C_WARNINGS, "-xc", "-"], source)
            for dialect in CXX_DIALECTS:
                checked += 1
                source = text + "int main() { return 0; }\n"
                failed += not compiles([options.cxx, f"-std={dialect}", *common, *CXX_WARNINGS, "-xc++", "-"], source)
    hpp = sorted((pathlib.Path(options.include) / "lla").glob("*.hpp"))
    for header in hpp:
        source = f"#include <lla/{header.name}>\n" * 2 + "int main() { return 0; }\n"
        for flags in ([], ["-fno-exceptions", "-fno-rtti"], ["-DLLA_STATIC"]):
            for dialect in HPP_DIALECTS:
                checked += 1
                failed += not compiles([options.cxx, f"-std={dialect}", *WARNINGS, *CXX_WARNINGS, *flags, "-fsyntax-only",
                                        f"-I{options.include}", "-xc++", "-"], source)
    print(f"{checked} compilations, {failed} failed")
    return 1 if failed or not checked or not hpp else 0


if __name__ == "__main__":
    sys.exit(main())
