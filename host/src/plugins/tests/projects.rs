//! Projects that `plugins new` writes, and the examples in other languages.

use std::collections::BTreeSet;
use std::fs;

use super::super::check::inputs;
use super::super::contract;
use super::super::project::{Language, Project, new};
use super::*;

/// Every kind and language that a project can be made for.
const TEMPLATES: [(Language, &[Kind]); 4] = [
    (Language::Rust, &Kind::ALL),
    (Language::Python, &[Kind::Sampler, Kind::CheckpointScheduler, Kind::CorpusFilter]),
    (Language::JavaScript, &[Kind::Sampler, Kind::CheckpointScheduler, Kind::CorpusFilter]),
    (Language::C, &[Kind::Sampler]),
];

#[test]
fn every_template_is_a_project_under_its_own_name() {
    let parent = tempfile::tempdir().unwrap();
    for (language, kinds) in TEMPLATES {
        for &kind in kinds {
            let name = format!("my-{kind}-{language}");
            let folder = new(parent.path(), &name, kind, language).unwrap();
            let project = Project::open(&folder).unwrap();
            assert_eq!((project.name(), project.language()), (name.as_str(), language));
            let source = match language {
                Language::Rust => "src/lib.rs",
                Language::Python => "plugin.py",
                Language::JavaScript => "plugin.js",
                Language::C => "plugin.c",
            };
            let source = fs::read_to_string(folder.join(source)).unwrap();
            // In Rust the name comes from Cargo.toml.
            assert_eq!(source.contains(&name), language != Language::Rust, "{source}");
            assert!(fs::read_to_string(folder.join(".gitignore")).unwrap().contains("/target"));
        }
    }
}

#[test]
fn a_project_in_rust_holds_the_sdk_the_contract_and_a_lock_of_its_own() {
    let parent = tempfile::tempdir().unwrap();
    let folder = new(parent.path(), "mine", Kind::Exporter, Language::Rust).unwrap();
    let read = |file: &str| fs::read_to_string(folder.join(file)).unwrap();
    for (file, text) in contract::FILES {
        assert_eq!(read(&format!("wit/{file}")), text);
    }
    let sdk = Path::new(env!("CARGO_MANIFEST_DIR")).join("../plugins/sdk/src");
    for file in fs::read_dir(sdk).unwrap() {
        let file = file.unwrap();
        let copy = format!("vendor/sdk/src/{}", file.file_name().to_string_lossy());
        assert_eq!(read(&copy), fs::read_to_string(file.path()).unwrap());
    }
    let manifest: toml::Table = toml::from_str(&read("Cargo.toml")).unwrap();
    let shared = manifest["workspace"]["dependencies"].as_table().unwrap();
    assert_eq!(shared["tunehost-plugin-sdk"]["path"].as_str(), Some("vendor/sdk"));
    let sdk: toml::Table = toml::from_str(&read("vendor/sdk/Cargo.toml")).unwrap();
    for (dependency, from) in sdk["dependencies"].as_table().unwrap() {
        assert!(from.get("workspace").is_none() || shared.contains_key(dependency), "{dependency} is inherited");
    }
    let lock: toml::Table = toml::from_str(&read("Cargo.lock")).unwrap();
    let packages = lock["package"].as_array().unwrap().iter();
    let ours: BTreeSet<&str> = packages
        .filter(|package| package.get("source").is_none())
        .map(|package| package["name"].as_str().unwrap())
        .collect();
    assert_eq!(ours, BTreeSet::from(["mine", "tunehost-plugin-sdk"]));
}

#[test]
fn what_has_no_template_is_refused_with_what_has_one() {
    let parent = tempfile::tempdir().unwrap();
    for (language, kinds) in TEMPLATES {
        for kind in Kind::ALL.into_iter().filter(|kind| !kinds.contains(kind)) {
            let error = new(parent.path(), "mine", kind, language).unwrap_err();
            let all = "rust: sampler, checkpoint-scheduler, corpus-filter, eligibility, exporter; python: sampler";
            assert_error(&error, "usage::no_template", &[kind.name(), language.name(), all, "c: sampler"]);
        }
    }
    assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
}

