//! `[plugins.limits]`, `plugins.wasi` and `--limit`.

use super::*;
use crate::plugins::{Kind, Limits};

/// The values in configs/reference.toml that stand behind `# `, as the limits of a kind.
fn documented_limits(kind: &str) -> LimitsConfig {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/reference.toml");
    let text = fs::read_to_string(path).unwrap();
    let (_, table) = text.split_once(&format!("[plugins.limits.{kind}]\n")).unwrap();
    let table = table.split("\n[").next().unwrap();
    let values: Vec<&str> =
        table.lines().filter_map(|line| line.strip_prefix("# ")).filter(|l| l.contains(" = ")).collect();
    toml::from_str(&values.join("\n")).unwrap()
}

#[test]
fn the_reference_documents_the_limits_of_each_kind() {
    for kind in Kind::ALL {
        let documented = documented_limits(kind.config_key());
        assert!(documented.named().iter().all(|(_, value, _)| value.is_some()), "{kind}");
        assert_eq!(Limits::of(kind).with(&documented), Limits::of(kind), "{kind}");
    }
}

#[test]
fn limits_and_wasi_are_of_one_kind_and_its_plugin() {
    let more = "[plugins]\nsampler = \"x.wasm\"\nwasi = [\"sampler\", \"exporter\"]\n\
                [plugins.limits.sampler]\ncall_deadline_ms = 5\n[plugins.limits.exporter]\nmemory_mib = 7\n";
    let files = Files::new(&[("a.toml", &format!("{SMALLEST}{more}"))]);
    let limits = |sets: &[&str], plugins: &[&str], kind| {
        Limits::configured(kind, &files.load(sets, plugins).unwrap().config.plugins)
    };
    let of = Limits::of;
    assert_eq!(limits(&[], &[], Kind::Sampler), Limits { call_deadline_ms: 5, wasi: true, ..of(Kind::Sampler) });
    assert_eq!(limits(&[], &[], Kind::Exporter), Limits { memory_mib: 7, wasi: true, ..of(Kind::Exporter) });
    assert_eq!(limits(&[], &[], Kind::CorpusFilter), of(Kind::CorpusFilter));
    // They were meant for x.wasm, and stay with the other kinds.
    let (other, set) = (["sampler=shuffled"], ["plugins.limits.sampler.memory_mib=9"]);
    assert_eq!(limits(&[], &other, Kind::Sampler), of(Kind::Sampler));
    assert_eq!(limits(&set, &other, Kind::Sampler), Limits { memory_mib: 9, ..of(Kind::Sampler) });
    assert!(limits(&[], &other, Kind::Exporter).wasi);
}

#[test]
fn limits_by_flag_are_read_or_refused() {
    let read = |flags: &[&str]| parse_limits(&flags.iter().map(|flag| flag.to_string()).collect::<Vec<_>>());
    let given = LimitsConfig { memory_mib: Some(64), log_lines_per_minute: Some(0), ..LimitsConfig::default() };
    assert_eq!(read(&["memory_mib=64", "log_lines_per_minute=0"]).unwrap(), given);
    assert_eq!(read(&[]).unwrap(), LimitsConfig::default());
    for (flags, expected) in [
        (vec!["memory_mib"], "usage::limit]: cannot read `--limit memory_mib`\n  expected: --limit KEY=VALUE"),
        (
            vec!["memory=1"],
            "usage::limit]: cannot read `--limit memory=1`\n  expected: KEY is one of memory_mib, answer_mib",
        ),
        (
            vec!["memory_mib=0"],
            "usage::limit]: cannot read `--limit memory_mib=0`\n  expected: memory_mib is 1 to 65536",
        ),
        (
            vec!["memory_mib=much"],
            "usage::limit]: cannot read `--limit memory_mib=much`\n  expected: memory_mib is 1 to",
        ),
        (vec!["memory_mib=1", "memory_mib=2"], "usage::conflict]: --limit memory_mib is given twice"),
    ] {
        let error = read(&flags).unwrap_err().to_string();
        assert!(error.starts_with(&format!("error[{expected}")), "{error}");
    }
}
