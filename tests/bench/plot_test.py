#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""plot.py draws every value that it is given, refuses what it cannot draw, and draws the data of the documentation."""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree

SVG = "{http://www.w3.org/2000/svg}"
PROGRAM = FIGURES = None


class Plot(unittest.TestCase):
    def draw(self, figure):
        with tempfile.TemporaryDirectory() as folder:
            data, picture = pathlib.Path(folder, "in.json"), pathlib.Path(folder, "out.svg")
            data.write_text(json.dumps(figure), encoding="utf-8")
            ran = subprocess.run([sys.executable, PROGRAM, "--title", "T<1>", "--x-label", "x & y", "--y-label", "µs",
                                  "--out", picture, data], capture_output=True, text=True, check=False)
            return ran, ElementTree.parse(picture).getroot() if picture.exists() else None

    def points(self, root):
        return [line.get("points").split() for line in root.iter(SVG + "polyline")]

    def test_every_value_has_its_place(self):
        ran, root = self.draw({"x": [1024, 4096, 16384], "lines": {"a": [1, 10, 100], "b<": [7, None, 3]}})
        self.assertEqual(ran.returncode, 0, ran.stderr)
        a, b = ([tuple(map(float, p.split(","))) for p in line] for line in self.points(root))
        self.assertEqual((len(a), len(b)), (3, 2))
        # Logarithmic both ways: equal ratios are equal distances, and greater values stand higher.
        for axis in (0, 1):
            self.assertAlmostEqual(a[1][axis] - a[0][axis], a[2][axis] - a[1][axis], delta=0.2)
        self.assertGreater(a[0][1], a[2][1])
        self.assertEqual((b[0][0], b[1][0]), (a[0][0], a[2][0]))
        words = [t.text for t in root.iter(SVG + "text")]
        for word in ("T<1>", "x & y", "µs", "a", "b<", "1 Ki", "16 Ki"):
            self.assertIn(word, words)

    def test_narrow_and_single_ranges(self):
        for values in ([5.5, 5.6], [5.5, None]):
            ran, root = self.draw({"x": [1, 2], "lines": {"a": values}})
            self.assertEqual(ran.returncode, 0, ran.stderr)
            self.assertEqual(len(self.points(root)[0]), sum(v is not None for v in values))

    def test_refuses(self):
        for figure in ({"x": [1, 2], "lines": {"a": [1]}}, {"x": [1], "lines": {"a": [0]}}, {"x": [1], "lines": {}},
                       {"x": [1], "lines": {"a": [None]}}, {"lines": {}}):
            ran, root = self.draw(figure)
            self.assertEqual(ran.returncode, 1)
            self.assertTrue(ran.stderr.startswith("plot.py: "), ran.stderr)
            self.assertIsNone(root)

    def test_figures_of_the_documentation(self):
        data = sorted(pathlib.Path(FIGURES).glob("*.json"))
        self.assertTrue(data)
        for file in data:
            with self.subTest(file.stem):
                ran, root = self.draw(json.loads(file.read_text(encoding="utf-8")))
                self.assertEqual(ran.returncode, 0, ran.stderr)
                picture = ElementTree.parse(file.with_suffix(".svg")).getroot()
                self.assertEqual(self.points(picture), self.points(root))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", required=True)
    parser.add_argument("--figures", required=True)
    arguments, rest = parser.parse_known_args()
    PROGRAM, FIGURES = arguments.program, arguments.figures
    unittest.main(argv=sys.argv[:1] + rest)
