//! How long the parts of a run's steps take, each for itself, at the run's shapes, on its device, with the kernels that the run
//! resolves to: a benchmark of anything else says nothing about the run.

use crate::config::Config;
use crate::device;
use crate::error::{Error, Result};
use crate::job::Rehearsal;
use crate::model::adapter::{Adapter, tensor};
use crate::model::config::{LayerConfig, TextConfig};
use crate::model::gemma4;
use crate::model::lora::{LoraPlan, group};
use crate::model::rng::SplitMix64;
use crate::plan::Spread;
use crate::plugins::{PlanRequest, StepInfo};
use crate::profile::Setting;
use crate::run::clock::unix_ms_now;
use crate::run::folder::PROVENANCE;
use crate::run::provenance::Provenance;
use crate::smoke::{self, Smoke};
use crate::train::batch::Batch;
use crate::train::engine::Gradients;
use crate::train::optimizer::{AdamW, global_norm};
use crate::train::steps::MicroBatch;
use burn::tensor::{DType, Device, Tensor};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};
use std::path::{Path, PathBuf};
use std::time::Instant;
use tunehost_kernels::attention::windowed_attention_output;
use tunehost_kernels::cotangent::pull_back;
use tunehost_kernels::cross_entropy::linear_cross_entropy;
use tunehost_kernels::glu::geglu;
use tunehost_kernels::linear::{Adapter as LinearAdapter, lora_linear};
use tunehost_kernels::norm::rms_norm_residual;
use tunehost_kernels::{moe, trace};

/// What the parts of a run's steps take.
#[derive(Debug, Serialize)]
pub struct Report {
    /// On what.
    #[serde(flatten)]
    pub setting: Setting,
    /// The run whose kernels were found to be the same; null where none was named.
    pub same_as_run: Option<String>,
    /// Whether the kernels are those of what `tunehost smoke` kept of the configuration; null where there is nothing.
    pub smoke: Option<SmokeKernels>,
    /// The micro-batches.
    pub shapes: Vec<Shape>,
    /// Whether a signal ended it: then only its first parts were measured.
    pub stopped: bool,
    /// What was measured.
    pub rows: Vec<Row>,
}

/// The kernels that `tunehost smoke` measured with.
#[derive(Debug, Serialize)]
pub struct SmokeKernels {
    /// The file that says so.
    pub path: PathBuf,
    /// When, UTC.
    pub measured: String,
    /// Their hash.
    pub kernels_sha256: String,
    /// Whether they are those of this bench.
    pub same: bool,
}

/// A micro-batch of the run.
#[derive(Debug, Clone, Serialize)]
pub struct Shape {
    /// `median` or `largest`, by tokens.
    pub name: &'static str,
    /// Tokens.
    pub tokens: usize,
    /// Documents.
    pub documents: usize,
    /// Tokens with a target.
    pub trained_tokens: usize,
}

/// A part of a step.
#[derive(Debug, Serialize)]
pub struct Row {
    /// What it is.
    pub what: String,
    /// At which micro-batch, where it depends on one.
    pub shape: Option<&'static str>,
    /// Seconds.
    pub s: Spread,
    /// Operations of its products; null for what is no kernel, or one that does not tell.
    pub flop: Option<usize>,
    /// Bytes that it moves at least.
    pub bytes: Option<usize>,
}

