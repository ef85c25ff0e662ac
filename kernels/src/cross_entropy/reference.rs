//! Head and loss in plain f64, with all logits at once.

use super::IGNORED;

/// softcap(hidden W^T), `[n, v]`, for hidden `[n, h]` and weight `[v, h]`.
pub fn logits(hidden: &[f64], weight: &[f64], h: usize, softcap: Option<f64>) -> Vec<f64> {
    let mut logits = Vec::new();
    for hidden in hidden.chunks(h) {
        for weight in weight.chunks(h) {
            let z: f64 = hidden.iter().zip(weight).map(|(a, b)| a * b).sum();
            logits.push(softcap.map_or(z, |cap| cap * (z / cap).tanh()));
        }
    }
    logits
}

/// -log p(target) for each row, 0 for an ignored one.
pub fn forward(hidden: &[f64], weight: &[f64], h: usize, targets: &[i32], softcap: Option<f64>) -> Vec<f64> {
    let classes = weight.len() / h;
    let logits = logits(hidden, weight, h, softcap);
    let row_loss = |(row, &target): (usize, &i32)| {
        if target == IGNORED {
            return 0.0;
        }
        let logits = &logits[row * classes..(row + 1) * classes];
        logits.iter().map(|logit| logit.exp()).sum::<f64>().ln() - logits[target as usize]
    };
    targets.iter().enumerate().map(row_loss).collect()
}

/// Gradient of the sum of the losses to hidden, `[n, h]`.
pub fn backward(hidden: &[f64], weight: &[f64], h: usize, targets: &[i32], softcap: Option<f64>) -> Vec<f64> {
    let classes = weight.len() / h;
    let logits = logits(hidden, weight, h, softcap);
    let mut d_hidden = vec![0.0; hidden.len()];
    for (row, &target) in targets.iter().enumerate().filter(|&(_, &target)| target != IGNORED) {
        let logits = &logits[row * classes..(row + 1) * classes];
        let total: f64 = logits.iter().map(|logit| logit.exp()).sum();
        for (class, &logit) in logits.iter().enumerate() {
            let hit = if class == target as usize { 1.0 } else { 0.0 };
            let slope = softcap.map_or(1.0, |cap| 1.0 - (logit / cap).powi(2));
            let d_logit = (logit.exp() / total - hit) * slope;
            for i in 0..h {
                d_hidden[row * h + i] += d_logit * weight[class * h + i];
            }
        }
    }
    d_hidden
}
