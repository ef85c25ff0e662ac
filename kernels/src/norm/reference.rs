//! The definition, in f64 and one row at a time.

/// `y = x * (mean(x^2) + eps)^(-1/2) * weight` over rows of `dim` values.
pub fn forward(x: &[f64], weight: Option<&[f64]>, dim: usize, eps: f64) -> Vec<f64> {
    let mut y = Vec::with_capacity(x.len());
    for row in x.chunks(dim) {
        let scale = inverse_rms(row, eps);
        y.extend(row.iter().enumerate().map(|(i, x)| x * scale * weight.map_or(1.0, |w| w[i])));
    }
    y
}

/// The gradient with respect to `x`, given that of `y`.
///
/// With `r` the inverse root mean square and `g = dy * weight`: `dx = r * g - x * r^3 * sum(g * x) / dim`.
pub fn backward(x: &[f64], weight: Option<&[f64]>, dy: &[f64], dim: usize, eps: f64) -> Vec<f64> {
    let mut dx = Vec::with_capacity(x.len());
    for (row, dy) in x.chunks(dim).zip(dy.chunks(dim)) {
        let r = inverse_rms(row, eps);
        let g: Vec<f64> = dy.iter().enumerate().map(|(i, dy)| dy * weight.map_or(1.0, |w| w[i])).collect();
        let dot: f64 = row.iter().zip(&g).map(|(x, g)| x * g).sum();
        dx.extend(row.iter().zip(&g).map(|(x, g)| r * g - x * r.powi(3) * dot / dim as f64));
    }
    dx
}

fn inverse_rms(row: &[f64], eps: f64) -> f64 {
    let mean_square = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
    (mean_square + eps).sqrt().recip()
}
