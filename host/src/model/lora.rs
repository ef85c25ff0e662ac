//! Which modules get a low-rank adapter, and what that amounts to before anything is loaded.

use super::config::LayerKind;
use super::spec::{LinearModule, ModelSpec, Slot};
use crate::config::{LoraConfig, Targets};
use crate::error::{Error, Result};
use regex::Regex;
use std::fmt::Write;

/// The adapted modules of a model, resolved from the configured targets.
#[derive(Debug, Clone)]
pub struct LoraPlan {
    /// Rank r.
    pub rank: usize,
    /// Factor of the update B A.
    pub scale: f64,
    /// alpha, as PEFT records it.
    pub alpha: f64,
    /// Whether the scale is alpha / sqrt(r).
    pub rslora: bool,
    /// Dropout on the adapter's input.
    pub dropout: f64,
    /// The adapted modules, in the order of [`ModelSpec::modules`].
    pub modules: Vec<LinearModule>,
    /// Module counts of the whole model per slot and layer kind, to say where a target does not exist.
    layers: Vec<(LayerKind, usize)>,
    absent: Vec<(Slot, LayerKind, usize)>,
}

impl LoraPlan {
    /// Resolves `config.targets` against the modules of `spec`.
    ///
    /// # Errors
    /// `config::lora_target` when a target matches nothing or cannot be adapted, `config::lora_regex` for a broken expression.
    pub fn new(config: &LoraConfig, spec: &ModelSpec) -> Result<Self> {
        let modules = match &config.targets {
            Targets::Names(names) => by_names(names, spec)?,
            Targets::Regex(pattern) => by_regex(pattern, spec)?,
        };
        let root = if config.rslora { (config.rank as f64).sqrt() } else { config.rank as f64 };
        let mut layers: Vec<(LayerKind, usize)> = Vec::new();
        for kind in [LayerKind::Sliding, LayerKind::Full] {
            let count = spec.modules.iter().filter(|m| m.kind == kind && m.slot == Slot::Q).count();
            if count > 0 {
                layers.push((kind, count));
            }
        }
        let mut absent = Vec::new();
        for slot in Slot::ALL.into_iter().filter(|slot| modules.iter().any(|m| m.slot == *slot)) {
            for (kind, count) in &layers {
                if !spec.modules.iter().any(|m| m.slot == slot && m.kind == *kind) {
                    absent.push((slot, *kind, *count));
                }
            }
        }
        Ok(Self {
            rank: config.rank,
            scale: config.alpha / root,
            alpha: config.alpha,
            rslora: config.rslora,
            dropout: config.dropout,
            modules,
            layers,
            absent,
        })
    }

    /// Trainable parameters: r x (input + output) for each module.
    pub fn parameters(&self) -> usize {
        self.modules.iter().map(|m| self.rank * (m.input + m.output)).sum()
    }

    /// The table of target x layer kind -> modules and parameters, and a line for each target that a layer kind lacks.
    pub fn table(&self) -> String {
        let mut out = format!("{:<10}", "target");
        for (kind, count) in &self.layers {
            write!(out, " {:>24}", format!("{} ({count} layers)", kind.name())).unwrap();
        }
        writeln!(out, " {:>9} {:>12}", "modules", "parameters").unwrap();
        for slot in Slot::ALL.into_iter().filter(|slot| self.modules.iter().any(|m| m.slot == *slot)) {
            write!(out, "{:<10}", slot.name()).unwrap();
            for (kind, _) in &self.layers {
                let (modules, parameters) = self.count(|m| m.slot == slot && m.kind == *kind);
                let cell = if modules == 0 { "none".into() } else { format!("{modules} x, {}", group(parameters)) };
                write!(out, " {cell:>24}").unwrap();
            }
            let (modules, parameters) = self.count(|m| m.slot == slot);
            writeln!(out, " {modules:>9} {:>12}", group(parameters)).unwrap();
        }
        write!(out, "{:<10}", "total").unwrap();
        for (kind, _) in &self.layers {
            let (modules, parameters) = self.count(|m| m.kind == *kind);
            write!(out, " {:>24}", format!("{modules} x, {}", group(parameters))).unwrap();
        }
        writeln!(out, " {:>9} {:>12}", self.modules.len(), group(self.parameters())).unwrap();
        for (slot, kind, count) in &self.absent {
            write!(out, "note: the {count} {} layers have no {}", kind.name(), slot.name()).unwrap();
            let why =
                if *slot == Slot::V { ": their k_proj feeds keys and values, so adapting it changes both" } else { "" };
            writeln!(out, "{why}").unwrap();
        }
        out
    }

