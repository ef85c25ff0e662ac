//! What a device reaches at best, measured: a large product by the kernel that a run multiplies with, and a copy of memory.

use crate::config::{Config, WeightDtype};
use crate::model::adapter::tensor;
use crate::plan::Spread;
use burn::tensor::{DType, Device, Tensor};
use rayon::prelude::*;
use serde::Serialize;
use std::time::{Duration, Instant};
use tunehost_kernels::linear::lora_linear;

/// Rows, columns and depth of the smallest and the largest product that are tried.
const SIZES: [usize; 2] = [512, 4096];
/// A product that takes so long is large enough: a larger one reaches no more, and a device that computes on a processor would take
/// minutes for it.
const LONG: Duration = Duration::from_millis(20);
/// Bytes that are copied: with the copy more than a cache holds, and no more than every wgpu device takes as one tensor.
const COPY_BYTES: usize = 128 << 20;
/// Times that each is measured, after one that is not.
const TIMES: usize = 7;

/// Peaks of a device; the peak is the most of what was measured.
#[derive(Debug, Clone, Serialize)]
pub struct Peaks {
    /// Operations per second of a product of f32 matrices.
    pub f32_product_flops: Spread,
    /// The same with one matrix in bf16, where weights are kept so.
    pub bf16_product_flops: Option<Spread>,
    /// Bytes read and written per second by a copy within the device's memory.
    pub copy_bytes_per_s: Spread,
}

impl Peaks {
    /// Measures what the run of `config` is held against.
    pub fn measure(config: &Config, device: &Device) -> Self {
        let weights = config.model.weights;
        Self {
            f32_product_flops: product(device, DType::F32),
            bf16_product_flops: (weights == WeightDtype::Bf16).then(|| product(device, DType::BF16)),
            copy_bytes_per_s: match &config.model.device[..] {
                "cpu" => copy(),
                _ => copy_on(device),
            },
        }
    }

    /// The peak of products with frozen weights.
    pub fn weights_product_flops(&self) -> f64 {
        self.bf16_product_flops.unwrap_or(self.f32_product_flops).max
    }

    /// The peak that operations of the kernel `name` are held against.
    pub fn product_flops(&self, name: &str) -> f64 {
        match name.starts_with("windowed_attention") {
            true => self.f32_product_flops.max,
            false => self.weights_product_flops(),
        }
    }
}

fn product(device: &Device, dtype: DType) -> Spread {
    let mut size = SIZES[0];
    loop {
        let values = || (0..size * size).map(|i| (i % 2017) as f32 / 1008.0 - 1.0).collect();
        let x = tensor([size, size], values(), device);
        let weight = tensor([size, size], values(), device).cast(dtype);
        let call = || {
            let y = lora_linear(x.clone(), weight.clone(), None);
            _ = device.sync();
            drop(y);
        };
        let flop = 2.0 * (size as f64).powi(3);
        let rate = rate(flop, call);
        if flop / rate.max > LONG.as_secs_f64() || size == SIZES[1] {
            return rate;
        }
        size *= 2;
    }
}

fn copy() -> Spread {
    let from = vec![1.0f32; COPY_BYTES / size_of::<f32>()];
    let mut to = vec![0.0f32; from.len()];
    rate(2.0 * COPY_BYTES as f64, || {
        let parts = to.par_chunks_mut(1 << 20).zip(from.par_chunks(1 << 20));
        parts.for_each(|(to, from)| to.copy_from_slice(from));
    })
}

/// Every value read, negated and written: what a kernel bound by the memory of the device reaches.
fn copy_on(device: &Device) -> Spread {
    let from = Tensor::<1>::ones([COPY_BYTES / size_of::<f32>()], device);
    rate(2.0 * COPY_BYTES as f64, || {
        let to = from.clone().neg();
        _ = device.sync();
        drop(to);
    })
}

/// `amount` per second of each of some calls.
fn rate(amount: f64, mut call: impl FnMut()) -> Spread {
    call();
    let mut rates = Vec::with_capacity(TIMES);
    for _ in 0..TIMES {
        let started = Instant::now();
        call();
        rates.push(amount / started.elapsed().as_secs_f64());
    }
    Spread::of(&rates).expect("it was measured")
}