/// Measures each part `times` times after a time that is not counted. With `run`, the folder of a run, first compares its
/// kernels. Once `stop` says so, nothing more is measured.
///
/// # Errors
/// `run::other_kernels` where the run's kernels are others; classes `run`, `device`, `plugin`.
pub fn bench(
    config: &Config,
    rehearsal: &mut Rehearsal,
    times: usize,
    run: Option<&Path>,
    stop: &dyn Fn() -> bool,
) -> Result<Report> {
    let setting = Setting::of(config)?;
    let same_as_run = run.map(|run| same_kernels(run, &setting)).transpose()?;
    let smoke = smoke_kernels(&smoke::path_of(config), &setting);
    let device = device::open(&config.model.device)?;
    let activations = config.train.activations.dtype();
    let mut bench = Bench { times, device: &device, activations, stop, rows: Vec::new() };
    let prepared = &mut rehearsal.prepared;
    let records = &prepared.corpus.train;
    let mut batches: Vec<&MicroBatch> = prepared.steps.iter().flat_map(|step| &step.batches).collect();
    batches.sort_by_key(|batch| batch.tokens(records).0);
    let laid_out = |batch: &MicroBatch| Batch::of(batch.rows.iter().flatten().map(|i| &records[*i as usize]));
    let chosen = [("median", batches[batches.len() / 2]), ("largest", batches[batches.len() - 1])];
    let mut shapes = Vec::new();
    for (name, micro_batch) in chosen {
        let batch = laid_out(micro_batch);
        let documents = batch.segments.cu_seqlens().len() - 1;
        shapes.push(Shape { name, tokens: batch.tokens(), documents, trained_tokens: batch.trained() });
        bench.kernels(name, config, &prepared.text, &prepared.lora, &batch);
        bench.measure("data: micro-batch laid out", Some(name), || {
            laid_out(micro_batch);
            Ok(())
        })?;
    }
    bench.optimiser(config, &prepared.initial_adapter(config.train.seed, &device));

    let (lengths, roots) = prepared.corpus.columns();
    let request = PlanRequest::configured(config, &lengths, &roots, 0);
    let policies = &mut prepared.policies;
    let what = format!("plugin {}: {} records planned", policies.sampler.identity().name, group(lengths.len()));
    bench.measure(what, None, || policies.sampler.plan(&request).map(drop))?;
    let what = format!("plugin {}: asked after a step", policies.scheduling.run.identity().name);
    let mut step = 0;
    bench.measure(what, None, || {
        step += 1;
        let (total_steps, wall_clock_ms) = (prepared.steps.len().max(step) as u64, unix_ms_now());
        let (since_last_save_ms, last_save_cost_ms) = (1000, 0);
        let step = step as u64;
        let info = StepInfo { step, total_steps, wall_clock_ms, since_last_save_ms, last_save_cost_ms, loss: 1.0 };
        policies.scheduling.run.after_step(&info).map(drop)
    })?;
    Ok(Report { setting, same_as_run, smoke, stopped: stop(), shapes, rows: bench.rows })
}

/// What is kept at `path`, where it names its kernels.
fn smoke_kernels(path: &Path, setting: &Setting) -> Option<SmokeKernels> {
    let smoke = Smoke::read(path).ok().flatten()?;
    let kernels_sha256 = smoke.fingerprint.kernels_sha256()?.to_string();
    let same = kernels_sha256 == setting.kernels_sha256;
    Some(SmokeKernels { path: path.into(), measured: smoke.measured, kernels_sha256, same })
}

/// The id of the run in the folder `run`, where its kernels are those of `setting`.
fn same_kernels(run: &Path, setting: &Setting) -> Result<String> {
    let (resolved, is) = (&setting.resolved, &setting.kernels_sha256);
    let provenance = Provenance::read(run)?;
    let of_run = provenance.kernels.iter().map(|(kernel, by)| (&kernel[..], &by.resolved[..]));
    let was = device::kernels_sha256(of_run.clone());
    // A run of an earlier version recorded its kernels without their hash.
    let recorded = &provenance.kernels_sha256;
    if !recorded.is_empty() && *recorded != was {
        let message = format!("{} says that the kernels have the sha256 {recorded}", run.join(PROVENANCE).display());
        return Err(Error::new("run::other_kernels", message)
            .expected(format!("{was}, that of the kernels which it lists"))
            .help("the file was changed: tunehost runs verify says what else was"));
    }
    if was == *is {
        return Ok(provenance.run_id);
    }
    let of_run: BTreeMap<&str, &str> = of_run.collect();
    let differs = |kernel: &&str| of_run.get(*kernel) != resolved.get(*kernel).map(|by| &by[..]).as_ref();
    let kernel = of_run.keys().chain(resolved.keys()).copied().find(|kernel| differs(kernel)).unwrap_or_default();
    let of_run = of_run.get(kernel).copied().unwrap_or("nothing");
    let here = resolved.get(kernel).map_or("nothing", |by| &by[..]);
    let message = format!("the kernels here have the sha256 {is}: {kernel} is {here}");
    Err(Error::new("run::other_kernels", message)
        .expected(format!("{was}, with which run {} was started: {kernel} is {of_run}", provenance.run_id))
        .help("bench on the run's machine with its model.device and model.weights, or leave --run out"))
}

struct Bench<'a> {
    times: usize,
    device: &'a Device,
    activations: DType,
    stop: &'a dyn Fn() -> bool,
    rows: Vec<Row>,
}

