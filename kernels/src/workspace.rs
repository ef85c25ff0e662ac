//! Whose workspaces are told: each kernel's `workspace_bytes` says what it takes beside its inputs and results.

use burn::tensor::DType;

/// Which implementation of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runtime {
    /// The CPU's, on so many threads.
    Cpu {
        /// Threads of the pool.
        threads: usize,
    },
    /// cubecl's, on any device.
    Cubecl {
        /// Whether operands of products are rounded to bf16, for matrix instructions.
        bf16: bool,
        /// What operations pass to each other.
        activations: DType,
    },
}
