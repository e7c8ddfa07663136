// SPDX-License-Identifier: Apache-2.0
//! Failures: a status with its name, and a text that names the argument.
use std::ffi::CStr;
use std::fmt;
use std::os::raw::c_char;

use lla_sys as sys;

/// Result of every call that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a call failed. States and outputs are as they were before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    status: i32,
    message: String,
}

impl Error {
    pub(crate) fn new(status: sys::lla_status, message: impl Into<String>) -> Self {
        Error { status, message: message.into() }
    }

    /// The number of the status, one of `lla_sys::LLA_...`.
    pub fn status(&self) -> i32 {
        self.status
    }

    /// The identifier of the status: `"LLA_SHAPE_MISMATCH"`.
    pub fn name(&self) -> &'static str {
        // SAFETY: static text, never NULL, for any number.
        unsafe { static_text(sys::lla_status_name(self.status)) }
    }

    /// What was wrong, with the name of the argument.
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}", self.name(), self.message)
    }
}

impl std::error::Error for Error {}

/// Text of the library that lives for ever.
///
/// # Safety
/// `text` must be NUL-ended and static.
pub(crate) unsafe fn static_text(text: *const c_char) -> &'static str {
    CStr::from_ptr(text).to_str().unwrap_or("?")
}

/// Runs a call that writes its failure into an `lla_error`.
pub(crate) fn check(call: impl FnOnce(*mut sys::lla_error) -> sys::lla_status) -> Result<()> {
    let mut error = sys::lla_error::default();
    let status = call(&mut error);
    if status == sys::LLA_OK {
        return Ok(());
    }
    // SAFETY: the text is NUL-ended within its array.
    let text = unsafe { CStr::from_ptr(error.text.as_ptr()) };
    Err(Error::new(status, text.to_string_lossy()))
}

/// Numbers of rows, slots and sizes, as the library counts them.
pub(crate) fn int(number: usize) -> Result<i64> {
    i64::try_from(number).map_err(|_| Error::new(sys::LLA_SIZE_OVERFLOW, format!("{number} does not fit into 63 bits")))
}
