//! What the calls of plugins cost: `cargo bench --bench plugins`.

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use serde_json::json;
use tunehost::plugins::check::inputs::{self, Record};
use tunehost::plugins::{CheckpointScheduler, CorpusFilter, Kind, PlanRequest, PluginRef, Sampler, StepInfo};

fn find(kind: Kind, name: &str) -> PluginRef {
    PluginRef::resolve(kind, name, &[]).expect("a bundled plugin")
}

fn plan(c: &mut Criterion) {
    let mut group = c.benchmark_group("plan");
    group.sample_size(20);
    for count in [20_000, 1_000_000] {
        let (lengths, roots) = (inputs::skewed(count, 16_384), inputs::roots(count));
        let request = PlanRequest {
            lengths: &lengths,
            roots: &roots,
            epoch: 0,
            seed: 42,
            max_seq_len: 16_384,
            rows_per_batch: 2,
            accumulation: 8,
            token_budget: None,
        };
        group.throughput(Throughput::Elements(count as u64));
        for name in ["bucket-to-pair", "shuffled", "packed"] {
            let mut sampler = Sampler::load(&find(Kind::Sampler, name), None).expect("it loads");
            group.bench_function(format!("{name}, {count} records"), |b| {
                b.iter(|| sampler.plan(&request).expect("a plan"));
            });
        }
    }
}

fn after_step(c: &mut Criterion) {
    let plugin = find(Kind::CheckpointScheduler, "wall-clock");
    let mut scheduler = CheckpointScheduler::load(&plugin, None).expect("it loads");
    let info = StepInfo {
        step: 17,
        total_steps: 444,
        wall_clock_ms: 1_700_000_000_000,
        since_last_save_ms: 60_000,
        last_save_cost_ms: 900,
        loss: 2.5,
    };
    c.bench_function("after-step of wall-clock", |b| b.iter(|| scheduler.after_step(&info).expect("a decision")));
}

fn filter(c: &mut Criterion) {
    let records = inputs::records(4096);
    let candidates: Vec<_> = records.iter().map(Record::candidate).collect();
    let mut group = c.benchmark_group("filter");
    group.sample_size(20).throughput(Throughput::Elements(candidates.len() as u64));
    for name in ["keep-all", "length-and-dedup"] {
        let mut filter = CorpusFilter::load(&find(Kind::CorpusFilter, name), None).expect("it loads");
        group.bench_function(format!("{name}, 4096 records"), |b| {
            b.iter(|| filter.filter(0, &candidates).expect("verdicts"));
        });
    }
}

fn ready(c: &mut Criterion) {
    let plugin = find(Kind::CheckpointScheduler, "every-n-steps");
    let config = json!({"n": 10});
    let load = || CheckpointScheduler::load(&plugin, Some(&config)).expect("it loads");
    drop(load());
    c.bench_function("a cached plugin ready", |b| b.iter_batched(|| (), |()| load(), BatchSize::PerIteration));
}

criterion_group!(benches, plan, after_step, filter, ready);
criterion_main!(benches);
