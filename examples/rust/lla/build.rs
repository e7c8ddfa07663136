// SPDX-License-Identifier: Apache-2.0
// Lets the tests and examples of this package find the library that lla-sys found.
fn main() {
    if let Some(folder) = std::env::var_os("DEP_LLA_LIBRARY") {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{}", folder.to_string_lossy());
    }
}
