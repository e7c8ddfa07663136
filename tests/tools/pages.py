#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The guides hold nothing that Doxygen reads otherwise than other Markdown readers do; with --html, the pages that it made of
them show no markup as text."""
import argparse
import html
import pathlib
import re
import sys

FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.M | re.S)
# What is markup and must not be left in the text of a page: of the pages, also in code; of the sources.
OF_PAGES = [r"\\ilinebr", r"</?t[drh]\b", r"markdownTable"]
OF_SOURCES = [r"[\\@](ref|page|brief|param|return|file|cond|snippet|include)\b", r"\{#\w", r"\]\(\w+\.md"]


def sources(root):
    return [path for pattern in ("*.md", "docs/*.md") for path in sorted(root.glob(pattern))]


def check_source(path):
    # Text between ` and ' is a quotation to Doxygen; the next ` then begins a code span where one was to end.
    text = FENCE.sub(lambda m: "\n" * m[0].count("\n"), path.read_text(encoding="utf-8"))
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("    "):
            continue
        for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", line):
            if "'" in span:
                yield f"{path.name}:{number}: an apostrophe in `{span}`"
            if r"\|" in span:
                yield f"{path.name}:{number}: the backslash before the bar in `{span}` will be seen"


def check_page(path):
    whole = path.read_text(encoding="utf-8")
    whole = re.sub(r"<(script|style|pre)\b.*?</\1>|<div class=\"line\">.*?</div>", "", whole, flags=re.S)
    prose = re.sub(r"<code>.*?</code>", "", whole, flags=re.S)
    for text, patterns in ((whole, OF_PAGES), (prose, OF_SOURCES)):
        text = html.unescape(re.sub(r"<[^>]*>", "", text))
        for pattern in patterns:
            for match in re.finditer(pattern, text):
                yield f"{path.name}: {' '.join(text[max(0, match.start() - 30):match.end() + 30].split())}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", required=True)
    parser.add_argument("--html", help="folder of the pages")
    options = parser.parse_args()
    guides = sources(pathlib.Path(options.root))
    faults = [fault for path in guides for fault in check_source(path)]
    pages = []
    if options.html:
        pages = [path for path in sorted(pathlib.Path(options.html).glob("*.html")) if not path.name.endswith("_source.html")]
        faults += [fault for path in pages for fault in check_page(path)]
    print(f"{len(guides)} guides, {len(pages)} pages, {len(faults)} faults")
    for fault in faults:
        print("FAULT", fault)
    return 1 if faults or not guides or (options.html and not pages) else 0


if __name__ == "__main__":
    sys.exit(main())
