#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""packaging/sbom writes SPDX 2.3 as its JSON schema wants it, and names every library that the products are linked with.

  tests/tools/sbom_test.py --program packaging/sbom [--readelf READELF] PACKAGE=FILE...
"""
import argparse
import datetime
import json
import re
import subprocess
import sys

NAME = re.compile(r"SPDXRef-[A-Za-z0-9.-]+")
LIBRARY = re.compile(r"lib[\w+]+\.so\.\d+")
TEXT = str
# Field -> its type: those that the schema requires, and of the others, beyond which it allows none, those that are used.
DOCUMENT = {"spdxVersion": TEXT, "dataLicense": TEXT, "SPDXID": TEXT, "name": TEXT, "documentNamespace": TEXT,
            "creationInfo": dict, "packages": list, "relationships": list, "hasExtractedLicensingInfos": list}
CREATION = {"created": TEXT, "creators": list}
PACKAGE = {"SPDXID": TEXT, "name": TEXT, "versionInfo": TEXT, "downloadLocation": TEXT, "filesAnalyzed": bool, 
           "licenseConcluded": TEXT, "licenseDeclared": TEXT, "copyrightText": TEXT, "comment": TEXT}
RELATION = {"spdxElementId": TEXT, "relationshipType": TEXT, "relatedSpdxElement": TEXT}
LICENCE = {"licenseId": TEXT, "name": TEXT, "extractedText": TEXT}
# Of the relationships and licences of the specification those that are used.
RELATIONS = {"DESCRIBES", "GENERATED_FROM", "CONTAINS", "STATIC_LINK", "DYNAMIC_LINK", "OPTIONAL_DEPENDENCY_OF"}
LICENCES = {"Apache-2.0", "BSD-3-Clause", "MIT", "GPL-3.0-or-later", "LGPL-2.1-or-later"}
EXCEPTIONS = {"GCC-exception-3.1"}


def shape(what, fields, where):
    if not isinstance(what, dict) or set(what) != set(fields):
        return [f"{where}: its fields are {list(what)}, not {list(fields)}"]
    return [f"{where}: {name} is {what[name]!r}" for name, kind in fields.items()
            if not isinstance(what[name], kind) or what[name] == ""]


def licence_faults(expression, known, where):
    words = re.sub(r"[()]", " ", expression).split()
    faults = [f"{where}: licence {word} is not known" for word, before in zip(words, ["", *words])
              if word not in ("AND", "OR", "WITH") and word not in (EXCEPTIONS if before == "WITH" else known)]
    if not re.fullmatch(r"\S+( (AND|OR|WITH) \S+)*", " ".join(words)):
        faults.append(f"{where}: {expression!r} is no licence")
    return faults


def document_faults(document):
    faults = shape(document, DOCUMENT, "document")
    if not faults:
        faults += shape(document["creationInfo"], CREATION, "creationInfo")
        for field, fields in (("packages", PACKAGE), ("relationships", RELATION), ("hasExtractedLicensingInfos", LICENCE)):
            for number, what in enumerate(document[field]):
                faults += shape(what, fields, f"{field}[{number}]")
    if faults:
        return faults
    for field, wanted in (("spdxVersion", "SPDX-2.3"), ("dataLicense", "CC0-1.0"), ("SPDXID", "SPDXRef-DOCUMENT")):
        if document[field] != wanted:
            faults.append(f"{field} is {document[field]}")
    if not re.fullmatch(r"https://[^\s#]+", document["documentNamespace"]):
        faults.append(f"documentNamespace is {document['documentNamespace']}")
    created, creators = (document["creationInfo"][field] for field in ("created", "creators"))
    try:
        datetime.datetime.strptime(created, "%Y-%m-%dT%H:%M:%SZ")
    except ValueError:
        faults.append(f"created is {created}")
    if not creators or not all(re.fullmatch(r"(Person|Organization|Tool): .+", creator) for creator in creators):
        faults.append(f"creators are {creators}")
    names = [package["SPDXID"] for package in document["packages"]]
    faults += [f"{name} is no identifier, or not the only one" for name in names
               if not NAME.fullmatch(name) or names.count(name) > 1]
    extracted = [licence["licenseId"] for licence in document["hasExtractedLicensingInfos"]]
    faults += [f"licenseId is {licence}" for licence in extracted if not re.fullmatch(r"LicenseRef-[A-Za-z0-9.-]+", licence)]
    for package in document["packages"]:
        for field in ("licenseConcluded", "licenseDeclared"):
            faults += licence_faults(package[field], LICENCES | set(extracted), package["name"])
        if not re.fullmatch(r"NOASSERTION|NONE|\w+(\+\w+)?://\S+", package["downloadLocation"]):
            faults.append(f"{package['name']}: downloadLocation is {package['downloadLocation']}")
    related = set()
    for relation in document["relationships"]:
        one, kind, other = (relation[field] for field in RELATION)
        if kind not in RELATIONS or one not in {"SPDXRef-DOCUMENT", *names} or other not in names:
            faults.append(f"{one} {kind} {other} is no relationship of what is listed")
        related |= {one, other}
    if not any(relation["relationshipType"] == "DESCRIBES" for relation in document["relationships"]):
        faults.append("the document describes nothing")
    return faults + [f"{name} has no relationship" for name in names if name not in related]


def needed(readelf, file):
    said = subprocess.run([readelf, "-dW", file], check=True, capture_output=True, text=True).stdout
    found = re.findall(r"\(NEEDED\).*\[(.*)\]", said)
    # The loader is the C library's.
    return {"libc.so.6" if re.match(r"ld(64)?[-.]", name) else name for name in found}


def link_faults(document, product, linked):
    """Of what the files of a package need against what the list has it linked with."""
    comments = {package["SPDXID"]: package["comment"] for package in document["packages"]}
    others = [relation["relatedSpdxElement"] for relation in document["relationships"]
              if relation["spdxElementId"] == f"SPDXRef-{product}" and relation["relationshipType"] == "DYNAMIC_LINK"]
    listed = {name: set(LIBRARY.findall(comments[name])) for name in others}
    faults = [f"{product} needs {name}, which is not listed" for name in sorted(linked - set().union(*listed.values()))]
    return faults + [f"{product} is not linked with {name}" for name, libraries in listed.items() if not libraries & linked]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True)
    parser.add_argument("--readelf", default="readelf")
    parser.add_argument("products", nargs="+", metavar="PACKAGE=FILE")
    options = parser.parse_args()
    said = [subprocess.run([sys.executable, options.program], check=True, capture_output=True, text=True).stdout
            for _ in range(2)]
    document = json.loads(said[0])
    faults = document_faults(document)
    if said[0] != said[1]:
        faults.append("the same commit gave two texts")
    linked = {}
    for product, file in (words.split("=", 1) for words in options.products):
        linked.setdefault(product, set()).update(needed(options.readelf, file))
    if not faults:
        for product, names in linked.items():
            faults += link_faults(document, product, names)
        for package in document["packages"]:
            faults += [f"nothing needs {name} of {package['name']}" for name in LIBRARY.findall(package["comment"])
                       if not any(name in names for names in linked.values())]
    print(f"{len(document['packages'])} packages, {len(document['relationships'])} relationships;",
          "; ".join(f"{product} needs {' '.join(sorted(names))}" for product, names in linked.items()))
    for fault in faults:
        print("FAULT", fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
