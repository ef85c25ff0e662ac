//! `tunehost plugins`.

use super::{PluginArgs, print, print_as};
use crate::config;
use crate::error::{Error, Result};
use crate::plugins::project::{self, Language, Project};
use crate::plugins::{self, Kind, Limits, PluginRef, bench, check, contract};
use crate::run::atomic::{self, Existing};
use serde_json::Value;
use std::path::{Path, PathBuf};

pub fn list(config: Option<&Path>, mut search_path: Vec<PathBuf>, json: bool) -> Result<()> {
    if let Some(config) = config {
        search_path.extend(config::load(config, &[], &[])?.config.plugins.search_path);
    }
    let (listed, broken) = plugins::list(&search_path);
    for error in &broken {
        eprintln!("{error}");
    }
    print_as(json, || plugins::json(&listed), || plugins::table(&listed))
}

pub fn show(args: &PluginArgs) -> Result<()> {
    let sheet = plugins::Sheet::of(&plugin(args)?)?;
    print_as(args.json, || sheet.json(), || sheet.text())
}

pub fn check(args: &PluginArgs, config: Option<&str>) -> Result<()> {
    let plugin = plugin(args)?;
    let properties = check::check(&plugin, settings(config)?.as_ref())?;
    print_as(args.json, || check::json(&properties), || check::text(&properties))?;
    check::verdict(&plugin, &properties).map_or(Ok(()), Err)
}

pub fn bench(args: &PluginArgs, config: Option<&str>) -> Result<()> {
    let measured = bench::bench(&plugin(args)?, settings(config)?.as_ref())?;
    print_as(args.json, || bench::json(&measured), || bench::text(&measured))
}

pub fn new(name: &str, kind: &str, language: Language) -> Result<()> {
    project::new(Path::new("."), name, Kind::parse(kind)?, language)?;
    print(&format!("{name}/ is written; build it with `tunehost plugins build {name}`"))
}

pub fn build(folder: &Path, json: bool) -> Result<()> {
    let project = Project::open(folder)?;
    eprintln!("building {} ({})", project.name(), project.language());
    let built = project.build()?;
    print_as(json, || project::json(&built), || project::text(&built))
}

pub fn wit(out: Option<&Path>) -> Result<()> {
    let Some(folder) = out else { return print(&contract::document()) };
    std::fs::create_dir_all(folder).map_err(|e| Error::io("create", folder, e))?;
    for (name, text) in contract::FILES {
        atomic::write(&folder.join(name), text.as_bytes(), Existing::Refuse)?;
    }
    Ok(())
}

fn plugin(args: &PluginArgs) -> Result<PluginRef> {
    let given = config::parse_limits(&args.limits)?;
    let plugin = PluginRef::resolve_any(&args.plugin, &args.search_path)?;
    let limits = Limits { wasi: args.wasi, ..plugin.limits().clone().with(&given) };
    Ok(plugin.within(limits).set_by("--config JSON"))
}

fn settings(config: Option<&str>) -> Result<Option<Value>> {
    let parse = |text| {
        serde_json::from_str(text).map_err(|e| {
            Error::new("usage::invalid_value", format!("--config is no JSON: {e}"))
                .expected(r#"an object, such as --config '{"bucket": 4}'"#)
        })
    };
    config.map(parse).transpose()
}
