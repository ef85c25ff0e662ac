//! What plugins are tried on: corpora, records and tuned models of every shape that has its own way to go wrong, the same
//! at every run.

use serde_json::json;

use crate::model::rng::SplitMix64;
use crate::plugins::{BaseTensor, Candidate, Tuned};

/// Longest row that the conformance corpora are made for.
pub const MAX_SEQ_LEN: u32 = 4096;

/// The lengths of a corpus, and what is special about it.
#[derive(Debug, Clone)]
pub struct Lengths {
    /// What is special about it.
    pub name: &'static str,
    /// Tokens of each record.
    pub of_records: Vec<u32>,
}

/// `count` records of each shape.
pub fn shapes(count: usize) -> Vec<Lengths> {
    let lengths = |name: &'static str, of_records: Vec<u32>| Lengths { name, of_records };
    let mut long_and_short = skewed(count, MAX_SEQ_LEN);
    for length in long_and_short.iter_mut().step_by(3) {
        *length = MAX_SEQ_LEN;
    }
    vec![
        lengths("short ones more often", skewed(count, MAX_SEQ_LEN)),
        lengths("all alike", vec![1024; count]),
        lengths("single tokens", vec![1; count]),
        lengths("every row full", vec![MAX_SEQ_LEN; count]),
        lengths("rising", (0..count).map(|at| (at as u32 % MAX_SEQ_LEN) + 1).collect()),
        lengths("a third of them full rows", long_and_short),
        lengths("some too long for a row", skewed(count, 2 * MAX_SEQ_LEN)),
    ]
}

/// Lengths from 1 to `longest` whose cube root is spread evenly: many short records, few long ones.
pub fn skewed(count: usize, longest: u32) -> Vec<u32> {
    let mut rng = SplitMix64::new(0, "conformance");
    (0..count).map(|_| (rng.next_f64().powi(3) * f64::from(longest)) as u32 + 1).collect()
}

/// Three roots of unequal size.
pub fn roots(count: usize) -> Vec<u32> {
    (0..count).map(|at| [0, 0, 0, 1, 1, 2][at % 6]).collect()
}

/// Longest row of [`long_tailed`].
pub const ROW_TOKENS_MAX: u32 = 16_384;

/// Lengths and roots of a corpus such as a real one was: 20,982 records of 2,752 tokens on average in three roots, one of
/// short texts, one of passages cut to like lengths, one of dialogues with a long tail up to the longest row.
pub fn long_tailed() -> (Vec<u32>, Vec<u32>) {
    let mut rng = SplitMix64::new(0, "long-tailed corpus");
    let (mut lengths, mut roots) = (Vec::new(), Vec::new());
    for (root, (count, median, spread)) in
        [(3_583, 4800.0, 1.12), (12_003, 2100.0, 0.3), (5_396, 1143.0, 0.7)].iter().enumerate()
    {
        for _ in 0..*count {
            // Box and Muller 1958.
            let radius = (-2.0 * (1.0 - rng.next_f64()).ln()).sqrt();
            let normal: f64 = radius * (std::f64::consts::TAU * rng.next_f64()).cos();
            let length: f64 = median * (spread * normal).exp();
            lengths.push(length.clamp(142.0, f64::from(ROW_TOKENS_MAX)) as u32);
            roots.push(root as u32);
        }
    }
    (lengths, roots)
}

/// A record for a filter.
#[derive(Debug, Clone)]
pub struct Record {
    /// Its id.
    pub id: String,
    json: String,
    root: &'static str,
    tokens: u32,
    trained_tokens: u32,
}

impl Record {
    /// As a filter gets it.
    pub fn candidate(&self) -> Candidate<'_> {
        let Self { id, json, root, tokens, trained_tokens } = self;
        Candidate { id, root, json, tokens: *tokens, trained_tokens: *trained_tokens }
    }
}

/// `count` records of every shape that a corpus may hold, a third of them copies of earlier ones.
pub fn records(count: usize) -> Vec<Record> {
    let mut rng = SplitMix64::new(0, "conformance records");
    let record = |at: usize| {
        let number = if at % 3 == 2 { (rng.next_f64() * at as f64) as usize } else { at };
        let (json, tokens) = content(number);
        let root = ["talk", "stage", "verse"][number % 3];
        Record { id: format!("record-{at}"), json: json.to_string(), root, tokens, trained_tokens: tokens / 2 }
    };
    (0..count).map(record).collect()
}

/// The content of record `number` and a count of tokens for it.
fn content(number: usize) -> (serde_json::Value, u32) {
    let chat = |user: serde_json::Value, assistant: &str| json!({"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]});
    let words = format!("word-{number} ").repeat(number % 50);
    match number % 10 {
        0 => (json!({"text": words}), number as u32 % 50 * 2),
        1 => (json!({"text": ""}), 0),
        2 => (json!({"input_ids": (0..number % 40).collect::<Vec<_>>()}), number as u32 % 40),
        3 => (chat(json!([{"type": "text", "text": words}]), "Yes."), 20 + number as u32 % 50),
        4 => (chat(json!("ünïcödé \u{1f600} \u{0} \\ \"quoted\""), &words), 30),
        5 => {
            let call = json!({"type": "function", "function": {"name": "look", "arguments": {"at": number}}});
            let messages = json!([
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": words},
                {"role": "assistant", "content": null, "tool_calls": [call]},
                {"role": "tool", "name": "look", "content": "nothing"},
                {"role": "assistant", "content": "There is nothing."},
            ]);
            (json!({"messages": messages, "tools": [{"type": "function", "function": {"name": "look"}}]}), 90)
        }
        6 => (chat(json!("A long one."), &"and on ".repeat(2000)), 4000),
        7 => (json!({"text": "The same for all of its kind."}), 8),
        _ => (chat(json!(format!("Question {number}?")), &words), 12 + number as u32 % 50),
    }
}

/// `config.json` of a text model of so many layers.
fn config(layers: usize) -> String {
    let kind = |layer: usize| {
        if (layer + 1).is_multiple_of(6) || layer + 1 == layers { "full_attention" } else { "sliding_attention" }
    };
    let kinds: Vec<&str> = (0..layers).map(kind).collect();
    let text = json!({
        "model_type": "gemma4_text", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "global_head_dim": 32, "sliding_window": 16, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6, "layer_types": kinds, "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        },
    });
    json!({"model_type": "gemma4", "text_config": text}).to_string()
}

/// A tuned model of `tensors` base tensors, one in `each` of them adapted.
pub fn tuned(tensors: usize, each: usize) -> Tuned {
    let names = ["self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj", "input_layernorm"];
    let module = |at: usize| format!("model.layers.{}.{}", at / names.len(), names[at % names.len()]);
    let adapted = || (0..tensors).step_by(each);
    Tuned {
        base_tensors: (0..tensors)
            .map(|at| BaseTensor { name: format!("{}.weight", module(at)), dtype: "BF16".into(), shape: vec![64, 32] })
            .collect(),
        base_config: config(tensors.div_ceil(names.len())),
        base_path: "/models/base".into(),
        modules: adapted().map(module).collect(),
        module_tensors: adapted().map(|at| at as u32).collect(),
        modules_regex: r"model\.layers\.\d+\..*".into(),
        rank: 16,
        alpha: 32.0,
        rslora: false,
        dropout: 0.0,
        weight_norms: adapted().map(|at| 1.0 + at as f64).collect(),
        update_norms: adapted().map(|_| 0.25).collect(),
        chat_template: Some("{{ messages }}".into()),
    }
}
