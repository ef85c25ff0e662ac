//! Gates on the steps as they are computed.

use super::Records;
use crate::config::{Action, GatesConfig};
use crate::error::{Error, Result};
use crate::model::adapter::{Adapter, values};
use crate::run::metrics::StepMetrics;
use crate::run::provenance::{GateRecord, Verdict};
use std::collections::VecDeque;

/// What the inert-adapter gate found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Movement {
    /// Every B moved.
    All,
    /// The modules whose B is as it was.
    SomeStill(Vec<String>),
}

/// Whether B of every adapter left its value in `initial`, or zero where there is none ([`Adapter::init`]). An adapter whose B
/// never moves leaves the model as it was, and nothing else of a run shows it.
///
/// # Errors
/// `gate::inert_adapter` when no B moved.
pub fn movement(adapter: &Adapter, initial: Option<&Adapter>) -> Result<Movement> {
    let is_still = |i: &usize| {
        let b = values(&adapter.pair(*i).b);
        initial.map_or_else(|| b.iter().all(|v| *v == 0.0), |initial| b == values(&initial.pair(*i).b))
    };
    let still = (0..adapter.plan.modules.len()).filter(is_still);
    let still: Vec<String> = still.map(|i| adapter.plan.modules[i].path.clone()).collect();
    if still.len() == adapter.plan.modules.len() {
        return Err(Error::new("gate::inert_adapter", "no adapter moved in a step with a learning rate above 0")
            .expected("every lora_B to differ from its initial value")
            .help(
                "no gradient reaches the adapters (gates.zero_gradient says), or the rate is too small to move an f32: a run \
                 like this would end with the base's own answers",
            ));
    }
    Ok(if still.is_empty() { Movement::All } else { Movement::SomeStill(still) })
}

/// # Errors
/// `gate::not_finite` for a loss or gradient norm that is not a number.
pub fn finite(step: u64, loss: f64, grad_norm: f64) -> Result<()> {
    if loss.is_finite() && grad_norm.is_finite() {
        return Ok(());
    }
    Err(Error::new("gate::not_finite", format!("step {step} has loss {loss} and gradient norm {grad_norm}"))
        .expected("finite numbers")
        .help("its update was not applied and the last checkpoint stands; try a lower `train.lr`, a longer warm-up, or look at the step's records in order-manifest.jsonl"))
}

/// # Errors
/// `gate::zero_gradient` for a gradient norm of exactly 0.
pub fn moving_gradient(step: u64, grad_norm: f64) -> Result<()> {
    if grad_norm != 0.0 {
        return Ok(());
    }
    Err(Error::new("gate::zero_gradient", format!("step {step} has a gradient norm of 0"))
        .expected("a gradient for the adapters")
        .help("nothing is learnt from such a step; are its losses all 0?"))
}

/// Compares a loss with the median of `recent`, the losses of the steps before it.
///
/// # Errors
/// `gate::loss_spike` where it is more than `nats` above.
pub fn loss_spike(step: u64, loss: f64, recent: &VecDeque<f64>, nats: f64) -> Result<()> {
    let mut sorted: Vec<f64> = recent.iter().copied().collect();
    sorted.sort_by(f64::total_cmp);
    let Some(median) = sorted.get(sorted.len() / 2) else { return Ok(()) };
    if loss <= median + nats {
        return Ok(());
    }
    let message =
        format!("step {step} has loss {loss:.3}; the median of the {} steps before it is {median:.3}", sorted.len());
    Err(Error::new("gate::loss_spike", message)
        .expected(format!("at most {nats} nats more"))
        .help("its records stand in order-manifest.jsonl; try a lower `train.lr` or a longer warm-up"))
}

/// One gate over the steps of a run.
#[derive(Debug)]
struct Gate {
    name: &'static str,
    action: Action,
    found: u64,
    last: String,
    stopped: bool,
}

impl Gate {
    fn new(name: &'static str, action: Action) -> Self {
        Self { name, action, found: 0, last: String::new(), stopped: false }
    }

