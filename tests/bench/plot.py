#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws named lines over logarithmic axes as an SVG file, for the figures of docs/benchmarks.md.

Input (JSON): {"x": [...], "lines": {"name": [...]}}, null where a line has no value. Needs no package."""
import argparse
import json
import math
import sys
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 40, 52
# Told apart also without colours: each line has its own dash and marker.
COLOURS = ["#1b6ac9", "#d1495b", "#2e8b57", "#b8860b", "#7a4fb5", "#4f5d75", "#c2579b", "#0e7c86"]
DASHES = ["", "7 3", "2 3", "9 3 2 3", "4 2", "1 2", "12 4", "6 2 2 2"]
MARKERS = ["circle", "square", "triangle", "diamond"]
LINE_HEIGHT = 18


def parse_arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("input", help="JSON file: x and lines")
    parser.add_argument("--title", default="")
    parser.add_argument("--x-label", default="")
    parser.add_argument("--y-label", default="")
    parser.add_argument("--out", required=True, metavar="FILE.svg")
    return parser.parse_args(argv)


def read_figure(path):
    """x values and [(name, [(x, y), ...]), ...]; raises ValueError for what cannot be drawn."""
    with open(path, encoding="utf-8") as file:
        data = json.load(file)
    x, lines = data["x"], []
    for name, values in data["lines"].items():
        if len(values) != len(x):
            raise ValueError(f"line '{name}' has {len(values)} values for {len(x)} of x")
        points = [(a, b) for a, b in zip(x, values) if b is not None]
        if any(a <= 0 or b <= 0 for a, b in points):
            raise ValueError(f"line '{name}' has a value that is not positive")
        if points:
            lines.append((name, points))
    if not lines:
        raise ValueError("there is nothing to draw")
    return x, lines


def compact(value):
    """A number as a label: 16384 -> 16 Ki, 0.05 -> 0.05."""
    if value >= 1024 and value == int(value) and int(value) % 1024 == 0:
        return f"{int(value) // 1024} Ki" if value < 1 << 20 else f"{value / (1 << 20):g} Mi"
    return f"{value:g}"


def decade_ticks(low, high):
    """1, 2, 5 times powers of ten within the range; fewer or more if those would be too many or too few."""
    ticks = []
    for exponent in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        ticks += [m * 10.0**exponent for m in (1, 2, 5)]
    ticks = [t for t in ticks if low * 0.999 <= t <= high * 1.001]
    if len(ticks) > 12:
        return [t for t in ticks if f"{t:e}".startswith("1.0")]
    if len(ticks) < 3:  # a narrow range: equal steps
        step = 10.0 ** math.floor(math.log10(high - low))
        return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return ticks


class Axis:
    """A logarithmic scale from values to pixels."""

    def __init__(self, low, high, start, end):
        self.low, self.high = low, high
        self.start, self.end = start, end

    def at(self, value):
        if self.high == self.low:
            return (self.start + self.end) / 2
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)


def marker(shape, x, y, colour):
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.4" fill="{colour}"/>'
    offsets = {
        "square": [(-3, -3), (3, -3), (3, 3), (-3, 3)],
        "triangle": [(0, -4.2), (4, 3.2), (-4, 3.2)],
        "diamond": [(0, -4.4), (4.4, 0), (0, 4.4), (-4.4, 0)],
    }[shape]
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in offsets)
    return f'<polygon points="{points}" fill="{colour}"/>'


def text(x, y, words, anchor="middle", extra=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(words)}</text>'


def draw(x_values, lines, title, x_label, y_label):
    values = [y for _, points in lines for _, y in points]
    low, high = min(values), max(values)
    low, high = low / 1.25, high * 1.25
    legend = LINE_HEIGHT * len(lines)
    height = HEIGHT + legend
    across = Axis(min(x_values), max(x_values), LEFT + 16, WIDTH - RIGHT - 16)
    up = Axis(low, high, HEIGHT - BOTTOM, TOP)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12" fill="#222">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        text(WIDTH / 2, 22, title, extra=' font-size="15" font-weight="bold"'),
    ]
    for tick in decade_ticks(low, high):
        y = up.at(tick)
        out.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        out.append(text(LEFT - 6, y + 4, f"{tick:g}", "end"))
    for value in x_values:
        x = across.at(value)
        out.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#eee"/>')
        out.append(text(x, HEIGHT - BOTTOM + 17, compact(value)))
    out.append(f'<rect x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" height="{HEIGHT - TOP - BOTTOM}" '
               'fill="none" stroke="#666"/>')
    out.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM + 38, x_label))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    out.append(text(18, middle, y_label, extra=f' transform="rotate(-90 18 {middle:.1f})"'))
    for number, (name, points) in enumerate(lines):
        colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
        shape = MARKERS[number % len(MARKERS)]
        stroke = f'fill="none" stroke="{colour}" stroke-width="2"' + (f' stroke-dasharray="{dash}"' if dash else "")
        path = " ".join(f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in points)
        out.append(f'<polyline points="{path}" {stroke}/>')
        out += [marker(shape, across.at(x), up.at(y), colour) for x, y in points]
        y = HEIGHT + LINE_HEIGHT * number
        out.append(f'<line x1="{LEFT}" y1="{y}" x2="{LEFT + 44}" y2="{y}" {stroke}/>')
        out.append(marker(shape, LEFT + 22, y, colour))
        out.append(text(LEFT + 54, y + 4, name, "start"))
    out.append("</svg>")
    return "\n".join(out) + "\n"


def main(argv):
    arguments = parse_arguments(argv)
    try:
        x_values, lines = read_figure(arguments.input)
    except (ValueError, KeyError, OSError) as problem:
        print(f"plot.py: {arguments.input}: {problem}", file=sys.stderr)
        return 1
    with open(arguments.out, "w", encoding="utf-8") as file:
        file.write(draw(x_values, lines, arguments.title, arguments.x_label, arguments.y_label))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
