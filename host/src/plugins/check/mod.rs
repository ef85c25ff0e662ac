//! Conformance: does a plugin keep its contract on inputs made for the purpose?

mod eligibility;
mod exporter;
mod filter;
pub mod inputs;
mod sampler;
mod scheduler;

use serde_json::{Value, json};

use super::schema::Schema;
use super::{CheckpointScheduler, CorpusFilter, Description, Eligibility, Exporter, Kind, PluginRef, Sampler};
use crate::error::{Error, Result};

/// One property of the contract and whether the plugin has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Property {
    /// The property, as a sentence.
    pub name: String,
    /// Why it does not hold; `None` where it does.
    pub failure: Option<String>,
}

/// Whether a property holds, or why not.
type Outcome = Result<(), String>;

#[derive(Default)]
struct Report(Vec<Property>);

impl Report {
    fn add(&mut self, name: impl Into<String>, outcome: Outcome) {
        self.0.push(Property { name: name.into(), failure: outcome.err() });
    }
}

/// Check every property of the plugin's kind, with the settings `config`. Without any, with `{}` or, where the plugin
/// needs settings, with the least that fit its schema.
///
/// # Errors
/// Where the plugin cannot be started at all: those of [`Description::of`], and `plugin::config_refused` for `config`.
pub fn check(plugin: &PluginRef, config: Option<&Value>) -> Result<Vec<Property>> {
    let description = Description::of(plugin)?;
    let schema = Schema::parse(&description.config_schema);
    let config = match (config, &schema) {
        (Some(config), _) => config.clone(),
        (None, Ok(schema)) => schema.minimal(),
        (None, Err(_)) => json!({}),
    };
    load(plugin, &config)?;
    let mut report = Report::default();
    let identity = plugin.identity();
    report.add("its name and version stand in its bytes, and `describe` agrees", described(plugin));
    report.add("its settings have a schema", schema.as_ref().map(|_| ()).map_err(Clone::clone));
    if let Ok(schema) = &schema {
        report.add("wrong settings are refused", wrong_settings(plugin, schema, &config));
    }
    match identity.kind {
        Kind::Sampler => {
            let same_order = schema.is_ok_and(|schema| schema.claims_same_order());
            sampler::check(plugin, &config, same_order, &mut report);
        }
        Kind::CheckpointScheduler => scheduler::check(plugin, &config, &mut report),
        Kind::CorpusFilter => filter::check(plugin, &config, &mut report),
        Kind::Eligibility => eligibility::check(plugin, &config, &mut report),
        Kind::Exporter => exporter::check(plugin, &config, &mut report),
    }
    Ok(report.0)
}

/// The error that a failed conformance check ends with; `None` where every property holds.
pub fn verdict(plugin: &PluginRef, properties: &[Property]) -> Option<Error> {
    let failed = properties.iter().filter(|property| property.failure.is_some()).count();
    (failed > 0).then(|| {
        let identity = plugin.identity();
        Error::new("plugin::nonconforming", format!("{identity} fails {failed} of {} properties", properties.len()))
            .expected("every property of its kind's world, as `tunehost plugins wit` prints it")
    })
}

fn load(plugin: &PluginRef, config: &Value) -> Result<()> {
    match plugin.identity().kind {
        Kind::Sampler => Sampler::load(plugin, Some(config)).map(|_| ()),
        Kind::CheckpointScheduler => CheckpointScheduler::load(plugin, Some(config)).map(|_| ()),
        Kind::CorpusFilter => CorpusFilter::load(plugin, Some(config)).map(|_| ()),
        Kind::Eligibility => Eligibility::load(plugin, Some(config)).map(|_| ()),
        Kind::Exporter => Exporter::load(plugin, Some(config)).map(|_| ()),
    }
}

fn described(plugin: &PluginRef) -> Outcome {
    // That they agree was checked when it was asked; nothing in the bytes is what is left to find.
    match plugin.identity().described {
        true => Ok(()),
        false => Err("it has no custom section `tunehost-plugin`, so a listing cannot show its version".into()),
    }
}

/// Refused must be said by `configure`, not by a trap.
fn wrong_settings(plugin: &PluginRef, schema: &Schema, good: &Value) -> Outcome {
    for (what, settings) in schema.wrong(good) {
        match load(plugin, &settings) {
            Err(error) if error.code() == "plugin::config_refused" => {}
            Err(error) => return Err(format!("{what}: {error}")),
            Ok(()) => return Err(format!("{what}: accepted, but its schema does not allow {settings}")),
        }
    }
    Ok(())
}

/// The report as lines, the failures with their reason.
pub fn text(properties: &[Property]) -> String {
    let line = |property: &Property| match &property.failure {
        None => format!("ok      {}\n", property.name),
        Some(why) => format!("FAILED  {}\n        {}\n", property.name, why.replace('\n', "\n        ")),
    };
    properties.iter().map(line).collect()
}

/// The report as a JSON array of objects.
pub fn json(properties: &[Property]) -> Value {
    let object = |property: &Property| json!({"property": property.name, "ok": property.failure.is_none(), "failure": property.failure});
    properties.iter().map(object).collect()
}
