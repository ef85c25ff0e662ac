//! Parity with Hugging Face transformers + PEFT on the golden data of `fixtures/golden` (made by `reference/make_golden.py`).

use safetensors::SafeTensors;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tunehost::config::{LoraConfig, TrainConfig, WeightDtype};
use tunehost::corpus::{Encoder, encode_for_scoring};
use tunehost::export;
use tunehost::model::adapter::{Adapter, LayerAdapters, LowRank, peft_names, values};
use tunehost::model::checkpoint::Checkpoint;
use tunehost::model::config::TextConfig;
use tunehost::model::gemma4::Positions;
use tunehost::model::lora::LoraPlan;
use tunehost::model::peft;
use tunehost::model::products::Products;
use tunehost::model::spec::ModelSpec;
use tunehost::model::weights::Model;
use tunehost::plugins::{Exporter, Kind, PluginRef};
use tunehost::train::batch::{Batch, IGNORED};
use tunehost::train::engine::{Engine, Gradients};
use tunehost::train::optimizer::{AdamW, global_norm};

const CASES: [&str; 3] = ["single", "padded", "packed"];

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/golden").join(name)
}

struct Golden(Vec<u8>);

impl Golden {
    fn open(name: &str) -> Self {
        Self(std::fs::read(golden(name)).unwrap())
    }

    fn f32(&self, name: &str) -> Vec<f32> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let view = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        view.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    fn i32(&self, name: &str) -> Vec<i32> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let view = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        view.data().chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    fn has(&self, name: &str) -> bool {
        SafeTensors::deserialize(&self.0).unwrap().tensor(name).is_ok()
    }

    /// The documents of a case, and the flat positions of their tokens in Hugging Face's rectangle.
    fn case(&self, case: &str) -> (Batch, Vec<usize>) {
        let ids = self.i32(&format!("{case}.input_ids"));
        let labels = self.i32(&format!("{case}.labels"));
        let mut spans: Vec<(usize, usize)> = Vec::new();
        if self.has(&format!("{case}.attention_mask")) {
            let mask = self.i32(&format!("{case}.attention_mask"));
            let width = 33;
            for (row, mask) in mask.chunks(width).enumerate() {
                spans.push((row * width, mask.iter().sum::<i32>() as usize));
            }
        } else if self.has(&format!("{case}.doc_lengths")) {
            let mut start = 0;
            for length in self.i32(&format!("{case}.doc_lengths")) {
                spans.push((start, length as usize));
                start += length as usize;
            }
        } else {
            spans.push((0, ids.len()));
        }
        let ids: Vec<u32> = ids.iter().map(|v| *v as u32).collect();
        let batch = Batch::new(spans.iter().map(|(s, n)| (&ids[*s..s + n], &labels[*s..s + n])));
        let kept = spans.iter().flat_map(|(s, n)| *s..s + n).collect();
        (batch, kept)
    }
}

fn engine(recompute_layers: usize) -> Engine {
    let dir = golden("model");
    let device = burn::tensor::Device::flex();
    let config = TextConfig::read(&dir).unwrap();
    let model = Model::load(config, &Checkpoint::open(&dir).unwrap(), &device, WeightDtype::F32, &mut |_| {}).unwrap();
    Engine { model, recompute_layers, keep_products: false, loss_chunk_rows: 16, residuals: WeightDtype::F32 }
}

fn rows(flat: &[f32], kept: &[usize], width: usize) -> Vec<f32> {
    kept.iter().flat_map(|i| &flat[i * width..(i + 1) * width]).copied().collect()
}

