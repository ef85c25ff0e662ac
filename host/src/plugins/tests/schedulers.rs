use std::time::Instant;

use super::*;

fn load(name: &str, config: Value) -> CheckpointScheduler {
    CheckpointScheduler::load(&bundled(Kind::CheckpointScheduler, name), Some(&config)).unwrap()
}

pub(super) fn info(step: u64, since_last_save_ms: u64) -> StepInfo {
    StepInfo {
        step,
        total_steps: 100,
        wall_clock_ms: 1_700_000_000_000,
        since_last_save_ms,
        last_save_cost_ms: 900,
        loss: f64::NAN,
    }
}

#[test]
fn every_n_steps_saves_on_multiples_alone() {
    let mut scheduler = load("every-n-steps", json!({"n": 4}));
    let saved: Vec<u64> = (1..=12).filter(|&step| scheduler.after_step(&info(step, 0)).unwrap().save).collect();
    assert_eq!(saved, [4, 8, 12]);
}

#[test]
fn wall_clock_saves_when_the_time_has_passed() {
    let mut scheduler = load("wall-clock", json!({"minutes": 0.5}));
    assert_eq!(
        scheduler.after_step(&info(3, 29_999)).unwrap(),
        Decision { save: false, stop: false, reason: String::new() }
    );
    let decision = scheduler.after_step(&info(4, 30_000)).unwrap();
    assert!(decision.save && !decision.stop);
    assert!(decision.reason.contains("30 s"), "{}", decision.reason);
}

#[test]
fn wall_clock_works_without_settings() {
    let mut scheduler = CheckpointScheduler::load(&bundled(Kind::CheckpointScheduler, "wall-clock"), None).unwrap();
    assert!(!scheduler.after_step(&info(1, 899_999)).unwrap().save);
    assert!(scheduler.after_step(&info(1, 900_000)).unwrap().save);
}

#[test]
fn a_window_stops_the_run_before_it_closes() {
    // `info` is at 22:13:20; a step took 10 s, the last save 0.9 s, and 60 s are kept free.
    let mut open = load("window", json!({"until": "2023-11-14T22:14:31Z"}));
    assert!(!open.after_step(&info(1, 10_000)).unwrap().stop);
    let mut closing = load("window", json!({"until": "2023-11-15T00:14:30+02:00"}));
    let decision = closing.after_step(&info(1, 10_000)).unwrap();
    assert!(decision.stop && decision.reason.contains("70 s needed"), "{decision:?}");
}

#[test]
fn a_setting_that_is_missing_is_named() {
    let plugin = bundled(Kind::CheckpointScheduler, "every-n-steps");
    let error = CheckpointScheduler::load(&plugin, None).err().expect("n has no default");
    let parts = ["plugin every-n-steps 0.1.0", "missing field `n`", "[plugins.config.checkpoint_scheduler]"];
    assert_error(&error, "plugin::config_refused", &parts);
}

#[test]
fn a_call_takes_microseconds() {
    let mut scheduler = load("wall-clock", json!({"minutes": 15}));
    let calls = 20_000;
    let start = Instant::now();
    for step in 0..calls {
        scheduler.after_step(&info(step, step)).unwrap();
    }
    let call_us = start.elapsed().as_secs_f64() * 1e6 / calls as f64;
    println!("a scheduler call takes {call_us:.2} µs");
    assert!(call_us < 200.0, "{call_us}");
}

fn hostile(act: &str) -> CheckpointScheduler {
    let plugin = PluginRef::resolve(Kind::CheckpointScheduler, HOSTILE, &[]).unwrap();
    CheckpointScheduler::load(&plugin, Some(&json!({ "act": act }))).unwrap()
}

const HOSTILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../plugins/dist/hostile/hostile-scheduler.wasm");

#[test]
fn what_a_scheduler_remembers_is_saved_and_taken_up() {
    let mut scheduler = hostile("refuse-restore");
    let saves = |scheduler: &mut CheckpointScheduler| {
        (1..=4).map(|step| scheduler.after_step(&info(step, 0)).unwrap().save).collect::<Vec<_>>()
    };
    assert_eq!(saves(&mut scheduler), [false, false, true, false]);
    let memory = scheduler.save().unwrap().expect("it has a memory");
    assert_eq!(scheduler.save().unwrap().as_ref(), Some(&memory), "saving changes nothing");
    let error = hostile("refuse-restore").restore(Some(&memory)).unwrap_err();
    assert_error(&error, "plugin::refused", &["hostile-scheduler 0.1.0", "restore refused"]);
    let mut resumed = hostile("panic-at-nan");
    resumed.restore(Some(&memory)).unwrap();
    let number = |step| StepInfo { loss: 1.0, ..info(step, 0) };
    assert_eq!([5, 6].map(|step| resumed.after_step(&number(step)).unwrap().save), [false, true]);
}

#[test]
fn a_memory_against_the_rules_is_refused() {
    let error = hostile("save-too-much").save().unwrap_err();
    assert_error(&error, "plugin::memory_too_large", &["hostile-scheduler 0.1.0", "65537 bytes", "at most 65536"]);
    assert_error(&hostile("panic-in-save").save().unwrap_err(), "plugin::trapped", &["save"]);
    assert_error(&hostile("panic-in-restore").restore(Some(b"")).unwrap_err(), "plugin::trapped", &["restore"]);
    let error = load("wall-clock", json!({})).restore(Some(b"x")).unwrap_err();
    assert_error(&error, "plugin::refused", &["wall-clock 0.1.0", "it has no memory, but the checkpoint holds one"]);
    assert_eq!(load("wall-clock", json!({})).save().unwrap(), None);
}

#[test]
fn a_scheduler_that_forgets_does_not_conform() {
    let plugin = PluginRef::resolve_any(HOSTILE, &[]).unwrap();
    let failure = |act: &str| {
        let properties = check::check(&plugin, Some(&json!({ "act": act }))).unwrap();
        let property = "a resumed run has the decisions of one that was never stopped";
        properties.into_iter().find(|found| found.name == property).unwrap().failure
    };
    let why = failure("forget").expect("it forgets");
    assert!(why.contains("stopped after") && why.contains("it saved 0 bytes"), "{why}");
    assert!(failure("save-too-much").unwrap().contains("65537"));
}

#[test]
fn a_loss_that_is_no_number_is_the_schedulers_to_bear() {
    let error = hostile("panic-at-nan").after_step(&info(7, 0)).unwrap_err();
    assert_error(&error, "plugin::trapped", &["after-step", "the loss of step 7 is no number"]);
    let reason = hostile("long-reason-to-stop").after_step(&info(1, 0)).unwrap().reason;
    assert!(reason.len() < 2100, "{}", reason.len());
}
