//! What the process's allocator does with freed memory.

/// Gives freed memory back, so that what the process holds is what it uses. Does nothing where the C library is not glibc.
pub fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it gives back pages that hold nothing, and takes the allocator's lock for that.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Keeps freed memory in the process instead of giving it back at once. A step frees and allocates the same sizes over and
/// over; given back in between, every page is cleared by the system and mapped anew, a tenth of a step on a CPU. The
/// process's peak is what it was. Does nothing where the C library is not glibc.
pub fn keep_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // The largest that glibc takes; what is larger is mapped for itself and does go back.
        const MMAP_THRESHOLD_BYTES: i32 = 32 << 20;
        // SAFETY: both only set a parameter of the allocator, and take its lock for that.
        unsafe {
            libc::mallopt(libc::M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES);
            libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX);
        }
    }
}
