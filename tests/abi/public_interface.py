# SPDX-License-Identifier: Apache-2.0
"""What the public headers and the version script declare: read by the other scripts of this folder."""
import pathlib
import re


def declared_functions(headers):
    """Names of all functions that the headers of a folder mark with LLA_API."""
    names = []
    for header in sorted(pathlib.Path(headers).glob("*.h")):
        text = re.sub(r"/\*.*?\*/", "", header.read_text(encoding="utf-8"), flags=re.S)
        text = re.sub(r"^\s*#.*$", "", text, flags=re.M)
        names += re.findall(r"\bLLA_API\b[^;(]*?\b(\w+)\s*\(", text)
    return names


def map_functions(script):
    """Names in the version script, by node."""
    text = re.sub(r"#.*", "", pathlib.Path(script).read_text(encoding="utf-8"))
    nodes = {}
    for node, body in re.findall(r"(\S+)\s*\{(.*?)\}", text, flags=re.S):
        body = body.split("local:")[0].replace("global:", "")
        nodes[node] = [name.strip() for name in body.split(";") if name.strip()]
    return nodes
