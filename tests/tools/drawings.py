#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the figures of docs/guide.md: buckets, the state of a sequence, the carry. Levels, nodes and carries are computed, not
placed by hand.

    drawings.py --figures docs/figures             writes them
    drawings.py --figures docs/figures --check     they are there, as this program draws them, and the guide shows each"""
import argparse
import itertools
import pathlib
import sys
from xml.sax.saxutils import escape

WIDTH = 760
INK, PALE, READ, WRITE = "#222", "#667", "#1b6ac9", "#b3261e"
LEVELS = ["#ffc98a", "#ffe28f", "#c9e7bd", "#bfe3ee", "#cdd5f6"]  # light enough for dark text
NODE, TAIL, EMPTY = "#cdd5f6", "#ffe28f", "#f3f4f6"
SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


class Drawing:
    """Elements on white, and where its words stand."""

    def __init__(self, title):
        self.elements, self.words, self.title = [], [], title
        self.text(WIDTH / 2, 24, title, size=15, bold=True)

    def text(self, x, y, words, anchor="middle", size=12, colour=INK, bold=False):
        wide = 0.6 * size * len(words)  # more than what a sans-serif font takes on the average
        left = x - {"start": 0, "middle": wide / 2, "end": wide}[anchor]
        self.words.append((left, y - 0.8 * size, left + wide, y + 0.25 * size, words))
        extra = (f' font-size="{size}"' if size != 12 else "") + (' font-weight="bold"' if bold else "")
        extra += f' fill="{colour}"' if colour != INK else ""
        self.elements.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{extra}>{escape(words)}</text>')

    def box(self, x, y, wide, high, fill, words="", stroke="#556", dashed=False, **style):
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.elements.append(f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" fill="{fill}" stroke="{stroke}"{dash}/>')
        if words:
            self.text(x + wide / 2, y + high / 2 + 4, words, **style)

    def label(self, x, y, words, colour):
        """Words upon a line."""
        self.elements.append(f'<rect x="{x - 13:g}" y="{y - 12:g}" width="26" height="16" fill="#fff"/>')
        self.text(x, y, words, size=11, colour=colour)

    def line(self, *points, colour=INK, arrow=True, dashed=False):
        way = " ".join(f"{x:g},{y:g}" for x, y in points)
        extra = ' stroke-dasharray="5 3"' if dashed else ""
        self.elements.append(f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="1.5"{extra}/>')
        if arrow:
            (ax, ay), (x, y) = points[-2:]
            length = ((x - ax) ** 2 + (y - ay) ** 2) ** 0.5
            dx, dy = 7 * (x - ax) / length, 7 * (y - ay) / length
            head = f"{x:g},{y:g} {x - dx - dy / 2:.1f},{y - dy + dx / 2:.1f} {x - dx + dy / 2:.1f},{y - dy - dx / 2:.1f}"
            self.elements.append(f'<polygon points="{head}" fill="{colour}"/>')

    def svg(self, height):
        for left, top, right, bottom, words in self.words:
            if left < 0 or right > WIDTH or top < 0 or bottom > height:
                sys.exit(f"'{words}' runs over the edge")
        for a, b in itertools.combinations(self.words, 2):
            if a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]:
                sys.exit(f"'{a[4]}' runs into '{b[4]}'")
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            f'font-family="sans-serif" font-size="12" fill="{INK}">', f"<title>{escape(self.title)}</title>",
            f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>', *self.elements, "</svg>", ""])


def level(t, s):
    return (t ^ s).bit_length()


def buckets(t, first=0):
    """[(level, first key, number of keys)] that a query at t sees from key `first` on, the oldest first."""
    return [(of, members[0], len(members))
            for of, members in ((of, list(keys)) for of, keys in itertools.groupby(range(first, t + 1), lambda s: level(t, s)))]


def nodes(chunks):
    """[(b, first chunk)] of the nodes after so many chunks, the oldest first."""
    found, start = [], 0
    for b in reversed(range(chunks.bit_length())):
        if chunks >> b & 1:
            found.append((b, start))
            start += 1 << b
    return found


def plural(number, noun):
    return f"{number} {noun}" + ("s" if number != 1 else "")


def draw_buckets():
    t, cell, left = 11, 40, 92
    d = Drawing(f"What a query at t = {t} (binary {t:b}) sees")
    for s in range(t + 1):
        d.text(left + cell * (s + 0.5), 54, str(s), colour=PALE)
    d.text(left - 10, 54, "key s", "end", colour=PALE)
    d.text(left - 10, 80, "bucket", "end")
    d.text(left - 10, 106, "read with", "end")
    d.text(left - 10, 124, "from", "end")
    for of, s, count in buckets(t):
        x, wide = left + cell * s, cell * count
        d.box(x, 62, wide, 28, LEVELS[of], f"level {of}" if wide > 60 else str(of), bold=True)
        d.text(x + wide / 2, 106, f"λ[{of}]")
        source = f"bit {of - 1}" if of else "itself"
        power = f" of t: 2{str(of - 1).translate(SUPERSCRIPTS)} = {plural(count, 'key')}"
        d.text(x + wide / 2, 124, source + (power if wide > 200 else ""), size=11, colour=PALE)
    d.text(WIDTH / 2, 162, "The same for every query: a row is a query, a column a key, the number is the level", bold=True)
    top, high, count = 192, 18, 16
    d.text(left - 10, top - 8, "t", "end", colour=PALE)
    for s in range(count):
        d.text(left + cell * (s + 0.5), top - 8, str(s), size=11, colour=PALE)
    for row in range(count):
        y = top + high * row
        d.text(left - 46, y + 13, f"{row:04b}", "end", size=11, colour=PALE)
        d.text(left - 10, y + 13, str(row), "end", size=11, bold=row == t)
        for of, s, keys in buckets(row):
            d.box(left + cell * s, y + 1, cell * keys, high - 2, LEVELS[of], str(of), size=11)
    d.elements.append(f'<rect x="{left - 3}" y="{top + high * t - 2}" width="{cell * (t + 1) + 6}" height="{high + 4}" '
                      f'fill="none" stroke="{INK}" stroke-width="2"/>')
    d.text(left, top + high * count + 22, "A bucket for each set bit of t, and the query itself. Buckets merge from row to row; none is split.",
           "start", size=11, colour=PALE)
    return d.svg(top + high * count + 36)


def draw_state():
    n, grain = 203, 64
    whole, rest = divmod(n, grain)
    d = Drawing(f"A sequence of n = {n} rows, grain C = {grain}: {n} = {whole} · {grain} + {rest}, {whole} = binary {whole:b}")
    left, top, high, chunk, cell = 24, 82, 46, 112, 28
    end = left + chunk * whole  # of the nodes
    out = 212  # top of the output
    for b, first in nodes(whole):
        x, wide = left + chunk * first, chunk << b
        column = level(n, first * grain)
        assert column == b + grain.bit_length()  # λ[b + log2 C + 1]
        d.text(x + wide / 2, top - 10, f"rows {first * grain} to {(first + (1 << b)) * grain - 1}", size=11, colour=PALE)
        d.box(x, top, wide, high, NODE)
        d.text(x + wide / 2, top + 20, f"node {b}", bold=True)
        d.text(x + wide / 2, top + 37, "dk × dv per head", size=11)
        d.line((x + wide / 2, top + high), (x + wide / 2, out), colour=READ)
        d.label(x + wide / 2, 176, f"λ[{column}]", READ)
    d.text(end + cell * rest / 2, top - 25, f"tail: rows {whole * grain} to {n - 1}", size=11, colour=PALE)
    d.text(end + cell * rest / 2, top - 10, "raw k, v, gate, write strength", size=11, colour=PALE)
    for row in range(rest):
        d.box(end + cell * row, top, cell, high, TAIL)
    d.box(end + cell * rest, top, cell, high, "#fff", stroke=WRITE, dashed=True)
    for of, s, count in buckets(n, whole * grain):
        x, wide = end + cell * (s - whole * grain), cell * count
        d.line((x + 3, top + high + 6), (x + 3, top + high + 12), (x + wide - 3, top + high + 12), (x + wide - 3, top + high + 6),
               colour=READ, arrow=False)
        d.line((x + wide / 2, top + high + 12), (x + wide / 2, out), colour=READ)
        d.label(x + wide / 2, 176, f"λ[{of}]", READ)
    d.box(left, out, end + cell * (rest + 1) - left, 34, EMPTY,
          f"output of row {n}: the sum of what is read, with λ by level in front", bold=True)
    x = end + cell * (rest + 0.5)
    d.text(x, 52, f"row {n}", size=11, colour=WRITE)
    d.line((x, 57), (x, top), colour=WRITE, dashed=True)
    y = out + 62
    d.line((left, y), (left + 34, y), colour=READ)
    d.text(left + 44, y + 4, f"read: {plural(len(nodes(whole)), 'node')} and {rest} raw rows of the tail, and the row itself", "start")
    d.line((left, y + 22), (left + 34, y + 22), colour=WRITE, dashed=True)
    d.text(left + 44, y + 26, "written: the raw row, behind the tail, and the output. Then lla_state_commit() moves n on", "start")
    d.text(left + 44, y + 48, f"Nodes are not written: only each {grain}th row, which fills the tail, makes a new one (the carry).", "start")
    return d.svg(y + 62)


def draw_carry():
    before = 3
    d = Drawing(f"{before} chunks are full, and the tail fills up: {before} + 1 = {before + 1}, binary {before:03b} + 1 = {before + 1:b}")
    columns, tail = {2: 182, 1: 348, 0: 514}, 680  # middle of each bit's column, and of the tail
    above, carry, below, high, wide = 62, 132, 164, 32, 130
    d.text(106, above + 20, "before", "end")
    d.text(106, carry + 4, "carry", "end", colour=PALE)
    d.text(106, below + 20, "after", "end")
    d.line((tail, above + high), (tail, carry), (columns[before.bit_length()], carry), (columns[before.bit_length()], below))
    d.box(tail - wide / 2, above, wide, high, TAIL, f"tail: chunk {before}", bold=True)
    d.box(tail - wide / 2, below, wide, high, "#fff", "empty", stroke="#99a", dashed=True, colour=PALE)
    d.text(tail, 50, "C raw rows", size=11, colour=PALE)
    for b, x in columns.items():
        d.text(x, 50, f"bit {b}: {plural(1 << b, 'chunk')}", size=11, colour=PALE)
        for y, bits, word in ((above, before, f"node {b}"), (below, before + 1, f"node {b}, a new block")):
            if bits >> b & 1:
                d.box(x - wide / 2, y, wide, high, NODE, word, bold=True, size=11)
            else:
                d.box(x - wide / 2, y, wide, high, "#fff", "free" if y == below else "", stroke="#99a", dashed=True, colour=PALE)
        if before >> b & 1:
            d.line((x, above + high), (x, carry - 10))
            d.elements.append(f'<circle cx="{x}" cy="{carry}" r="10" fill="#fff" stroke="{INK}" stroke-width="1.5"/>')
            d.text(x, carry + 4.5, "+", size=14, bold=True)
            d.text(x - 83, carry - 6, plural(2 << b, "chunk"), size=11, colour=PALE)
    d.text((tail + columns[0]) / 2, carry - 6, "1 chunk", size=11, colour=PALE)
    top, left, cell, step, count = 270, 150, 44, 26, 8
    d.text(WIDTH / 2, top - 34, "Counting goes on like that", bold=True)
    d.text(96, top - 10, "full chunks", "end", size=11, colour=PALE)
    d.text(left + cell * count / 2, top - 10, "nodes over the chunks, the oldest first", size=11, colour=PALE)
    d.text(left + cell * count + 20, top - 10, "merged, and then free", "start", size=11, colour=PALE)
    for chunks in range(1, count + 1):
        y = top + step * (chunks - 1)
        d.text(40, y + 16, str(chunks), "end", bold=chunks == before + 1)
        d.text(96, y + 16, f"{chunks:04b}", "end", colour=PALE)
        for b, first in nodes(chunks):
            d.box(left + cell * first, y, cell << b, step - 4, NODE, f"node {b}" if b else "0", size=11)
        old, new = set(nodes(chunks - 1)), set(nodes(chunks))
        gone = [b for b, _ in sorted(old - new)]
        assert gone == list(range(len(gone))) and len(gone) == ((chunks - 1) ^ chunks).bit_length() - 1
        d.text(left + cell * count + 20, y + 16, " and ".join([", ".join(f"node {b}" for b in gone[:-1])] * (len(gone) > 1) +
                                                             [f"node {b}" for b in gone[-1:]]) or "none", "start", size=11,
               colour=INK if gone else PALE)
    return d.svg(top + step * count + 10)


DRAWINGS = {"buckets.svg": draw_buckets, "state.svg": draw_state, "carry.svg": draw_carry}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figures", required=True, type=pathlib.Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    faults = []
    for name, draw in DRAWINGS.items():
        file = options.figures / name
        if not options.check:
            file.write_text(draw(), encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != draw():
            faults.append(f"{file} is not what drawings.py draws")
        elif f"](figures/{name})" not in (options.figures.parent / "guide.md").read_text(encoding="utf-8"):
            faults.append(f"docs/guide.md does not show {name}")
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
