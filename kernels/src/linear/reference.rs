//! The linear layer in plain f64.

use super::Dropout;
use super::cpu::{element_hash, row_key};

/// Operands of a LoRA linear layer, row-major.
#[derive(Clone, Debug)]
pub struct Operands {
    /// `[n, input]`
    pub x: Vec<f64>,
    /// `[output, input]`
    pub weight: Vec<f64>,
    /// `[rank, input]`
    pub a: Vec<f64>,
    /// `[output, rank]`
    pub b: Vec<f64>,
    /// Factor of the adapter's output.
    pub scale: f64,
    /// Dropout of the adapter's input.
    pub dropout: Option<Dropout>,
    /// Columns of x.
    pub input: usize,
    /// Columns of y.
    pub output: usize,
    /// Rank of the adapter; 0 for none.
    pub rank: usize,
}

/// Gradients to x, a and b.
#[derive(Clone, Debug)]
pub struct Gradients {
    /// `[n, input]`
    pub x: Vec<f64>,
    /// `[rank, input]`
    pub a: Vec<f64>,
    /// `[output, rank]`
    pub b: Vec<f64>,
}

impl Operands {
    fn rows(&self) -> usize {
        self.x.len() / self.input
    }

    /// What element (row, col) of x is multiplied by on its way into the adapter.
    fn keep(&self, row: usize, col: usize) -> f64 {
        match self.dropout {
            None => 1.0,
            Some(Dropout { p, seed }) => {
                let kept = element_hash(row_key(seed, row as u64), col as u32) as f64 >= (p * 2f64.powi(32)).floor();
                if kept { 1.0 / (1.0 - p) } else { 0.0 }
            }
        }
    }

    /// Element (row, r) of drop(x) A^T.
    fn inner(&self, row: usize, r: usize) -> f64 {
        (0..self.input).map(|i| self.keep(row, i) * self.x[row * self.input + i] * self.a[r * self.input + i]).sum()
    }

    /// y = x W^T + scale * (drop(x) A^T) B^T.
    pub fn forward(&self) -> Vec<f64> {
        let mut y = Vec::new();
        for row in 0..self.rows() {
            let inner: Vec<f64> = (0..self.rank).map(|r| self.inner(row, r)).collect();
            for o in 0..self.output {
                let base: f64 =
                    (0..self.input).map(|i| self.x[row * self.input + i] * self.weight[o * self.input + i]).sum();
                let low_rank: f64 = (0..self.rank).map(|r| inner[r] * self.b[o * self.rank + r]).sum();
                y.push(base + self.scale * low_rank);
            }
        }
        y
    }

    /// Gradients of sum(y * d_y).
    pub fn backward(&self, d_y: &[f64]) -> Gradients {
        let (input, output, rank) = (self.input, self.output, self.rank);
        let mut gradients =
            Gradients { x: vec![0.0; self.x.len()], a: vec![0.0; self.a.len()], b: vec![0.0; self.b.len()] };
        for row in 0..self.rows() {
            let d_y = &d_y[row * output..(row + 1) * output];
            for i in 0..input {
                gradients.x[row * input + i] += (0..output).map(|o| d_y[o] * self.weight[o * input + i]).sum::<f64>();
            }
            for r in 0..rank {
                let inner = self.inner(row, r);
                let d_inner = self.scale * (0..output).map(|o| d_y[o] * self.b[o * rank + r]).sum::<f64>();
                for (o, d_y) in d_y.iter().enumerate() {
                    gradients.b[o * rank + r] += self.scale * d_y * inner;
                }
                for i in 0..input {
                    let keep = self.keep(row, i);
                    gradients.a[r * input + i] += d_inner * keep * self.x[row * input + i];
                    gradients.x[row * input + i] += d_inner * keep * self.a[r * input + i];
                }
            }
        }
        gradients
    }
}
