//! The sizing of the 26B-A4B model, held against arithmetic by a script (`tests/fixtures/plan`).

use super::Source;
use super::blocks::Block;
use super::memory::{Model, Shape};
use super::report::{Adapters, Base, CHECKPOINT_VALUES, Disk};
use super::steps::{Speed, Steps, steps};
use super::work::visible_keys;
use crate::config::{LoraConfig, Recompute, RecomputeGranularity, RecomputeWord, Targets, TrainConfig, WeightDtype};
use crate::corpus::{Record, Tokens};
use crate::model::config::TextConfig;
use crate::model::fixtures::{fixture, large_model_headers};
use crate::model::lora::LoraPlan;
use crate::model::spec::ModelSpec;
use crate::plugins::Plan;
use crate::train::steps::epoch_steps;
use burn::tensor::DType;
use serde_json::Value;
use std::collections::BTreeMap;
use tunehost_kernels::Runtime;

/// The model of the published headers with adapters of rank 64, on one thread.
struct Large {
    text: TextConfig,
    base: Base,
    all: LoraPlan,
    attention: LoraPlan,
    train: TrainConfig,
}

impl Large {
    fn new() -> Self {
        let (text, found) = large_model_headers();
        let (spec, towers) = ModelSpec::check(&text, &found).unwrap();
        let base = Base::of(
            &spec,
            &towers,
            &found,
            |name| 2 * found[name].0.iter().product::<usize>(),
            WeightDtype::Bf16,
            &text,
        );
        let lora = |targets| LoraPlan::new(&LoraConfig { rank: 64, targets, ..LoraConfig::default() }, &spec).unwrap();
        let attention = ["q_proj", "k_proj", "v_proj", "o_proj"].map(String::from).into();
        let train = TrainConfig {
            loss_chunk_rows: 1024,
            recompute_granularity: RecomputeGranularity::Full,
            ..TrainConfig::default()
        };
        let (all, attention) = (lora(LoraConfig::default().targets), lora(Targets::Names(attention)));
        Self { text, base, all, attention, train }
    }

    fn model(&self) -> Model<'_> {
        let base_bytes = self.base.device_bytes();
        let runtime = Runtime::Cpu { threads: 1 };
        Model {
            text: &self.text,
            lora: &self.all,
            train: &self.train,
            base_bytes,
            process_bytes: 0,
            runtime,
            dropout: false,
        }
    }
}

/// One epoch of `records` in micro-batches of `rows`, each record a row of two tokens.
fn epoch(model: &Model, records: u32, rows: usize, accumulation: u32) -> Steps {
    let batch_ends = (0..records).step_by(rows).map(|first| records.min(first + rows as u32)).collect();
    let plan = Plan { records: (0..records).collect(), row_ends: (1..=records).collect(), batch_ends, dropped: vec![] };
    let record = |i: u32| Record { id: i.to_string().into(), root: 0, tokens: Tokens::new(&[2, 3], &[2, 3]) };
    steps(model, &epoch_steps(0, &plan, accumulation), &(0..records).map(record).collect::<Vec<_>>())
}