impl Bench<'_> {
    fn measure(
        &mut self,
        what: impl Into<String>,
        shape: Option<&'static str>,
        mut call: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        if (self.stop)() {
            return Ok(());
        }
        // The first call is not counted, and tells what the kernels do.
        let (first, spans) = trace::record(|| (), &mut call);
        first?;
        _ = self.device.sync();
        let work = || spans.iter().filter_map(|span| span.work);
        let told = work().next().is_some();
        let mut seconds = Vec::with_capacity(self.times);
        for _ in 0..self.times {
            let started = Instant::now();
            call()?;
            _ = self.device.sync();
            seconds.push(started.elapsed().as_secs_f64());
            if (self.stop)() {
                break;
            }
        }
        self.rows.push(Row {
            what: what.into(),
            shape,
            s: Spread::of(&seconds).expect("it is measured once at least"),
            flop: told.then(|| work().map(|work| work.flop).sum()),
            bytes: told.then(|| work().map(|work| work.bytes).sum()),
        });
        Ok(())
    }

    /// Measures a call that cannot fail.
    fn kernel(&mut self, what: impl Into<String>, shape: &'static str, mut call: impl FnMut()) {
        let measured = self.measure(what, Some(shape), || {
            call();
            Ok(())
        });
        measured.expect("the call does not fail");
    }

    fn random<const D: usize>(&self, shape: [usize; D]) -> Tensor<D> {
        let mut rng = SplitMix64::new(D as u64, "bench");
        let values = (0..shape.iter().product::<usize>()).map(|_| (rng.next_f64() - 0.5) as f32).collect();
        tensor(shape, values, self.device)
    }

    /// What operations pass to each other.
    fn passed_on<const D: usize>(&self, shape: [usize; D]) -> Tensor<D> {
        self.random(shape).cast(self.activations)
    }

    fn kernels(&mut self, shape: &'static str, config: &Config, text: &TextConfig, lora: &LoraPlan, batch: &Batch) {
        let n = batch.tokens();
        let dtype = config.model.weights.dtype();
        for (layer, _) in text.attention_kinds() {
            self.attention(shape, layer, text.heads, dtype, batch);
        }
        let hidden = text.hidden_size;
        if let Some(moe) = text.layers.iter().find_map(|layer| layer.moe) {
            let gate_up = self.random([moe.experts, 2 * moe.intermediate_size, hidden]).cast(dtype);
            let down = self.random([moe.experts, hidden, moe.intermediate_size]).cast(dtype);
            let (x, logits) = (self.passed_on([n, hidden]), self.random([n, moe.experts]));
            let scale = Tensor::<1>::ones([moe.experts], self.device);
            let d_out = self.passed_on([n, hidden]);
            let run = |x: Tensor<2>, logits: Tensor<2>| {
                let routing = moe::route(logits, scale.clone(), moe.top_k);
                moe::experts(x, &routing, gate_up.clone(), down.clone())
            };
            let name = "moe_experts with routing";
            self.kernel(format!("{name}, forward"), shape, || drop(run(x.clone(), logits.clone())));
            self.kernel(format!("{name}, forward and backward"), shape, || {
                let [x, logits] = [&x, &logits].map(|t| t.clone().autodiff().require_grad());
                drop(pull_back(run(x, logits), d_out.clone()));
            });
        }
        self.linear(shape, lora, dtype, n);
        let (weight, residual) = (Tensor::<1>::ones([hidden], self.device), self.random([n, hidden]));
        self.both("rms_norm with residual".into(), shape, self.passed_on([n, hidden]), |x| {
            rms_norm_residual(x, weight.clone(), text.rms_norm_eps, residual.clone(), 1.0)
        });
        let up = self.passed_on([n, text.intermediate_size]);
        self.both("geglu".into(), shape, up.clone(), |gate| geglu(gate, up.clone()));
        let (rows, head) = (self.passed_on([n, hidden]), self.random([text.vocab_size, hidden]).cast(dtype));
        self.kernel("embedding", shape, || drop(gemma4::embedded(&head, &batch.ids)));
        for (name, want_grad) in [("loss", false), ("loss and gradient", true)] {
            self.kernel(format!("linear_cross_entropy, {name}"), shape, || {
                let (softcap, chunk_rows) = (text.final_logit_softcapping, config.train.loss_chunk_rows);
                let (rows, head) = (rows.clone(), head.clone());
                drop(linear_cross_entropy(rows, head, &batch.targets, softcap, 1.0, chunk_rows, want_grad));
            });
        }
    }

    /// The largest adapted module.
    fn linear(&mut self, shape: &'static str, lora: &LoraPlan, dtype: DType, n: usize) {
        let Some(module) = lora.modules.iter().max_by_key(|module| module.input * module.output) else { return };
        let weight = self.random([module.output, module.input]).cast(dtype);
        let [a, b] = [[lora.rank, module.input], [module.output, lora.rank]].map(|shape| self.random(shape));
        let name = format!("lora_linear, {} of a {} layer", module.slot.name(), module.kind.name());
        self.both(name, shape, self.passed_on([n, module.input]), |x| {
            // As in training, where the adapter is differentiated too.
            let [a, b] =
                [&a, &b].map(|t| if x.is_require_grad() { t.clone().autodiff().require_grad() } else { t.clone() });
            let adapter = LinearAdapter { a, b, scale: lora.scale, dropout: None };
            lora_linear(x, weight.clone(), Some(&adapter))
        });
    }

    /// Measures the forward pass of `run`, and both passes.
    fn both(&mut self, name: String, shape: &'static str, x: Tensor<2>, run: impl Fn(Tensor<2>) -> Tensor<2>) {
        let d_out = run(x.clone());
        self.kernel(format!("{name}, forward"), shape, || drop(run(x.clone())));
        self.kernel(format!("{name}, forward and backward"), shape, || {
            drop(pull_back(run(x.clone().autodiff().require_grad()), d_out.clone()));
        });
    }

    fn attention(&mut self, shape: &'static str, layer: &LayerConfig, heads: usize, weights: DType, batch: &Batch) {
        let (n, LayerConfig { kv_heads, head_dim, kind, .. }) = (batch.tokens(), *layer);
        let inputs = [heads, kv_heads, kv_heads].map(|heads| self.passed_on([n, heads, head_dim]));
        let d_out = self.passed_on([n, heads * head_dim]);
        let attention = gemma4::attention(layer, &batch.segments, weights);
        let run = |[q, k, v]: [Tensor<3>; 3]| windowed_attention_output(q, k, v, &attention).out;
        let name = format!("windowed_attention, {} layer", kind.name());
        self.kernel(format!("{name}, forward"), shape, || drop(run(inputs.clone())));
        self.kernel(format!("{name}, forward and backward"), shape, || {
            let out = run(inputs.clone().map(|t| t.autodiff().require_grad()));
            drop(pull_back(out.reshape([n, heads * head_dim]), d_out.clone()));
        });
    }

    fn optimiser(&mut self, config: &Config, initial: &Adapter) {
        let mut adapter = initial.clone();
        let mut optimizer = AdamW::new(&config.train, &adapter);
        let gradients = Gradients::of(initial);
        let what = format!("optimiser: {} parameters updated", group(adapter.plan.parameters()));
        let measured = self.measure(what, None, || {
            let norm = global_norm(&gradients);
            optimizer.update(&mut adapter, gradients.clone(), 1.0 / norm, config.train.lr);
            Ok(())
        });
        measured.expect("the call does not fail");
    }
}