#[test]
fn a_name_that_is_no_name_is_refused() {
    let parent = tempfile::tempdir().unwrap();
    for name in ["", "Big", "two words", "-x", "x-", "x--y", "../x", "/x", "1st", "x_y", "ü"] {
        let error = new(parent.path(), name, Kind::Sampler, Language::Rust).unwrap_err();
        assert_error(&error, "usage::invalid_value", &["lower case words", "longest-first"]);
    }
    assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
}

#[test]
fn what_exists_is_not_overwritten() {
    let parent = tempfile::tempdir().unwrap();
    fs::write(parent.path().join("mine"), "of value").unwrap();
    let error = new(parent.path(), "mine", Kind::Sampler, Language::C).unwrap_err();
    assert_error(&error, "run::exists", &["mine", "not overwritten"]);
    assert_eq!(fs::read_to_string(parent.path().join("mine")).unwrap(), "of value");
}

#[test]
fn a_folder_that_is_no_project_is_not_built() {
    let folder = tempfile::tempdir().unwrap();
    let open = || Project::open(folder.path()).unwrap_err();
    assert_error(&open(), "usage::no_project", &["plugin.toml", "plugins new"]);
    let missing = folder.path().join("missing");
    assert_error(&Project::open(&missing).unwrap_err(), "io::failed", &["missing"]);
    let good = "name = \"x\"\nversion = \"1.0.0\"\nkind = \"sampler\"\nlanguage = \"c\"\n";
    for (wrong, code, says) in [
        (good.replace("\"c\"", "\"cobol\""), "usage::bad_project", "cobol"),
        (good.replace("\"c\"", "\"rust\""), "usage::bad_project", "Cargo.toml"),
        (good.replace("version", "versoin"), "usage::bad_project", "versoin"),
        (good.replace("sampler", "sampling"), "usage::unknown_plugin_kind", "sampling"),
        (good.replace("\"x\"", "\"../x\""), "usage::invalid_value", "../x"),
        (format!("{good}memory = true\n"), "usage::bad_project", "has none"),
        (good.replace("name", "[name"), "usage::bad_project", "TOML parse error"),
    ] {
        fs::write(folder.path().join("plugin.toml"), wrong).unwrap();
        assert_error(&open(), code, &["plugin.toml", says]);
    }
    fs::write(folder.path().join("plugin.toml"), good).unwrap();
    assert_eq!(Project::open(folder.path()).unwrap().name(), "x");
}

#[test]
fn a_cargo_package_without_a_name_is_not_built() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("Cargo.toml"), "[workspace]\n").unwrap();
    let error = Project::open(folder.path()).unwrap_err();
    assert_error(&error, "usage::bad_project", &["Cargo.toml", "package"]);
}

/// Plans of `plugin` must be those of `bucket-to-pair`, byte by byte, and so must its refusals be refusals.
fn assert_plans_like_rust(plugin: &PluginRef) {
    for bucket in [1, 2, 5, 4_294_967_295u32] {
        let config = Some(json!({ "bucket": bucket }));
        let mut theirs = Sampler::load(plugin, config.as_ref()).unwrap();
        let mut ours = sampler("bucket-to-pair", config);
        for count in [0, 1, 2, 7, 64, 1001] {
            let roots = inputs::roots(count);
            for (at, shape) in inputs::shapes(count).into_iter().enumerate() {
                for (rows_per_batch, token_budget) in
                    [(1, None), (2, None), (8, Some(inputs::MAX_SEQ_LEN)), (3, Some(9000)), (u32::MAX, Some(u32::MAX))]
                {
                    let request = PlanRequest {
                        lengths: &shape.of_records,
                        roots: &roots,
                        epoch: at as u32 * 1_000_000_007,
                        seed: u64::MAX - count as u64,
                        rows_per_batch,
                        token_budget,
                        ..request(&[])
                    };
                    let place = format!("bucket {bucket}, {count} records, {}, {rows_per_batch} rows", shape.name);
                    assert_eq!(theirs.plan(&request).unwrap(), ours.plan(&request).unwrap(), "{place}");
                }
            }
        }
        let too_long = PlanRequest { token_budget: Some(5), ..request(&[1, 6]) };
        assert_error(&theirs.plan(&too_long).unwrap_err(), "plugin::refused", &["budget"]);
        assert_error(&ours.plan(&too_long).unwrap_err(), "plugin::refused", &["budget"]);
    }
}

