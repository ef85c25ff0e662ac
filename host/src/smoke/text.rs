//! The measurements as a person reads them.

use super::file::{Outcome, Prediction, ShapeResult, Smoke};
use super::fit::Fit;
use super::measure::had;
use crate::model::lora::group;
use crate::plan::memory::Shape;
use crate::report::{bytes, duration};
use std::fmt::{self, Display, Formatter};
use std::time::Duration;

/// A line for each shape as it ends.
pub fn progress(result: &ShapeResult) -> String {
    let shape = shape(result.asked.shape);
    match (result.outcome, &result.step_s) {
        (Outcome::Fits, Some(step)) => format!("shape       {shape}: {step} s a step, peak {}", had(result)),
        (outcome, _) => format!(
            "shape       {shape}: {}{}",
            outcome.name(),
            result.why.as_ref().map(|why| format!(" ({why})")).unwrap_or_default()
        ),
    }
}

fn shape(shape: Shape) -> String {
    format!("{} x {}", shape.micro_batch, group(shape.seq_len_tokens))
}

fn seconds(s: f64) -> String {
    duration(Duration::from_secs_f64(s.max(0.0)))
}

impl Display for Smoke {
    fn fmt(&self, out: &mut Formatter) -> fmt::Result {
        let free = self.free_bytes.map_or_else(|| "not known".into(), |free| bytes(free as usize));
        writeln!(out, "measured {}, free memory before {free} (measured, n = 1)", self.measured)?;
        let device = self.fingerprint.device();
        if device != "cpu" {
            writeln!(
                out,
                "peaks that were measured are what the allocator of {device} reserved, of the host's memory where the device has none of its own"
            )?;
        }
        writeln!(out)?;
        writeln!(
            out,
            "{:<14} {:<19} {:>14} {:>14}  s a micro-batch (measured): median (min to max, n); a peak is one process's, n = 1",
            "rows x tokens", "of", "peak, computed", "peak, measured"
        )?;
        for result in &self.shapes {
            let (names, computed) = (result.asked.names.join(", "), bytes(result.computed_peak_bytes));
            write!(out, "{:<14} {names:<19} {computed:>14} ", shape(result.asked.shape))?;
            match &result.micro_batch_s {
                Some(time) => writeln!(out, "{:>14}  {time}", had(result))?,
                None => {
                    let told = result.peak_bytes.map(|_| format!("; {} when it last told", had(result)));
                    let why = result.why.as_deref().unwrap_or("a smaller shape ran out of memory");
                    writeln!(out, "{:>14}  {why}{}", result.outcome.name(), told.unwrap_or_default())?;
                }
            }
        }
        for result in &self.shapes {
            if let (Some(in_use), Some(host)) = (result.peak_in_use_bytes, result.host_peak_bytes) {
                let (shape, [in_use, host]) = (shape(result.asked.shape), [in_use, host].map(bytes));
                writeln!(
                    out,
                    "{shape}: tensors took {in_use} of it, seen at the ends of kernels; the process took {host} of the host"
                )?;
            }
        }
        if let Some(fit) = &self.fit {
            write!(out, "\n{fit}")?;
        }
        if let Some(prediction) = &self.prediction {
            write!(out, "{prediction}")?;
            let widest = self.fit.as_ref().map_or(0, Fit::widest_tokens);
            if prediction.longest_record_tokens > widest {
                writeln!(
                    out,
                    "  extrapolated: the longest record has {} tokens, and no row of more than {} was measured",
                    group(prediction.longest_record_tokens),
                    group(widest)
                )?;
            }
        }
        match self.failed() {
            None => write!(out, "will not fit: none of these shapes"),
            Some(failed) => write!(
                out,
                "will not fit: {} ({}); a run with a micro-batch of {} tokens or more is refused (gates.smoke)",
                shape(failed.asked.shape),
                failed.outcome.name(),
                group(failed.asked.shape.tokens())
            ),
        }
    }
}

impl Display for Fit {
    fn fmt(&self, out: &mut Formatter) -> fmt::Result {
        let curve = &self.curve;
        writeln!(
            out,
            "fit (computed: least squares of relative residuals, n = {} widths), a micro-batch of {} rows of w tokens:\n  \
             t(w) = {:.4e} s/token w + {:.4e} s/token^2 w^2",
            self.residuals.len(),
            self.micro_batch,
            curve.a_s_per_token,
            curve.b_s_per_token2
        )?;
        for residual in &self.residuals {
            writeln!(
                out,
                "  w = {:<7} measured {:.4} s (median, as above), fitted {:.4} s, residual {:+.4} s ({:+.1}%)",
                residual.seq_len_tokens,
                residual.measured_s,
                residual.fitted_s,
                residual.seconds(),
                100.0 * residual.share()
            )?;
        }
        for doubt in &self.doubts {
            writeln!(out, "  not to be trusted: {doubt}")?;
        }
        writeln!(out, "optimiser (measured) {} s a step", self.optimizer_s)
    }
}

impl Display for Prediction {
    fn fmt(&self, out: &mut Formatter) -> fmt::Result {
        let band = |[fastest, median, slowest]: [f64; 3]| {
            format!(
                "{} (all steps as the fastest {}, as the slowest {})",
                seconds(median),
                seconds(fastest),
                seconds(slowest)
            )
        };
        writeln!(
            out,
            "predicted (computed: the fit over the run's own micro-batches; no evaluation, no export)\n  \
             an epoch {}\n  all {} steps {}\n  largest micro-batch {} tokens",
            band(self.epoch_s),
            group(self.optimiser_steps),
            band(self.run_s),
            group(self.largest_micro_batch_tokens)
        )
    }
}
