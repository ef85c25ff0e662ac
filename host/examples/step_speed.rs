//! Time of a LoRA forward and backward pass over one row of random tokens: `cargo run --release --example step_speed -- BASE
//! --adapter DIR --tokens FILE`. Prints one JSON line; `tests/bench/vs_hf` runs it beside Hugging Face.

use clap::Parser;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;
use tunehost::config::WeightDtype;
use tunehost::device;
use tunehost::model::checkpoint::Checkpoint;
use tunehost::model::config::TextConfig;
use tunehost::model::{peft, weights::Model};
use tunehost::train::batch::Batch;
use tunehost::train::engine::{Engine, Gradients};

#[derive(Parser)]
struct Args {
    /// The base's folder.
    base: PathBuf,
    /// Adapter folder, as PEFT writes it.
    #[arg(long)]
    adapter: PathBuf,
    /// A JSON array of rows, each an array of token ids; every token but the first of a row is trained.
    #[arg(long)]
    tokens: PathBuf,
    /// f32 or bf16: how the frozen matrices are kept and multiplied.
    #[arg(long, default_value = "f32")]
    dtype: String,
    /// Threads.
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// What the backward pass computes again: full (each layer), selective (all but products and attention), none.
    #[arg(long, default_value = "selective", value_parser = ["full", "selective", "none"])]
    recompute: String,
    /// Rows of the loss head at once.
    #[arg(long, default_value_t = 512)]
    chunk: usize,
    /// Steps before the timed ones.
    #[arg(long, default_value_t = 1)]
    warmup: usize,
    /// Timed steps.
    #[arg(long, default_value_t = 3)]
    reps: usize,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = Args::parse();
    rayon::ThreadPoolBuilder::new().num_threads(args.threads).build_global()?;
    let device = device::open("cpu")?;
    let weights: WeightDtype = serde_json::from_value(json!(args.dtype))?;
    let checkpoint = Checkpoint::open(&args.base)?;
    let model = Model::load(TextConfig::read(&args.base)?, &checkpoint, &device, weights, &mut |_| {})?;
    let adapter = peft::read(&args.adapter, &model.spec, &device)?;
    let rows: Vec<Vec<u32>> = serde_json::from_slice(&std::fs::read(&args.tokens)?)?;
    let labels: Vec<Vec<i32>> = rows.iter().map(|row| row.iter().map(|&id| id as i32).collect()).collect();
    let batch = Batch::new(rows.iter().map(Vec::as_slice).zip(labels.iter().map(Vec::as_slice)));
    let trained = batch.trained();
    let recompute_layers = if args.recompute == "none" { 0 } else { model.layers.len() };
    let keep_products = args.recompute == "selective";
    let engine =
        Engine { model, recompute_layers, keep_products, loss_chunk_rows: args.chunk, residuals: WeightDtype::F32 };
    let loaded_peak_mib = peak_mib();
    let (mut walls, mut loss) = (Vec::new(), 0.0);
    for step in 0..args.warmup + args.reps {
        let started = Instant::now();
        let mut gradients = Gradients::new(&adapter);
        let losses = engine.accumulate(&adapter, &batch, 1.0 / trained as f64, 0, &mut gradients);
        loss = losses.iter().map(|loss| f64::from(*loss)).sum::<f64>() / trained as f64;
        if step >= args.warmup {
            walls.push(started.elapsed().as_secs_f64());
        }
    }
    let mut sorted = walls.clone();
    sorted.sort_by(f64::total_cmp);
    println!(
        "{}",
        json!({
            "engine": "tunehost", "loss": loss, "wall_s": sorted[sorted.len() / 2], "walls_s": walls,
            "tokens": batch.tokens(), "peak_mib": peak_mib(), "loaded_peak_mib": loaded_peak_mib,
            "kernels": BTreeMap::from(device::kernels("cpu", weights.beside_f32())?), "threads": args.threads,
        })
    );
    Ok(())
}

/// Largest resident memory so far, as the kernel counts it.
fn peak_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse().ok());
    kib.unwrap_or(f64::NAN) / 1024.0
}