#[test]
fn the_sizing_of_26b_a4b_is_what_a_script_makes_of_its_headers() {
    let large = Large::new();
    let model = large.model();
    let (mut found, mut shares): (BTreeMap<String, f64>, Vec<(String, f64)>) = Default::default();
    let mut note = |name: String, value: usize| found.insert(name, value as f64);

    note("base.parameters".into(), large.base.parameters);
    note("base.disk_bytes".into(), large.base.disk_bytes);
    note("memory.base_bytes".into(), large.base.device_bytes());
    for size in &large.base.blocks {
        let name = serde_json::to_value(size.block).unwrap().as_str().unwrap().to_string();
        note(format!("{name}.parameters"), size.parameters);
        note(format!("{name}.tensors"), size.tensors);
        note(format!("{name}.disk_bytes"), size.disk_bytes);
        for (scheme, bytes) in &size.quantised_bytes {
            bytes.map(|bytes| note(format!("{name}.{scheme}.bytes"), bytes));
            note(format!("base.{scheme}.bytes"), large.base.quantised_bytes(scheme));
        }
    }

    for (name, lora) in [("adapters", &large.all), ("attention_adapters", &large.attention)] {
        let adapters = Adapters::new(&Model { lora, ..model }, large.base.parameters);
        note(format!("{name}.modules"), adapters.modules);
        note(format!("{name}.parameters"), adapters.parameters);
        for layers in ["sliding", "full"] {
            let of = adapters.targets.iter().filter(|target| target.layers == layers);
            note(format!("{name}.{layers}.parameters"), of.map(|target| target.parameters).sum());
        }
        for target in ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"] {
            let of = || adapters.targets.iter().filter(|found| found.target == target);
            note(format!("{name}.{target}.modules"), of().map(|target| target.modules).sum());
            let full = of().filter(|target| target.layers == "full").map(|target| target.modules).sum();
            note(format!("{name}.{target}.full.modules"), full);
        }
        shares.push((format!("{name}.trainable_share"), adapters.trainable_share));
    }
    found.extend(shares);

    let mut note = |name: &str, value: usize| found.insert(name.into(), value as f64);
    let memory = model.memory(Shape { micro_batch: 1, seq_len_tokens: 8192 });
    note("memory.8192.logits", memory.naive_logits);
    note("memory.8192.naive_loss_head_bytes", memory.naive_loss_head_bytes);
    note("memory.8192.layer_inputs_bytes", memory.layer_inputs_bytes);
    note("memory.adapters_gradients_adamw_bytes", memory.adapters_gradients_adamw_bytes);
    note("memory.loss_chunk_1024_bytes", tunehost_kernels::cross_entropy::logits_bytes(1024, 262_144));
    let Base { active_parameters, active_layer_parameters, blocks, .. } = &large.base;
    note("work.active_parameters", *active_parameters);
    note("work.active_layer_parameters", *active_layer_parameters);
    // What others count: no values of their own in sliding layers, no router; a tower whose every tensor has four bits.
    let sliding = large.text.layers.iter().filter(|layer| layer.window.is_some());
    let values: usize = sliding.map(|layer| layer.kv_heads * layer.head_dim * large.text.hidden_size).sum();
    let router: usize =
        large.text.layers.iter().filter_map(|layer| layer.moe).map(|moe| moe.experts * large.text.hidden_size).sum();
    note("work.active_parameters.one_key_and_value_projection", active_parameters - values - router);
    let towers = blocks.iter().find(|size| size.block == Block::Towers).unwrap();
    let as_loaded = large.base.quantised_bytes("4bit_linear_modules");
    let of_towers = towers.quantised_bytes["4bit_linear_modules"].unwrap();
    note("base.4bit_whole_towers.bytes", as_loaded - of_towers + towers.disk_bytes / 4);
    let window = large.text.layers[0].window;
    note("work.visible_keys.16384.window", visible_keys(16_384, window));
    note("work.visible_keys.16384.full", visible_keys(16_384, None));
    note("work.visible_keys.100.window", visible_keys(100, window));
    for (records, rows, accumulation) in [(7104, 4, 4), (20_982, 2, 8)] {
        let steps = epoch(&model, records, rows, accumulation);
        note(&format!("steps.{records}.micro_batches"), steps.micro_batches);
        note(&format!("steps.{records}.optimiser_steps"), steps.optimiser_steps);
        note(&format!("steps.{records}.last_step_micro_batches"), steps.last_step_micro_batches);
    }
    note("disk.checkpoint_bytes", CHECKPOINT_VALUES * 4 * large.all.parameters());
    found.insert("work.8192.nominal_flop".into(), model.work([8192].into_iter(), 8192).nominal_flop);

    let golden: Vec<Value> = serde_json::from_slice(&std::fs::read(fixture("plan/golden.json")).unwrap()).unwrap();
    assert!(golden.len() >= 50, "{}", golden.len());
    for check in &golden {
        let (name, expected) = (check["name"].as_str().unwrap(), check["expected"].as_f64().unwrap());
        let value = found.get(name).unwrap_or_else(|| panic!("{name} is not sized"));
        assert!((value - expected).abs() <= expected * 1e-12, "{name}: {value}, expected {expected}: {check}");
    }
}

#[test]
fn a_scheme_says_what_it_leaves() {
    let large = Large::new();
    let of = |block: Block, scheme: &str| {
        large.base.blocks.iter().find(|size| size.block == block).unwrap().quantised_bytes[scheme]
    };
    // 88.5% of the parameters are no linear modules.
    assert_eq!(of(Block::Experts, "4bit_linear_modules"), None);
    assert!(of(Block::Attention, "4bit_linear_modules").is_some());
    for scheme in ["fp8", "w4a16_g64", "nvfp4a16"] {
        assert!(of(Block::Experts, scheme).is_some());
        assert_eq!(of(Block::Embedding, scheme), None);
        assert_eq!(of(Block::RouterAndNorms, scheme), None);
        assert_eq!(of(Block::Towers, scheme), None);
    }
}

#[test]
fn recompute_trades_memory_for_work_and_chunks_save_the_logits() {
    let large = Large::new();
    let shape = Shape { micro_batch: 2, seq_len_tokens: 16_384 };
    let of = |recompute, recompute_granularity| {
        let train = TrainConfig { recompute, recompute_granularity, ..large.train.clone() };
        let model = Model { train: &train, ..large.model() };
        (model.memory(shape), model.work([16_384, 16_384].into_iter(), 32_768))
    };
    let all = Recompute::Word(RecomputeWord::All);
    let (full, full_work) = of(all, RecomputeGranularity::Full);
    let (selective, selective_work) = of(all, RecomputeGranularity::Selective);
    let (half, half_work) = of(Recompute::Layers(15), RecomputeGranularity::Full);
    let (none, none_work) = of(Recompute::Word(RecomputeWord::None), RecomputeGranularity::Full);
    assert!(full.kept_bytes == 0 && full.peak_bytes < selective.peak_bytes && selective.peak_bytes < none.peak_bytes);
    assert!(full.peak_bytes < half.peak_bytes && half.peak_bytes < none.peak_bytes);
    let performed = [full_work, half_work, selective_work, none_work].map(|work| work.performed_flop);
    assert!(performed.is_sorted_by(|a, b| a > b), "{performed:?}");
    assert!([full_work, selective_work, none_work].iter().all(|w| w.nominal_flop == full_work.nominal_flop));
    assert!(full.naive_loss_head_bytes > 100 << 30 && full.loss_head_bytes < 4 << 30, "{full:?}");
}

