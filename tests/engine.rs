//! What must hold of a training step whatever the model: losses are sums over a window, documents never see each other, no
//! full logits exist, recompute changes no bit.

use burn::tensor::Device;
use std::collections::BTreeMap;
use std::path::Path;
use tunehost::config::{Action, GatesConfig, LoraConfig, TrainConfig, WeightDtype};
use tunehost::corpus::{Record, Tokens};
use tunehost::model::adapter::{Adapter, LowRank, values};
use tunehost::model::checkpoint::Checkpoint;
use tunehost::model::config::TextConfig;
use tunehost::model::lora::LoraPlan;
use tunehost::model::weights::Model;
use tunehost::train::batch::Batch;
use tunehost::train::engine::{Engine, Gradients};
use tunehost::train::evaluate::{MOST_TOKENS, evaluate};
use tunehost::train::gates::StepGates;
use tunehost::train::optimizer::AdamW;
use tunehost::train::steps::{MicroBatch, Step};
use tunehost::train::trainer::Trainer;
use tunehost_kernels::adamw::Write;

fn engine(recompute_layers: usize) -> Engine {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/golden/model");
    let config = TextConfig::read(&dir).unwrap();
    let model =
        Model::load(config, &Checkpoint::open(&dir).unwrap(), &Device::flex(), WeightDtype::F32, &mut |_| {}).unwrap();
    Engine { model, recompute_layers, keep_products: false, loss_chunk_rows: 7, residuals: WeightDtype::F32 }
}

/// Adapters whose B is not zero, so that every gradient is.
fn adapter(engine: &Engine, dropout: f64) -> Adapter {
    let config = LoraConfig { rank: 4, dropout, ..LoraConfig::default() };
    let plan = LoraPlan::new(&config, &engine.model.spec).unwrap();
    let mut adapter = Adapter::init(plan, 5, &engine.model.device);
    for i in 0..adapter.plan.modules.len() {
        let LowRank { a, b } = adapter.pair(i);
        adapter.flat.write(i, LowRank { a, b: b.add_scalar(0.01 + 0.001 * i as f32) }, Write::Set);
    }
    adapter
}

fn record(id: usize, length: usize) -> Record {
    let ids: Vec<u32> = (0..length).map(|t| 3 + ((t * 31 + id * 17 + t * t) % 690) as u32).collect();
    let labels: Vec<i32> = ids.iter().enumerate().map(|(t, id)| if t < 2 { -100 } else { *id as i32 }).collect();
    Record { id: format!("record-{id}").into(), root: 0, tokens: Tokens::new(&ids, &labels) }
}

fn flat(gradients: &Gradients) -> Vec<f32> {
    gradients.pairs().flat_map(|pair| [values(&pair.a), values(&pair.b)].concat()).collect()
}

fn batch(records: &[&Record]) -> Batch {
    Batch::of(records.iter().copied())
}

#[test]
fn recompute_gives_the_same_gradients_with_dropout_too() {
    let (a, b) = (record(1, 30), record(2, 11));
    let run = |recompute_layers, keep_products, seed| {
        let engine = Engine { keep_products, ..engine(recompute_layers) };
        let adapter = adapter(&engine, 0.3);
        let mut gradients = Gradients::new(&adapter);
        engine.accumulate(&adapter, &batch(&[&a, &b]), 1.0, seed, &mut gradients);
        flat(&gradients)
    };
    let all = run(6, false, 1);
    assert!(all == run(0, false, 1) && all == run(2, false, 1), "recompute = all, none and 2");
    assert!(all == run(6, true, 1) && all == run(2, true, 1), "with kept products");
    assert!(all != run(6, true, 2), "another dropout seed drops other elements");
}

