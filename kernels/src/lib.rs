//! The kernels of tunehost: each module holds a contract with its gradient (`mod.rs`), a plain f64 reference
//! (`reference.rs`), the CPU implementation (`cpu.rs`) and, with the feature `cubecl`, one for GPUs (`cube.rs`).

// A `#[cube]` function is translated, not called: what these lints advise the translation does not take, or it is of what it made.
#![cfg_attr(
    feature = "cubecl",
    allow(
        clippy::assign_op_pattern,
        clippy::collapsible_if,
        clippy::duplicate_underscore_argument,
        clippy::manual_clamp,
        clippy::needless_range_loop,
        clippy::unnecessary_cast
    )
)]

pub mod adamw;
pub mod attention;
pub mod cotangent;
pub mod cross_entropy;
#[cfg(feature = "cubecl")]
mod cube;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod embedding;
mod flex;
pub mod glu;
pub mod gpu;
pub mod linear;
pub mod matmul;
pub mod memory;
#[cfg(feature = "cubecl")]
mod mma;
pub mod moe;
pub mod norm;
#[cfg(all(test, feature = "nvrtc"))]
mod nvrtc;
pub mod resolve;
pub mod rope;
pub mod simd;
#[cfg(test)]
mod testing;
pub mod trace;
#[cfg(feature = "wgpu")]
pub mod wgpu;
mod workspace;

pub use workspace::Runtime;