impl Display for Report {
    fn fmt(&self, out: &mut Formatter) -> fmt::Result {
        writeln!(out, "bench (measured) on {}", self.setting)?;
        match &self.same_as_run {
            Some(run) => writeln!(out, "the kernels are the same as those of run {run}")?,
            None => writeln!(out, "compared with no run: --run RUN compares them with what a run recorded")?,
        }
        if let Some(SmokeKernels { path, measured, kernels_sha256, same }) = &self.smoke {
            let are = if *same { "the same".to_string() } else { format!("others, sha256 {kernels_sha256}") };
            writeln!(out, "those of {}, measured on {measured}, are {are}", path.display())?;
        }
        for Shape { name, tokens, documents, trained_tokens } in &self.shapes {
            let (tokens, trained) = (group(*tokens), group(*trained_tokens));
            writeln!(
                out,
                "the {name} micro-batch: {tokens} tokens in {} documents, {trained} trained",
                group(*documents)
            )?;
        }
        write!(out, "\n{:<58} {:<8} {:>40} {:>9}", "part", "at", "ms: median (least to most, n)", "GFLOP/s")?;
        for Row { what, shape, s, flop, .. } in &self.rows {
            let [median, min, max] = [s.median, s.min, s.max].map(|s| s * 1e3);
            let time = format!("{median:.4} ({min:.4} to {max:.4}, n = {})", s.n);
            write!(out, "\n{what:<58} {:<8} {time:>40}", shape.unwrap_or(""))?;
            if let Some(flop) = flop.filter(|flop| *flop > 0) {
                write!(out, " {:>9.1}", flop as f64 / s.median / 1e9)?;
            }
        }
        if self.stopped {
            write!(out, "\nstopped by a signal: what follows was not measured")?;
        }
        write!(out, "\noperations are those of the products, computed from shapes")
    }
}