#[test]
fn a_stream_kept_in_bf16_is_the_same_in_both_passes_and_in_evaluation() {
    let (a, b) = (record(1, 30), record(2, 11));
    let run = |recompute_layers, keep_products, residuals| {
        let engine = Engine { keep_products, residuals, ..engine(recompute_layers) };
        let (adapter, batch) = (adapter(&engine, 0.0), batch(&[&a, &b]));
        let mut gradients = Gradients::new(&adapter);
        let losses = engine.accumulate(&adapter, &batch, 1.0, 1, &mut gradients);
        assert!(losses == engine.losses(Some(&adapter), &batch), "evaluation sees what is trained");
        (losses, flat(&gradients))
    };
    let [wide, narrow] = [WeightDtype::F32, WeightDtype::Bf16].map(|residuals| run(6, false, residuals));
    assert!(narrow == run(0, false, WeightDtype::Bf16) && narrow == run(2, true, WeightDtype::Bf16));
    let norm = |values: &[f32]| values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
    for (wide, narrow) in [(wide.0, narrow.0), (wide.1, narrow.1)] {
        let apart: Vec<f32> = wide.iter().zip(&narrow).map(|(w, n)| w - n).collect();
        let relative = norm(&apart) / norm(&wide);
        // a rounding of 2^-9 in each of six layers
        assert!((1e-6..0.03).contains(&relative), "{relative}");
    }
}

#[test]
fn a_window_is_one_mean_over_its_tokens_however_it_is_split() {
    // Records of very different length: a mean of means would weigh the short one a hundred times too much.
    let records = [record(1, 10), record(2, 90), record(3, 25)];
    let engine = engine(6);
    let run = |batches: Vec<Vec<Vec<u32>>>| {
        let config = TrainConfig { warmup_steps: 0, lr: 1e-3, clip_norm: 0.0, ..TrainConfig::default() };
        let adapter = adapter(&engine, 0.0);
        let optimizer = AdamW::new(&config, &adapter);
        let mut trainer =
            Trainer { config: &config, engine: &engine, records: &records, total_steps: 1, adapter, optimizer };
        let batches = batches.into_iter().map(|rows| MicroBatch { rows }).collect();
        trainer.step(0, &Step { epoch: 0, batches }, &mut StepGates::new(&GatesConfig::default(), None)).unwrap()
    };
    let together = run(vec![vec![vec![0], vec![1], vec![2]]]);
    let trained: usize = records.iter().map(|r| r.trained_tokens()).sum();
    let sum: f64 =
        records.iter().flat_map(|r| engine.losses(Some(&adapter(&engine, 0.0)), &batch(&[r]))).map(f64::from).sum();
    assert!((together.loss - sum / trained as f64).abs() < 1e-6);
    assert_eq!(together.trained_tokens as usize, trained);
    for split in [vec![vec![vec![0]], vec![vec![1]], vec![vec![2]]], vec![vec![vec![0, 1]], vec![vec![2]]]] {
        let apart = run(split);
        assert!((apart.loss - together.loss).abs() < 1e-9);
        assert!((apart.grad_norm - together.grad_norm).abs() < 1e-5 * together.grad_norm);
    }
}

/// Row 14, for what is learned: the gradient of B's loss, with A beside it untrained.
#[test]
fn the_gradient_of_a_document_does_not_see_its_neighbour() {
    let engine = engine(6);
    let untrained = |id| {
        let Record { id, root, tokens } = record(id, 23);
        Record { id, root, tokens: tunehost::corpus::Tokens::new(&tokens.ids(), &[-100; 23]) }
    };
    let (a, changed, b) = (untrained(1), untrained(4), record(2, 40));
    let gradient = |records: &[&Record]| {
        let adapter = adapter(&engine, 0.0);
        let mut gradients = Gradients::new(&adapter);
        let losses = engine.accumulate(&adapter, &batch(records), 1.0, 0, &mut gradients);
        (losses[losses.len() - b.tokens.len()..].to_vec(), flat(&gradients))
    };
    let beside_a = gradient(&[&a, &b]);
    assert!(beside_a.1.iter().any(|g| *g != 0.0));
    assert!(beside_a == gradient(&[&changed, &b]), "document A changed at equal length");
    assert!(gradient(&[&b, &a]).1 == gradient(&[&b, &changed]).1, "behind it");
    let alone = gradient(&[&b]);
    assert!(beside_a.0 == alone.0, "the loss of B alone is the same, bit for bit");
    let most = alone.1.iter().fold(0.0_f32, |most, g| most.max(g.abs()));
    assert!(
        beside_a.1.iter().zip(&alone.1).all(|(a, b)| (a - b).abs() <= 1e-5 * most),
        "and its gradient but for the order of sums"
    );
}

