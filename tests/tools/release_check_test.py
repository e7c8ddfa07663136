#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What packaging/release_check says of interfaces: the same, grown, broken, and of version scripts."""
import argparse
import contextlib
import importlib.machinery
import importlib.util
import io
import sys

SCRIPT = "LLA_0.1 {\n  global: lla_a;\n  local: *;\n};\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", required=True)
    loader = importlib.machinery.SourceFileLoader("release_check", parser.parse_args().program)
    check = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    sys.dont_write_bytecode = True
    loader.exec_module(check)

    (_, abi), now = check.current()
    function = next(name for name in now if name.startswith("lla_"))
    struct = next(name for name in now if name.startswith("LLA_SIZE"))
    number = next(name for name in now if name.startswith("LLA_IS"))
    assert len(now) > 400, len(now)

    def verdict(before, old_version, version, old_abi=abi, new_abi=abi):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            faults = check.compare(((old_version, old_abi), before), ((version, new_abi), now))
        return faults, said.getvalue()

    def changed(name, text):
        return {**now, name: text}

    without = {name: text for name, text in now.items() if name != function}
    smaller = changed(struct, now[struct].rsplit(", ", 1)[0] + ", 1)")
    larger = changed(struct, now[struct].rsplit(", ", 1)[0] + ", 100000)")
    other_number = changed(number, now[number].rsplit(", ", 1)[0] + ", 12345)")
    other_arguments = changed(function, now[function].replace("(", "(long more, ", 1))
    more = {**now, "lla_gone": "void lla_gone(void)"}
    # What was released, the two versions, may it be released so.
    cases = [(now, (0, 1, 0), (0, 1, 1), True), (now, (0, 2, 0), (0, 1, 9), False), (without, (0, 1, 0), (0, 2, 0), True),
             (without, (0, 1, 0), (0, 1, 1), False), (smaller, (0, 1, 0), (0, 2, 0), True), (smaller, (1, 0, 0), (1, 1, 0), True),
             (smaller, (1, 0, 0), (1, 0, 1), False)]
    for broken in (larger, other_number, other_arguments, more):
        cases += [(broken, (0, 1, 0), (0, 1, 1), False), (broken, (0, 1, 0), (0, 2, 0), True), (broken, (1, 0, 0), (1, 1, 0), False)]
    for number_of_case, (before, old, new, allowed) in enumerate(cases):
        faults, _ = verdict(before, old, new)
        assert (not faults) == allowed, (number_of_case, old, new, faults)
    assert verdict(more, (1, 0, 0), (2, 0, 0))[0] and not verdict(more, (1, 0, 0), (2, 0, 0), 1, 2)[0]  # the soname too
    said = verdict(more, (0, 1, 0), (0, 2, 0))[1]
    assert "- void lla_gone(void)" in said and "0 added, 1 removed, 0 changed" in said, said
    assert "1 added, 0 removed, 0 changed" in verdict(without, (0, 1, 0), (0, 2, 0))[1]

    second = "LLA_0.2 {\n  global: lla_b;\n} LLA_0.1;\n"
    scripts = [(SCRIPT, True), (SCRIPT + second, True), (SCRIPT + second.replace(" LLA_0.1;", ";"), False), (second + SCRIPT, False),
               (SCRIPT + SCRIPT, False), (SCRIPT + second.replace("0.2", "0.3"), False), ("", False)]
    for number_of_case, (script, allowed) in enumerate(scripts):
        faults = check.check_nodes(script, (0, 2, 0))
        assert (not faults) == allowed, (number_of_case, faults)
    print(f"{len(cases)} pairs of interfaces of {len(now)} entries, {len(scripts)} version scripts")


if __name__ == "__main__":
    main()
