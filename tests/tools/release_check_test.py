#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""packaging/release_check judges changes of the interface and the nodes of the version script as docs/abi.md has them."""
import argparse
import contextlib
import importlib.machinery
import importlib.util
import io
import pathlib
import subprocess
import sys
import tempfile
import unittest

PROGRAM = CHECK = None
HEADER = "/* lla_gone(void); */\nLLA_API lla_status lla_one(int32_t a,\n    const void *b);\n"
LAYOUT = "LLA_SIZE(lla_desc, 40);\nLLA_SIZE(lla_tensor, 64);\nLLA_AT(lla_desc, kind, 4);\nLLA_IS(LLA_OK, 0);\n"
MAP = "# Symbols.\nLLA_0.1 {\n  global:\n    lla_one;\n  local:\n    *;\n};\n"
NEXT = "LLA_0.2 {\n  global:\n    lla_two;\n} LLA_0.1;\n"
TWO = "LLA_API void lla_two(void);\n"


def load(program):
    loader = importlib.machinery.SourceFileLoader("release_check", program)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("release_check", loader))
    sys.dont_write_bytecode = True  # nothing is written into the source tree
    loader.exec_module(module)
    return module


def judged(version, header=HEADER, layout=LAYOUT, script=MAP, abi=0, old_version=(0, 1, 0)):
    """(faults, what was printed) of a change from the release above."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        faults = CHECK.compare(((old_version, 0), CHECK.interface([HEADER], LAYOUT, MAP)),
                               ((version, abi), CHECK.interface([header], layout, script)))
    return faults, said.getvalue()


class Comparison(unittest.TestCase):
    def fails(self, words, *arguments, **changes):
        faults, _ = judged(*arguments, **changes)
        self.assertEqual(len([fault for fault in faults if words in fault]), 1, faults)

    def passes(self, counts, *arguments, **changes):
        faults, said = judged(*arguments, **changes)
        self.assertEqual(faults, [])
        self.assertIn(counts, said)

    def test_no_change(self):
        same = HEADER.replace("a,\n    const", "a, const")  # how a line is broken is no change
        for version in ((0, 1, 0), (0, 1, 1), (0, 2, 0)):
            self.passes("0 added, 0 removed, 0 changed", version, same)
        self.fails("lower than the last", (0, 0, 9))

    def test_additions_raise_the_minor_version(self):
        self.passes("2 added, 0 removed, 0 changed", (0, 2, 0), HEADER + TWO, script=MAP + NEXT)
        self.fails("something new", (0, 1, 1), HEADER + TWO, script=MAP + NEXT)
        longer = LAYOUT.replace("desc, 40", "desc, 48") + "LLA_AT(lla_desc, more, 40);\n"
        self.passes("1 added, 0 removed, 1 changed", (0, 2, 0), layout=longer)
        self.fails("something new", (0, 1, 1), layout=longer)
        self.passes("1 added", (1, 1, 0), layout=longer, old_version=(1, 0, 0))

    def test_incompatible_changes(self):
        changes = [{"header": HEADER.replace("int32_t a", "int64_t a")}, {"layout": LAYOUT.replace("desc, 40", "desc, 32")},
                   {"layout": LAYOUT.replace("tensor, 64", "tensor, 72")}, {"layout": LAYOUT.replace("kind, 4", "kind, 8")},
                   {"layout": LAYOUT.replace("OK, 0", "OK, 1")}, {"layout": LAYOUT.replace("LLA_IS(LLA_OK, 0);", "")},
                   {"header": ""}]
        for change in changes:
            with self.subTest(change):
                self.fails("before 1.0 raises the minor", (0, 1, 1), **change)
                self.assertEqual(judged((0, 2, 0), **change)[0], [])
                for version, abi in (((1, 1, 0), 1), ((2, 0, 0), 0)):
                    self.fails("raises the major version", version, abi=abi, old_version=(1, 0, 0), **change)
                self.assertEqual(judged((2, 0, 0), abi=1, old_version=(1, 0, 0), **change)[0], [])

    def test_released_nodes_are_never_touched(self):
        for was, now in (("lla_one;", "lla_one; lla_two;"), ("lla_one;", ""), ("_0.1", "_0.2")):
            self.fails("released node", (0, 2, 0), script=MAP.replace(was, now))
        self.assertEqual(judged((1, 0, 0), script=MAP.replace("_0.1", "_1.0"), abi=1)[0], [])

    def test_version_script(self):
        third = NEXT.replace("LLA_0.1", "LLA_0.2").replace("LLA_0.2 {", "LLA_0.3 {")
        for script in (MAP, MAP + NEXT, MAP + NEXT + third):
            self.assertEqual(CHECK.map_faults(script, (0, 3, 0)), [])
        wrong = {"inherits from nothing, not from LLA_0.1": MAP + NEXT.replace("} LLA_0.1;", "};"),
                 "LLA_0.3 inherits from LLA_0.1, not from LLA_0.2": MAP + NEXT + third.replace("} LLA_0.2", "} LLA_0.1"),
                 "LLA_0.1 inherits from LLA_0.0": MAP.replace("};", "} LLA_0.0;"),
                 "newer than the version": MAP + NEXT.replace("LLA_0.2", "LLA_0.4"),
                 "misnamed": "",
                 "out of order": MAP + MAP.replace("};", "} LLA_0.1;")}
        for words, script in wrong.items():
            faults = CHECK.map_faults(script, (0, 3, 0))
            self.assertEqual(len(faults), 1, faults)
            self.assertIn(words, faults[0])


class Program(unittest.TestCase):
    """This tree against its own list, and against lists that differ from it."""

    def run_against(self, edit):
        listed = subprocess.run([sys.executable, PROGRAM, "--list"], check=True, capture_output=True, text=True).stdout
        with tempfile.TemporaryDirectory() as folder:
            last = pathlib.Path(folder, "last")
            last.write_text(edit(listed), encoding="utf-8")
            ran = subprocess.run([sys.executable, PROGRAM, "--against", last], check=False, capture_output=True, text=True)
        return ran.returncode, ran.stdout

    def test_no_change(self):
        code, said = self.run_against(lambda listed: listed)
        self.assertEqual(code, 0, said)
        self.assertIn("0 added, 0 removed, 0 changed", said)

    def test_additive_change(self):
        def without(listed):
            return "".join(line for line in listed.splitlines(keepends=True) if not line.startswith("LLA_IS(LLA_OK)"))
        code, said = self.run_against(without)
        self.assertEqual(code, 1, said)
        self.assertIn("1 added, 0 removed, 0 changed", said)
        self.assertIn("FAULT something new", said)

    def test_incompatible_change(self):
        code, said = self.run_against(lambda listed: listed.replace("LLA_IS(LLA_OK, 0)", "LLA_IS(LLA_OK, 7)"))
        self.assertEqual(code, 1, said)
        self.assertIn("0 added, 0 removed, 1 changed", said)
        self.assertIn("FAULT an incompatible change", said)


def main():
    global PROGRAM, CHECK
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", required=True)
    options, rest = parser.parse_known_args()
    PROGRAM, CHECK = options.program, load(options.program)
    unittest.main(argv=[sys.argv[0], *rest])


if __name__ == "__main__":
    main()