fn max_abs_diff(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Largest difference as a share of the largest reference value.
fn relative(a: &[f32], b: &[f32]) -> f32 {
    max_abs_diff(a, b) / b.iter().fold(f32::MIN_POSITIVE, |m, v| m.max(v.abs()))
}

fn mean_loss(losses: &[f32], batch: &Batch) -> f64 {
    losses.iter().map(|l| f64::from(*l)).sum::<f64>() / batch.trained() as f64
}

#[test]
fn the_towers_are_left_alone_and_reported() {
    let engine = engine(6);
    assert_eq!(engine.model.spec.prefix, "model.language_model.");
    assert!(engine.model.towers.names.iter().all(|n| n.contains("vision")));
    assert!(!engine.model.towers.names.is_empty());
}

#[test]
fn states_logits_and_token_losses() {
    let engine = engine(6);
    let gold = Golden::open("cases.safetensors");
    let (hidden, vocab) = (engine.model.config.hidden_size, engine.model.config.vocab_size);
    for case in CASES {
        let (batch, kept) = gold.case(case);
        let mut states = Vec::new();
        let last = engine.hidden(None, &batch, &mut |_, h| states.push(values(h)));
        let name = |s: &str| format!("{case}.{s}");
        assert!(max_abs_diff(&states[0], &rows(&gold.f32(&name("embedded")), &kept, hidden)) < 1e-5);
        for (layer, state) in states[1..].iter().enumerate() {
            let diff = max_abs_diff(state, &rows(&gold.f32(&name(&format!("layer{layer}.hidden"))), &kept, hidden));
            assert!(diff < 1e-4, "{case} layer {layer}: {diff:e}");
        }
        let normed = values(&engine.model.final_norm(last.clone()));
        assert!(max_abs_diff(&normed, &rows(&gold.f32(&name("final_norm")), &kept, hidden)) < 1e-4);
        let logits = values(&engine.logits_of(last));
        let diff = max_abs_diff(&logits, &rows(&gold.f32(&name("logits")), &kept, vocab));
        assert!(diff < 1e-4, "{case} logits: {diff:e}");
        let losses = engine.losses(None, &batch);
        let reference = rows(&gold.f32(&name("token_loss")), &kept, 1);
        for (i, target) in batch.targets.iter().enumerate().filter(|(_, t)| **t != IGNORED) {
            assert!((losses[i] - reference[i]).abs() < 1e-4, "{case} token {i} -> {target}");
        }
        assert!((mean_loss(&losses, &batch) - f64::from(gold.f32(&name("loss"))[0])).abs() < 1e-5);
    }
}

/// bf16 has 8 bits of precision: on a trained base losses agree to three digits, gradients in direction and size.
#[test]
fn bf16_weights_stay_near_f32() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
    let base = dir.join("tiny-base");
    let text = TextConfig::read(&base).unwrap();
    let encoder = Encoder::open(&base, Some("base"), text.vocab_size, Default::default()).unwrap();
    let records = encode_for_scoring(&encoder, &dir.join("corpus/stage.jsonl")).unwrap();
    let batch = Batch::of(&records[..8]);
    let run = |weights: WeightDtype| {
        let device = burn::tensor::Device::flex();
        let model =
            Model::load(text.clone(), &Checkpoint::open(&base).unwrap(), &device, weights, &mut |_| {}).unwrap();
        let plan = LoraPlan::new(&LoraConfig::default(), &model.spec).unwrap();
        let adapter = Adapter::init(plan, 1, &device);
        let mut gradients = Gradients::new(&adapter);
        let engine = Engine {
            model,
            recompute_layers: 6,
            keep_products: true,
            loss_chunk_rows: 64,
            residuals: WeightDtype::F32,
        };
        let losses = engine.accumulate(&adapter, &batch, 1.0 / batch.trained() as f64, 0, &mut gradients);
        // B is zero, so A has no gradient yet.
        let gradients: Vec<f32> = gradients.pairs().flat_map(|pair| values(&pair.b)).collect();
        (mean_loss(&losses, &batch), gradients)
    };
    let ((loss, gradients), (narrow_loss, narrow_gradients)) = (run(WeightDtype::F32), run(WeightDtype::Bf16));
    println!("loss {loss:.6}, with bf16 weights {narrow_loss:.6}");
    assert!((narrow_loss / loss - 1.0).abs() < 2e-3, "{narrow_loss} for {loss}");
    assert_ne!(loss, narrow_loss, "something was rounded");
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let norms = [&gradients, &narrow_gradients].map(|g| dot(g, g).sqrt());
    let cosine = dot(&gradients, &narrow_gradients) / (norms[0] * norms[1]);
    println!("gradient norm {:.6}, with bf16 weights {:.6}, cosine {cosine:.6}", norms[0], norms[1]);
    assert!(cosine > 0.99 && (norms[1] / norms[0] - 1.0).abs() < 0.05, "{cosine}, {norms:?}");
}

