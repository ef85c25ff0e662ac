//! What the types of the schema cannot say: ranges, and values that contradict each other.

use super::{Action, Config, ExportedCheckpoint, Origin, PLUGIN_KINDS, PluginsConfig, Targets, keys};
use crate::corpus::COLUMNS;
use crate::error::{Error, Result};
use serde::Serialize;

/// Longest record that a configuration may ask for, in tokens.
const MAX_SEQ_LEN_MAX: usize = 1 << 24;
/// How often a source's record may be trained in an epoch.
const WEIGHT_MAX: f64 = 1000.0;
/// Largest rank, far beyond any layer's width.
const RANK_MAX: usize = 1 << 16;

/// Checks every value; `origin` gives the place of a key for the message.
pub(super) fn check(config: &Config, origin: &dyn Fn(&str) -> Origin) -> Result<()> {
    let check = Checker { origin };
    let Config {
        name,
        model: _,
        data,
        template: _,
        lora,
        train,
        plugins,
        eligibility,
        checkpoint,
        window,
        eval,
        gates,
        export,
        run: _,
    } = config;

    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let folder = name.chars().all(plain) && !name.starts_with('.') && !name.is_empty();
    check.that(folder, "name", name, "letters, digits, `-`, `_` and `.`, since it names the run folder")?;

    check.that(!data.sources.is_empty(), "data.sources", &data.sources, "one source or more")?;
    check.that(data.template.as_deref() != Some(""), "data.template", &data.template, "a path, or the word `base`")?;
    check.that(data.cache.as_deref() != Some(""), "data.cache", &data.cache, "a folder, or the word `off`")?;
    let length = (2..=MAX_SEQ_LEN_MAX).contains(&data.max_seq_len);
    check.that(length, "data.max_seq_len", &data.max_seq_len, &format!("2 to {MAX_SEQ_LEN_MAX} tokens"))?;
    check.that((0.0..=0.5).contains(&data.held_out), "data.held_out", &data.held_out, "0 to 0.5")?;
    for (i, source) in data.sources.iter().enumerate() {
        let key = |field| keys::join(&keys::index("data.sources", i), field);
        check.that(!source.root.is_empty(), &key("root"), &source.root, "the name of a root")?;
        let weight = source.weight > 0.0 && source.weight <= WEIGHT_MAX;
        check.that(weight, &key("weight"), &source.weight, &format!("more than 0, to {WEIGHT_MAX}"))?;
        check.that(source.cap != Some(0), &key("cap"), &source.cap, "1 record or more")?;
        for column in source.columns.keys() {
            let known = COLUMNS.contains(&column.as_str());
            let expected = format!("columns by the keys {}", COLUMNS.join(", "));
            check.that(known, &key("columns"), &source.columns, &expected)?;
        }
        let first = data.sources[..i].iter().position(|earlier| earlier.path == source.path);
        if let Some(first) = first {
            let expected = format!("each file once; `data.sources[{first}]` reads it already");
            check.that(false, &key("path"), &source.path, &expected)?;
        }
    }

    check.that((1..=RANK_MAX).contains(&lora.rank), "lora.rank", &lora.rank, &format!("1 to {RANK_MAX}"))?;
    check.that(lora.alpha > 0.0, "lora.alpha", &lora.alpha, "more than 0")?;
    check.that((0.0..1.0).contains(&lora.dropout), "lora.dropout", &lora.dropout, "0 or more and less than 1")?;
    match &lora.targets {
        Targets::Names(names) => {
            let named = !names.is_empty() && names.iter().all(|name| !name.is_empty());
            check.that(named, "lora.targets", names, "one module name or more")?;
        }
        Targets::Regex(pattern) => {
            let problem = regex::Regex::new(pattern).err().map(|e| format!("a regular expression; {e}"));
            check.that(problem.is_none(), "lora.targets", pattern, &problem.unwrap_or_default())?;
        }
    }

    let not_negative = "0 or more";
    check.that(train.epochs >= 1, "train.epochs", &train.epochs, "1 or more")?;
    check.that(train.max_steps != Some(0), "train.max_steps", &0, "1 or more, or no such key")?;
    check.that(train.micro_batch >= 1, "train.micro_batch", &train.micro_batch, "1 row or more")?;
    check.that(train.accumulation >= 1, "train.accumulation", &train.accumulation, "1 micro-batch or more")?;
    check.that(train.lr > 0.0, "train.lr", &train.lr, "more than 0")?;
    check.that((0.0..=1.0).contains(&train.min_lr_ratio), "train.min_lr_ratio", &train.min_lr_ratio, "0 to 1")?;
    let betas = train.betas.iter().all(|beta| (0.0..1.0).contains(beta));
    check.that(betas, "train.betas", &train.betas, "each 0 or more and less than 1")?;
    check.that(train.eps > 0.0, "train.eps", &train.eps, "more than 0")?;
    check.that(train.weight_decay >= 0.0, "train.weight_decay", &train.weight_decay, not_negative)?;
    check.that(train.clip_norm >= 0.0, "train.clip_norm", &train.clip_norm, "0 (no clipping) or more")?;
    check.that(train.loss_chunk_rows >= 1, "train.loss_chunk_rows", &train.loss_chunk_rows, "1 row or more")?;

    check.that(checkpoint.keep_last != Some(0), "checkpoint.keep_last", &0, "1 or more, or no such key")?;
    let every = checkpoint.keep_every;
    check.that(every != Some(0), "checkpoint.keep_every", &0, "1 step or more, or no such key")?;
    let used = every.is_none() || checkpoint.keep_last.is_some();
    let beside = "`checkpoint.keep_last` beside it: without one every checkpoint stays";
    check.that(used, "checkpoint.keep_every", &every, beside)?;

    for (key, commands) in [("window.open", &window.open), ("window.close", &window.close)] {
        let named = |command: &Vec<String>| command.first().is_some_and(|program| !program.is_empty());
        check.that(commands.iter().all(named), key, commands, "commands, each [\"program\", \"argument\"]")?;
    }
    check.that(window.deadline_s >= 1, "window.deadline_s", &window.deadline_s, "1 second or more")?;
    let used = window.close.is_empty() || !window.open.is_empty();
    check.that(used, "window.close", &window.close, "`window.open` beside it: what was not opened is not closed")?;
    let evaluated = data.held_out > 0.0 && eval.max_records_per_root > 0;
    let held_out = "held-out records to evaluate: data.held_out and eval.max_records_per_root above 0";
    check.that(eval.every_steps != Some(0), "eval.every_steps", &0, "1 step or more")?;
    check.that(eval.every_steps.is_none() || evaluated, "eval.every_steps", &eval.every_steps, held_out)?;
    let minutes = eval.every_minutes;
    check.that(minutes.is_none_or(|n| n > 0.0), "eval.every_minutes", &minutes, "more than 0")?;
    check.that(minutes.is_none() || evaluated, "eval.every_minutes", &minutes, held_out)?;
    let by_steps = "`eval.every_steps` beside it: evaluations by the clock choose nothing";
    check.that(eval.patience != Some(0), "eval.patience", &0, "1 evaluation or more")?;
    check.that(eval.patience.is_none() || eval.every_steps.is_some(), "eval.patience", &eval.patience, by_steps)?;
    let kept = export.checkpoint == ExportedCheckpoint::Last || checkpoint.keep_best;
    check.that(kept, "checkpoint.keep_best", &false, "true, since `export.checkpoint` is the best")?;
    let known = export.checkpoint == ExportedCheckpoint::Last || eval.every_steps.is_some();
    check.that(known, "export.checkpoint", &export.checkpoint, by_steps)?;
    let skipped = gates.not_finite != Action::Off;
    let expected = "stop or warn: an update that is no number would leave nothing of the adapters";
    check.that(skipped, "gates.not_finite", &gates.not_finite, expected)?;
    check.that(gates.loss_spike_nats > 0.0, "gates.loss_spike_nats", &gates.loss_spike_nats, "more than 0")?;
    check.that(gates.loss_spike_steps >= 1, "gates.loss_spike_steps", &gates.loss_spike_steps, "1 step or more")?;
    let factor = gates.tokens_per_step_factor;
    check.that(factor >= 1.0, "gates.tokens_per_step_factor", &factor, "1 or more")?;
    let excess = gates.single_root_excess;
    check.that((0.0..=1.0).contains(&excess), "gates.single_root_excess", &excess, "0 to 1")?;

    for (kind, plugin) in PLUGIN_KINDS.into_iter().zip(plugins.named()) {
        check.that(!plugin.is_empty(), &keys::join("plugins", kind), plugin, "a name or a path")?;
    }
    // What is named must not stand unused.
    let asked = eligibility.manifest.is_some();
    let used = asked || plugins.eligibility == PluginsConfig::default().eligibility;
    let manifest = "`eligibility.manifest` beside it: without one the plugin is not asked";
    check.that(used, "plugins.eligibility", &plugins.eligibility, manifest)?;
    if let Some(grants) = &eligibility.grants {
        check.that(asked, "eligibility.grants", grants, manifest)?;
    }
    let known = |kind: &String| PLUGIN_KINDS.contains(&kind.as_str());
    let kinds = PLUGIN_KINDS.join(", ");
    let tables = plugins.config.keys().map(|kind| ("plugins.config", kind));
    let tables = tables.chain(plugins.limits.keys().map(|kind| ("plugins.limits", kind)));
    if let Some((table, kind)) = tables.into_iter().find(|(_, kind)| !known(kind)) {
        let key = keys::join(table, kind);
        let message = format!("{}: unknown key `{key}`", origin(&key));
        return Err(Error::new("config::unknown_key", message).help(format!("known here: {kinds}")));
    }
    for (kind, limits) in &plugins.limits {
        for (name, value, range) in limits.named() {
            let key = keys::join(&keys::join("plugins.limits", kind), name);
            let value = value.unwrap_or(*range.start());
            check.that(range.contains(&value), &key, &value, &format!("{} to {}", range.start(), range.end()))?;
        }
    }
    for (i, kind) in plugins.wasi.iter().enumerate() {
        check.that(known(kind), &keys::index("plugins.wasi", i), kind, &format!("one of {kinds}"))?;
    }
    Ok(())
}

struct Checker<'a> {
    origin: &'a dyn Fn(&str) -> Origin,
}

impl Checker<'_> {
    fn that(&self, holds: bool, key: &str, value: &impl Serialize, expected: &str) -> Result<()> {
        if holds {
            return Ok(());
        }
        let value = serde_json::to_value(value).expect("a value of the configuration");
        let message = format!("{}: `{key}` is {}", (self.origin)(key), keys::toml_text(&value));
        Err(Error::new("config::invalid_value", message).expected(expected))
    }
}
