//! `tunehost probe` as a person meets it.

mod common;

use common::{copy_base, fails, ok, root, short};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

fn probed(what: &str, config: &str, more: &[&str]) -> Value {
    serde_json::from_str(&ok(&[&["probe", what, config, "--json"], more].concat())).unwrap()
}

fn config(dir: &Path) -> String {
    short::config(dir, "").display().to_string()
}

#[test]
fn the_mask_is_that_of_the_bases_configuration() {
    let dir = tempfile::tempdir().unwrap();
    let (config, base) = (config(dir.path()), copy_base(&dir.path().join("base")));
    let set = format!("model.base=\"{}\"", base.display());
    let mut published: Value = serde_json::from_slice(&fs::read(base.join("config.json")).unwrap()).unwrap();
    // No weight is read, and the window is what config.json says, whatever that is.
    fs::remove_file(base.join("model.safetensors")).unwrap();
    for window in [published["sliding_window"].as_u64().unwrap(), 100] {
        published["sliding_window"] = json!(window);
        fs::write(base.join("config.json"), published.to_string()).unwrap();
        let report = probed("mask", &config, &["--set", &set]);
        assert_eq!(report["source"], "measured");
        let types = published["layer_types"].as_array().unwrap();
        for band in report["bands"].as_array().unwrap() {
            let sliding = band["kind"] == "sliding";
            let name = if sliding { "sliding_attention" } else { "full_attention" };
            let layers = types.iter().filter(|kind| **kind == name).count();
            assert_eq!(band["layers"], layers);
            assert_eq!(band["pairs_seen"], band["pairs_expected"]);
            let most = band["keys_most"].as_u64().unwrap();
            assert_eq!(band["saturated_row"], most - 1);
            let longest = report["documents_tokens"][0].as_u64().unwrap();
            assert!(longest > window && most == if sliding { window } else { longest }, "{band}");
        }
        assert_eq!(report["bands"].as_array().unwrap().len(), 2);
    }
    let text = ok(&["probe", "mask", &config, "--set", &set]);
    assert!(text.contains("mask (measured), cpu-f32-") && text.contains("expected"), "{text}");
    published["layer_types"][0] = json!("linear_attention");
    fs::write(base.join("config.json"), published.to_string()).unwrap();
    assert!(fails(&["probe", "mask", &config, "--set", &set], 4).contains("linear_attention"));
}

#[test]
fn the_template_is_shown_with_what_is_trained_and_its_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let text = ok(&["probe", "template", &config]);
    for part in ["the base's own", "⟦Good morning.<turn|>⟧", "⟦Gladly.<turn|>⟧", "end of turn", "r0: "] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let report = probed("template", &config, &[]);
    let special = report["special_tokens"].as_array().unwrap();
    assert!(special.iter().all(|token| token["ids"].as_array().unwrap().len() == 1), "{special:?}");
    let example = &report["records"][0];
    let spans: Vec<u64> = example["trained_spans"]
        .as_array()
        .unwrap()
        .iter()
        .map(|span| span["end"].as_u64().unwrap() - span["start"].as_u64().unwrap())
        .collect();
    assert_eq!((spans.len(), spans.iter().sum::<u64>()), (2, example["trained_tokens"].as_u64().unwrap()));
    // A record over the limit is told as the run cuts it, and shown in part.
    let long = json!({"id": "long", "text": "word ".repeat(400)}).to_string();
    fs::write(dir.path().join("records.jsonl"), long).unwrap();
    let record = &probed("template", &config, &["--set", "data.max_seq_len=300"])["records"][1];
    assert_eq!((&record["overlong"], &record["trained_tokens"]), (&json!("truncate"), &json!(299)), "{record}");
    assert!(record["tokens"].as_u64() > Some(400) && record["shown_tokens"] == 200, "{record}");
    let text = ok(&["probe", "template", &config, "--set", "data.max_seq_len=300"]);
    assert!(text.contains("over data.max_seq_len, 300") && text.contains("... and 100 tokens more"), "{text}");
    let stale = root().join("tests/fixtures/templates/forcepusher-gemma4.jinja");
    let stale = format!("data.template=\"{}\"", stale.display());
    assert!(fails(&["probe", "template", &config, "--set", &stale], 3).contains("corpus::template_mismatch"));
}

