// SPDX-License-Identifier: Apache-2.0
//! Aligned memory for batches and workspaces.
use std::alloc::{alloc, dealloc, Layout};
use std::os::raw::c_void;
use std::ptr;

use lla_sys as sys;

use crate::error::{check, Error, Result};

/// Memory of the size and alignment that a query of the library asked for; grows, never shrinks.
pub(crate) struct Memory {
    pointer: *mut u8,
    layout: Layout,
}

impl Memory {
    pub(crate) const fn empty() -> Self {
        Memory { pointer: ptr::null_mut(), layout: Layout::new::<()>() }
    }

    /// Makes room for what `query(bytes, alignment, error)` says. What was in it is lost if it grows.
    pub(crate) fn reserve(
        &mut self,
        query: impl FnOnce(*mut usize, *mut usize, *mut sys::lla_error) -> sys::lla_status,
    ) -> Result<()> {
        let (mut bytes, mut alignment) = (0, 0);
        check(|error| query(&mut bytes, &mut alignment, error))?;
        if !self.pointer.is_null() && bytes <= self.layout.size() && alignment <= self.layout.align() {
            return Ok(());
        }
        let no_memory = || Error::new(sys::LLA_OUT_OF_MEMORY, format!("no memory for {bytes} bytes"));
        let layout =
            Layout::from_size_align(bytes.max(1), alignment.max(self.layout.align())).map_err(|_| no_memory())?;
        // SAFETY: the layout's size is not 0.
        let pointer = unsafe { alloc(layout) };
        if pointer.is_null() {
            return Err(no_memory());
        }
        *self = Memory { pointer, layout };
        Ok(())
    }

    pub(crate) fn pointer(&self) -> *mut c_void {
        self.pointer.cast()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.layout.size()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if !self.pointer.is_null() {
            // SAFETY: from alloc() with this layout.
            unsafe { dealloc(self.pointer, self.layout) }
        }
    }
}