/// Decisions of `plugin` must be those of `every-n-steps`.
fn assert_decides_like_rust(plugin: &PluginRef) {
    for n in [1, 3, 1000] {
        let config = Some(json!({ "n": n }));
        let mut theirs = CheckpointScheduler::load(plugin, config.as_ref()).unwrap();
        let rust = bundled(Kind::CheckpointScheduler, "every-n-steps");
        let mut ours = CheckpointScheduler::load(&rust, config.as_ref()).unwrap();
        for step in (1..20).chain([999, 1000, 3000, u64::MAX]) {
            let info = super::schedulers::info(step, 0);
            assert_eq!(theirs.after_step(&info).unwrap(), ours.after_step(&info).unwrap(), "n {n}, step {step}");
        }
    }
}

/// Verdicts of `plugin` must be those of `length-and-dedup`.
fn assert_judges_like_rust(plugin: &PluginRef) {
    let records = inputs::records(900);
    let candidates: Vec<Candidate> = records.iter().map(inputs::Record::candidate).collect();
    for config in [
        json!({}),
        json!({"min_tokens": 10, "max_tokens": 80, "min_trained_tokens": 6}),
        json!({"dedup": "none", "min_trained_tokens": 0}),
    ] {
        let judge = |plugin: &PluginRef| {
            let mut filter = CorpusFilter::load(plugin, Some(&config)).unwrap();
            let chunks = candidates.chunks(250).enumerate();
            chunks.flat_map(|(at, chunk)| filter.filter(at as u64 * 250, chunk).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(judge(plugin), judge(&bundled(Kind::CorpusFilter, "length-and-dedup")), "{config}");
    }
}

/// The same tensors as `peft-adapter`, and a report card with the largest update first.
fn assert_exports_the_adapter_like_rust(plugin: &PluginRef) {
    let mut tuned = inputs::tuned(12, 2);
    tuned.update_norms[3] = 100.0;
    let plan = |plugin: &PluginRef| Exporter::load(plugin, Some(&json!({}))).unwrap().plan(&tuned).unwrap();
    let (ours, theirs) = (plan(plugin), plan(&bundled(Kind::Exporter, "peft-adapter")));
    assert_eq!(ours.tensor_files, theirs.tensor_files);
    let card = ours.texts.iter().find(|(name, _)| name == "report-card.md").unwrap();
    let row = format!("| {} | {:.3}% |", tuned.modules[3], 10_000.0 / tuned.weight_norms[3]);
    assert_eq!(card.1.lines().nth(2), Some(row.as_str()));
    assert!(ours.notes[0].starts_with(&tuned.modules[3]), "{:?}", ours.notes);
}

#[test]
fn the_sampler_in_c_plans_like_the_one_in_rust() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../plugins/dist/examples/bucket-to-pair-c.wasm");
    assert_plans_like_rust(&PluginRef::resolve_any(path, &[]).unwrap());
}

/// What `tests/languages` built.
#[test]
#[ignore = "needs TUNEHOST_EXAMPLES, a folder of built examples"]
fn built_examples_answer_like_the_plugins_in_rust() {
    let folder = PathBuf::from(std::env::var_os("TUNEHOST_EXAMPLES").expect("TUNEHOST_EXAMPLES"));
    let (listed, errors) = list(&[folder]);
    assert!(errors.is_empty(), "{errors:?}");
    let files: Vec<String> = listed
        .iter()
        .filter_map(|listing| match &listing.origin {
            Origin::File(path) => Some(path.to_string_lossy().into_owned()),
            Origin::Bundled => None,
        })
        .collect();
    assert!(!files.is_empty(), "TUNEHOST_EXAMPLES has none");
    for file in files {
        let plugin = PluginRef::resolve_any(&file, &[]).unwrap();
        println!("{}", plugin.identity());
        match plugin.identity().kind {
            Kind::Sampler => assert_plans_like_rust(&plugin),
            Kind::CheckpointScheduler => assert_decides_like_rust(&plugin),
            Kind::CorpusFilter => assert_judges_like_rust(&plugin),
            Kind::Exporter => assert_exports_the_adapter_like_rust(&plugin),
            kind => panic!("there is no {kind} to compare it with"),
        }
    }
}
