use super::check::inputs::tuned;
use super::*;

fn hostile(act: &str) -> Exporter {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../plugins/dist/hostile/hostile-exporter.wasm");
    let plugin = PluginRef::resolve(Kind::Exporter, path, &[]).unwrap();
    Exporter::load(&plugin, Some(&json!({ "act": act }))).unwrap()
}

#[test]
fn peft_adapter_lays_out_settings_and_both_factors_of_every_module() {
    let mut model = tuned(6, 3);
    model.modules_regex = r"model\.(?:layers\.\d+).*".into();
    let plan = Exporter::load(&bundled(Kind::Exporter, "peft-adapter"), None).unwrap().plan(&model).unwrap();
    let [file] = &plan.tensor_files[..] else { panic!("{plan:?}") };
    assert_eq!(file.name, "adapter_model.safetensors");
    let expected: Vec<(String, Source)> = (0..2)
        .flat_map(|at| {
            let name = |which: &str| format!("base_model.model.{}.{which}.weight", model.modules[at]);
            [(name("lora_A"), Source::A(at)), (name("lora_B"), Source::B(at))]
        })
        .collect();
    let found: Vec<(String, Source)> = file.tensors.iter().map(|tensor| (tensor.name.clone(), tensor.source)).collect();
    assert_eq!(found, expected);
    let [(name, text)] = &plan.texts[..] else { panic!("{plan:?}") };
    let settings: Value = serde_json::from_str(text).unwrap();
    assert_eq!(name, "adapter_config.json");
    assert_eq!(settings["target_modules"], json!(model.modules_regex));
    assert_eq!(
        (&settings["r"], &settings["lora_alpha"], &settings["peft_type"]),
        (&json!(16), &json!(32.0), &json!("LORA"))
    );
}

#[test]
fn a_plan_against_the_rules_is_refused_with_its_file_or_tensor() {
    for (act, parts) in [
        ("nan-strength", &["tensor merged has the strength NaN", "a finite number"][..]),
        ("infinite-strength", &["tensor merged has the strength inf"]),
        ("strength-of-a", &["tensor a has the strength 2", "1, since it is not merged"]),
        ("unknown-tensor", &["tensor merged is made of base tensor 1", "below 1"]),
        ("unknown-module", &["tensor a is made of module 1", "below 1"]),
        ("short-column", &["dtypes has 2 elements", "3, as names has"]),
        ("falling-ends", &["merged.safetensors end at 2", "more than the 3 before it"]),
        ("empty-tensor-file", &["empty.safetensors end at 3"]),
        ("file-above", &["\"../about.txt\" is no name for a file"]),
        ("absolute-file", &["\"/about.txt\" is no name for a file"]),
        ("unnamed-file", &["\"\" is no name for a file"]),
        ("same-file-twice", &["\"adapter.safetensors\" is named twice"]),
        ("same-tensor-twice", &["tensor a stands twice in adapter.safetensors"]),
        ("nothing-of-the-adapter", &["the update of module model.layers.0.self_attn.q_proj is left out"]),
    ] {
        let error = hostile(act).plan(&tuned(1, 1)).expect_err(act);
        assert_error(&error, "plugin::invalid_export", &["plugin hostile-exporter 0.1.0", "plan: "]);
        assert_error(&error, "plugin::invalid_export", parts);
    }
}

#[test]
fn a_module_that_is_left_out_is_named() {
    let error = hostile("same-tensor-twice").plan(&tuned(2, 1)).expect_err("the second module is not there");
    let parts = ["the update of module model.layers.0.self_attn.k_proj is left out", "or its tensor merged"];
    assert_error(&error, "plugin::invalid_export", &parts);
}
