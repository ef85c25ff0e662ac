use super::fit::{Curve, Fit, Pace};
use super::{Asked, Fingerprint, Found, Outcome, Prediction, ShapeResult, Smoke, asked};
use crate::documented::assert_documented;
use crate::plan::memory::Shape;
use crate::plan::{Source, Spread};
use serde_json::{json, to_value};

#[test]
fn shapes_are_quantiles_of_the_plan_and_what_the_configuration_allows() {
    let tokens: Vec<usize> = (1..=100).collect();
    let shapes = |max_seq_len| asked(&tokens, 2, max_seq_len);
    let of = |shapes: Vec<Asked>| -> Vec<(String, usize)> {
        shapes.into_iter().map(|shape| (shape.names.join(" "), shape.shape.seq_len_tokens)).collect()
    };
    let names = |found: &[(&str, usize)]| -> Vec<(String, usize)> {
        found.iter().map(|(name, width)| (name.to_string(), *width)).collect()
    };
    assert_eq!(of(shapes(64)), names(&[("p50", 25), ("p90", 45), ("max", 50), ("worst", 64)]));
    assert_eq!(of(shapes(50)), names(&[("p50", 25), ("p90", 45), ("max worst", 50)]));
    assert_eq!(of(asked(&[1], 1, 8)), names(&[("p50 p90 max", 2), ("between", 4), ("worst", 8)]));
}

#[test]
fn a_curve_finds_its_own_coefficients_and_never_a_negative_one() {
    // The three points of a measured 26B-A4B step, and what an unweighted fit made of them.
    let measured = [(2048.0, 1.776), (8192.0, 11.570), (16_384.0, 35.017)];
    let curve = Curve::fit(&measured).unwrap();
    assert!((curve.a_s_per_token / 6.8715e-4 - 1.0).abs() < 0.01, "{curve:?}");
    assert!((curve.b_s_per_token2 / 8.8509e-8 - 1.0).abs() < 0.01, "{curve:?}");
    for (width, seconds) in measured {
        assert!((curve.seconds(width) / seconds - 1.0).abs() < 0.005);
    }
    // Faster than in proportion, as where the first rows pay for all.
    let concave = Curve::fit(&[(100.0, 2.0), (200.0, 3.0)]).unwrap();
    assert!(concave.b_s_per_token2 == 0.0 && concave.a_s_per_token > 0.0, "{concave:?}");
    // Faster than a square.
    let cubic = Curve::fit(&[(100.0, 1.0), (200.0, 8.0)]).unwrap();
    assert!(cubic.a_s_per_token == 0.0 && cubic.b_s_per_token2 > 0.0, "{cubic:?}");
    let line = Curve::fit(&[(50.0, 5.0)]).unwrap();
    assert_eq!((line.a_s_per_token, line.b_s_per_token2), (0.1, 0.0));
    assert_eq!(Curve::fit(&[]), None);
}

fn spread(median: f64) -> Spread {
    Spread { n: 3, median, min: median / 2.0, max: 2.0 * median }
}

#[test]
fn a_step_is_what_its_documents_take_and_one_update() {
    // 2 rows: 1e-3 s a token of width, 1e-6 s a squared one
    let time = |width: usize| spread(1e-3 * width as f64 + 1e-6 * (width * width) as f64);
    let fit = Fit::new(2, &[(100, time(100)), (1000, time(1000))], spread(0.5)).unwrap();
    let two_rows_of_400 = fit.step_s(Pace::Median, 800.0, 2.0 * 400.0 * 400.0);
    assert!((two_rows_of_400 - (0.4 + 0.16 + 0.5)).abs() < 1e-9, "{two_rows_of_400}");
    let [fastest, median, slowest] = Pace::ALL.map(|pace| fit.step_s(pace, 800.0, 320_000.0));
    assert!((fastest - median / 2.0).abs() < 1e-9 && (slowest - 2.0 * median).abs() < 1e-9);
    assert!(fit.residuals.iter().all(|residual| residual.seconds().abs() < 1e-9) && fit.widest_tokens() == 1000);
}

#[test]
fn a_fit_says_when_it_is_not_to_be_trusted() {
    let of = |times: &[(usize, f64)]| {
        let points: Vec<(usize, Spread)> = times.iter().map(|(width, s)| (*width, spread(*s))).collect();
        Fit::new(1, &points, spread(0.1)).unwrap().doubts
    };
    let line = |width: usize| (width, 1e-3 * width as f64);
    assert!(of(&[line(100), line(200), line(400)]).is_empty());
    let few = of(&[line(100), line(400)]);
    assert!(few.len() == 1 && few[0].contains("n = 2 widths"), "{few:?}");
    let near = of(&[line(100), line(110), line(120)]);
    assert!(near.len() == 1 && near[0].contains("100 to 120 tokens"), "{near:?}");
    // Rows that are wider and take less are on no such curve.
    let missed = of(&[line(100), (200, 0.01), line(400)]);
    assert!(missed.len() == 1 && missed[0].contains("misses the median of rows of "), "{missed:?}");
}

