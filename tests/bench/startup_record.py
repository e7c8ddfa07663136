#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The recorded start-up time (startup.json, written by the program startup) keeps the promise, and the page says that figure."""
import argparse
import json
import pathlib
import sys

LIMIT_MS = 5.0
LEAST_PROCESSES = 100


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", required=True)
    parser.add_argument("--page", required=True)
    options = parser.parse_args()
    record = json.loads(pathlib.Path(options.record).read_text(encoding="utf-8"))
    said = f"{record['median_ms']:.2f} ms"
    faults = []
    if record["processes"] < LEAST_PROCESSES:
        faults.append(f"{record['processes']} processes were measured, fewer than {LEAST_PROCESSES}")
    if not 0 < record["median_ms"] < LIMIT_MS:
        faults.append(f"the median is {record['median_ms']} ms, not below {LIMIT_MS}")
    if said not in pathlib.Path(options.page).read_text(encoding="utf-8"):
        faults.append(f"{options.page} does not say {said}")
    print(f"median on record: {said}, limit {LIMIT_MS} ms")
    for fault in faults:
        print("FAULT", fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
