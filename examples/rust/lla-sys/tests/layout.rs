// SPDX-License-Identifier: Apache-2.0
//! Compares what this crate declares with the installed headers, by the answers of a small C program.
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;
use std::process::Command;
use std::{env, fs};

const SOURCE: &str = include_str!("../src/lib.rs");

/// Evaluates C expressions against the installed headers.
fn values_in_c(expressions: &[String]) -> BTreeMap<String, i64> {
    let mut program = String::from("#include <lla/lla.h>\n#include <stdio.h>\nint main(void) {\n");
    for expression in expressions {
        writeln!(program, "  printf(\"%s=%lld\\n\", \"{expression}\", (long long)({expression}));").unwrap();
    }
    program += "  return 0;\n}\n";
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let (source, binary) = (folder.join("layout.c"), folder.join("layout"));
    fs::write(&source, program).unwrap();
    let compiler = env::var_os("CC").unwrap_or_else(|| "cc".into());
    let status = Command::new(compiler)
        .arg(format!("-I{}", env!("LLA_INCLUDE")))
        .arg(&source)
        .arg("-o")
        .arg(&binary)
        .status()
        .unwrap();
    assert!(status.success(), "the C program does not compile");
    let output = Command::new(&binary).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let pairs = text.lines().map(|line| line.split_once('=').unwrap());
    pairs.map(|(expression, value)| (expression.to_string(), value.parse().unwrap())).collect()
}

#[test]
fn sizes_offsets_and_numbers_are_those_of_the_headers() {
    let mut here = BTreeMap::new();
    for (name, size, fields) in lla_sys::layouts() {
        here.insert(format!("sizeof({name})"), size as i64);
        for (field, offset) in fields {
            here.insert(format!("offsetof({name}, {field})"), offset as i64);
        }
    }
    for (name, value) in lla_sys::CONSTANTS {
        here.insert(name.to_string(), *value);
    }
    here.insert("LLA_MAX_RANK".into(), lla_sys::LLA_MAX_RANK as i64);
    here.insert("LLA_TAG_SIZE".into(), lla_sys::LLA_TAG_SIZE as i64);
    here.insert("LLA_ERROR_TEXT_SIZE".into(), lla_sys::LLA_ERROR_TEXT_SIZE as i64);
    assert!(here.len() > 300);
    let there = values_in_c(&here.keys().cloned().collect::<Vec<_>>());
    let different: Vec<_> = here.iter().filter(|(name, value)| there.get(*name) != Some(value)).collect();
    assert!(different.is_empty(), "not as in the headers: {different:?}");
}

#[test]
fn every_function_of_the_headers_is_declared() {
    let mut functions = 0;
    for header in fs::read_dir(PathBuf::from(env!("LLA_INCLUDE")).join("lla")).unwrap() {
        let path = header.unwrap().path();
        if path.extension().map_or(true, |extension| extension != "h") || path.ends_with("export.h") {
            continue;
        }
        for declaration in fs::read_to_string(path).unwrap().split("\nLLA_API ").skip(1) {
            let name = declaration.split('(').next().unwrap().rsplit([' ', '*']).next().unwrap();
            assert!(SOURCE.contains(&format!("pub fn {name}(")), "{name} is missing");
            functions += 1;
        }
    }
    assert_eq!(functions, SOURCE.matches("    pub fn lla_").count());
}

#[test]
fn the_library_answers() {
    // SAFETY: functions without preconditions.
    unsafe {
        assert_eq!(lla_sys::lla_abi_version(), lla_sys::LLA_ABI_VERSION);
        assert_eq!(lla_sys::lla_levels_needed(1024), 11);
    }
}