fn result(seq_len_tokens: usize, outcome: Outcome) -> ShapeResult {
    let shape = Shape { micro_batch: 2, seq_len_tokens };
    let value = json!({"names": ["p50"], "micro_batch": shape.micro_batch, "seq_len_tokens": seq_len_tokens,
        "computed_peak_bytes": 1, "outcome": outcome, "steps": 0});
    serde_json::from_value(value).unwrap()
}

fn smoke(shapes: Vec<ShapeResult>) -> Smoke {
    let fingerprint = fingerprint("f32");
    let measured = "2026-03-01T09:30:00Z".into();
    Smoke {
        schema: 1,
        source: Source::Measured,
        measured,
        fingerprint,
        free_bytes: None,
        shapes,
        fit: None,
        prediction: None,
    }
}

fn fingerprint(weights: &str) -> Fingerprint {
    serde_json::from_value(json!({"model.weights": weights, "lora.rank": "16"})).unwrap()
}

#[test]
fn a_run_is_refused_from_the_smallest_shape_on_that_failed() {
    let path = std::path::Path::new("runs/a.smoke.json");
    let found = smoke(vec![
        result(100, Outcome::Fits),
        result(200, Outcome::Crashed),
        result(300, Outcome::OutOfMemory),
        result(400, Outcome::NotTried),
    ]);
    assert!(found.look(path, 200).unwrap().ends_with("200 fit"));
    assert!(found.look(path, 399).unwrap().ends_with("no more than 200 were seen to fit"));
    for tokens in [400, 1000] {
        let error = found.look(path, tokens).unwrap_err();
        assert_eq!((error.code(), error.exit_code()), ("gate::smoke", 7));
        let said = error.to_string();
        assert!(said.contains("2 x 200 crashed") && said.contains("fewer than 400 tokens"), "{said}");
        assert!(said.contains("runs/a.smoke.json") && said.contains("train.micro_batch"), "{said}");
    }
    assert!(smoke(vec![result(100, Outcome::Fits)]).look(path, 1000).is_ok());
}

#[test]
fn what_measured_something_else_is_not_used() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("deep/a.smoke.json");
    let at = |now: &Fingerprint| Found::at(&path, || Ok(now.clone())).unwrap();
    assert_eq!(at(&fingerprint("f32")), Found::Nothing);
    let written = smoke(vec![result(100, Outcome::Fits)]);
    written.write(&path).unwrap();
    assert_eq!(at(&fingerprint("f32")), Found::Fresh(written.clone().into()));
    let unusable = |now: &Fingerprint| match at(now) {
        Found::Unusable(why) => why,
        found => panic!("{found:?}"),
    };
    let why = unusable(&fingerprint("bf16"));
    assert!(why.contains("model.weights was f32, is bf16") && !why.contains("lora.rank"), "{why}");
    let fewer = serde_json::from_value(json!({"model.weights": "f32", "device": "cpu"})).unwrap();
    let why = unusable(&fewer);
    assert!(why.contains("lora.rank was 16, is nothing") && why.contains("device was nothing, is cpu"), "{why}");
    Smoke { schema: 2, ..written }.write(&path).unwrap();
    assert!(unusable(&fingerprint("f32")).contains("schema 2"));
    std::fs::write(&path, "{").unwrap();
    assert!(unusable(&fingerprint("f32")).contains("cannot be read"));
}

#[test]
fn every_key_that_is_written_is_documented_and_no_other() {
    let mut shape = result(100, Outcome::Fits);
    (shape.step_s, shape.micro_batch_s, shape.optimizer_s) = (Some(spread(1.0)), Some(spread(0.5)), Some(spread(0.1)));
    let fit = Fit::new(2, &[(100, spread(1.0))], spread(0.1));
    let prediction = Some(Prediction {
        source: Source::Computed,
        optimiser_steps: 1,
        epoch_s: [1.0; 3],
        run_s: [1.0; 3],
        largest_micro_batch_tokens: 1,
        longest_record_tokens: 1,
    });
    let full = Smoke { fit, prediction, ..smoke(vec![shape]) };
    let samples = [to_value(&full).unwrap(), to_value(smoke(vec![])).unwrap()];
    assert_documented(include_str!("smoke.md"), &samples);
}
