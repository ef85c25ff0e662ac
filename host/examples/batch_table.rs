//! Padding and mixing of the standard samplers on a synthetic corpus with one long-tailed root:
//! `cargo run --release --example batch_table`.

use serde_json::{Value, json};
use tunehost::error::Result;
use tunehost::plugins::check::inputs::{ROW_TOKENS_MAX, long_tailed};
use tunehost::plugins::mixture::{Mixture, table};
use tunehost::plugins::{Kind, PlanRequest, PluginRef, Sampler};

fn main() -> Result<()> {
    let (lengths, roots) = long_tailed();
    let tokens: u64 = lengths.iter().map(|&length| u64::from(length)).sum();
    let (shortest, longest) = (lengths.iter().min().expect("not empty"), lengths.iter().max().expect("not empty"));
    println!(
        "{} records of {shortest} to {longest} tokens, {:.0} on average, in 3 roots; 2 rows a micro-batch, 8 micro-batches \
         a window\n",
        lengths.len(),
        tokens as f64 / lengths.len() as f64
    );
    let bucket = |size: u32| (format!("bucket-to-pair, bucket {size}"), "bucket-to-pair", json!({"bucket": size}));
    let mut samplers = vec![("shuffled".to_string(), "shuffled", json!({}))];
    samplers.extend([2, 8, 32, 128, 512].map(bucket));
    samplers.push(("packed".into(), "packed", json!({})));
    let plan = |(label, name, config): (String, &str, Value)| {
        let request = PlanRequest {
            lengths: &lengths,
            roots: &roots,
            epoch: 0,
            seed: 0,
            max_seq_len: ROW_TOKENS_MAX,
            rows_per_batch: 2,
            accumulation: 8,
            token_budget: None,
        };
        let mut sampler = Sampler::load(&PluginRef::resolve(Kind::Sampler, name, &[])?, Some(&config))?;
        Ok((label, Mixture::of(&sampler.plan(&request)?, &request)))
    };
    let rows: Vec<_> = samplers.into_iter().map(plan).collect::<Result<_>>()?;
    print!("{}", table(&rows));
    Ok(())
}