#[test]
fn each_runtime_tells_its_own_workspaces() {
    let large = Large::new();
    let shape = Shape { micro_batch: 1, seq_len_tokens: 8192 };
    let of = |runtime| Model { runtime, ..large.model() }.memory(shape);
    let on_cubecl = |bf16| of(Runtime::Cubecl { bf16, activations: DType::F32 });
    let (cpu, cubecl) = (of(Runtime::Cpu { threads: 1 }), on_cubecl(false));
    // 65,536 pairs of a token and an expert, each with gradients of gate, up and the input, where a CPU goes tile by tile.
    let pairs = 8192 * 8 * (2 * 704 + 2816) * 4;
    let more = cubecl.feed_forward_bytes - cpu.feed_forward_bytes;
    assert!(more > pairs * 9 / 10 && more < pairs * 11 / 10, "{more} more bytes, {pairs} of the pairs");
    assert_eq!(cpu.loss_head_bytes, cubecl.loss_head_bytes);
    // In bf16 half of that, beside the attention's rounded inputs, and the gradient of a chunk's logits once more.
    let rounded = on_cubecl(true);
    let less = cubecl.feed_forward_bytes - rounded.feed_forward_bytes;
    assert!(less > pairs * 4 / 10 && less < pairs * 6 / 10, "{less} fewer bytes, {pairs} of the pairs");
    assert!(rounded.attention_bytes > cubecl.attention_bytes);
    let chunk = large.train.loss_chunk_rows * 262_144 * 2;
    assert!(rounded.loss_head_bytes - cubecl.loss_head_bytes >= chunk);
}

#[test]
fn activations_in_bf16_halve_a_layer_but_for_its_stream() {
    let mut large = Large::new();
    large.train.loss_chunk_rows = 512;
    large.train.residuals = WeightDtype::Bf16;
    let shape = Shape { micro_batch: 2, seq_len_tokens: 16_384 };
    let of = |activations| {
        let runtime = Runtime::Cubecl { bf16: true, activations };
        Model { runtime, ..large.model() }.memory(shape)
    };
    let (wide, narrow) = (of(DType::F32), of(DType::BF16));
    assert_eq!(wide.layer_inputs_bytes, narrow.layer_inputs_bytes, "the stream is kept as it was");
    for (wide, narrow) in
        [(wide.attention_bytes, narrow.attention_bytes), (wide.feed_forward_bytes, narrow.feed_forward_bytes)]
    {
        let share = narrow as f64 / wide as f64;
        assert!((0.45..0.65).contains(&share), "{narrow} bytes of {wide}");
    }
    // Of the last stream, its norm and their gradients the norm and its gradient are halved.
    assert_eq!(wide.loss_head_bytes - narrow.loss_head_bytes, shape.tokens() * large.text.hidden_size * 4);
    // One night on a card of 96 GB: what the run of the report took was 79.71 GiB.
    let gib = narrow.peak_bytes as f64 / f64::from(1 << 30);
    println!("{gib:.2} GiB at 2 x 16,384 tokens, {:.2} in f32", wide.peak_bytes as f64 / f64::from(1 << 30));
    assert!(gib < 64.0, "{gib} GiB");
}

#[test]
fn a_speed_is_a_peak_and_shares_of_it() {
    assert_eq!(Speed::new(300.0, vec![0.25, 0.1]).unwrap().utilisation, [0.1, 0.25]);
    for (peak, shares) in [(0.0, vec![0.1]), (f64::NAN, vec![0.1]), (300.0, vec![]), (300.0, vec![10.0])] {
        assert_eq!(Speed::new(peak, shares).unwrap_err().code(), "usage::speed");
    }
}

#[test]
fn a_run_folder_that_the_disk_does_not_hold_is_an_error() {
    let disk = |free_bytes| Disk {
        source: Source::Computed,
        encode_cache_bytes: 0,
        checkpoint_bytes: 3 << 20,
        checkpoints_bytes: Some(6 << 20),
        adapter_bytes: 1 << 20,
        merged_bytes: 0,
        run_bytes: 7 << 20,
        free_bytes,
        free_source: Source::Measured,
        free_n: 1,
    };
    assert!(disk(Some(7 << 20)).require_fit().is_ok() && disk(None).require_fit().is_ok());
    let error = disk(Some((7 << 20) - 1)).require_fit().unwrap_err();
    assert!(error.code() == "gate::free_disk" && error.message().contains("7.0 MiB"), "{error}");
}
