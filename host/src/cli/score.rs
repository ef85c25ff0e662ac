//! `tunehost score`.

use super::{ScoreArgs, load};
use crate::corpus::{self, EncodeOptions, Encoder, Record};
use crate::error::{Error, Result};
use crate::model::adapter::{Adapter, values};
use crate::model::peft::f32_safetensors;
use crate::report::bytes;
use crate::run::atomic::{self, Existing};
use crate::train::batch::Batch;
use crate::train::engine::Engine;
use crate::train::evaluate::{MOST_TOKENS, RecordLoss, evaluate, finite};
use serde_json::json;
use std::collections::HashSet;
use std::path::Path;

/// Largest file of logits.
const LOGITS_BYTES_MAX: usize = 1 << 30;

pub fn score(args: &ScoreArgs) -> Result<()> {
    let reporter = args.output.reporter();
    if let Some(path) = args.logits.as_deref().filter(|p| p.exists()) {
        return Err(Error::new("export::exists", format!("{} exists already", path.display())).help("name a new file"));
    }
    let (engine, adapter) = load::model(&args.model)?;
    let vocab_size = engine.model.config.vocab_size;
    let encoder = Encoder::open(&args.model.model, args.template.as_deref(), vocab_size, EncodeOptions::default())?;
    let mut records: Vec<Record> = Vec::new();
    for path in &args.data {
        records.extend(corpus::encode_for_scoring(&encoder, path)?);
    }
    if let Some(path) = &args.logits {
        refuse_unnameable(&records)?;
        write_logits(&engine, adapter.as_ref(), &records, path)?;
    }
    let references: Vec<&Record> = records.iter().collect();
    let losses = evaluate(&engine, adapter.as_ref(), &references, MOST_TOKENS, &mut |_| {}, &|| false)
        .expect("nothing stops it");
    finite(&losses)?;
    reporter.line(format!("{:>12} {:>10} {:>8}  record", "loss", "perplexity", "tokens"));
    for loss in &losses {
        let mean = mean(loss.loss_sum, loss.tokens);
        reporter.line(format!("{} {:>8}  {}", cells(mean), loss.tokens, loss.id));
        reporter.event(
            "record",
            json!({"id": loss.id, "loss": mean, "perplexity": mean.map(f64::exp), "tokens": loss.tokens}),
        );
    }
    let tokens = losses.iter().map(|l| l.tokens).sum();
    let total = mean(losses.iter().map(|l: &RecordLoss| l.loss_sum).sum(), tokens);
    reporter.result(format!("{} {tokens:>8}  all {} records", cells(total), losses.len()));
    reporter.event(
        "total",
        json!({"records": losses.len(), "loss": total, "perplexity": total.map(f64::exp), "tokens": tokens}),
    );
    Ok(())
}

/// Logits are stored under record ids: each once, and not the name that the format keeps for itself.
fn refuse_unnameable(records: &[Record]) -> Result<()> {
    let mut seen = HashSet::from(["__metadata__"]);
    match records.iter().find(|r| !seen.insert(&r.id)) {
        Some(record) => {
            Err(Error::new("corpus::duplicate_id", format!("--logits cannot store two tensors named {:?}", record.id))
                .expected("record ids that are unique")
                .help("give the records an `id`, or score one file at a time"))
        }
        None => Ok(()),
    }
}

/// `None` where nothing is trained.
fn mean(sum: f64, tokens: usize) -> Option<f64> {
    (tokens > 0).then(|| sum / tokens as f64)
}

fn cells(mean: Option<f64>) -> String {
    match mean {
        Some(mean) => format!("{mean:>12.6} {:>10.3}", mean.exp()),
        None => format!("{:>12} {:>10}", "none", "none"),
    }
}

fn write_logits(engine: &Engine, adapter: Option<&Adapter>, records: &[Record], path: &Path) -> Result<()> {
    let vocab_size = engine.model.config.vocab_size;
    let size_bytes = records.iter().map(|r| r.tokens.len() * vocab_size * 4).sum();
    if size_bytes > LOGITS_BYTES_MAX {
        return Err(Error::new(
            "usage::too_large",
            format!("the logits of {} records are {}", records.len(), bytes(size_bytes)),
        )
        .expected(format!("at most {}", bytes(LOGITS_BYTES_MAX)))
        .help("score fewer or shorter records"));
    }
    let tensors: Vec<(String, [usize; 2], Vec<f32>)> = records
        .iter()
        .map(|r| {
            let batch = Batch::of([r]);
            (r.id.to_string(), [r.tokens.len(), vocab_size], values(&engine.logits(adapter, &batch)))
        })
        .collect();
    let file = f32_safetensors(tensors.iter().map(|(name, shape, values)| (name.as_str(), &shape[..], &values[..])));
    atomic::write(path, &file, Existing::Refuse)
}