    /// Counts what the gate found; the error where it stops, else the warning. A step that is only `replayed` was let through.
    fn settle(&mut self, found: Result<()>, replayed: bool) -> Result<Option<String>> {
        let Err(error) = found else { return Ok(None) };
        if self.action == Action::Off {
            return Ok(None);
        }
        self.found += 1;
        self.last = error.message().into();
        if self.action == Action::Stop && !replayed {
            self.stopped = true;
            return Err(super::let_through(error, self.name));
        }
        Ok(Some(format!("gate {}: {}", self.name, self.last)))
    }

    fn record(&self, steps: u64) -> GateRecord {
        let (verdict, found) = match (self.action, self.found) {
            (Action::Off, _) => (Verdict::Off, "it did not look".into()),
            (_, 0) => (Verdict::Passed, format!("nothing in {steps} steps")),
            _ if self.stopped => (Verdict::Stopped, self.last.clone()),
            (_, n) => (Verdict::Warned, format!("{n} of {steps} steps; the last: {}", self.last)),
        };
        GateRecord { action: self.action, verdict, found }
    }
}

/// The gates of a run's steps. What they know is in `metrics.jsonl`, so that a resumed run's gates say what those of one that
/// never stopped say.
#[derive(Debug)]
pub struct StepGates {
    config: GatesConfig,
    initial: Option<Adapter>,
    recent: VecDeque<f64>,
    steps: u64,
    not_finite: Gate,
    zero_gradient: Gate,
    loss_spike: Gate,
    inert: Option<GateRecord>,
    warnings: Vec<String>,
}

impl StepGates {
    /// Gates before the first step of a run that starts from the adapter `initial`, or from a fresh one.
    pub fn new(config: &GatesConfig, initial: Option<Adapter>) -> Self {
        Self {
            initial,
            recent: VecDeque::new(),
            steps: 0,
            not_finite: Gate::new("not_finite", config.not_finite),
            zero_gradient: Gate::new("zero_gradient", config.zero_gradient),
            loss_spike: Gate::new("loss_spike", config.loss_spike),
            inert: None,
            warnings: Vec::new(),
            config: config.clone(),
        }
    }

    /// Takes in a step that was computed before the run was resumed.
    pub fn replay(&mut self, step: &StepMetrics) {
        _ = self.look(step, true);
        self.warnings.clear();
    }

    /// Looks at a step before its update is applied, and says whether it is to be.
    ///
    /// # Errors
    /// What a gate found that stops the run; the update is then not to be applied.
    pub fn before_update(&mut self, step: &StepMetrics) -> Result<bool> {
        self.look(step, false)
    }

    fn look(&mut self, step: &StepMetrics, replayed: bool) -> Result<bool> {
        self.steps += 1;
        let StepMetrics { step, loss, grad_norm, .. } = *step;
        let broken = finite(step, loss, grad_norm);
        let apply = broken.is_ok();
        self.warnings.extend(self.not_finite.settle(broken, replayed)?);
        if !apply {
            return Ok(false);
        }
        self.warnings.extend(self.zero_gradient.settle(moving_gradient(step, grad_norm), replayed)?);
        let window = self.config.loss_spike_steps;
        if self.recent.len() == window {
            let spike = loss_spike(step, loss, &self.recent, self.config.loss_spike_nats);
            self.warnings.extend(self.loss_spike.settle(spike, replayed)?);
            self.recent.pop_front();
        }
        self.recent.push_back(loss);
        Ok(true)
    }

