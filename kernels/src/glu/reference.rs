//! The gated linear unit in plain f64.

/// gelu_tanh(x).
pub fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + inner(x).tanh())
}

/// Derivative of [`gelu`].
pub fn gelu_derivative(x: f64) -> f64 {
    let tanh = inner(x).tanh();
    let d_inner = (2.0 / std::f64::consts::PI).sqrt() * (1.0 + 3.0 * 0.044715 * x * x);
    0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * d_inner
}

fn inner(x: f64) -> f64 {
    (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)
}

/// gelu_tanh(gate) * up, elementwise.
pub fn forward(gate: &[f64], up: &[f64]) -> Vec<f64> {
    gate.iter().zip(up).map(|(&gate, &up)| gelu(gate) * up).collect()
}

/// Gradients of sum(out * d_out) to gate and up.
pub fn backward(gate: &[f64], up: &[f64], d_out: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let d_gate = (0..gate.len()).map(|i| d_out[i] * up[i] * gelu_derivative(gate[i])).collect();
    let d_up = (0..gate.len()).map(|i| d_out[i] * gelu(gate[i])).collect();
    (d_gate, d_up)
}
