//! Files mapped to memory.

use memmap2::Mmap;

/// Lets the operating system drop mapped pages that will not be read again soon.
#[cfg(unix)]
pub fn release_pages(map: &Mmap, start: usize, len: usize) {
    // SAFETY: the mapping is read-only and file-backed, so dropped pages are read from the file again.
    #[allow(unsafe_code)]
    let _ = unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, len) };
}

#[cfg(not(unix))]
pub fn release_pages(_: &Mmap, _: usize, _: usize) {}
