//! `tunehost generate`.

use super::{GenerateArgs, PromptFormArg, load};
use crate::corpus::{EncodeOptions, Encoder, PromptForm};
use crate::error::{Error, Result};
use crate::generate::{Sampling, generate as continue_prompt};
use crate::report::Mode;
use serde_json::{Value, json};

pub fn generate(args: &GenerateArgs) -> Result<()> {
    let out_of_range = |flag: &str, expected: &str| {
        Error::new("usage::invalid_value", format!("{flag} is out of range")).expected(expected)
    };
    if !(args.temperature >= 0.0 && args.temperature.is_finite()) {
        return Err(out_of_range("--temperature", "0 (greedy) or more"));
    }
    if !(args.top_p > 0.0 && args.top_p <= 1.0) {
        return Err(out_of_range("--top-p", "more than 0, at most 1"));
    }
    let reporter = args.output.reporter();
    let (engine, adapter) = load::model(&args.model)?;
    let template = args.template.as_deref().unwrap_or("base");
    let vocab_size = engine.model.config.vocab_size;
    let encoder = Encoder::open(&args.model.model, Some(template), vocab_size, EncodeOptions::default())?;
    if let (Mode::Human, Some(template)) = (reporter.mode(), encoder.template()) {
        eprintln!("chat template: {}", template.info().origin);
    }
    let mut messages: Vec<Value> = Vec::new();
    if let Some(system) = &args.system {
        messages.push(json!({"role": "system", "content": system}));
    }
    messages.push(json!({"role": "user", "content": args.prompt}));
    let form = match args.prompt_form {
        PromptFormArg::Training => PromptForm::Training,
        PromptFormArg::Generation => PromptForm::Generation,
    };
    let prompt = encoder.render_prompt(&Value::Array(messages), form)?;
    let sampling = Sampling { temperature: args.temperature, top_p: args.top_p, seed: args.seed };
    let mut who = vec![("base", None)];
    if adapter.is_some() {
        who.push(("tuned", adapter.as_ref()));
    }
    for (name, adapter) in who {
        let ids = continue_prompt(&engine, adapter, &prompt, args.max_new_tokens, sampling)?;
        let text = encoder.tokenizer()?.decode(&ids, true)?;
        match (reporter.mode(), args.model.adapter.is_some()) {
            (Mode::Json, _) => reporter.event(
                "answer",
                json!({"model": name, "text": text, "tokens": ids.len(), "prompt_ids": prompt, "ids": ids}),
            ),
            (_, true) => reporter.result(format!("{name}: {}", text.trim())),
            (_, false) => reporter.result(text.trim()),
        }
    }
    Ok(())
}
