//! Which checkpoints stay: `[checkpoint]`.
//!
//! The one place that removes anything, and only checkpoints of this very run (`written.jsonl`) as [`checkpoint::write`] wrote
//! them: a folder that holds anything more, anything less, or what another wrote, stays. A checkpoint is first renamed to `.step-N.expired`, so
//! that a run killed meanwhile never leaves half of one under its name, and finishes the removal when it saves next.

use super::atomic::{sync_folder, taken};
use super::checkpoint::{self, Contents, MANIFEST, name_of};
use super::written::Written;
use crate::config::CheckpointConfig;
use crate::error::{Error, Result};
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::Path;

const EXPIRED: &str = ".expired";

/// The most checkpoints that are there at once in a run that saves after the steps `saved`: one more is being written when an old
/// one goes, and the best may be any.
pub fn kept_at_once(saved: &[u64], keep: &CheckpointConfig, evaluates: bool) -> usize {
    let Some(last) = keep.keep_last else { return saved.len() };
    let older = saved.len().saturating_sub(last as usize + 1);
    let every = |step: &&u64| keep.keep_every.is_some_and(|every| step.is_multiple_of(every));
    let best = usize::from(keep.keep_best && evaluates && older > 0);
    saved.len() - older + saved[..older].iter().filter(every).count() + best
}

/// Removes the checkpoints up to step `newest`, which is whole, that `keep` does not ask for; `best` is the step of the best one.
///
/// # Errors
/// Class `io`.
pub fn apply(checkpoints: &Path, keep: &CheckpointConfig, newest: u64, best: Option<u64>) -> Result<()> {
    let Some(keep_last) = keep.keep_last else { return Ok(()) };
    let written = Written::read(checkpoints)?;
    finish_removals(checkpoints, &written)?;
    let steps = checkpoint::by_step(checkpoints)?;
    let own = steps.range(..=newest).rev().filter(|(_, path)| own(path, &written));
    let kept = |step: u64| {
        keep.keep_every.is_some_and(|every| step.is_multiple_of(every)) || keep.keep_best && best == Some(step)
    };
    let expired = own.skip(keep_last as usize).filter(|(step, _)| !kept(**step));
    for (step, path) in expired {
        let aside = checkpoints.join(format!(".step-{step:06}{EXPIRED}"));
        // Taken where somebody put something into one that was being removed.
        if !taken(&aside) {
            fs::rename(path, &aside).map_err(|e| Error::io("rename", path, e))?;
            remove(&aside, name_of(path), &written)?;
        }
    }
    sync_folder(checkpoints)
}

/// Removes what a killed process had put aside to be removed.
fn finish_removals(checkpoints: &Path, written: &Written) -> Result<()> {
    for entry in fs::read_dir(checkpoints).map_err(|e| Error::io("list", checkpoints, e))? {
        let entry = entry.map_err(|e| Error::io("list", checkpoints, e))?;
        let name = entry.file_name();
        let name = name.to_str().and_then(|name| name.strip_prefix('.')?.strip_suffix(EXPIRED));
        if let Some(name) = name.filter(|name| written.names(name)) {
            remove(&entry.path(), name, written)?;
        }
    }
    Ok(())
}

/// Removes the checkpoint `name` that was put aside: the manifest last, since it says what else may go.
fn remove(aside: &Path, name: &str, written: &Written) -> Result<()> {
    let listed = names(aside)?;
    let Some(contents) = manifest(aside, name, written).filter(|contents| listed.is_subset(&expected(contents))) else {
        // Killed after its last file was removed, or none of ours.
        return if listed.is_empty() {
            fs::remove_dir(aside).map_err(|e| Error::io("remove", aside, e))
        } else {
            Ok(())
        };
    };
    let ours = contents.files.keys().map(String::as_str).chain([MANIFEST]);
    for name in ours.filter(|name| listed.contains(OsStr::new(name))) {
        let path = aside.join(name);
        fs::remove_file(&path).map_err(|e| Error::io("remove", &path, e))?;
    }
    fs::remove_dir(aside).map_err(|e| Error::io("remove", aside, e))
}

/// Whether `folder` holds a checkpoint that this run wrote, and nothing else.
fn own(folder: &Path, written: &Written) -> bool {
    let Some(contents) = manifest(folder, name_of(folder), written) else { return false };
    let whole = |(name, entry): (&String, &checkpoint::FileEntry)| {
        folder.join(name).symlink_metadata().is_ok_and(|found| found.is_file() && found.len() == entry.bytes)
    };
    names(folder).is_ok_and(|names| names == expected(&contents)) && contents.files.iter().all(whole)
}

/// What the checkpoint `name` in `folder` holds, where the run wrote it.
fn manifest(folder: &Path, name: &str, written: &Written) -> Option<Contents> {
    written.holds(name, folder).then(|| checkpoint::read_contents(folder).ok()).flatten()
}

fn expected(contents: &Contents) -> BTreeSet<OsString> {
    contents.files.keys().map(OsString::from).chain([MANIFEST.into()]).collect()
}

