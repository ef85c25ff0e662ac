//! The model: its configuration, its checkpoint on disk, its weights on a device, its adapters and its forward pass.

pub mod adapter;
pub mod checkpoint;
pub mod codes;
pub mod config;
pub mod experts;
#[cfg(test)]
pub mod fixtures;
pub mod flat;
pub mod fp8;
pub mod gemma4;
pub mod ggml;
pub mod gguf;
pub mod lora;
pub mod peft;
pub mod products;
pub mod quantized;
pub mod rng;
pub mod spec;
pub mod weights;