    /// Looks at the adapters after a step with learning rate `lr`: after the first, after step `inert_adapter_step`, and
    /// where the run is about to `save` them.
    ///
    /// # Errors
    /// `gate::inert_adapter`.
    pub fn after_update(&mut self, step: u64, lr: f64, save: bool, adapter: &Adapter) -> Result<()> {
        let first = self.inert.is_none() && lr > 0.0;
        let due = first || step == self.config.inert_adapter_step || save && self.inert.is_some();
        let action = self.config.inert_adapter;
        if !due || action == Action::Off {
            return Ok(());
        }
        let of = adapter.plan.modules.len();
        let mut write = |verdict, found| self.inert = Some(GateRecord { action, verdict, found });
        match movement(adapter, self.initial.as_ref()) {
            Ok(Movement::All) => write(Verdict::Passed, format!("all {of} adapters moved by step {step}")),
            Ok(Movement::SomeStill(paths)) => {
                let still =
                    format!("{} of {of} adapters did not move by step {step}: {}", paths.len(), paths.join(", "));
                write(Verdict::Warned, still.clone());
                self.warnings.push(format!("gate inert_adapter: {still}"));
            }
            Err(error) if action == Action::Warn => {
                write(Verdict::Warned, error.message().into());
                self.warnings.push(format!("gate inert_adapter: {}", error.message()));
            }
            Err(error) => {
                write(Verdict::Stopped, error.message().into());
                return Err(super::let_through(error, "inert_adapter"));
            }
        }
        Ok(())
    }

