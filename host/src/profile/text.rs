//! The report as a person reads it.

use super::{KernelRow, LayerRow, PhaseRow, Report, Time, WARM_UP_STEPS};
use crate::model::lora::group;
use std::fmt::{self, Display, Formatter};

impl Display for Report {
    fn fmt(&self, out: &mut Formatter) -> fmt::Result {
        let step = self.step_s;
        writeln!(
            out,
            "profile (measured) on {}: {} steps of {} tokens in all, after one that is not counted",
            self.setting,
            step.n,
            group(self.tokens)
        )?;
        let per_s = |mean_s: f64| group((self.tokens as f64 / (step.n as f64 * mean_s)) as usize);
        let recorded_s = self.table.step_mean_s;
        match (self.unrecorded_step_mean_s, self.unrecorded_step_s) {
            (Some(mean_s), Some(spread)) => writeln!(
                out,
                "a step takes {mean_s:.4} s, the mean; {} tokens/s; median {spread} s\nrecorded it takes {recorded_s:.4} s, the mean, \
                 which the times below are of; median {step} s: {} is waited for before and after every kernel, so that its time is \
                 its own, and nothing runs beside anything else",
                per_s(mean_s),
                self.setting.device
            )?,
            _ => writeln!(
                out,
                "a step takes {recorded_s:.4} s, the mean, which every figure below is of; {} tokens/s; median {step} s",
                per_s(recorded_s)
            )?,
        }
        if self.run_steps < WARM_UP_STEPS + step.n {
            writeln!(out, "the run has {} steps: they were computed in turn", group(self.run_steps))?;
        }
        let peaks = &self.peaks;
        writeln!(out, "peak (measured in this process, the most of n)")?;
        for (what, spread, unit) in [
            ("f32 product", Some(peaks.f32_product_flops), "GFLOP/s"),
            ("bf16 product", peaks.bf16_product_flops, "GFLOP/s"),
            ("copy", Some(peaks.copy_bytes_per_s), "GB/s"),
        ] {
            if let Some(spread) = spread {
                let [median, min, max] = [spread.median, spread.min, spread.max].map(|rate| rate / 1e9);
                writeln!(out, "  {what:<14} {max:.1} {unit} (median {median:.1}, least {min:.1}, n = {})", spread.n)?;
            }
        }
        writeln!(
            out,
            "MFU, of {:.1} GFLOP/s: performed {:.1}% ({:.3e} FLOP a step), nominal {:.1}% ({:.3e}: nothing computed twice)",
            peaks.weights_product_flops() / 1e9,
            100.0 * self.mfu_performed,
            self.work.performed_flop,
            100.0 * self.mfu_nominal,
            self.work.nominal_flop
        )?;
        writeln!(out, "\n{:<12} {TIMES} {:>12} {:>12}", "phase", "in kernels", "other")?;
        for PhaseRow { phase, time, kernels_s } in &self.table.phases {
            let [kernels_ms, other_ms] = [*kernels_s, time.s - kernels_s].map(|s| s * 1e3);
            writeln!(out, "{phase:<12} {time} {kernels_ms:>12.2} {other_ms:>12.2}")?;
        }
        let accounted = self.table.accounted_share;
        let all = format!("{:>10.2} {:>21} {:>6.1}%", 1e3 * self.table.step_mean_s * accounted, "", 100.0 * accounted);
        writeln!(out, "{:<12} {all}", "all phases")?;
        writeln!(out, "\n{:<12} {:<12} {:>10} {TIMES}", "layers", "phase", "calls")?;
        for LayerRow { layers, phase, calls, time } in &self.table.layers {
            writeln!(out, "{layers:<12} {phase:<12} {calls:>10.1} {time}")?;
        }
        write!(
            out,
            "\n{:<35} {:<8} {:>8} {TIMES} {:>9} {:>9} {:>7} {:>9} {:>7} {:>7}",
            "kernel", "layers", "calls", "GFLOP", "GFLOP/s", "of peak", "GB", "GB/s", "of copy"
        )?;
        self.table.kernels.iter().try_for_each(|row| self.kernel(out, row))?;
        let others: f64 = self.table.phases.iter().map(|phase| phase.time.s - phase.kernels_s).sum();
        let share = 100.0 * others / self.table.step_mean_s;
        write!(out, "\n{:<35} {:<8} {:>8} {:>10.2} {:>21} {share:>6.1}%", "everything else", "", "", others * 1e3, "")?;
        write!(out, "\n{:<35} {:<8} {:>8} {all}", "all of it", "", "")?;
        write!(
            out,
            "\nmeans over {} steps, which differ in size, with the least and the most; calls are a step's; operations (of products \
             alone) and bytes (inputs and results, each once) are computed from shapes; the copy is of memory, and what is faster \
             found some of its bytes in a cache",
            self.step_s.n
        )
    }
}

/// The heading of a [`Time`].
const TIMES: &str = " ms a step       (least to most)   share";

impl Display for Time {
    fn fmt(&self, out: &mut Formatter) -> fmt::Result {
        let range = format!("({:.2} to {:.2})", 1e3 * self.min_s, 1e3 * self.max_s);
        write!(out, "{:>10.2} {range:>21} {:>6.1}%", 1e3 * self.s, 100.0 * self.share)
    }
}

impl Report {
    fn kernel(&self, out: &mut Formatter, row: &KernelRow) -> fmt::Result {
        let KernelRow { kernel, layers, calls, time, flop, bytes } = row;
        write!(out, "\n{kernel:<35} {:<8} {calls:>8.1} {time}", layers.unwrap_or(""))?;
        match *flop > 0.0 {
            true => write!(
                out,
                " {:>9.3} {:>9.1} {:>6.1}%",
                flop / 1e9,
                flop / time.s / 1e9,
                100.0 * flop / time.s / self.peaks.product_flops(kernel)
            )?,
            false => write!(out, " {:>9} {:>9} {:>7}", "", "", "")?,
        }
        write!(out, " {:>9.4} {:>7.1}", bytes / 1e9, bytes / time.s / 1e9)?;
        match bytes / time.s / self.peaks.copy_bytes_per_s.max {
            // Faster than memory: not all of it came from there.
            share if share > 1.0 => write!(out, " {:>7}", "cache"),
            share => write!(out, " {:>6.1}%", 100.0 * share),
        }
    }
}
