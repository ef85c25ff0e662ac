//! Optimiser steps of a base with random weights, made on the device: what a shape takes, without a checkpoint. `tests/gpu/bench` runs
//! it with the shape of Gemma-4 26B-A4B: first rows of one length, then every second row half as long, which without padding costs
//! its real tokens.
//!
//!     synthetic_steps tests/fixtures/gemma4-26b-a4b-config.json --device cuda:0 --weights bf16 --activations bf16 --tokens 16384 --chunk 512

use clap::Parser;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;
use tunehost::config::{ActivationDtype, LoraConfig, TrainConfig, WeightDtype};
use tunehost::device;
use tunehost::model::adapter::Adapter;
use tunehost::model::config::TextConfig;
use tunehost::model::lora::{LoraPlan, group};
use tunehost::model::rng::SplitMix64;
use tunehost::model::weights::Model;
use tunehost::report::bytes;
use tunehost::run::machine::peak_resident_bytes;
use tunehost::train::batch::Batch;
use tunehost::train::engine::{Engine, Gradients};
use tunehost::train::optimizer::{AdamW, clip_factor, global_norm};
use tunehost_kernels::resolve::Dtypes;

#[derive(Parser)]
struct Args {
    /// The base's config.json.
    config: PathBuf,
    /// The device, as the build has it.
    #[arg(long, default_value = "cpu")]
    device: String,
    /// f32 or bf16: how the frozen matrices and the residual stream are kept.
    #[arg(long, default_value = "f32", value_parser = ["f32", "bf16"])]
    weights: String,
    /// f32, bf16 or f16: what the operations of a layer pass to each other.
    #[arg(long, default_value = "f32", value_parser = ["f32", "bf16", "f16"])]
    activations: String,
    /// Rows of a micro-batch.
    #[arg(long, default_value_t = 2)]
    rows: usize,
    /// Tokens of a row.
    #[arg(long)]
    tokens: usize,
    /// Timed steps of each batch, after one that is not.
    #[arg(long, default_value_t = 3)]
    steps: usize,
    /// Rank of the adapters, on every module.
    #[arg(long, default_value_t = 64)]
    rank: usize,
    /// Rows of the loss head at once.
    #[arg(long, default_value_t = 512)]
    chunk: usize,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = Args::parse();
    let weights = if args.weights == "bf16" { WeightDtype::Bf16 } else { WeightDtype::F32 };
    let text = TextConfig::parse(&serde_json::from_slice(&std::fs::read(&args.config)?)?)?;
    let device = device::open(&args.device)?;
    let activations: ActivationDtype = serde_json::from_value(args.activations.into())?;
    let dtypes = Dtypes { weights: weights.dtype(), activations: activations.dtype() };
    device::check(&args.device, dtypes, weights, &text)?;
    for (kernel, by) in BTreeMap::from(device::kernels(&args.device, dtypes)?) {
        println!("{kernel:<22} {by}");
    }
    let mut model = Model::random(&text, &device, weights);
    model.activations = dtypes.activations;
    let lora = LoraConfig { rank: args.rank, alpha: args.rank as f64, ..LoraConfig::default() };
    let plan = LoraPlan::new(&lora, &model.spec)?;
    let (parameters, adapted, layers) = (model.spec.parameters(), plan.parameters(), text.layers.len());
    println!("{} parameters, {} of adapters, full recompute", group(parameters), group(adapted));
    let mut adapter = Adapter::init(plan, 0, &device);
    let config = TrainConfig::default();
    let mut optimizer = AdamW::new(&config, &adapter);
    let engine = Engine {
        model,
        recompute_layers: layers,
        keep_products: false,
        loss_chunk_rows: args.chunk,
        residuals: weights,
    };
    device.sync()?;
    // What weights took while they were made is not of the steps.
    device.memory_cleanup();

    let mut ms_per_token = Vec::new();
    for every_second in [args.tokens, args.tokens / 2] {
        let lengths = (0..args.rows).map(|row| if row % 2 == 0 { args.tokens } else { every_second });
        let batch = random_batch(lengths, text.vocab_size);
        let mut seconds = Vec::new();
        let mut loss = 0.0;
        for _ in 0..=args.steps {
            let started = Instant::now();
            let mut gradients = Gradients::new(&adapter);
            let scale = 1.0 / batch.trained() as f64;
            let losses = engine.accumulate(&adapter, &batch, scale, 0, &mut gradients);
            let factor = clip_factor(global_norm(&gradients), config.clip_norm);
            optimizer.update(&mut adapter, gradients, factor, config.lr);
            device.sync()?;
            seconds.push(started.elapsed().as_secs_f64());
            loss = losses.iter().map(|loss| f64::from(*loss)).sum::<f64>() * scale;
        }
        // The first compiles.
        let timed = &mut seconds[1..];
        timed.sort_by(f64::total_cmp);
        let (median, tokens) = (timed[timed.len() / 2], batch.tokens());
        println!(
            "{} tokens in {} rows: {median:.3} s a step ({:.3} to {:.3}, n = {}), {:.0} tokens/s, loss {loss:.3}",
            group(tokens),
            args.rows,
            timed[0],
            timed[timed.len() - 1],
            timed.len(),
            tokens as f64 / median
        );
        ms_per_token.push(1e3 * median / tokens as f64);
    }
    println!("a token beside a shorter row takes {:.2} times one of a full batch", ms_per_token[1] / ms_per_token[0]);
    match device.memory_pool_usage() {
        Some(usage) => {
            println!("peak memory of the device, as cubecl reserved it: {}", bytes(usage.bytes_reserved as usize))
        }
        None => println!("peak memory of the process: {}", bytes(peak_resident_bytes().unwrap_or(0))),
    }
    Ok(())
}

/// Documents of these lengths, every token trained.
fn random_batch(lengths: impl Iterator<Item = usize>, vocabulary: usize) -> Batch {
    let mut rng = SplitMix64::new(0, "tokens");
    let rows: Vec<Vec<u32>> =
        lengths.map(|tokens| (0..tokens).map(|_| (rng.next_f64() * vocabulary as f64) as u32).collect()).collect();
    let labels: Vec<Vec<i32>> = rows.iter().map(|row| row.iter().map(|&id| id as i32).collect()).collect();
    Batch::new(rows.iter().map(Vec::as_slice).zip(labels.iter().map(Vec::as_slice)))
}
