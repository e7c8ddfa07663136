#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds and runs the code that stands in README.md and docs/languages.md against the installed library: each block is put
between the declarations that it takes for granted and a check.     usage: snippets.py WORK

PKG_CONFIG_PATH, LD_LIBRARY_PATH, LLA_LIBRARY and LLA_PREFIX say where lla is; LLA_PYTHON is an interpreter with NumPy."""
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = ["README.md", "docs/languages.md"]
LANGUAGES = {"c", "cpp", "rust", "go", "python"}

C = """#include <stdio.h>
{includes}
enum {{ n = 3 }};
int main(void) {{
  static float q[n * 32], k[n * 32], v[n * 48], gate[n * 2], lambda[n * 26], y[n * 48];
{code}
  lla_state_release(state); lla_layer_release(layer); lla_context_release(context);
  if (error.code != LLA_OK) return 1;
  puts("ran");
  return 0;
}}
"""
CPP = """#include <cstdio>
#include <vector>
{includes}
int main() {{
  const std::int64_t n = 3;
  const std::vector<float> values(n * 2 * 16, 0.1f);
  std::vector<float> outputs(values.size());
  const float *q = values.data(), *k = q, *v = q;
  float *y = outputs.data();
{code}
  if (status != LLA_OK || state.length(0) != 2 * n) return 1;
  std::puts("ran");
}}
"""
RUST = """#![allow(unused_variables)]
use lla::{{Batch, LayerDescription, Limits, Role, Sequence, State, StateDescription, View, ViewMut}};
fn main() -> lla::Result<()> {{
    let n = 3;
    let (q, k, v) = (vec![0.1f32; n * 32], vec![0.2f32; n * 32], vec![0.3f32; n * 32]);
    let mut y = vec![0f32; n * 32];
{code}
    assert_eq!(slots[0].position()?, n);
    println!("ran");
    Ok(())
}}
"""
GO = """package main

import (
	"errors"
	"fmt"

	"example.org/lla"
)

func main() {{
	const n, slot = 3, 7
	values := make([]float32, n*2*16)
	k, _ := lla.TensorOf(values, n, 2, 16)
	v, _ := lla.TensorOf(values, n, 2, 16)
{code}
	if length, _ := state.Length(slot); err != nil || length != n {{
		panic(err)
	}}
	fmt.Println("ran")
}}
"""
PYTHON = """import numpy as np
n, m = 3, 0
q = k = v = dy = np.full((n + m, 2, 16), 0.1, np.float32)
{code}
assert state.length(0) == 2 * n and y.shape == (n, 2, 16) and gradients["q"].shape == q.shape
print("ran")
"""


def run(*command, cwd, **environment):
    result = subprocess.run(command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{result.stdout}{result.stderr}")
    return result.stdout


def flags():
    return shlex.split(run("pkg-config", "--cflags", "--libs", "lla", cwd="."))


def build(language, code, folder):
    """Writes the program into `folder`, builds it and returns what it says; None without the tool chain."""
    lines = code.splitlines()
    parts = {"includes": "\n".join(line for line in lines if line.startswith("#include")),
             "code": "\n".join(line for line in lines if not line.startswith("#include"))}
    folder.mkdir()
    if language == "c":
        (folder / "snippet.c").write_text(C.format(**parts))
        run("cc", "-std=c99", "-Wall", "-Wextra", "-Werror", "snippet.c", "-o", "snippet", *flags(), "-lm", cwd=folder)
    elif language == "cpp":
        (folder / "snippet.cpp").write_text(CPP.format(**parts))
        run("c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "snippet.cpp", "-o", "snippet", *flags(), cwd=folder)
    elif language == "rust":
        if not shutil.which("cargo"):
            return None
        (folder / "src").mkdir()
        (folder / "src/main.rs").write_text(RUST.format(**parts))
        (folder / "Cargo.toml").write_text('[package]\nname = "snippet"\nversion = "0.0.0"\nedition = "2021"\n[dependencies]\n'
                                           f'lla = {{ path = "{ROOT}/examples/rust/lla" }}\n')
        return run("cargo", "run", "--quiet", "--offline", cwd=folder)
    elif language == "go":
        if not shutil.which("go"):
            return None
        (folder / "main.go").write_text(GO.format(**parts))
        (folder / "go.mod").write_text("module snippet\n\ngo 1.19\n\nrequire example.org/lla v0.0.0\n\n"
                                       f"replace example.org/lla => {ROOT}/examples/go\n")
        return run("go", "run", ".", cwd=folder, GOPROXY="off", GOFLAGS="-mod=mod")
    else:
        python = os.environ.get("LLA_PYTHON", "python3")
        if not python:
            return None
        (folder / "snippet.py").write_text(PYTHON.format(**parts))
        return run(python, "snippet.py", cwd=folder, PYTHONPATH=str(ROOT / "examples/python"), PYTHONDONTWRITEBYTECODE="1")
    return run("./snippet", cwd=folder)


def main():
    work = pathlib.Path(sys.argv[1])
    found, missing = [], []
    for page in PAGES:
        for language, code in re.findall(r"^```(\w+)\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), flags=re.M | re.S):
            output = build(language, code, work / f"snippet_{len(found)}_{language}")
            if output is None:
                missing.append(language)
            elif "ran" not in output.split():
                sys.exit(f"{page}, {language}: {output}")
            found.append(language)
    if set(found) != LANGUAGES:
        sys.exit(f"snippets of {sorted(set(found))}")
    print(*[language for language in found if language not in missing], *[f"({language} is not installed)" for language in missing])


main()
