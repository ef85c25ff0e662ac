//! Spans of steps summed up: by phase, by layer kind, by kernel.

use super::Recorded;
use crate::model::config::LayerConfig;
use crate::train::phase;
use serde::Serialize;
use std::collections::BTreeMap;
use tunehost_kernels::trace::Span;

/// A mean step. The kernels, and what of the phases is not in them, make up the step.
#[derive(Debug, Default, Serialize)]
pub struct Table {
    /// The parts of a step, in their order.
    pub phases: Vec<PhaseRow>,
    /// The layers, by kind and phase.
    pub layers: Vec<LayerRow>,
    /// The kernels, by kind of layer, the longest first.
    pub kernels: Vec<KernelRow>,
    /// Seconds of a step, the mean.
    pub step_mean_s: f64,
    /// Seconds of all kernels and of all else in the phases, over those of the step: what the tables account for.
    pub accounted_share: f64,
}

/// Seconds in the measured steps, which may be of different sizes.
#[derive(Debug, Default, Clone, Copy, PartialEq, Serialize)]
pub struct Time {
    /// In a step, the mean.
    pub s: f64,
    /// In the step in which it was least.
    pub min_s: f64,
    /// In the step in which it was most.
    pub max_s: f64,
    /// Share of the steps.
    pub share: f64,
}

/// A part of a step.
#[derive(Debug, Default, Clone, PartialEq, Serialize)]
pub struct PhaseRow {
    /// Its name.
    pub phase: &'static str,
    /// How long it took.
    #[serde(flatten)]
    pub time: Time,
    /// Seconds of it in kernels, the mean.
    pub kernels_s: f64,
}

/// The layers of one kind in one phase.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerRow {
    /// `sliding` or `full`.
    pub layers: &'static str,
    /// The phase.
    pub phase: &'static str,
    /// Layers that were run in a step, over all micro-batches.
    pub calls: f64,
    /// How long they took.
    #[serde(flatten)]
    pub time: Time,
}

/// A kernel in the layers of one kind, or outside them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct KernelRow {
    /// Its name.
    pub kernel: &'static str,
    /// `sliding` or `full`; null outside the layers.
    pub layers: Option<&'static str>,
    /// Calls a step.
    pub calls: f64,
    /// How long it took.
    #[serde(flatten)]
    pub time: Time,
    /// Operations of its products a step: computed from shapes.
    pub flop: f64,
    /// Bytes that it moves at least, a step: computed from shapes.
    pub bytes: f64,
}

#[derive(Default)]
struct Sum {
    calls: usize,
    /// Seconds in each step, up to the last in which it ran.
    steps_s: Vec<f64>,
    flop: f64,
    bytes: f64,
}

impl Sum {
    fn total_s(&self) -> f64 {
        self.steps_s.iter().sum()
    }

    /// In `steps` steps of `total_s` seconds.
    fn time(&self, steps: usize, total_s: f64) -> Time {
        let mut all = self.steps_s.clone();
        all.resize(steps, 0.0);
        Time {
            s: self.total_s() / steps as f64,
            min_s: all.iter().copied().fold(f64::INFINITY, f64::min),
            max_s: all.iter().copied().fold(0.0, f64::max),
            share: self.total_s() / total_s,
        }
    }
}