#[test]
fn the_same_experts_are_chosen() {
    let engine = engine(6);
    let gold = Golden::open("cases.safetensors");
    for case in CASES {
        let (batch, kept) = gold.case(case);
        let positions =
            Positions::new(&engine.model.config, batch.segments.clone(), &batch.position_ids, &engine.model.device);
        let mut h = engine.model.embed(&batch.ids);
        for index in 0..engine.model.layers.len() {
            let layer = engine.model.layer(index);
            h = layer.attention_block(h, &LayerAdapters::default(), &positions, &mut Products::default());
            let moe = layer.weights.moe.as_ref().unwrap();
            let routing = layer.route(h.clone(), moe, 2);
            let chosen: Vec<i32> = routing.experts.try_to_vec_as::<i32>().unwrap();
            let reference = gold.i32(&format!("{case}.layer{index}.topk_index"));
            let expected: Vec<i32> = kept.iter().flat_map(|i| [reference[2 * i], reference[2 * i + 1]]).collect();
            assert_eq!(chosen, expected, "{case} layer {index}");
            let weights = rows(&gold.f32(&format!("{case}.layer{index}.topk_weights")), &kept, 2);
            assert!(max_abs_diff(&values(&routing.weights), &weights) < 1e-4);
            h = layer.feed_forward_block(h, &LayerAdapters::default(), &mut Products::default());
        }
    }
}

#[test]
fn lora_gradients_with_and_without_recompute() {
    let gold = Golden::open("cases.safetensors");
    let reference = Golden::open("lora_grads.safetensors");
    let mut first: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    for (recompute_layers, keep_products) in [(6, false), (0, false), (3, false), (6, true)] {
        let engine = Engine { keep_products, ..engine(recompute_layers) };
        let adapter = peft::read(&golden("adapter_init"), &engine.model.spec, &engine.model.device).unwrap();
        for case in CASES {
            let (batch, kept) = gold.case(case);
            let mut gradients = Gradients::new(&adapter);
            let losses = engine.accumulate(&adapter, &batch, 1.0 / batch.trained() as f64, 0, &mut gradients);
            let loss = reference.f32(&format!("{case}.loss"))[0];
            assert!((mean_loss(&losses, &batch) - f64::from(loss)).abs() < 1e-5);
            let logits = values(&engine.logits(Some(&adapter), &batch));
            let expected = rows(&reference.f32(&format!("{case}.logits")), &kept, engine.model.config.vocab_size);
            assert!(max_abs_diff(&logits, &expected) < 1e-4);
            for (module, LowRank { a, b }) in adapter.plan.modules.iter().zip(gradients.pairs()) {
                for (name, ours) in peft_names(module).into_iter().zip([values(&a), values(&b)]) {
                    let key = format!("{case}.grad.{name}");
                    let diff = relative(&ours, &reference.f32(&key));
                    assert!(diff < 1e-4, "{key} at recompute {recompute_layers}: {diff:e}");
                    // Recompute changes memory and time, not one bit of a gradient.
                    assert_eq!(first.entry(key.clone()).or_insert_with(|| ours.clone()), &ours, "{key}");
                }
            }
        }
    }
}

#[test]
fn the_training_trace_and_the_final_adapter() {
    let engine = engine(6);
    let gold = Golden::open("cases.safetensors");
    let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(golden("train_trace.json")).unwrap()).unwrap();
    let mut adapter = peft::read(&golden("adapter_init"), &engine.model.spec, &engine.model.device).unwrap();
    let mut optimizer = AdamW::new(&TrainConfig { weight_decay: 0.0, eps: 1e-8, ..TrainConfig::default() }, &adapter);
    for step in trace["steps"].as_array().unwrap() {
        let (batch, _) = gold.case(step["case"].as_str().unwrap());
        let mut gradients = Gradients::new(&adapter);
        let losses = engine.accumulate(&adapter, &batch, 1.0 / batch.trained() as f64, 0, &mut gradients);
        let diff = (mean_loss(&losses, &batch) - step["loss"].as_f64().unwrap()).abs();
        assert!(diff < 1e-4, "step {}: {diff:e}", step["step"]);
        let norm = step["grad_norm"].as_f64().unwrap();
        assert!((global_norm(&gradients) - norm).abs() < 1e-3 * norm);
        optimizer.update(&mut adapter, gradients, 1.0, 1e-3);
    }
    for case in CASES {
        let (batch, _) = gold.case(case);
        let loss = mean_loss(&engine.losses(Some(&adapter), &batch), &batch);
        assert!((loss - trace["final_losses"][case].as_f64().unwrap()).abs() < 1e-4, "{case}");
    }
    let expected = peft::read(&golden("adapter_final"), &engine.model.spec, &engine.model.device).unwrap();
    for ((name, _, ours), (_, _, theirs)) in adapter.tensors().iter().zip(expected.tensors()) {
        let diff = max_abs_diff(ours, &theirs);
        assert!(diff < 1e-4, "{name}: {diff:e}");
    }
}