#[test]
fn evaluating_twice_gives_the_same_number_whatever_stands_beside_a_record() {
    let engine = engine(6);
    let records = [record(1, 30), record(2, 90), record(3, 25)];
    let at_once = |most_tokens: usize, records: &[&Record]| {
        let tuned = adapter(&engine, 0.3);
        let found = evaluate(&engine, Some(&tuned), records, most_tokens, &mut |_| {}, &|| false).unwrap();
        found.into_iter().map(|l| (l.id, l.loss_sum.to_bits())).collect::<BTreeMap<_, _>>()
    };
    let [a, b, c] = &records;
    let losses = |records: &[&Record]| at_once(MOST_TOKENS, records);
    let all = losses(&[a, b, c]);
    // A record that is longer than what is evaluated at once, and two that are not.
    assert_eq!(all, at_once(60, &[a, b, c]));
    assert_eq!(all, at_once(60, &[c, a, b]));
    assert_eq!(all, losses(&[c, a, b]));
    assert_eq!(all["record-2"], losses(&[b])["record-2"]);
    assert!(evaluate(&engine, None, &[a], MOST_TOKENS, &mut |_| {}, &|| true).is_none(), "it was stopped");
}

#[test]
fn documents_never_see_each_other() {
    let engine = engine(6);
    let (a, changed, b) = (record(1, 23), record(4, 23), record(2, 40));
    let logits = |records: &[&Record]| {
        let all = values(&engine.logits(None, &batch(records)));
        all[all.len() - b.tokens.len() * engine.model.config.vocab_size..].to_vec()
    };
    let beside_a = logits(&[&a, &b]);
    assert!(beside_a == logits(&[&changed, &b]), "document A changed at equal length");
    assert!(beside_a == logits(&[&b]), "document B alone");
    assert!(beside_a == logits(&[&a, &changed, &a, &b]), "more documents before it");
}

#[test]
fn a_step_with_nothing_trained_or_no_finite_loss_is_not_applied() {
    let engine = engine(6);
    let mut untrained = record(1, 12);
    untrained.tokens = Tokens::new(&untrained.tokens.ids(), &[-100; 12]);
    let records = [untrained, record(2, 12)];
    let config = TrainConfig::default();
    let start = adapter(&engine, 0.0);
    let optimizer = AdamW::new(&config, &start);
    let mut trainer =
        Trainer { config: &config, engine: &engine, records: &records, total_steps: 1, adapter: start, optimizer };
    let step = |row: u32| Step { epoch: 0, batches: vec![MicroBatch { rows: vec![vec![row]] }] };
    let mut gates = StepGates::new(&GatesConfig::default(), None);
    let e = trainer.step(0, &step(0), &mut gates).unwrap_err();
    assert_eq!(e.code(), "gate::nothing_trained");
    assert!(e.to_string().contains("record-1"), "{e}");
    let LowRank { a, b } = trainer.adapter.pair(0);
    trainer.adapter.flat.write(0, LowRank { a: a.mul_scalar(f32::NAN), b }, Write::Set);
    assert_eq!(trainer.step(0, &step(1), &mut gates).unwrap_err().code(), "gate::not_finite");
    assert_eq!(trainer.optimizer.step, 0);
    // Where it may go on, the step is counted and its update left out.
    let still = values(&trainer.adapter.pair(1).a);
    let mut gates = StepGates::new(&GatesConfig { not_finite: Action::Warn, ..GatesConfig::default() }, None);
    assert!(!trainer.step(0, &step(1), &mut gates).unwrap().grad_norm.is_finite());
    assert_eq!(trainer.optimizer.step, 1);
    assert_eq!(values(&trainer.adapter.pair(1).a), still);
}