impl Table {
    /// Of steps of a model with these layers.
    pub fn of(steps: &[Recorded], layers: &[LayerConfig]) -> Self {
        let kind = |index: usize| layers[index].kind.name();
        let (count, mut total) = (steps.len() as f64, 0.0);
        let mut phases: BTreeMap<&str, Sum> = BTreeMap::new();
        let mut in_kernels: BTreeMap<&str, f64> = BTreeMap::new();
        let mut by_layer: BTreeMap<(&str, &str), Sum> = BTreeMap::new();
        let mut kernels: BTreeMap<(&str, Option<&str>), Sum> = BTreeMap::new();
        for (number, step) in steps.iter().enumerate() {
            total += (step.end - step.start).as_secs_f64();
            for span in &step.spans {
                let (phase, layer) = place(span, &step.spans);
                let sum = match (span.work, span.index) {
                    (Some(work), _) => {
                        *in_kernels.entry(phase).or_default() += span.duration().as_secs_f64();
                        let sum = kernels.entry((span.name, layer.map(kind))).or_default();
                        sum.flop += work.flop as f64;
                        sum.bytes += work.bytes as f64;
                        sum
                    }
                    (None, Some(index)) => by_layer.entry((kind(index), phase)).or_default(),
                    (None, None) => phases.entry(span.name).or_default(),
                };
                sum.calls += 1;
                sum.steps_s.resize(number + 1, 0.0);
                sum.steps_s[number] += span.duration().as_secs_f64();
            }
        }
        let accounted: f64 = phases.values().map(Sum::total_s).sum();
        let time = |sum: &Sum| sum.time(steps.len(), total);
        let phases = phase::ALL.iter().filter_map(|phase| phases.get_key_value(phase)).map(|(name, sum)| PhaseRow {
            phase: name,
            time: time(sum),
            kernels_s: in_kernels.get(name).copied().unwrap_or(0.0) / count,
        });
        let mut by_layer: Vec<_> = by_layer.into_iter().collect();
        by_layer.sort_by_key(|((_, phase), _)| phase::ALL.iter().position(|known| known == phase));
        let layers = by_layer.iter().map(|&((layers, phase), ref sum)| LayerRow {
            layers,
            phase,
            calls: sum.calls as f64 / count,
            time: time(sum),
        });
        let kernels = kernels.iter().map(|(&(kernel, layers), sum)| KernelRow {
            kernel,
            layers,
            calls: sum.calls as f64 / count,
            time: time(sum),
            flop: sum.flop / count,
            bytes: sum.bytes / count,
        });
        let mut kernels: Vec<KernelRow> = kernels.collect();
        kernels.sort_by(|a, b| b.time.s.total_cmp(&a.time.s));
        Self {
            phases: phases.collect(),
            layers: layers.collect(),
            kernels,
            step_mean_s: total / count,
            accounted_share: accounted / total,
        }
    }
}

/// The phase and the layer that a span is in.
fn place(span: &Span, spans: &[Span]) -> (&'static str, Option<usize>) {
    let (mut phase, mut layer) = (span.name, None);
    let mut at = span.parent;
    while let Some(parent) = at.map(|at| &spans[at]) {
        layer = layer.or(parent.index);
        phase = parent.name;
        at = parent.parent;
    }
    (phase, layer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::fixtures::large_model_headers;
    use std::time::Duration;
    use tunehost_kernels::trace::Work;

    fn span(
        name: &'static str,
        index: Option<usize>,
        ms: [u64; 2],
        parent: Option<usize>,
        flop: Option<usize>,
    ) -> Span {
        let work = flop.map(|flop| Work { flop, bytes: 8 });
        let [start, end] = ms.map(Duration::from_millis);
        Span { name, index, work, start, end, parent }
    }

    #[test]
    fn times_are_summed_by_phase_layer_kind_and_kernel() {
        let layers = large_model_headers().0.layers;
        // layer 5 is the first full one
        let spans = vec![
            span(phase::FORWARD, None, [0, 50], None, None),
            span("layer", Some(4), [0, 20], Some(0), None),
            span("linear", None, [5, 15], Some(1), Some(100)),
            span("layer", Some(5), [20, 40], Some(0), None),
            span("linear", None, [25, 30], Some(3), Some(300)),
            span(phase::LOSS, None, [50, 90], None, None),
            span("linear_cross_entropy", None, [50, 80], Some(5), Some(7)),
        ];
        let step = || Recorded { start: Duration::ZERO, end: Duration::from_millis(100), spans: spans.clone() };
        let mut short = step();
        short.spans.truncate(5);
        let table = Table::of(&[step(), step()], &layers);
        let close = |a: f64, b: f64| (a - b).abs() < 1e-12;
        assert!(close(table.accounted_share, 0.9));
        let [forward, loss] = &table.phases[..] else { panic!("{table:?}") };
        assert!(
            close(forward.time.s, 0.05) && close(forward.time.share, 0.5) && close(forward.kernels_s, 0.015),
            "{forward:?}"
        );
        assert!(loss.phase == phase::LOSS && close(loss.kernels_s, 0.03), "{loss:?}");
        let kernels: Vec<_> = table.kernels.iter().map(|row| (row.kernel, row.layers, row.calls, row.flop)).collect();
        let linear = |layers, flop| ("linear", Some(layers), 1.0, flop);
        let head = ("linear_cross_entropy", None, 1.0, 7.0);
        assert_eq!(kernels, [head, linear("sliding", 100.0), linear("full", 300.0)]);
        let kinds: Vec<_> = table.layers.iter().map(|row| (row.layers, row.phase, row.calls)).collect();
        assert_eq!(kinds, [("full", phase::FORWARD, 1.0), ("sliding", phase::FORWARD, 1.0)]);
        // A step in which there was no loss.
        let loss = &Table::of(&[step(), short], &layers).phases[1];
        assert!(close(loss.time.s, 0.02) && loss.time.min_s == 0.0 && close(loss.time.max_s, 0.04), "{loss:?}");
    }
}