/// What the bundled exporter `name` makes of `adapter`, in the new folder `dir`.
fn export(
    name: &str,
    settings: &Value,
    adapter: &Adapter,
    spec: &ModelSpec,
    checkpoint: &Checkpoint,
    template: Option<&str>,
    dir: &Path,
) {
    let exporter = PluginRef::resolve(Kind::Exporter, name, &[]).unwrap();
    let tuned = export::tuned(adapter, spec, checkpoint, template).unwrap();
    let plan = Exporter::load(&exporter, Some(settings)).unwrap().plan(&tuned).unwrap();
    let pending = export::PendingFolder::new(dir).unwrap();
    export::carry_out(&plan, adapter, checkpoint, &pending, &mut |_| Ok(()), &mut |_, _| {}).unwrap();
    pending.commit().unwrap();
}

#[test]
fn merged_weights() {
    let base = golden("model");
    let engine = engine(6);
    let adapter = peft::read(&golden("adapter_final"), &engine.model.spec, &engine.model.device).unwrap();
    let out = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&base).unwrap();
    // One file, and shards small enough that there are many.
    for (name, settings) in [("one", json!({})), ("many", json!({"max_shard_size": 200_000}))] {
        let dir = out.path().join(name);
        export("merge-bf16", &settings, &adapter, &engine.model.spec, &checkpoint, Some("template"), &dir);
        assert_eq!(std::fs::read_to_string(dir.join("chat_template.jinja")).unwrap(), "template");
        let (ours, theirs) = (Checkpoint::open(&dir).unwrap(), Checkpoint::open(&golden("merged")).unwrap());
        assert!(ours.entries().keys().eq(theirs.entries().keys()));
        let adapted: Vec<String> = adapter.plan.modules.iter().map(|m| format!("{}.weight", m.path)).collect();
        for tensor in ours.entries().keys() {
            let diff = max_abs_diff(&ours.read_f32(tensor).unwrap(), &theirs.read_f32(tensor).unwrap());
            assert!(diff < 1e-6, "{tensor}: {diff:e}");
            if !adapted.contains(tensor) {
                assert_eq!(ours.bytes(tensor).unwrap(), checkpoint.bytes(tensor).unwrap(), "{tensor}");
            }
        }
        // Merged logits equal base + adapter.
        let model =
            Model::load(TextConfig::read(&dir).unwrap(), &ours, &engine.model.device, WeightDtype::F32, &mut |_| {})
                .unwrap();
        let merged = Engine {
            model,
            recompute_layers: 6,
            keep_products: true,
            loss_chunk_rows: 16,
            residuals: WeightDtype::F32,
        };
        let (batch, _) = Golden::open("cases.safetensors").case("single");
        let diff = max_abs_diff(&values(&merged.logits(None, &batch)), &values(&engine.logits(Some(&adapter), &batch)));
        assert!(diff < 1e-4, "{diff:e}");
        let e = export::PendingFolder::new(&dir).err().unwrap();
        assert_eq!(e.code(), "export::exists");
    }
}

#[test]
fn an_adapter_written_here_reads_back_bit_for_bit() {
    let engine = engine(6);
    let spec = &engine.model.spec;
    let adapter = peft::read(&golden("adapter_final"), spec, &engine.model.device).unwrap();
    let out = tempfile::tempdir().unwrap();
    let dir = out.path().join("adapter");
    // Relative to this package's folder, where tests run.
    let checkpoint = Checkpoint::open(Path::new("../tests/fixtures/golden/model")).unwrap();
    export("peft-adapter", &json!({}), &adapter, spec, &checkpoint, None, &dir);
    let config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(dir.join(peft::CONFIG_FILE)).unwrap()).unwrap();
    let recorded = Path::new(config["base_model_name_or_path"].as_str().unwrap());
    assert!(recorded.is_absolute() && recorded.ends_with("tests/fixtures/golden/model"), "{}", recorded.display());
    let again = peft::read(&dir, spec, &engine.model.device).unwrap();
    assert_eq!(adapter.tensors(), again.tensors());
    assert_eq!(again.plan.scale, adapter.plan.scale);
    // The tensors' names are exactly those that PEFT wrote.
    let names = |dir: &Path| -> Vec<String> {
        let bytes = std::fs::read(dir.join(peft::WEIGHTS_FILE)).unwrap();
        let mut names: Vec<String> =
            SafeTensors::deserialize(&bytes).unwrap().names().iter().map(|n| n.to_string()).collect();
        names.sort();
        names
    };
    assert_eq!(names(&dir), names(&golden("adapter_final")));
}

