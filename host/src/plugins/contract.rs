//! The contract's own text, inside the program: what `tunehost plugins wit` prints and `plugins new` puts into a project.

/// File name and text of each file of `wit/`, in reading order.
pub const FILES: [(&str, &str); 8] = [
    ("plugin.wit", include_str!("../../../wit/plugin.wit")),
    ("host.wit", include_str!("../../../wit/host.wit")),
    ("sampler.wit", include_str!("../../../wit/sampler.wit")),
    ("checkpoint-scheduler.wit", include_str!("../../../wit/checkpoint-scheduler.wit")),
    ("memory.wit", include_str!("../../../wit/memory.wit")),
    ("corpus-filter.wit", include_str!("../../../wit/corpus-filter.wit")),
    ("eligibility.wit", include_str!("../../../wit/eligibility.wit")),
    ("exporter.wit", include_str!("../../../wit/exporter.wit")),
];

/// All files as one WIT document: the package is named once.
pub fn document() -> String {
    let (package, _) = FILES[0].1.split_once('\n').expect("the first line of a WIT file names the package");
    let bodies = FILES.map(|(_, text)| text.trim_start_matches(package).trim());
    format!("{package}\n\n{}\n", bodies.join("\n\n"))
}
