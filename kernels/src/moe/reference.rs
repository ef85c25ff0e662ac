//! Router and experts in plain f64.

use crate::glu::reference::{gelu, gelu_derivative};

/// Weights and experts, `[n, top_k]` each, for logits `[n, e]` with `scale` `[e]`.
pub fn route(logits: &[f64], scale: &[f64], top_k: usize) -> (Vec<f64>, Vec<usize>) {
    let (mut weights, mut experts) = (Vec::new(), Vec::new());
    for logits in logits.chunks(scale.len()) {
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = logits.iter().map(|logit| (logit - max).exp()).sum();
        let softmax: Vec<f64> = logits.iter().map(|logit| (logit - max).exp() / total).collect();
        let mut order: Vec<usize> = (0..scale.len()).collect();
        // The sort is stable: of equal probabilities the lower index stays first.
        order.sort_by(|&a, &b| softmax[b].total_cmp(&softmax[a]));
        order.truncate(top_k);
        let sum: f64 = order.iter().map(|&e| softmax[e]).sum();
        weights.extend(order.iter().map(|&e| softmax[e] / sum * scale[e]));
        experts.extend(order);
    }
    (weights, experts)
}

/// Gradient of sum(weights * d_weights) to the logits, through softmax and renormalisation as they stand.
pub fn route_backward(logits: &[f64], scale: &[f64], experts: &[usize], d_weights: &[f64], top_k: usize) -> Vec<f64> {
    let count = scale.len();
    let mut d_logits = Vec::new();
    for (row, logits) in logits.chunks(count).enumerate() {
        let chosen = &experts[row * top_k..(row + 1) * top_k];
        let d_weights = &d_weights[row * top_k..(row + 1) * top_k];
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = logits.iter().map(|logit| (logit - max).exp()).sum();
        let softmax: Vec<f64> = logits.iter().map(|logit| (logit - max).exp() / total).collect();
        let sum: f64 = chosen.iter().map(|&e| softmax[e]).sum();
        let through_sum: f64 =
            chosen.iter().zip(d_weights).map(|(&e, d)| d * scale[e] * softmax[e]).sum::<f64>() / (sum * sum);
        let mut d_softmax = vec![0.0; count];
        for (&e, d) in chosen.iter().zip(d_weights) {
            d_softmax[e] = d * scale[e] / sum - through_sum;
        }
        let mean: f64 = (0..count).map(|e| softmax[e] * d_softmax[e]).sum();
        d_logits.extend((0..count).map(|e| softmax[e] * (d_softmax[e] - mean)));
    }
    d_logits
}

/// Experts' weights, row-major.
#[derive(Clone, Debug)]
pub struct Bank {
    /// `[e, 2 intermediate, hidden]`, the gate first.
    pub gate_up: Vec<f64>,
    /// `[e, hidden, intermediate]`
    pub down: Vec<f64>,
    /// Columns of x.
    pub hidden: usize,
    /// Columns of the activation.
    pub intermediate: usize,
}

impl Bank {
    /// Gate and up of a token at an expert.
    fn gate_and_up(&self, x: &[f64], expert: usize) -> (Vec<f64>, Vec<f64>) {
        let (hidden, intermediate) = (self.hidden, self.intermediate);
        let row = |r: usize| {
            let start = (expert * 2 * intermediate + r) * hidden;
            (0..hidden).map(|h| self.gate_up[start + h] * x[h]).sum::<f64>()
        };
        ((0..intermediate).map(row).collect(), (intermediate..2 * intermediate).map(row).collect())
    }

    /// sum over chosen e of w_e down\[e\] (gelu(gate) * up), for x `[n, hidden]`, weights and experts `[n, top_k]`.
    pub fn forward(&self, x: &[f64], weights: &[f64], experts: &[usize], top_k: usize) -> Vec<f64> {
        let (hidden, intermediate) = (self.hidden, self.intermediate);
        let mut out = vec![0.0; x.len()];
        for (place, (&weight, &expert)) in weights.iter().zip(experts).enumerate() {
            let token = place / top_k;
            let (gate, up) = self.gate_and_up(&x[token * hidden..(token + 1) * hidden], expert);
            for h in 0..hidden {
                let down = &self.down[(expert * hidden + h) * intermediate..][..intermediate];
                out[token * hidden + h] +=
                    weight * (0..intermediate).map(|i| down[i] * gelu(gate[i]) * up[i]).sum::<f64>();
            }
        }
        out
    }

    /// Gradients of sum(out * d_out) to x and to the weights.
    pub fn backward(
        &self,
        x: &[f64],
        weights: &[f64],
        experts: &[usize],
        top_k: usize,
        d_out: &[f64],
    ) -> (Vec<f64>, Vec<f64>) {
        let (hidden, intermediate) = (self.hidden, self.intermediate);
        let (mut d_x, mut d_weights) = (vec![0.0; x.len()], vec![0.0; weights.len()]);
        for (place, (&weight, &expert)) in weights.iter().zip(experts).enumerate() {
            let token = place / top_k;
            let (gate, up) = self.gate_and_up(&x[token * hidden..(token + 1) * hidden], expert);
            for i in 0..intermediate {
                let d_activation: f64 = (0..hidden)
                    .map(|h| d_out[token * hidden + h] * self.down[(expert * hidden + h) * intermediate + i])
                    .sum();
                d_weights[place] += d_activation * gelu(gate[i]) * up[i];
                let d_gate = weight * d_activation * up[i] * gelu_derivative(gate[i]);
                let d_up = weight * d_activation * gelu(gate[i]);
                for h in 0..hidden {
                    let gate_row = (expert * 2 * intermediate + i) * hidden + h;
                    let up_row = (expert * 2 * intermediate + intermediate + i) * hidden + h;
                    d_x[token * hidden + h] += d_gate * self.gate_up[gate_row] + d_up * self.gate_up[up_row];
                }
            }
        }
        (d_x, d_weights)
    }
}