    fn count(&self, keep: impl Fn(&LinearModule) -> bool) -> (usize, usize) {
        let kept = self.modules.iter().filter(|m| keep(m));
        kept.fold((0, 0), |(n, p), m| (n + 1, p + self.rank * (m.input + m.output)))
    }

    /// A regular expression that fully matches exactly the adapted module paths, as PEFT's `target_modules` takes it.
    /// A list of suffixes would also match the vision tower of a multimodal checkpoint.
    pub fn full_match_regex(&self, spec: &ModelSpec) -> String {
        let slots: Vec<Slot> = Slot::ALL.into_iter().filter(|s| self.modules.iter().any(|m| m.slot == *s)).collect();
        let regular = spec.modules.iter().filter(|m| slots.contains(&m.slot)).eq(self.modules.iter());
        if !regular {
            return self.modules.iter().map(|m| regex::escape(&m.path)).collect::<Vec<_>>().join("|");
        }
        let group = |parent: &str, from: &[Slot]| {
            let names: Vec<&str> = from.iter().filter(|s| slots.contains(s)).map(|s| s.name()).collect();
            (!names.is_empty()).then(|| format!(r"{parent}\.({})", names.join("|")))
        };
        let parts: Vec<String> =
            [group("self_attn", &Slot::ALL[..4]), group("mlp", &Slot::ALL[4..])].into_iter().flatten().collect();
        format!(r"{}layers\.\d+\.({})", regex::escape(&spec.prefix), parts.join("|"))
    }
}

fn by_names(names: &[String], spec: &ModelSpec) -> Result<Vec<LinearModule>> {
    if names.is_empty() {
        return Err(Error::new("config::lora_target", "`lora.targets` is an empty list").expected(known_names()));
    }
    for name in names {
        if !spec.modules.iter().any(|m| m.slot.name() == name) {
            return Err(no_match(&format!("target `{name}`"), name));
        }
    }
    Ok(spec.modules.iter().filter(|m| names.iter().any(|n| n == m.slot.name())).cloned().collect())
}

fn by_regex(pattern: &str, spec: &ModelSpec) -> Result<Vec<LinearModule>> {
    let regex = Regex::new(&format!("^(?:{pattern})$")).map_err(|e| {
        Error::new("config::lora_regex", format!("`lora.targets` is not a regular expression: {e}"))
            .help("a list of names, such as [\"q_proj\", \"v_proj\"], needs no expression")
    })?;
    let modules: Vec<LinearModule> = spec.modules.iter().filter(|m| regex.is_match(&m.path)).cloned().collect();
    match modules.is_empty() {
        true => Err(no_match(&format!("the expression `{pattern}`"), pattern)
            .help(format!("it must match a whole module path, such as {}", spec.modules[0].path))),
        false => Ok(modules),
    }
}

fn no_match(what: &str, text: &str) -> Error {
    let error = Error::new("config::lora_target", format!("{what} in `lora.targets` matches no module"))
        .expected(known_names());
    match never_adapted(text) {
        Some(why) => error.help(why),
        None => error,
    }
}

