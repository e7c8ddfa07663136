#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Each probe of tests/probes.md has tests that are there and name it, or a reason in the second table, and no test names a
probe that is not listed."""
import argparse
import pathlib
import re
import sys

NAMED = re.compile(r"\bProbes? ((?:[A-Z]\d+(?:, )?)+)")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", required=True, type=pathlib.Path)
    tests = parser.parse_args().root / "tests"
    faults = []
    listed = {}  # probe: files whose tests show it
    reasons = 0
    shown = True  # in the table of those that tests show
    for line in (tests / "probes.md").read_text(encoding="utf-8").splitlines():
        shown = shown and not line.endswith("| why no test here shows it |")
        row = re.fullmatch(r"\| ([A-Z]\d+) \| (.+) \| (.+) \| (.+) \|", line)
        if not row:
            continue
        probe, cited = row[1], re.findall(r"`([^`]+)` (\w+)", row[4])
        if probe in listed:
            faults.append(f"{probe} is listed twice")
        listed[probe] = {file for file, _ in cited}
        reasons += not shown
        if shown != bool(cited):
            faults.append(f"{probe} has no test" if shown else f"{probe} has a test, and a reason for having none")
        for file, name in cited:
            text = (tests / file).read_text(encoding="utf-8") if (tests / file).is_file() else ""
            # Either the test's own name begins with the probe's, or the comment above it names the probe.
            places = [m.start() for m in re.finditer(rf"\b{name}\b", text)]
            above = [text[:at].rstrip().rsplit("\n", 12)[-12:] for at in places]
            if not places:
                faults.append(f"{probe}: tests/{file} has no {name}")
            elif not name.startswith(f"{probe}_") and not any(
                    re.search(rf"\bProbes? [^.]*\b{probe}\b", "\n".join(lines)) for lines in above):
                faults.append(f"{probe}: {name} in tests/{file} does not name it")
    if not listed:
        faults.append("tests/probes.md lists nothing")
    for path in sorted(tests.rglob("*")):
        if path.suffix not in (".c", ".cpp", ".h", ".cmake", ".py", "") or not path.is_file() or path.name == "probes.py":
            continue
        file = path.relative_to(tests).as_posix()
        for names in NAMED.findall(path.read_text(encoding="utf-8", errors="replace")):
            for probe in re.findall(r"[A-Z]\d+", names):
                if file not in listed.get(probe, ()):
                    faults.append(f"tests/{file} names {probe}, which tests/probes.md does not cite from there")
    for fault in faults:
        print(fault, file=sys.stderr)
    print(f"{len(listed)} probes, {reasons} of them with a reason for having no test")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
