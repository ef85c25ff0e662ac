//! What the kernels resolve to. Nothing else is tried if that fails.

#[cfg(feature = "cubecl")]
pub mod cube;

/// Every kernel of a step by its name, with the implementation `f32`, or `products` where it multiplies frozen matrices.
pub fn table(f32: String, products: String) -> [(&'static str, String); 7] {
    [
        ("windowed_attention", f32.clone()),
        ("rms_norm", f32.clone()),
        ("rope", f32.clone()),
        ("geglu", f32),
        ("lora_linear", products.clone()),
        ("moe_experts", products.clone()),
        ("linear_cross_entropy", products),
    ]
}