/// Why what `name` names takes no adapter in any model of the family, where that is so.
pub fn never_adapted(name: &str) -> Option<&'static str> {
    if name.contains("expert") {
        Some("the experts are fused 3-D tensors, not linear modules; they take no adapter")
    } else if name.contains("lm_head") || name.contains("embed_tokens") {
        Some("the head is tied to the embedding: an adapter on one would change the other")
    } else {
        None
    }
}

fn known_names() -> String {
    format!("names among {}", Slot::ALL.map(Slot::name).join(", "))
}

/// A whole number with thousands separators.
pub fn group(n: usize) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::fixtures::large_model_headers;

    fn large_spec() -> ModelSpec {
        let (config, found) = large_model_headers();
        ModelSpec::check(&config, &found).unwrap().0
    }

    fn lora(rank: usize, targets: Targets) -> LoraConfig {
        LoraConfig { rank, alpha: 64.0, targets, ..LoraConfig::default() }
    }

    fn names(list: &[&str]) -> Targets {
        Targets::Names(list.iter().map(|s| s.to_string()).collect())
    }

    #[test]
    fn counts_of_26b_a4b_from_headers_alone() {
        let spec = large_spec();
        let all = LoraPlan::new(&lora(64, LoraConfig::default().targets), &spec).unwrap();
        assert_eq!((all.modules.len(), all.parameters()), (205, 74_342_400));
        let attention = LoraPlan::new(&lora(64, names(&["q_proj", "k_proj", "v_proj", "o_proj"])), &spec).unwrap();
        assert_eq!((attention.modules.len(), attention.parameters()), (115, 45_957_120));
        assert_eq!(attention.count(|m| m.kind == LayerKind::Sliding), (100, 37_683_200));
        assert_eq!(attention.count(|m| m.kind == LayerKind::Full), (15, 8_273_920));
        let table = all.table();
        assert!(table.contains("the 5 full layers have no v_proj: their k_proj feeds keys and values"), "{table}");
        assert!(table.contains("74,342,400"), "{table}");
    }

    #[test]
    fn the_peft_expression_matches_exactly_the_adapted_modules() {
        let spec = large_spec();
        for targets in [
            names(&["q_proj", "down_proj"]),
            Targets::Regex(r".*layers\.(0|7)\.self_attn\.[qk]_proj".into()),
            Targets::Regex(r".*\.up_proj".into()),
        ] {
            let plan = LoraPlan::new(&lora(8, targets), &spec).unwrap();
            let regex = Regex::new(&format!("^(?:{})$", plan.full_match_regex(&spec))).unwrap();
            let matched: Vec<_> = spec.modules.iter().filter(|m| regex.is_match(&m.path)).collect();
            assert!(matched.into_iter().eq(plan.modules.iter()));
            assert!(!regex.is_match("model.vision_tower.encoder.layers.0.self_attn.q_proj.linear"));
        }
    }

    #[test]
    fn a_target_that_matches_nothing_is_an_error() {
        let spec = large_spec();
        for (targets, help) in [
            (names(&["q_proj", "qproj"]), "qproj"),
            (names(&["experts"]), "fused 3-D"),
            (names(&["lm_head"]), "tied"),
            (Targets::Regex("q_proj".into()), "whole module path"),
            (names(&[]), "empty"),
        ] {
            let e = LoraPlan::new(&lora(8, targets), &spec).unwrap_err();
            assert_eq!(e.code(), "config::lora_target");
            assert!(e.to_string().contains(help), "{e}");
        }
        let e = LoraPlan::new(&lora(8, Targets::Regex("(".into())), &spec).unwrap_err();
        assert_eq!(e.code(), "config::lora_regex");
    }

    #[test]
    fn scale_is_alpha_over_r_or_its_root() {
        let spec = large_spec();
        let mut config = lora(16, names(&["q_proj"]));
        assert_eq!(LoraPlan::new(&config, &spec).unwrap().scale, 4.0);
        config.rslora = true;
        assert_eq!(LoraPlan::new(&config, &spec).unwrap().scale, 16.0);
    }
}
