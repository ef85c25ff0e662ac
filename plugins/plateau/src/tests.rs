use super::*;

fn plateau(window: usize, min_delta: f64, patience: u64) -> Plateau {
    Plateau::new(Config { window, min_delta, patience, ..Config::default() }).unwrap()
}

fn info(step: u64, loss: f64) -> StepInfo {
    StepInfo {
        step,
        total_steps: 1000,
        wall_clock_ms: 1_700_000_000_000 + step * 1000,
        since_last_save_ms: step * 1000 % 900_001,
        last_save_cost_ms: 0,
        loss,
    }
}

/// The step after which it stops, if it does.
fn stops_at(plateau: &mut Plateau, losses: &[f64]) -> Option<u64> {
    let steps = (1..).zip(losses);
    steps
        .map(|(step, &loss)| (step, plateau.after_step(info(step, loss)).unwrap().stop))
        .find(|step| step.1)
        .map(|s| s.0)
}

#[test]
fn it_stops_when_the_mean_has_not_fallen_for_the_steps_of_patience() {
    // Means of two: 3.5, 2.5, 2, 2, 2, 2.
    assert_eq!(stops_at(&mut plateau(2, 0.0, 3), &[4.0, 3.0, 2.0, 2.0, 2.0, 2.0, 2.0]), Some(7));
    assert_eq!(stops_at(&mut plateau(2, 0.0, 4), &[4.0, 3.0, 2.0, 2.0, 2.0, 2.0, 2.0]), None);
    let falling: Vec<f64> = (0..500).map(|step| 3.0 - f64::from(step) / 1000.0).collect();
    assert_eq!(stops_at(&mut plateau(10, 0.0, 1), &falling), None);
}

#[test]
fn a_fall_of_less_than_min_delta_is_none() {
    let falling: Vec<f64> = (0..500).map(|step| 3.0 - f64::from(step) / 1000.0).collect();
    assert_eq!(stops_at(&mut plateau(1, 0.0105, 10), &falling), Some(11));
    assert_eq!(stops_at(&mut plateau(1, 0.0095, 10), &falling), None);
}

#[test]
fn a_window_must_be_full_before_it_counts() {
    assert_eq!(stops_at(&mut plateau(50, 0.0, 1), &[1.0; 60]), Some(51));
}

#[test]
fn losses_that_are_no_numbers_are_not_counted() {
    let losses = [1.0, f64::NAN, 1.0, f64::INFINITY, f64::NEG_INFINITY, 1.0, f64::NAN, f64::NAN, 1.0];
    assert_eq!(stops_at(&mut plateau(2, 0.0, 2), &losses), Some(9));
    assert_eq!(stops_at(&mut plateau(2, 0.0, 3), &losses), None);
    assert_eq!(stops_at(&mut plateau(1, 0.0, 1), &[f64::NAN; 100]), None);
}

#[test]
fn it_saves_by_time_and_needs_no_stop_at_the_last_step() {
    let mut quick = plateau(1, 0.0, 1);
    let due = StepInfo { since_last_save_ms: 900_000, ..info(1, 1.0) };
    let decision = quick.after_step(due).unwrap();
    assert!(decision.save && !decision.stop);
    assert_eq!(decision.reason, "900 s since the last save");
    let last = quick.after_step(StepInfo { total_steps: 2, ..info(2, 1.0) }).unwrap();
    assert!(!last.stop && !last.save && last.reason.is_empty());
    let stop = quick.after_step(info(3, 1.0)).unwrap();
    assert_eq!(stop.reason, "mean loss of 1 steps not below 1.0000 for 2 steps");
    assert!(stop.stop && !stop.save);
}

#[test]
fn a_restored_one_decides_like_one_that_never_stopped() {
    let loss = |step: u64| match step % 17 {
        5 => f64::NAN,
        rest => 3.0 / (step as f64).sqrt() + (rest as f64).sin() / 4.0,
    };
    let steps = 200;
    let mut unbroken = plateau(20, 0.01, 10);
    let expected: Vec<_> = (1..=steps)
        .map(|step| {
            let Decision { save, stop, reason } = unbroken.after_step(info(step, loss(step))).unwrap();
            (save, stop, reason)
        })
        .collect();
    assert!(expected.iter().any(|(_, stop, _)| *stop) && !expected[60].1);
    for cut in 0..steps {
        let mut before = plateau(20, 0.01, 10);
        (1..=cut).for_each(|step| drop(before.after_step(info(step, loss(step))).unwrap()));
        let state = before.save().unwrap();
        let mut after = plateau(20, 0.01, 10);
        after.restore(state.clone()).unwrap();
        assert_eq!(after.memory, before.memory);
        assert_eq!(after.save().unwrap(), state);
        for step in cut + 1..=steps {
            let Decision { save, stop, reason } = after.after_step(info(step, loss(step))).unwrap();
            assert_eq!((save, stop, reason), expected[step as usize - 1], "cut after {cut}, step {step}");
        }
    }
}

#[test]
fn the_longest_window_fits_what_may_be_saved() {
    let mut full = plateau(WINDOW_MAX, 0.0, 1);
    (1..=9000).for_each(|step| drop(full.after_step(info(step, 1.0)).unwrap()));
    let state = full.save().unwrap();
    assert_eq!(state.len(), 1 + 16 + 8 * WINDOW_MAX);
    assert!(state.len() <= 65_536);
}

#[test]
fn what_another_one_saved_is_refused() {
    let mut other = plateau(3, 0.0, 1);
    (1..=3).for_each(|step| drop(other.after_step(info(step, 1.0)).unwrap()));
    let state = other.save().unwrap();
    assert!(plateau(2, 0.0, 1).restore(state.clone()).unwrap_err().contains("not of a window of 2"));
    assert!(plateau(3, 0.0, 1).restore(state[..40].to_vec()).unwrap_err().contains("40 bytes"));
    assert!(plateau(3, 0.0, 1).restore(vec![VERSION]).is_err());
    for state in [vec![], vec![2; 17]] {
        assert!(plateau(3, 0.0, 1).restore(state).unwrap_err().contains("version 1"));
    }
}

#[test]
fn settings_out_of_bounds_are_refused_by_name() {
    let refusal = |config| Plateau::new(config).err().unwrap();
    let config = Config::default;
    assert!(refusal(Config { minutes: 0.0, ..config() }).starts_with("minutes"));
    assert!(refusal(Config { window: 0, ..config() }).starts_with("window"));
    assert!(refusal(Config { window: WINDOW_MAX + 1, ..config() }).starts_with("window"));
    assert!(refusal(Config { min_delta: -1.0, ..config() }).starts_with("min_delta"));
    assert!(refusal(Config { min_delta: f64::NAN, ..config() }).starts_with("min_delta"));
    assert!(refusal(Config { patience: 0, ..config() }).starts_with("patience"));
}
