//! The git revision that the program is built from, for provenance; none where it is built outside a repository.

use std::process::Command;

fn main() {
    // What makes a clean tree dirty, and a commit that makes it clean again.
    for path in ["src", "../kernels/src", "../plugins/dist", "../wit", "../Cargo.lock"] {
        println!("cargo::rerun-if-changed={path}");
    }
    for path in ["HEAD", "logs/HEAD"] {
        if let Some(path) = git(&["rev-parse", "--git-path", path]) {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    if let Some(revision) = git(&["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]) {
        println!("cargo::rustc-env=TUNEHOST_GIT_REVISION={revision}");
    }
}

fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_string()).filter(|text| !text.is_empty())
}
