use std::time::Instant;

use super::super::check::inputs::{ROW_TOKENS_MAX, long_tailed};
use super::super::mixture::Mixture;
use super::*;

const NAMES: [&str; 3] = ["bucket-to-pair", "shuffled", "in-order"];

/// The host checks each plan: every record once, rows, caps. What is asserted here is what it does not know.
#[test]
fn every_sampler_plans_every_shape_of_corpus() {
    for name in NAMES {
        let mut sampler = sampler(name, None);
        for count in [0, 1, 2, 3, 7, 64, 1001] {
            for rows_per_batch in [1, 2, 3, 8] {
                for token_budget in [None, Some(5000)] {
                    let lengths = lengths(count, 4200);
                    let plan = sampler
                        .plan(&PlanRequest { rows_per_batch, token_budget, ..request(&lengths) })
                        .unwrap_or_else(|error| panic!("{name}, {count} records, {rows_per_batch} rows: {error}"));
                    let too_long: Vec<u32> = (0..count).filter(|&record| lengths[record as usize] > 4096).collect();
                    assert_eq!(plan.dropped, too_long, "{name}: exactly what cannot fit is dropped");
                    if token_budget.is_none() {
                        let batches = (count as usize - too_long.len()).div_ceil(rows_per_batch as usize);
                        assert!(plan.batch_ends.len() <= batches + 1, "{name}: micro-batches are full");
                    }
                }
            }
        }
    }
}

#[test]
fn the_same_request_has_the_same_answer_in_another_instance() {
    let lengths = lengths(500, 4096);
    for name in NAMES {
        let mut first = sampler(name, None);
        let plan = first.plan(&request(&lengths)).unwrap();
        first.plan(&PlanRequest { epoch: 9, ..request(&lengths) }).unwrap();
        assert_eq!(first.plan(&request(&lengths)).unwrap(), plan, "{name}: nothing is remembered between calls");
        assert_eq!(sampler(name, None).plan(&request(&lengths)).unwrap(), plan, "{name}: a second instance agrees");
    }
}

#[test]
fn epochs_and_seeds_give_orders_of_their_own() {
    let lengths = lengths(500, 4096);
    for name in ["bucket-to-pair", "shuffled"] {
        let mut sampler = sampler(name, None);
        let mut records =
            |epoch, seed| sampler.plan(&PlanRequest { epoch, seed, ..request(&lengths) }).unwrap().records;
        let orders = [records(0, 42), records(1, 42), records(2, 42), records(0, 43)];
        for (at, order) in orders.iter().enumerate() {
            assert!(!orders[..at].contains(order), "{name}");
        }
    }
    let plan = sampler("in-order", None).plan(&request(&lengths)).unwrap();
    assert_eq!(plan.records, (0..500).collect::<Vec<u32>>());
}

#[test]
fn bucketing_saves_the_padding_of_shuffling() {
    let lengths = lengths(4000, 4096);
    let share = |name: &str, config| padding(&sampler(name, config).plan(&request(&lengths)).unwrap(), &lengths);
    let shuffled = share("shuffled", None);
    let (tight, default, wide) = (
        share("bucket-to-pair", Some(json!({"bucket": 1}))),
        share("bucket-to-pair", None),
        share("bucket-to-pair", Some(json!({"bucket": 500}))),
    );
    println!("padding: shuffled {shuffled:.4}, bucket 1 {tight:.4}, 2 {default:.4}, 500 {wide:.4}");
    assert!(shuffled > 0.25, "{shuffled}");
    assert!(tight <= default && default < 0.005, "{tight} {default}");
    assert!(default < wide && wide < shuffled, "{default} {wide} {shuffled}");
}

#[test]
fn packing_pads_almost_nothing_in_fewer_micro_batches() {
    let lengths = lengths(4000, 4096);
    let packed = sampler("packed", None).plan(&request(&lengths)).unwrap();
    let shuffled = sampler("shuffled", None).plan(&request(&lengths)).unwrap();
    let share = padding(&packed, &lengths);
    println!("padding: packed {share:.4}; micro-batches {} for {}", packed.batch_ends.len(), shuffled.batch_ends.len());
    assert!(share < 0.005, "{share}");
    assert!(packed.batch_ends.len() * 3 < shuffled.batch_ends.len());
}

#[test]
fn a_token_budget_fills_micro_batches_with_what_fits() {
    let lengths = lengths(4000, 4096);
    let mut sampler = sampler("token-budget", Some(json!({"tokens": 8192})));
    let plan = sampler.plan(&PlanRequest { rows_per_batch: 64, ..request(&lengths) }).unwrap();
    // The host takes the budget of the request as its own rule: the plan must also pass under it.
    let budgeted = PlanRequest { rows_per_batch: 64, token_budget: Some(8192), ..request(&lengths) };
    plan.check(&budgeted, sampler.identity()).unwrap();
    assert!(padding(&plan, &lengths) < 0.01);
    let rows: Vec<usize> = plan.batches().map(|rows| rows.len()).collect();
    assert!(rows.contains(&64) && rows.contains(&2), "{rows:?}");
}

