#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A manual page describes each option that the program's --help lists, in the same order, with the same default, and no other."""
import argparse
import re
import subprocess
import sys


def helps(program):
    """The text of --help of the program, or of each of its commands, by name of the command."""
    def run(*words):
        return subprocess.run([program, *words, "--help"], check=True, capture_output=True, text=True).stdout
    commands = re.search(r"^commands:\n((?:  .*\n)+)", run(), flags=re.M)
    if not commands:
        return {"": run()}
    return {name: run(name) for name in re.findall(r"^  (\w+)", commands[1], flags=re.M)}


def options_in_help(text):
    """(option, value name, default) of each line of a help text."""
    found = []
    for name, value, rest in re.findall(r"^  (--[\w-]+)(?: ([A-Z][\w,.]*))?(.*)$", text, flags=re.M):
        default = re.search(r"\(default ([^\s)]+)\)$", rest)
        if name != "--help":
            found.append((name, value, default[1] if default else ""))
    return found


def options_in_page(text):
    """The same of a page, where an option is a tagged paragraph: .TP, a line with the option, its description."""
    found = []
    text = text.replace("\\-", "-")
    for head, body in re.findall(r"^\.TP\n(.*)\n((?:[^.].*\n)+)", text, flags=re.M):
        words = re.sub(r"^\.\w+ |\\f.|\"", "", head).split()
        default = re.search(r"Default: ([^\s]+)\.\n", body)
        if words[0].startswith("--"):
            found.append((words[0], words[1] if len(words) > 1 else "", default[1] if default else ""))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", required=True)
    parser.add_argument("--page", required=True)
    parser.add_argument("--version", required=True)
    options = parser.parse_args()
    with open(options.page, encoding="utf-8") as file:
        page = file.read()
    sections = dict(re.findall(r"^\.SH (.*)\n((?:(?!\.SH ).*\n)*)", page, flags=re.M))
    faults = []
    count = 0
    for command, text in helps(options.program).items():
        title = f'"OPTIONS OF {command.upper()}"' if command else "OPTIONS"
        wanted, written = options_in_help(text), options_in_page(sections.get(title, ""))
        count += len(wanted)
        faults += [f"{title}: {entry} is in --help alone" for entry in wanted if entry not in written]
        faults += [f"{title}: {entry} is in the page alone" for entry in written if entry not in wanted]
        if not faults and wanted != written:
            faults.append(f"{title}: the page has another order than --help")
    if f'"lla {options.version}"' not in page.splitlines()[2]:
        faults.append(f"the page's header does not say lla {options.version}")
    print(f"{count} options, {len(faults)} faults")
    for fault in faults:
        print("FAULT", fault)
    return 1 if faults or not count else 0


if __name__ == "__main__":
    sys.exit(main())
