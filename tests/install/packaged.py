#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds the lists of the Debian packages and of the RPM spec against an installed tree: every file belongs to one package (or is
named among those that belong to none), and every entry of a list stands for a file.    usage: packaged.py PREFIX"""
import fnmatch
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def lines(path):
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]


def debian():
    """Pattern of each entry, where the packages' rules install: usr/lib/TRIPLET, usr/share/doc/liblla-dev."""
    for path in sorted((ROOT / "packaging/debian").glob("*.install")) + [ROOT / "packaging/debian/not-installed"]:
        for line in lines(path):
            entry = line.split()[0]
            if entry.startswith("usr/"):
                yield path.name, entry.removeprefix("usr/").replace("lib/*/", "lib/").replace("doc/liblla-dev", "doc/lla")


def rpm():
    """Pattern of each entry under a %files, and of each file that the spec removes."""
    macros = {"%{_libdir}": "lib", "%{_includedir}": "include", "%{_bindir}": "bin", "%{_mandir}": "share/man",
              "%{_datadir}": "share", "%{name}": "lla", "%{buildroot}": ""}
    for line in lines(ROOT / "packaging/rpm/lla.spec"):
        entry = line.removeprefix("rm ") if line.startswith("rm %{buildroot}") else line
        if re.match(r"%\{(buildroot|_[a-z]+dir)\}", entry):
            for macro, value in macros.items():
                entry = entry.replace(macro, value)
            yield "lla.spec", entry


def check(recipe, entries, files):
    covers = {entry: [f for f in files if fnmatch.fnmatchcase(f, entry[1]) or f.startswith(entry[1].rstrip("/") + "/")]
              for entry in entries}
    assert len(covers) > 8, f"{recipe}: its entries are not found"
    # The reference pages and the plugin are not in every installed tree.
    optional = ("share/doc/lla/html", "lib/lla/")
    wrong = [f"{name}: {entry} is not installed" for (name, entry), found in covers.items()
             if not found and not entry.startswith(optional)]
    wrong += [f"{recipe}: {file} belongs to no package" for file in files if not any(file in found for found in covers.values())]
    return wrong, len(covers)


prefix = pathlib.Path(sys.argv[1])
files = sorted(str(path.relative_to(prefix)) for path in prefix.rglob("*") if not path.is_dir())
assert files, f"{prefix} is empty"
wrong, counts = [], []
static = "lib/liblla.a"  # which the spec does not build
assert "-DLLA_BUILD_STATIC=OFF" in (ROOT / "packaging/rpm/lla.spec").read_text()
for recipe, entries, without in (("Debian", debian(), []), ("RPM", rpm(), [static])):
    found, count = check(recipe, set(entries), [file for file in files if file not in without])
    wrong += found
    counts.append(f"{count} entries of {recipe}")
print(*wrong, sep="\n") if wrong else print(f"{len(files)} files, {', '.join(counts)}")
sys.exit(bool(wrong))
