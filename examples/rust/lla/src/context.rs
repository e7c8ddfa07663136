// SPDX-License-Identifier: Apache-2.0
//! Context: which backend computes, with how many threads, and who hears the log.
use std::ffi::CStr;
use std::fmt;
use std::os::raw::{c_char, c_void};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::ptr;
use std::sync::Arc;

use lla_sys as sys;

use crate::error::{check, Result};

/// Backends that compute in host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(i32)]
pub enum Backend {
    /// SIMD kernels.
    #[default]
    Cpu = sys::LLA_BACKEND_CPU,
    /// Plain loops in double precision: the model of correctness, the only one that takes `f64`.
    Reference = sys::LLA_BACKEND_REFERENCE,
}

/// Weight of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(i32)]
pub enum LogLevel {
    /// Something failed.
    Error = sys::LLA_LOG_ERROR,
    /// Something is not as asked.
    Warning = sys::LLA_LOG_WARNING,
    /// What was chosen.
    Info = sys::LLA_LOG_INFO,
}

type Log = Box<dyn Fn(LogLevel, &str) + Send + Sync>;

/// How a context is made.
#[derive(Default)]
pub struct ContextBuilder {
    backend: Backend,
    threads: i32,
    log: Option<(LogLevel, Log)>,
}

struct Inner {
    raw: *mut sys::lla_context,
    _log: Option<Box<Log>>, // the library calls it until the context is freed
}

// SAFETY: a context is immutable and shared by any number of threads; the log function is Send and Sync.
unsafe impl Send for Inner {}
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: our reference; layers, states and batches hold this object, so that it is the last one.
        unsafe { sys::lla_context_release(self.raw) }
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.raw.fmt(formatter)
    }
}

/// Which backend computes. Immutable; a clone is one more reference.
#[derive(Clone, Debug)]
pub struct Context(Arc<Inner>);

impl Context {
    /// The CPU backend on the calling thread alone, without a log.
    pub fn new() -> Result<Self> {
        Self::builder().build()
    }

    /// Sets backend, threads and log.
    pub fn builder() -> ContextBuilder {
        ContextBuilder::default()
    }

    pub(crate) fn raw(&self) -> *mut sys::lla_context {
        self.0.raw
    }
}

impl ContextBuilder {
    /// Which backend.
    pub fn backend(mut self, backend: Backend) -> Self {
        self.backend = backend;
        self
    }

    /// Workers of the context's own pool, the calling thread included. 0 or 1: no pool.
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = i32::try_from(threads).unwrap_or(i32::MAX);
        self
    }

    /// Who hears the log, up to a level. Called from any thread that calls lla; a panic in it is dropped.
    pub fn log(mut self, level: LogLevel, write: impl Fn(LogLevel, &str) + Send + Sync + 'static) -> Self {
        self.log = Some((level, Box::new(write)));
        self
    }

    /// Creates the context.
    pub fn build(self) -> Result<Context> {
        let (level, log) = match self.log {
            Some((level, write)) => (level as i32, Some(Box::new(write))),
            None => (0, None),
        };
        let user = log.as_deref().map_or(ptr::null(), |log: &Log| log as *const Log) as *mut c_void;
        let hook = sys::lla_log { level, write: Some(write_log), user, ..Default::default() };
        let options = sys::lla_context_options {
            backend: self.backend as i32,
            threads: self.threads,
            log: if log.is_some() { &hook } else { ptr::null() },
            ..Default::default()
        };
        let mut raw = ptr::null_mut();
        // SAFETY: options are read during the call; the log function lives as long as the context.
        check(|error| unsafe { sys::lla_context_create(&options, &mut raw, error) })?;
        Ok(Context(Arc::new(Inner { raw, _log: log })))
    }
}

/// Hands a line to the closure; nothing may unwind into the library.
unsafe extern "C" fn write_log(level: sys::lla_log_level, text: *const c_char, user: *mut c_void) {
    let _ = catch_unwind(AssertUnwindSafe(|| {
        let level = match level {
            sys::LLA_LOG_ERROR => LogLevel::Error,
            sys::LLA_LOG_WARNING => LogLevel::Warning,
            _ => LogLevel::Info,
        };
        let (log, text) = (&*(user as *const Log), CStr::from_ptr(text)); // the Log of this context, and NUL-ended text
        log(level, &text.to_string_lossy());
    }));
}
