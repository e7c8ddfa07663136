#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Each file of the repository that can carry a comment names its licence in one of its first lines."""
import argparse
import fnmatch
import pathlib
import subprocess
import sys

TAG = "SPDX-License-Identifier: Apache-2.0"
# No place for a comment, or text to be read as it is: the licence of the whole (LICENSE) holds.
EXEMPT = ["LICENSE", "*.md", "*.json", "*.safetensors", "*.svg", "Cargo.lock", "packaging/debian/source/format",
          "packaging/debian/changelog", "packaging/debian/copyright", "packaging/debian/lla-doc.doc-base",
          "packaging/debian/*.install", "packaging/debian/*.examples", "tests/abi/interface.txt", "tests/data/states/*.bin", "tests/fuzz/corpus/*"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", required=True)
    root = pathlib.Path(parser.parse_args().root)
    listed = subprocess.run(["git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard"], check=True,
                            capture_output=True, text=True).stdout
    checked = 0
    faults = []
    for name in sorted(set(listed.split("\0")) - {""}):
        file = root / name
        if not file.is_file() or any(fnmatch.fnmatch(name, p) or fnmatch.fnmatch(file.name, p) for p in EXEMPT):
            continue
        checked += 1
        with open(file, encoding="utf-8", errors="replace") as text:
            if TAG not in "".join(text.readlines(400)[:5]):
                faults.append(f"{name}: no line '{TAG}' in its first five lines")
    print(f"{checked} files, {len(faults)} faults")
    for fault in faults:
        print("FAULT", fault)
    return 1 if faults or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