    /// What there is to warn of since the last call.
    pub fn warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.warnings)
    }

    /// What the gates said so far.
    pub fn records(&self) -> Records {
        let gates = [&self.not_finite, &self.zero_gradient, &self.loss_spike];
        let mut records: Records = gates.map(|gate| (gate.name.to_string(), gate.record(self.steps))).into();
        let action = self.config.inert_adapter;
        let off = GateRecord { action, verdict: Verdict::Off, found: "it did not look".into() };
        let inert = if action == Action::Off { Some(off) } else { self.inert.clone() };
        records.extend(inert.map(|record| ("inert_adapter".to_string(), record)));
        records
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::LoraConfig;
    use crate::model::adapter::LowRank;
    use crate::model::config::TextConfig;
    use crate::model::fixtures::fixture;
    use crate::model::lora::LoraPlan;
    use crate::model::spec::ModelSpec;
    use burn::tensor::Device;
    use std::ops::Range;
    use tunehost_kernels::adamw::Write;

    fn step(step: u64, loss: f64, grad_norm: f64) -> StepMetrics {
        StepMetrics { step, epoch: 0, loss, lr: 1e-3, grad_norm, tokens: 9, trained_tokens: 4, padding: 0.0 }
    }

    fn adapter() -> Adapter {
        let text = TextConfig::read(&fixture("golden/model")).unwrap();
        let plan = LoraPlan::new(&LoraConfig::default(), &ModelSpec::new(&text, "model.")).unwrap();
        Adapter::init(plan, 1, &Device::flex())
    }

    fn move_b(adapter: &mut Adapter, modules: Range<usize>) {
        for index in modules {
            let LowRank { a, b } = adapter.pair(index);
            adapter.flat.write(index, LowRank { a, b: b.add_scalar(0.5) }, Write::Set);
        }
    }

    #[test]
    fn an_adapter_that_does_not_move_stops_the_run_and_some_are_named() {
        let mut adapter = adapter();
        let mut gates = StepGates::new(&GatesConfig::default(), None);
        // A step whose learning rate is 0 says nothing.
        gates.after_update(1, 0.0, false, &adapter).unwrap();
        let error = gates.after_update(2, 1e-3, false, &adapter).unwrap_err();
        assert_eq!((error.code(), error.exit_code()), ("gate::inert_adapter", 7));
        assert_eq!(gates.records()["inert_adapter"].verdict, Verdict::Stopped);

        let mut gates = StepGates::new(&GatesConfig { inert_adapter: Action::Warn, ..GatesConfig::default() }, None);
        gates.after_update(1, 1e-3, false, &adapter).unwrap();
        assert!(gates.warnings()[0].contains("no adapter moved"));

        let of = adapter.plan.modules.len();
        move_b(&mut adapter, 1..of);
        // Looked at again where it is saved, and at the step that is set.
        for (step, save) in [(7, true), (100, false)] {
            gates.after_update(step, 1e-3, save, &adapter).unwrap();
            let named = format!("1 of {of} adapters did not move by step {step}: {}", adapter.plan.modules[0].path);
            assert!(gates.warnings()[0].ends_with(&named));
        }
        gates.after_update(101, 1e-3, false, &adapter).unwrap();
        assert_eq!(gates.warnings(), [""; 0]);
        move_b(&mut adapter, 0..1);
        gates.after_update(102, 1e-3, true, &adapter).unwrap();
        assert_eq!(gates.records()["inert_adapter"].verdict, Verdict::Passed);
    }

    #[test]
    fn an_adapter_that_was_trained_before_is_compared_with_what_it_was() {
        let mut initial = adapter();
        let of = initial.plan.modules.len();
        move_b(&mut initial, 0..of);
        let mut gates = StepGates::new(&GatesConfig::default(), Some(initial.clone()));
        let error = gates.after_update(1, 1e-3, false, &initial).unwrap_err();
        assert_eq!(error.code(), "gate::inert_adapter");
        // Back at zero is elsewhere.
        gates.after_update(2, 1e-3, true, &adapter()).unwrap();
        assert_eq!(gates.records()["inert_adapter"].verdict, Verdict::Passed);
    }

    #[test]
    fn a_loss_that_is_no_number_stops_or_its_update_is_left_out() {
        let mut gates = StepGates::new(&GatesConfig::default(), None);
        assert!(gates.before_update(&step(1, 2.0, 1.0)).unwrap());
        for (loss, norm) in [(f64::NAN, 1.0), (2.0, f64::INFINITY)] {
            assert_eq!(gates.before_update(&step(2, loss, norm)).unwrap_err().code(), "gate::not_finite");
        }
        assert_eq!(gates.records()["not_finite"].verdict, Verdict::Stopped);
        let mut gates = StepGates::new(&GatesConfig { not_finite: Action::Warn, ..GatesConfig::default() }, None);
        assert!(!gates.before_update(&step(1, f64::NAN, 1.0)).unwrap());
        assert!(gates.warnings()[0].starts_with("gate not_finite: step 1"));
        assert!(gates.records()["not_finite"].found.starts_with("1 of 1 steps"));
    }

    #[test]
    fn a_gradient_of_zero_and_a_spike_are_found_and_a_resumed_run_says_the_same() {
        let config = GatesConfig { zero_gradient: Action::Warn, loss_spike_steps: 3, ..GatesConfig::default() };
        let losses = [9.0, 3.0, 3.1, 2.9, 5.2, 3.0, 2.9];
        let steps: Vec<StepMetrics> =
            (1..).zip(losses).map(|(i, loss)| step(i, loss, f64::from(u8::from(i != 6)))).collect();
        let mut whole = StepGates::new(&config, None);
        for step in &steps {
            assert!(whole.before_update(step).unwrap());
        }
        let warnings = whole.warnings();
        assert_eq!(warnings.len(), 2, "{warnings:?}");
        assert_eq!(warnings[0], "gate loss_spike: step 5 has loss 5.200; the median of the 3 steps before it is 3.000");
        assert_eq!(warnings[1], "gate zero_gradient: step 6 has a gradient norm of 0");
        let mut resumed = StepGates::new(&config, None);
        steps[..5].iter().for_each(|step| resumed.replay(step));
        assert_eq!(resumed.warnings(), [""; 0]);
        steps[5..].iter().for_each(|step| assert!(resumed.before_update(step).unwrap()));
        assert_eq!(resumed.records(), whole.records());

        let stop = GatesConfig { loss_spike: Action::Stop, ..config };
        let mut gates = StepGates::new(&stop, None);
        steps[..4].iter().for_each(|step| assert!(gates.before_update(step).unwrap()));
        assert_eq!(gates.before_update(&steps[4]).unwrap_err().code(), "gate::loss_spike");
        let zero = StepGates::new(&GatesConfig::default(), None).before_update(&step(1, 2.0, 0.0)).unwrap_err();
        assert_eq!(zero.code(), "gate::zero_gradient");
    }
}