#[test]
fn every_way_in_which_peft_names_modules() {
    let engine = engine(6);
    let spec = &engine.model.spec;
    let theirs = golden("adapter_final");
    let tensors = peft::read_tensors(&std::fs::read(theirs.join(peft::WEIGHTS_FILE)).unwrap(), &theirs).unwrap();
    let read = |change: &serde_json::Value, kept: &dyn Fn(&str) -> bool| {
        let dir = tempfile::tempdir().unwrap();
        let mut config: serde_json::Value =
            serde_json::from_slice(&std::fs::read(theirs.join(peft::CONFIG_FILE)).unwrap()).unwrap();
        config.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        std::fs::write(dir.path().join(peft::CONFIG_FILE), config.to_string()).unwrap();
        let kept = tensors.iter().filter(|(name, _)| kept(name));
        let file = peft::f32_safetensors(kept.map(|(name, (shape, values))| (name.as_str(), &shape[..], &values[..])));
        std::fs::write(dir.path().join(peft::WEIGHTS_FILE), file).unwrap();
        peft::read(dir.path(), spec, &engine.model.device)
    };
    let in_layer = |name: &str, layer: usize| name.contains(&format!(".layers.{layer}."));
    let all = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
    for (change, kept, modules) in [
        (
            json!({"target_modules": all, "exclude_modules": ".*vision.*"}),
            &(|_: &str| true) as &dyn Fn(&str) -> bool,
            41,
        ),
        (json!({"target_modules": ["self_attn.q_proj"]}), &|n: &str| n.contains("q_proj"), 6),
        (
            json!({"target_modules": [spec.modules[0].path]}),
            &|n: &str| n.contains(&format!(".{}.", spec.modules[0].path)),
            1,
        ),
        (
            json!({"target_modules": all, "layers_to_transform": [0, 5]}),
            &|n: &str| in_layer(n, 0) || in_layer(n, 5),
            13,
        ),
        (
            json!({"target_modules": all, "layers_to_transform": 2, "layers_pattern": "layers"}),
            &|n: &str| in_layer(n, 2),
            7,
        ),
        (
            json!({"exclude_modules": ["mlp.up_proj", "o_proj"]}),
            &|n: &str| !n.contains("up_proj") && !n.contains("o_proj"),
            29,
        ),
    ] {
        let adapter = read(&change, kept).unwrap_or_else(|e| panic!("{change}: {e}"));
        assert_eq!(adapter.plan.modules.len(), modules, "{change}");
        for (name, shape, values) in adapter.tensors() {
            assert_eq!(tensors[&name], (shape, values), "{change}: {name}");
        }
    }
    for (change, code, part) in [
        (json!({"target_modules": ["q_proj"]}), "model::adapter_tensor", "belongs to no adapted module"),
        (json!({"target_modules": ["qproj"]}), "model::adapter_config", "another base"),
        (json!({"target_modules": "("}), "model::adapter_config", "target_modules"),
        (json!({"target_modules": all, "exclude_modules": 1}), "model::adapter_config", "exclude_modules"),
        (json!({"layers_to_transform": [1], "layers_pattern": "h"}), "model::adapter_config", "layers_pattern"),
    ] {
        let e = read(&change, &|_| true).unwrap_err();
        assert_eq!(e.code(), code, "{change}: {e}");
        assert!(e.to_string().contains(part), "{e}");
    }
    let e = read(&json!({}), &|name| !in_layer(name, 3)).unwrap_err();
    assert!(e.code() == "model::adapter_tensor" && e.to_string().contains("has no tensor"), "{e}");
}