fn names(folder: &Path) -> Result<BTreeSet<OsString>> {
    let list = fs::read_dir(folder).map_err(|e| Error::io("list", folder, e))?;
    list.map(|entry| entry.map(|entry| entry.file_name()).map_err(|e| Error::io("list", folder, e))).collect()
}

#[cfg(test)]
mod tests {
    use super::super::checkpoint::tests::checkpoint;
    use super::super::checkpoint::write;
    use super::super::written::RECORD;
    use super::*;

    fn keep(keep_last: u32, keep_every: Option<u64>) -> CheckpointConfig {
        CheckpointConfig { keep_last: Some(keep_last), keep_every, keep_best: true }
    }

    fn saved(steps: &[u64]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        steps.iter().for_each(|step| drop(write(folder.path(), &checkpoint(*step)).unwrap()));
        folder
    }

    fn left(folder: &tempfile::TempDir) -> Vec<String> {
        let mut left: Vec<String> =
            names(folder.path()).unwrap().into_iter().map(|n| n.into_string().unwrap()).collect();
        left.retain(|name| name != RECORD);
        left.iter_mut().for_each(|name| *name = name.replace("step-0000", ""));
        left
    }

    #[test]
    fn the_newest_every_nth_and_the_best_stay() {
        let all = vec!["03", "05", "07", "10", "12"];
        for (keep, best, stay) in [
            (keep(1, None), None, vec!["12"]),
            (keep(2, None), None, vec!["10", "12"]),
            (keep(1, Some(5)), None, vec!["05", "10", "12"]),
            (keep(1, None), Some(7), vec!["07", "12"]),
            (CheckpointConfig { keep_best: false, ..keep(1, None) }, Some(7), vec!["12"]),
            (keep(9, Some(5)), None, all.clone()),
            (CheckpointConfig::default(), None, all),
        ] {
            let folder = saved(&[3, 5, 7, 10, 12]);
            apply(folder.path(), &keep, 12, best).unwrap();
            assert_eq!(left(&folder), stay, "{keep:?}");
        }
    }

    #[test]
    fn the_most_that_are_there_at_once_are_counted() {
        let saved: Vec<u64> = (1..=10).collect();
        for (keep, evaluates, most) in [
            (CheckpointConfig::default(), true, 10),
            (keep(2, None), false, 3),
            (keep(2, None), true, 4),
            (keep(2, Some(3)), true, 6),
            (CheckpointConfig { keep_best: false, ..keep(2, Some(3)) }, true, 5),
            (keep(20, Some(3)), true, 10),
        ] {
            assert_eq!(kept_at_once(&saved, &keep, evaluates), most, "{keep:?}");
        }
        assert_eq!(kept_at_once(&[7], &keep(1, None), true), 1);
    }

    #[test]
    fn a_later_one_neither_counts_nor_goes() {
        // Passed over on resume since a bit of it flipped: the run went on from step 5 and saved step 7.
        let folder = saved(&[3, 5, 7, 10]);
        apply(folder.path(), &keep(1, None), 7, None).unwrap();
        assert_eq!(left(&folder), ["07", "10"]);
    }

    #[test]
    fn what_the_run_did_not_write_stays() {
        let folder = saved(&[1, 2, 3, 4, 5, 6, 9]);
        let path = |name: &str| folder.path().join(name);
        fs::write(path("step-000001/notes.txt"), "mine").unwrap();
        fs::write(path("step-000002/state.json"), "other").unwrap();
        fs::remove_file(path("step-000003").join(MANIFEST)).unwrap();
        fs::create_dir(path("step-000007")).unwrap();
        fs::write(path("step-000008"), "a file").unwrap();
        fs::rename(path("step-000004"), path("best-of-all")).unwrap();
        fs::write(path("README"), "mine").unwrap();
        // Of another run with the very same configuration.
        let other = saved(&[11]);
        fs::rename(other.path().join("step-000011"), path("step-000011")).unwrap();
        write(folder.path(), &checkpoint(12)).unwrap();
        apply(folder.path(), &keep(1, None), 12, None).unwrap();
        assert_eq!(left(&folder), ["README", "best-of-all", "01", "02", "03", "07", "08", "11", "12"]);
    }

    #[test]
    fn a_removal_that_was_cut_short_is_finished_without_what_is_not_ours() {
        let folder = saved(&[1, 2, 3, 4]);
        let aside = |step: u64| {
            let aside = folder.path().join(format!(".step-{step:06}{EXPIRED}"));
            fs::rename(folder.path().join(format!("step-{step:06}")), &aside).unwrap();
            aside
        };
        fs::remove_file(aside(1).join("adapter.safetensors")).unwrap();
        let emptied = aside(2);
        names(&emptied).unwrap().iter().for_each(|name| fs::remove_file(emptied.join(name)).unwrap());
        fs::write(aside(3).join("notes.txt"), "mine").unwrap();
        apply(folder.path(), &keep(1, None), 4, None).unwrap();
        assert_eq!(left(&folder), [".03.expired", "04"]);
        assert_eq!(names(&folder.path().join(".step-000003.expired")).unwrap().len(), 4);
    }
}
