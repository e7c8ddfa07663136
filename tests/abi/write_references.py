#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes a C program that refers to every listed function (capi/lla.map), so that compiling it proves that each one is declared,
and linking it that it exists."""
import argparse
import sys

from public_interface import map_functions


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--map", required=True)
    parser.add_argument("--output", required=True)
    options = parser.parse_args()
    names = [name for node in map_functions(options.map).values() for name in node]
    if not names:
        print("no function is listed")
        return 1
    lines = ["/* Written by write_references.py. */", "#include <lla/lla.h>", "#include <stdio.h>", "",
             "typedef void (*function)(void);", "static const struct {", "  const char *name;", "  function address;",
             "} functions[] = {"]
    lines += [f'  {{"{name}", (function){name}}},' for name in names]
    lines += ["};", "", "int main(void) {", "  size_t i, missing = 0;",
              "  for (i = 0; i < sizeof functions / sizeof functions[0]; ++i) {",
              "    if (!functions[i].address) {", '      printf("%s is missing\\n", functions[i].name);', "      ++missing;",
              "    }", "  }", f'  printf("%d functions\\n", (int)i);',
              f"  return missing || i != {len(names)} ? 1 : 0;", "}", ""]
    with open(options.output, "w", encoding="utf-8") as file:
        file.write("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
