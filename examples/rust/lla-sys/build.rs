// SPDX-License-Identifier: Apache-2.0
// Finds an installed lla: in LLA_PREFIX if that is set, else through pkg-config.
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, process};

fn in_prefix(prefix: &Path) -> Option<(PathBuf, PathBuf)> {
    let multiarch = format!("lib/{}-linux-gnu", env::var("CARGO_CFG_TARGET_ARCH").ok()?);
    let library = ["lib", "lib64", &multiarch]
        .iter()
        .map(|folder| prefix.join(folder))
        .find(|folder| folder.join("liblla.so").exists())?;
    Some((library, prefix.join("include")))
}

fn pkg_config(variable: &str) -> Option<PathBuf> {
    let program = env::var_os("PKG_CONFIG").unwrap_or_else(|| "pkg-config".into());
    let output = Command::new(program).arg(format!("--variable={variable}")).arg("lla").output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?.trim().replace('\\', ""); // spaces come escaped
    (output.status.success() && !text.is_empty()).then(|| PathBuf::from(text))
}

fn main() {
    for variable in ["LLA_PREFIX", "PKG_CONFIG", "PKG_CONFIG_PATH"] {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    let found = match env::var_os("LLA_PREFIX") {
        Some(prefix) => in_prefix(Path::new(&prefix)),
        None => pkg_config("libdir").zip(pkg_config("includedir")),
    };
    let (library, include) = found.unwrap_or_else(|| {
        eprintln!("lla is not installed: set LLA_PREFIX to where it is, or PKG_CONFIG_PATH to where its lla.pc is");
        process::exit(1)
    });
    let library = library.canonicalize().unwrap_or(library);
    let include = include.canonicalize().unwrap_or(include);
    println!("cargo:rustc-link-search=native={}", library.display());
    println!("cargo:rustc-link-lib=lla");
    // For the tests of this package, and for the build scripts of packages that depend on it (DEP_LLA_LIBRARY).
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", library.display());
    println!("cargo:rustc-env=LLA_INCLUDE={}", include.display());
    println!("cargo:library={}", library.display());
}