#[test]
fn an_adapter_that_no_gradient_reaches_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let (config, base) = (config(dir.path()), copy_base(&dir.path().join("base")));
    let report = probed("adapters", &config, &[]);
    let modules = report["modules"].as_array().unwrap();
    let norm = |module: &Value, name: &str| module[name].as_f64().unwrap();
    assert!(modules.len() > 10 && modules.iter().all(|m| m["b_is_zero"] == true && norm(m, "a_gradient_norm") == 0.0));
    assert!(modules.iter().all(|m| norm(m, "b_gradient_norm") > 0.0 && norm(m, "a_gradient_norm_after_update") > 0.0));
    assert!(report["loss_after"].as_f64() < report["loss_before"].as_f64(), "{report}");

    // What a layer's attention makes is multiplied by 0.
    let weights = base.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..start]).unwrap();
    let (_, entry) = header
        .as_object()
        .unwrap()
        .iter()
        .find(|(name, _)| name.ends_with("layers.1.post_attention_layernorm.weight"))
        .unwrap();
    let offset = |at: usize| start + entry["data_offsets"][at].as_u64().unwrap() as usize;
    bytes[offset(0)..offset(1)].fill(0);
    fs::write(&weights, bytes).unwrap();
    let set = format!("model.base=\"{}\"", base.display());
    let said = fails(&["probe", "adapters", &config, "--set", &set], 7);
    assert!(said.contains("probe::adapters") && said.contains("4 of "), "{said}");
    assert!(said.contains("layers.1.self_attn.q_proj: no gradient reaches B"), "{said}");
}

#[test]
fn padding_is_the_samplers() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let share = |sampler: &str| {
        let report = probed("padding", &config, &["--plugins", &format!("sampler={sampler}")]);
        let batches = ok(&["corpus", "batches", &config, "--json", "--plugins", &format!("sampler={sampler}")]);
        let batches: Value = serde_json::from_str(&batches).unwrap();
        // The run ends after three steps; `batches` is of a whole epoch.
        assert_eq!((&report["micro_batches"], report["sampler"].as_str()), (&json!(3), Some(sampler)));
        assert!(batches["micro_batches"].as_u64() > Some(3));
        report["padding_share"].as_f64().unwrap()
    };
    let (apart, together) = (share("shuffled"), share("bucket-to-pair"));
    assert!(apart > together, "{apart} {together}");
    let said = fails(&["probe", "padding", &config, "--plugins", "sampler=shuffled", "--most", "0"], 7);
    assert!(said.contains("probe::padding") && said.contains("0.00% at most"), "{said}");
    for wrong in ["nan", "-0.1", "1.5"] {
        assert!(fails(&["probe", "padding", &config, &format!("--most={wrong}")], 2).contains("a share from 0 to 1"));
    }
}

#[test]
fn steps_give_the_same_bytes_whatever_the_threads() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let report = probed("determinism", &config, &[]);
    let passes = report["passes"].as_array().unwrap();
    assert_eq!((passes.len(), &report["steps"]), (3, &json!(2)));
    assert!(passes[0]["threads"] == passes[1]["threads"] && passes[0]["threads"] != passes[2]["threads"]);
    assert!(passes[0]["steps"] == passes[1]["steps"] && passes[0]["steps"] == passes[2]["steps"], "{report}");
    // What is compared changes with what is computed.
    assert_ne!(passes[0]["steps"][0], passes[0]["steps"][1]);
    let other = probed("determinism", &config, &["--set", "train.seed=7"]);
    assert_ne!(passes[0]["steps"], other["passes"][0]["steps"]);
}
