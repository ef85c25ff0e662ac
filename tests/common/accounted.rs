//! What the report of `tunehost profile` must account for, on any device.

use serde_json::Value;

fn sum(rows: &Value, key: &str) -> f64 {
    rows.as_array().unwrap().iter().map(|row| row[key].as_f64().unwrap()).sum()
}

/// That the tables of `report` sum to its step, and that its kernels did the operations that `plan` counts. Every step of the run
/// must have been measured as often as every other.
pub fn assert_accounted(report: &Value, plan: &Value) {
    let (phases, kernels) = (&report["phases"], &report["kernels"]);
    let number = |path: &str| report.pointer(path).unwrap_or(&Value::Null).as_f64().unwrap_or_else(|| panic!("{path}"));
    let step = number("/step_mean_s");
    let within = |found: f64| (0.95..=1.0 + 1e-9).contains(&(found / step));
    assert!(within(sum(phases, "s")), "{report:#}");
    // A kernel is in a phase, so kernels and all else in the phases are the step too.
    let other = sum(phases, "s") - sum(phases, "kernels_s");
    assert!(other > 0.0 && within(sum(kernels, "s") + other), "{report:#}");

    let performed = number("/work/performed_flop");
    let close = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-9;
    assert!(close(sum(kernels, "flop"), performed));
    for which in ["nominal_flop", "performed_flop"] {
        let planned = plan["steps"]["work"][which].as_f64().unwrap() / number("/run_steps");
        assert!(close(report["work"][which].as_f64().unwrap(), planned), "{which}: {report:#} {planned}");
    }
    assert!(number("/work/nominal_flop") < performed);
    let bf16 = report.pointer("/peaks/bf16_product_flops/max").and_then(Value::as_f64);
    let peak = bf16.unwrap_or_else(|| number("/peaks/f32_product_flops/max"));
    let as_in_a_run = report["unrecorded_step_mean_s"].as_f64().unwrap_or(step);
    assert!(close(number("/mfu_performed") * as_in_a_run * peak, performed));
    assert!(number("/peaks/copy_bytes_per_s/max") > 0.0);

    // Each kernel is one of the table whose hash it stands under.
    let resolved: Vec<&String> = report["resolved"].as_object().unwrap().keys().collect();
    for row in kernels.as_array().unwrap() {
        let name = row["kernel"].as_str().unwrap();
        assert!(resolved.iter().any(|kernel| name.starts_with(kernel.as_str())), "{name}");
        assert!(row["s"].as_f64() > Some(0.0), "{row}");
    }
}
