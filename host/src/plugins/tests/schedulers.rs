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
