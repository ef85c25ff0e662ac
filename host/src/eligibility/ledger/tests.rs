use super::*;
use std::fs;
use tempfile::TempDir;

/// A ledger of three lines.
fn three() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = Ledger::path_for(&folder.path().join("grants.toml"));
    Ledger::create(&path).unwrap();
    let mut ledger = Ledger::open(&path).unwrap();
    ledger
        .append("run-1", &[("g1", vec!["chats/a".into(), "chats/b".into()]), ("g2", vec!["verse/c".into()])])
        .unwrap();
    drop(ledger);
    Ledger::open(&path).unwrap().append("run-2", &[("g2", vec!["verse/c".into()])]).unwrap();
    (folder, path)
}

#[test]
fn what_was_appended_is_read_back() {
    let (_folder, path) = three();
    assert!(path.ends_with("grants.ledger.jsonl"));
    let ledger = Ledger::read(&path).unwrap();
    let runs = |grant| ledger.uses_of(grant).map(|entry| entry.run.as_str()).collect::<Vec<_>>();
    assert_eq!((runs("g1"), runs("g2"), runs("g3")), (vec!["run-1"], vec!["run-1", "run-2"], vec![]));
    assert_eq!(ledger.uses_of("g1").next().unwrap().overridden, ["chats/a", "chats/b"]);
    assert_eq!(ledger.head().sequence, 3);
    let text = fs::read_to_string(&path).unwrap();
    assert!(
        text.starts_with(&format!("{{\"sequence\":1,\"previous\":\"{}\",\"grant\":\"g1\"", "0".repeat(64))),
        "{text}"
    );
}

#[test]
fn a_head_is_held_as_long_as_its_line_is_there() {
    let (_folder, path) = three();
    let whole = Ledger::read(&path).unwrap();
    let head = whole.head();
    assert!(whole.holds(&head));
    drop(whole);
    let text = fs::read_to_string(&path).unwrap();
    let two: String = text.split_inclusive('\n').take(2).collect();
    fs::write(&path, two).unwrap();
    let cut = Ledger::read(&path).unwrap();
    assert!(!cut.holds(&head) && cut.holds(&cut.head()));
    drop(cut);
    // Another line in its place.
    Ledger::open(&path).unwrap().append("run-3", &[("g2", vec![])]).unwrap();
    let other = Ledger::read(&path).unwrap();
    assert_eq!(other.head().sequence, head.sequence);
    assert!(!other.holds(&head));
    let empty = LedgerHead { sequence: 0, sha256: "0".repeat(64), ..head };
    assert!(other.holds(&empty));
    assert!(!other.holds(&LedgerHead { sequence: u64::MAX, ..empty }));
}

#[test]
fn every_tampering_is_refused_with_its_line() {
    let (_folder, path) = three();
    let text = fs::read_to_string(&path).unwrap();
    let lines: Vec<&str> = text.split_inclusive('\n').collect();
    let mut rehashed: Entry = serde_json::from_str(lines[1]).unwrap();
    rehashed.grant = "g9".into();
    rehashed.sha256 = rehashed.hash();
    let rehashed = rehashed.line() + "\n";
    for (changed, line, says) in [
        (text.replacen("run-2", "run-9", 1), 3, "was changed"),
        (text.replacen("\"g1\"", "\"gx\"", 1), 1, "was changed"),
        (text.replacen("\"run\":", "\"run\": ", 1), 1, "was changed"),
        ([lines[0], &rehashed, lines[2]].concat(), 3, "does not follow"),
        ([lines[0], lines[2]].concat(), 2, "does not follow"),
        ([lines[1], lines[2]].concat(), 1, "does not follow"),
        ([lines[0], lines[2], lines[1]].concat(), 2, "does not follow"),
        ([lines[0], "\n", lines[1]].concat(), 2, "cannot be read"),
        (text.replacen("\"grant\"", "\"grunt\"", 1), 1, "cannot be read"),
        // Half a line behind lines that are not whole helps nobody.
        (text.replacen("\"g1\"", "\"gx\"", 1) + "{\"seq", 1, "was changed"),
    ] {
        fs::write(&path, changed).unwrap();
        let error = Ledger::open(&path).unwrap_err();
        assert_eq!(error.code(), "gate::ledger_broken");
        assert!(error.message().contains(&format!("grants.ledger.jsonl:{line}: ")), "{error}");
        assert!(error.message().contains(says), "{says}: {error}");
    }
}

#[test]
fn half_a_line_is_moved_aside_and_the_ledger_goes_on() {
    let (folder, path) = three();
    let text = fs::read_to_string(&path).unwrap();
    let two = text.split_inclusive('\n').take(2).collect::<String>();
    for (cut, name) in
        [(1, "grants.ledger.torn"), (20, "grants.ledger.torn-2"), (text.len() - two.len() - 1, "grants.ledger.torn-3")]
    {
        fs::write(&path, &text[..text.len() - cut]).unwrap();
        // To read it changes nothing.
        assert_eq!(Ledger::read(&path).unwrap().head().sequence, 2);
        assert_eq!(fs::read_to_string(&path).unwrap(), text[..text.len() - cut]);
        let mut ledger = Ledger::open(&path).unwrap();
        let aside = ledger.set_torn_aside().unwrap().unwrap();
        assert_eq!(aside, folder.path().join(name));
        assert_eq!(fs::read_to_string(aside).unwrap(), text[two.len()..text.len() - cut]);
        assert_eq!(fs::read_to_string(&path).unwrap(), two);
        assert_eq!(ledger.set_torn_aside().unwrap(), None);
        ledger.append("run-3", &[("g2", vec![])]).unwrap();
        drop(ledger);
        assert_eq!(Ledger::read(&path).unwrap().head().sequence, 3);
    }
}

#[test]
fn one_that_is_missing_is_refused_and_one_that_is_there_is_not_made_anew() {
    let (_folder, path) = three();
    let before = fs::read(&path).unwrap();
    assert_eq!(Ledger::create(&path).unwrap_err().code(), "gate::ledger_exists");
    assert_eq!(fs::read(&path).unwrap(), before);
    fs::remove_file(&path).unwrap();
    for error in [Ledger::open(&path).unwrap_err(), Ledger::read(&path).unwrap_err()] {
        assert_eq!(error.code(), "gate::ledger_missing");
        assert!(error.to_string().contains("tunehost grants open"), "{error}");
    }
    assert!(!path.exists());
}

#[cfg(unix)]
#[test]
fn a_second_name_of_the_grants_has_the_same_ledger() {
    let folder = tempfile::tempdir().unwrap();
    let (grants, link) = (folder.path().join("grants.toml"), folder.path().join("other.toml"));
    fs::write(&grants, "").unwrap();
    std::os::unix::fs::symlink(&grants, &link).unwrap();
    assert_eq!(Ledger::path_for(&link), Ledger::path_for(&grants));
}

#[test]
fn of_two_that_want_the_last_use_one_waits_for_the_other() {
    let (_folder, path) = three();
    let mut held = Ledger::open(&path).unwrap();
    let waiting = std::thread::spawn({
        let path = path.clone();
        move || Ledger::open(&path).unwrap().head().sequence
    });
    std::thread::sleep(Duration::from_millis(50));
    assert!(!waiting.is_finished());
    held.append("run-3", &[("g1", vec![])]).unwrap();
    drop(held);
    assert_eq!(waiting.join().unwrap(), 4);
}
