//! The definition, in f64.

/// Rotates `x [tokens, heads, head_dim]` by `position * frequency` for each of the `head_dim / 2` pairs.
pub fn forward(x: &[f64], positions: &[u32], frequencies: &[f64], heads: usize) -> Vec<f64> {
    let pairs = frequencies.len();
    let mut y = vec![0.0; x.len()];
    for (head, (y, x)) in y.chunks_mut(2 * pairs).zip(x.chunks(2 * pairs)).enumerate() {
        let position = f64::from(positions[head / heads]);
        for (pair, frequency) in frequencies.iter().enumerate() {
            let (sin, cos) = (position * frequency).sin_cos();
            let (a, b) = (x[pair], x[pair + pairs]);
            y[pair] = a * cos - b * sin;
            y[pair + pairs] = b * cos + a * sin;
        }
    }
    y
}

/// The gradient with respect to `x`, given that of `y`: the transpose of a rotation is the rotation back.
pub fn backward(dy: &[f64], positions: &[u32], frequencies: &[f64], heads: usize) -> Vec<f64> {
    let back: Vec<f64> = frequencies.iter().map(|f| -f).collect();
    forward(dy, positions, &back, heads)
}
