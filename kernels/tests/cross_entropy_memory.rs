//! The loss never holds more logits than one chunk of rows.

use burn::tensor::{Device, Tensor, TensorData};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use tunehost_kernels::cross_entropy::{linear_cross_entropy, workspace_bytes};

/// The system's allocator, noting the largest request.
struct Watched;

static LARGEST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Relaxed);
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Relaxed);
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LARGEST.fetch_max(size, Relaxed);
        // SAFETY: the caller's promise, passed on.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise, passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watched = Watched;

#[test]
fn no_allocation_is_larger_than_the_logits_of_one_chunk() {
    let (n, h, classes, chunk_rows) = (400, 16, 30_000, 32);
    let device = Device::flex();
    let ramp = |len: usize| (0..len).map(|i| (i % 13) as f32 / 13.0 - 0.5).collect::<Vec<_>>();
    let hidden = Tensor::from_data(TensorData::new(ramp(n * h), [n, h]), &device);
    let weight = Tensor::from_data(TensorData::new(ramp(classes * h), [classes, h]), &device);
    let targets: Vec<i32> = (0..n as i32).collect();

    LARGEST.store(0, Relaxed);
    let result = linear_cross_entropy(hidden, weight, &targets, Some(30.0), 1.0, chunk_rows, true);
    let largest = LARGEST.load(Relaxed);

    assert!(result.loss.iter().all(|loss| loss.is_finite()) && result.d_hidden.is_some());
    let chunk = workspace_bytes(chunk_rows, classes);
    // The chunk itself was seen, and nothing above it; all logits at once would be 12 times as large.
    assert!((chunk..=chunk + 4096).contains(&largest), "{largest} bytes at once, {chunk} for a chunk's logits");
}