/// On lengths such as a real corpus had: the tightest bucket pads least and mixes the roots as well as any.
#[test]
fn bucket_size_decides_padding_and_leaves_the_mixture_alone() {
    let (lengths, roots) = long_tailed();
    let request = PlanRequest { roots: &roots, max_seq_len: ROW_TOKENS_MAX, accumulation: 8, ..request(&lengths) };
    let measure = |name: &str, config| Mixture::of(&sampler(name, config).plan(&request).unwrap(), &request);
    let shuffled = measure("shuffled", None);
    let buckets = [2, 8, 32, 128, 512].map(|bucket| measure("bucket-to-pair", Some(json!({"bucket": bucket}))));
    assert!((0.27..0.33).contains(&shuffled.padding_waste()), "{shuffled:?}");
    assert!(buckets.is_sorted_by(|tighter, wider| tighter.padding_waste() < wider.padding_waste()), "{buckets:?}");
    assert!(buckets[0].padding_waste() < 0.0005 && buckets[0].pad_free_share() > 0.6, "{buckets:?}");
    for bucket in &buckets {
        assert!((bucket.roots_per_window - buckets[0].roots_per_window).abs() < 0.15, "{buckets:?}");
    }
}

#[test]
fn wrong_settings_are_refused_by_name() {
    let plugin = bundled(Kind::Sampler, "bucket-to-pair");
    let refusal = |config: Value| Sampler::load(&plugin, Some(&config)).err().expect("refused");
    let expected = ["plugin bucket-to-pair 0.1.0", "configure", "[plugins.config.sampler]", "\"bucket\""];
    assert_error(&refusal(json!({"bucket": 0})), "plugin::config_refused", &expected);
    assert_error(&refusal(json!({"bucket": "two"})), "plugin::config_refused", &expected);
    assert_error(&refusal(json!({"buckets": 2})), "plugin::config_refused", &["unknown field `buckets`", "`bucket`"]);
    assert_error(&refusal(json!([1])), "plugin::config_refused", &["bucket-to-pair", "[1]", "a table"]);
}

#[test]
fn a_sampler_says_why_it_cannot_plan() {
    let error = sampler("in-order", None)
        .plan(&PlanRequest { token_budget: Some(100), ..request(&[50, 200]) })
        .expect_err("record 1 is over the budget");
    assert_error(&error, "plugin::refused", &["plugin in-order 0.1.0", "record 1 has 200 tokens", "100"]);
}

#[test]
fn large_corpora_are_planned_quickly() {
    for count in [100_000, 1_000_000] {
        let lengths = lengths(count, 16_384);
        let mut sampler = sampler("bucket-to-pair", None);
        let request = PlanRequest { max_seq_len: 16_384, ..request(&lengths) };
        let start = Instant::now();
        let plan = sampler.plan(&request).unwrap();
        let whole = start.elapsed();
        let start = Instant::now();
        plan.check(&request, sampler.identity()).unwrap();
        println!(
            "bucket-to-pair plans {count} records in {whole:?}, of which the host's check is {:?}",
            start.elapsed()
        );
        assert!(whole.as_secs() < 20, "{whole:?}");
    }
}

/// For a machine whose compiler is not the one of `plugins/dist/BUILD`: what `plugins/build --check` made there must
/// answer as the committed components do, whatever its bytes.
#[test]
#[ignore = "needs TUNEHOST_REBUILT_PLUGINS, the folder that `plugins/build --check` names"]
fn rebuilt_components_answer_like_the_committed_ones() {
    let folder = PathBuf::from(std::env::var_os("TUNEHOST_REBUILT_PLUGINS").expect("TUNEHOST_REBUILT_PLUGINS"));
    let rebuilt = |kind, name: &str| {
        PluginRef::resolve(kind, folder.join(format!("{name}.wasm")).to_str().unwrap(), &[]).unwrap()
    };
    let lengths = lengths(3000, 4200);
    for name in [&NAMES[..], &["packed"]].concat() {
        let mut rebuilt = Sampler::load(&rebuilt(Kind::Sampler, name), None).unwrap();
        for (epoch, token_budget) in [(0, None), (1, Some(6000))] {
            let request = PlanRequest { epoch, token_budget, ..request(&lengths) };
            assert_eq!(rebuilt.plan(&request).unwrap(), sampler(name, None).plan(&request).unwrap(), "{name}");
        }
    }
    for (name, config) in [
        ("wall-clock", json!({"minutes": 0.5})),
        ("every-n-steps", json!({"n": 3})),
        ("window", json!({"until": "2023-11-15T00:00:00Z"})),
    ] {
        let kind = Kind::CheckpointScheduler;
        let mut committed = CheckpointScheduler::load(&bundled(kind, name), Some(&config)).unwrap();
        let mut rebuilt = CheckpointScheduler::load(&rebuilt(kind, name), Some(&config)).unwrap();
        for step in 1..=20 {
            let info = super::schedulers::info(step, step * 3000);
            assert_eq!(rebuilt.after_step(&info).unwrap(), committed.after_step(&info).unwrap(), "{name}, step {step}");
        }
    }
}
