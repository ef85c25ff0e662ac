use super::*;
use std::fs;
use tempfile::TempDir;

mod limits;

const SMALLEST: &str = r#"name = "small"
[model]
base = "base"
[data]
max_seq_len = 64
[[data.sources]]
path = "a.jsonl"
root = "a"
"#;

/// A folder with the files given; the first is the one to load.
struct Files {
    folder: TempDir,
    first: PathBuf,
}

impl Files {
    fn new(files: &[(&str, &str)]) -> Self {
        let folder = TempDir::new().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let first = folder.path().join(files[0].0);
        Self { folder, first }
    }

    fn load(&self, sets: &[&str], plugins: &[&str]) -> Result<Resolved> {
        let owned = |flags: &[&str]| flags.iter().map(|flag| flag.to_string()).collect::<Vec<_>>();
        load(&self.first, &owned(sets), &owned(plugins))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The error with this folder's path cut out.
    fn error(&self, sets: &[&str], plugins: &[&str]) -> String {
        let error = self.load(sets, plugins).expect_err("this configuration is wrong").to_string();
        error.replace(&format!("{}/", self.folder.path().display()), "")
    }
}

/// Loads the smallest configuration with `extra` lines in front of its tables and `more` after them.
fn error_of(extra: &str, more: &str) -> String {
    Files::new(&[("a.toml", &format!("{extra}{SMALLEST}{more}"))]).error(&[], &[])
}

#[test]
fn the_smallest_file_gets_the_defaults() {
    let files = Files::new(&[("a.toml", SMALLEST)]);
    let resolved = files.load(&[], &[]).unwrap();
    assert_eq!(resolved.config.train, TrainConfig::default());
    assert_eq!(resolved.config.lora, LoraConfig::default());
    assert_eq!(resolved.origins["train.lr"], Origin::Default);
    assert_eq!(resolved.origins["data.max_seq_len"], Origin::File { path: files.first.clone(), line: 5 });
    assert_eq!(resolved.origins["data.sources[0].root"], Origin::File { path: files.first.clone(), line: 8 });
}

#[test]
fn a_file_extends_others_key_by_key() {
    let files = Files::new(&[
        ("c.toml", "extends = \"sub/b.toml\"\n[train]\nlr = 0.5\nbetas = [0.1, 0.2]\n"),
        ("sub/b.toml", "extends = \"../a.toml\"\n[train]\nlr = 0.25\nseed = 7\n[data]\ntemplate = \"t.jinja\"\n"),
        ("a.toml", SMALLEST),
    ]);
    let resolved = files.load(&[], &[]).unwrap();
    assert_eq!((resolved.config.train.lr, resolved.config.train.seed), (0.5, 7));
    assert_eq!(resolved.config.train.betas, [0.1, 0.2]);
    // Each path belongs to the file that says it.
    assert_eq!(resolved.config.data.template, Some(files.path("sub/t.jinja").display().to_string()));
    assert_eq!(resolved.config.model.base, files.path("base"));
    assert_eq!(resolved.origins["train.seed"], Origin::File { path: files.path("sub/b.toml"), line: 4 });
    assert_eq!(resolved.origins["train.betas"], Origin::File { path: files.path("c.toml"), line: 4 });
}

#[test]
fn an_array_is_replaced_as_a_whole() {
    let child = "extends = \"a.toml\"\n[[data.sources]]\npath = \"b.jsonl\"\nroot = \"b\"\n";
    let resolved = Files::new(&[("b.toml", child), ("a.toml", SMALLEST)]).load(&[], &[]).unwrap();
    let roots: Vec<_> = resolved.config.data.sources.iter().map(|source| source.root.as_str()).collect();
    assert_eq!(roots, ["b"]);
}

#[test]
fn files_in_a_circle_are_named() {
    let files = Files::new(&[("a.toml", "extends = \"b.toml\"\n"), ("b.toml", "\nextends = \"./a.toml\"\n")]);
    let error = files.error(&[], &[]);
    assert!(error.starts_with("error[config::extends_cycle]: b.toml:2:"), "{error}");
    assert!(error.ends_with("a.toml -> b.toml -> ./a.toml"), "{error}");
}

#[test]
fn a_missing_base_file_names_the_line() {
    let error = Files::new(&[("a.toml", "\nextends = \"gone.toml\"\n")]).error(&[], &[]);
    assert!(error.starts_with("error[config::unreadable]: a.toml:2: cannot read gone.toml:"), "{error}");
}

#[test]
fn an_unknown_key_names_line_and_nearest_key() {
    for (more, line, key, near) in [
        ("[train]\nlrr = 1.0\n", 10, "train.lrr", "train.lr"),
        ("[trian]\nlr = 1.0\n", 9, "trian", "train"),
        ("[train]\nmicro_batches = 1\n", 10, "train.micro_batches", "train.micro_batch"),
        ("[lora]\nepochs = 1\n", 10, "lora.epochs", "train.epochs"),
        ("[[data.sources]]\npath = \"b\"\nroots = \"b\"\n", 11, "data.sources[1].roots", "data.sources.root"),
        ("[plugins.config.samplr]\nx = 1\n", 9, "plugins.config.samplr", ""),
        ("[plugins.limits.samplr]\nmemory_mib = 1\n", 9, "plugins.limits.samplr", ""),
        (
            "[plugins.limits.sampler]\nmemory_mb = 1\n",
            10,
            "plugins.limits.sampler.memory_mb",
            "plugins.limits.sampler.memory_mib",
        ),
    ] {
        let error = error_of("", more);
        let first = format!("error[config::unknown_key]: a.toml:{line}: unknown key `{key}`\n  help: ");
        assert!(error.starts_with(&first), "{error}");
        let help = if near.is_empty() { "known here: ".into() } else { format!("did you mean `{near}`?") };
        assert!(error[first.len()..].starts_with(&help), "{error}");
    }
    let error = error_of("extend = \"b.toml\"\n", "");
    assert!(error.ends_with("a.toml:1: unknown key `extend`\n  help: did you mean `extends`?"), "{error}");
}

#[test]
fn a_wrong_type_says_expected_and_found() {
    for (more, message, expected) in [
        ("[train]\nlr = \"fast\"\n", "`train.lr` is the string \"fast\"", "a number"),
        (
            "[train]\nmicro_batch = 1.5\n",
            "`train.micro_batch` is the number 1.5",
            "a whole number from 0 to 4294967295",
        ),
        ("[train]\nwarmup_steps = true\n", "`train.warmup_steps` is the boolean true", "a whole number, 0 or more"),
        ("[lora]\nrslora = 1\n", "`lora.rslora` is the number 1", "a boolean"),
        ("[plugins]\nsampler = [\"a\"]\n", "`plugins.sampler` is an array of 1", "a string"),
        ("[train]\nschedule = 3\n", "`train.schedule` is the number 3", "a string"),
    ] {
        let error = error_of("", more);
        assert_eq!(error, format!("error[config::wrong_type]: a.toml:10: {message}\n  expected: {expected}"));
    }
    let error = error_of("train = 3\n", "");
    assert!(
        error.starts_with("error[config::wrong_type]: a.toml:1: `train` is the number 3\n  expected: a table"),
        "{error}"
    );
}

#[test]
fn a_value_out_of_range_says_the_range() {
    for (more, key) in [
        ("[train]\nmicro_batch = 0\n", "train.micro_batch"),
        ("[train]\nmicro_batch = -1\n", "train.micro_batch"),
        ("[train]\naccumulation = 0\n", "train.accumulation"),
        ("[train]\nepochs = 0\n", "train.epochs"),
        ("[train]\nmax_steps = 0\n", "train.max_steps"),
        ("[train]\nlr = 0.0\n", "train.lr"),
        ("[train]\nmin_lr_ratio = 1.5\n", "train.min_lr_ratio"),
        ("[train]\nbetas = [0.9, 1.0]\n", "train.betas"),
        ("[train]\nbetas = [0.9]\n", "train.betas"),
        ("[train]\nbetas = [0.9, 0.99, 0.999]\n", "train.betas"),
        ("[train]\neps = 0\n", "train.eps"),
        ("[train]\nweight_decay = -0.1\n", "train.weight_decay"),
        ("[train]\nclip_norm = -1\n", "train.clip_norm"),
        ("[train]\nloss_chunk_rows = 0\n", "train.loss_chunk_rows"),
        ("[train]\nrecompute = \"some\"\n", "train.recompute"),
        ("[train]\nschedule = \"step\"\n", "train.schedule"),
        ("[lora]\nrank = 0\n", "lora.rank"),
        ("[lora]\nalpha = 0\n", "lora.alpha"),
        ("[lora]\ndropout = 1.0\n", "lora.dropout"),
        ("[lora]\ntargets = []\n", "lora.targets"),
        ("[lora]\ntargets = \"(\"\n", "lora.targets"),
        ("[lora]\ntargets = 3\n", "lora.targets"),
        ("[plugins]\nsampler = \"\"\n", "plugins.sampler"),
        ("[plugins]\nwasi = [\"smapler\"]\n", "plugins.wasi[0]"),
        ("[plugins.limits.sampler]\nmemory_mib = 0\n", "plugins.limits.sampler.memory_mib"),
        ("[plugins.limits.sampler]\nanswer_mib = 4097\n", "plugins.limits.sampler.answer_mib"),
        ("[plugins.limits.exporter]\ncall_deadline_ms = 0\n", "plugins.limits.exporter.call_deadline_ms"),
        ("[plugins.limits.sampler]\nlog_lines_per_minute = -1\n", "plugins.limits.sampler.log_lines_per_minute"),
    ] {
        let error = error_of("", more);
        let start = format!("error[config::invalid_value]: a.toml:10: `{key}` is ");
        assert!(error.starts_with(&start) && error.contains("\n  expected: "), "{more}: {error}");
    }
    // No float of a configuration is infinite or not a number, whatever the key.
    let error = error_of("", "[train]\nlr = nan\n");
    assert!(error.starts_with("error[config::invalid_value]: a.toml:10: nan "), "{error}");
}

#[test]
fn data_is_checked() {
    for (from, to, line, key) in [
        ("max_seq_len = 64", "max_seq_len = 1", 5, "data.max_seq_len"),
        ("max_seq_len = 64", "max_seq_len = 64\nheld_out = 0.6", 6, "data.held_out"),
        ("root = \"a\"", "root = \"\"", 8, "data.sources[0].root"),
        (
            "root = \"a\"",
            "root = \"a\"\n[[data.sources]]\npath = \"./a.jsonl\"\nroot = \"b\"",
            10,
            "data.sources[1].path",
        ),
        ("root = \"a\"", "root = \"a\"\nweight = 0", 9, "data.sources[0].weight"),
        ("root = \"a\"", "root = \"a\"\ncap = 0", 9, "data.sources[0].cap"),
        ("root = \"a\"", "root = \"a\"\ncolumns = { dialog = \"messages\" }", 9, "data.sources[0].columns"),
        ("[[data.sources]]\npath = \"a.jsonl\"\nroot = \"a\"", "sources = []", 6, "data.sources"),
        ("name = \"small\"", "name = \"a/b\"", 1, "name"),
        ("name = \"small\"", "name = \"..\"", 1, "name"),
        ("name = \"small\"", "name = \"a\"\ntemplate.now = 2026-01-01T00:00:00Z", 2, "template.now"),
    ] {
        let text = SMALLEST.replace(from, to);
        let error = Files::new(&[("a.toml", &text)]).error(&[], &[]);
        let start = format!("error[config::invalid_value]: a.toml:{line}: `{key}` is ");
        assert!(error.starts_with(&start), "{to}: {error}");
    }
}

#[test]
fn a_missing_key_and_broken_toml_are_named() {
    let without = SMALLEST.replace("base = \"base\"\n", "");
    let error = Files::new(&[("a.toml", &without)]).error(&[], &[]);
    assert!(error.starts_with("error[config::missing_key]: a.toml:2: `model.base` is not set"), "{error}");
    let error = Files::new(&[("a.toml", "\n")]).error(&[], &[]);
    assert!(error.starts_with("error[config::missing_key]: a.toml: `name` is not set"), "{error}");
    let error = error_of("", "[train]\nlr = \n");
    assert!(error.starts_with("error[config::syntax]: a.toml:10: "), "{error}");
    let error = error_of("", "[train]\nlr = 1.0\nlr = 2.0\n");
    assert!(error.starts_with("error[config::syntax]: a.toml:11: duplicate key"), "{error}");
}

#[test]
fn flags_lie_over_the_file() {
    let files = Files::new(&[("a.toml", SMALLEST)]);
    let sets = [
        "train.lr=1e-4",
        "model.base=elsewhere/base",
        "plugins.config.sampler.buckets=[64, 128]",
        "data.template=base",
    ];
    let resolved = files.load(&sets, &["sampler=own/x.wasm", "checkpoint-scheduler=every-n-steps"]).unwrap();
    assert_eq!(resolved.config.train.lr, 1e-4);
    // A path on the command line is relative to the current directory.
    assert_eq!(resolved.config.model.base, PathBuf::from("elsewhere/base"));
    assert_eq!(resolved.config.data.template.as_deref(), Some("base"));
    assert_eq!(resolved.config.plugins.sampler, "own/x.wasm");
    assert_eq!(resolved.config.plugins.checkpoint_scheduler, "every-n-steps");
    assert_eq!(resolved.config.plugins.config["sampler"], serde_json::json!({ "buckets": [64, 128] }));
    assert_eq!(resolved.origins["train.lr"], Origin::Set("train.lr=1e-4".into()));
    assert_eq!(resolved.origins["plugins.sampler"], Origin::Plugins("sampler=own/x.wasm".into()));
}

#[test]
fn plugins_that_look_like_paths_belong_to_their_file() {
    let files = Files::new(&[(
        "sub/a.toml",
        &format!("{SMALLEST}[plugins]\nsampler = \"../x.wasm\"\nsearch_path = [\"p\"]\n"),
    )]);
    let plugins = files.load(&[], &[]).unwrap().config.plugins;
    assert_eq!(plugins.sampler, files.path("x.wasm").display().to_string());
    assert_eq!(plugins.search_path, [files.path("sub/p")]);
    assert_eq!(plugins.checkpoint_scheduler, "wall-clock");
}

#[test]
fn wrong_flags_are_named() {
    let files = Files::new(&[("a.toml", SMALLEST)]);
    for (sets, plugins, expected) in [
        (vec!["train.lrr=1"], vec![], "config::unknown_key]: --set train.lrr=1: unknown key `train.lrr`"),
        (vec!["train.lr=fast"], vec![], "config::wrong_type]: --set train.lr=fast: `train.lr` is the string \"fast\""),
        (vec!["train.lr=0"], vec![], "config::invalid_value]: --set train.lr=0: `train.lr` is 0.0"),
        (vec!["name=7"], vec![], "config::wrong_type]: --set name=7: `name` is the number 7"),
        (vec!["train=1"], vec![], "config::wrong_type]: --set train=1: `train` is the number 1"),
        (vec!["train.lr"], vec![], "usage::set]: cannot read `--set train.lr`"),
        (vec![".lr=1"], vec![], "usage::set]: cannot read `--set .lr=1`"),
        (vec![], vec!["filter=x"], "usage::plugins]: cannot read `--plugins filter=x`"),
        (vec![], vec!["sampler="], "usage::plugins]: cannot read `--plugins sampler=`"),
        (vec!["a.b=1", "a.b=2"], vec![], "usage::conflict]: `--set a.b=1` and `--set a.b=2` set the same key"),
        (vec!["a={}", "a.b=2"], vec![], "usage::conflict]: `--set a={}` and `--set a.b=2` set the same key"),
        (
            vec!["plugins.sampler=a"],
            vec!["sampler=b"],
            "usage::conflict]: `--set plugins.sampler=a` and `--plugins sampler=b` set the same key",
        ),
    ] {
        let error = files.error(&sets, &plugins);
        assert!(error.starts_with(&format!("error[{expected}")), "{error}");
    }
}

#[test]
fn what_eligibility_rules_on_belongs_to_its_file_and_is_never_named_in_vain() {
    let manifest = "[eligibility]\nmanifest = \"corpora.toml\"\ngrants = \"../grants.toml\"\n";
    let child = format!("extends = \"../a.toml\"\nplugins.eligibility = \"mine\"\n{manifest}");
    let files = Files::new(&[("sub/b.toml", &child), ("a.toml", SMALLEST)]);
    let eligibility = files.load(&[], &[]).unwrap().config.eligibility;
    assert_eq!(eligibility.manifest, Some(files.path("sub/corpora.toml")));
    assert_eq!(eligibility.grants, Some(files.path("grants.toml")));

    for (more, key) in [
        ("[plugins]\neligibility = \"mine\"\n", "`plugins.eligibility` is \"mine\""),
        ("[eligibility]\ngrants = \"g.toml\"\n", "`eligibility.grants` is \""),
    ] {
        let error = error_of("", more);
        assert!(error.starts_with(&format!("error[config::invalid_value]: a.toml:10: {key}")), "{error}");
        assert!(error.contains("expected: `eligibility.manifest`"), "{error}");
    }
}

#[test]
fn show_lists_values_and_origins() {
    let resolved = Files::new(&[("a.toml", SMALLEST)]).load(&["train.lr=3e-3"], &[]).unwrap();
    let shown = show(&resolved);
    let line = |key: &str| {
        let line = shown.lines().find(|line| line.starts_with(&format!("{key} "))).expect("each key has a line");
        line.split_once("   ").map(|(value, origin)| (value.to_string(), origin.trim().to_string())).unwrap()
    };
    assert_eq!(line("train.lr"), ("train.lr = 0.003".into(), "# --set train.lr=3e-3".into()));
    assert_eq!(line("train.eps"), ("train.eps = 1e-8".into(), "# default".into()));
    assert_eq!(line("train.recompute"), ("train.recompute = \"all\"".into(), "# default".into()));
    assert_eq!(line("# train.max_steps").0, "# train.max_steps is not set");
    assert!(line("data.max_seq_len").1.ends_with("a.toml:5"));
    let text = |value: serde_json::Value| Entry { key: "k".into(), value }.text().unwrap();
    assert_eq!(text(serde_json::json!([1, 2.0, "a\"b\n", []])), r#"[1, 2.0, "a\"b\n", []]"#);
    assert_eq!(shown.lines().count(), entries(&resolved.config).len());
}

#[test]
fn the_resolved_file_loads_to_the_same_values() {
    let more = "[lora]\ntargets = \"model\\\\.layers\\\\.[01].*\"\n[train]\nmax_steps = 5\nrecompute = 2\neps = 1e-7\n\
                [plugins]\nsampler = \"x.wasm\"\nwasi = [\"sampler\"]\n\
                [plugins.limits.sampler]\nmemory_mib = 64\n[plugins.config.sampler]\n\
                buckets = [1, 2]\nratio = 0.5\n\"odd name\" = \"x\"\n";
    let files = Files::new(&[("a.toml", &format!("{SMALLEST}{more}"))]);
    let resolved = files.load(&["run.root=my-runs"], &[]).unwrap();
    let mut absolute = resolved.config.clone();
    absolute.run.root = std::env::current_dir().unwrap().join("my-runs");

    let copy = Files::new(&[("elsewhere/config.resolved.toml", &to_toml(&resolved).unwrap())]);
    assert_eq!(copy.load(&[], &[]).unwrap().config, absolute);
}

#[test]
fn the_reference_documents_every_key_and_its_default() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/reference.toml");
    let resolved = load(&path, &[], &[]).unwrap();

    // What differs from the smallest configuration is what that one has to say itself.
    let mut smallest = Files::new(&[("a.toml", SMALLEST)]).load(&[], &[]).unwrap().config;
    smallest.name = resolved.config.name.clone();
    smallest.model.base = resolved.config.model.base.clone();
    smallest.data.sources = resolved.config.data.sources.clone();
    smallest.data.max_seq_len = resolved.config.data.max_seq_len;
    smallest.plugins.config = resolved.config.plugins.config.clone();
    smallest.plugins.limits = resolved.config.plugins.limits.clone();
    assert_eq!(resolved.config, smallest);

    // A key stands in its table as `key = ...` or, where it is not set, as `# key = ...`.
    let mut table = String::new();
    let mut documented = Vec::new();
    for line in fs::read_to_string(&path).unwrap().lines() {
        let line = line.trim_start_matches("# ");
        if let Some(name) = line.strip_prefix('[') {
            table = name.trim_start_matches('[').trim_end_matches(']').to_string();
            documented.push(table.clone());
        } else if let Some((key, _)) = line.split_once(" = ") {
            documented.push(keys::join(&table, key));
        }
    }
    let missing: Vec<_> = keys::known().into_iter().filter(|key| !documented.contains(key)).collect();
    // These two themselves are only ever written as one of their tables.
    assert_eq!(missing, ["plugins.limits", "plugins.config"], "configs/reference.toml lacks keys");
    for kind in PLUGIN_KINDS {
        assert!(documented.contains(&format!("plugins.config.{kind}")), "configs/reference.toml lacks {kind}");
    }
}
