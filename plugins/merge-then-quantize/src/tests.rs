use super::*;

fn tuned(width: u64) -> Tuned {
    let layer = |part: &str| format!("model.language_model.layers.3.{part}");
    let (mut dims, mut ends) = (Vec::new(), Vec::new());
    let mut names = Vec::new();
    for (name, shape) in [
        (layer("experts.down_proj"), vec![2, 6, width]),
        (layer("experts.gate_up_proj"), vec![2, 8, width]),
        (layer("mlp.gate_proj.weight"), vec![8, width]),
        (layer("mlp.up_proj.weight"), vec![8, width]),
        (layer("router.proj.weight"), vec![2, width]),
        (layer("self_attn.k_proj.weight"), vec![4, width]),
        (layer("self_attn.q_norm.weight"), vec![4]),
        (layer("self_attn.q_proj.weight"), vec![8, width]),
        ("model.vision_tower.encoder.layers.3.mlp.up_proj.linear.weight".into(), vec![4, width]),
    ] {
        names.push(name);
        dims.extend(shape);
        ends.push(dims.len() as u32);
    }
    Tuned {
        base_dtypes: vec!["BF16".into(); names.len()],
        base_tensors: names,
        base_dims: dims,
        base_dim_ends: ends,
        base_config: r#"{"model_type": "gemma4"}"#.into(),
        base_path: "/base".into(),
        modules: vec![layer("self_attn.q_proj")],
        module_tensors: vec![7],
        modules_regex: "x".into(),
        rank: 2,
        alpha: 4.0,
        rslora: false,
        dropout: 0.0,
        weight_norms: vec![],
        update_norms: vec![],
        chat_template: None,
    }
}

fn plan(config: &str, width: u64) -> Result<ExportPlan, String> {
    MergeThenQuantize::new(serde_json::from_str(config).unwrap()).unwrap().plan(tuned(width))
}

#[test]
fn experts_leave_one_by_one_gate_rows_first() {
    let plan = plan(r#"{"scheme": "nvfp4a16"}"#, 32).unwrap();
    let rows: Vec<(&str, u64, u64)> =
        plan.quantized.iter().map(|m| (m.path.rsplit_once("layers.3.").unwrap().1, m.first_row, m.rows)).collect();
    assert_eq!(
        rows,
        [
            ("experts.0.down_proj", 0, 6),
            ("experts.1.down_proj", 6, 6),
            ("experts.0.gate_proj", 0, 4),
            ("experts.0.up_proj", 4, 4),
            ("experts.1.gate_proj", 8, 4),
            ("experts.1.up_proj", 12, 4),
            ("mlp.gate_proj", 0, 8),
            ("mlp.up_proj", 0, 8),
            ("self_attn.k_proj", 0, 4),
            ("self_attn.q_proj", 0, 8),
        ]
    );
    let shared: Vec<u32> = plan.quantized.iter().map(|m| m.shared_scale).collect();
    assert_eq!(shared, [0, 1, 2, 2, 3, 3, 4, 4, 5, 5], "gate with up, q with k");
    assert_eq!(plan.names.len(), 3, "router, norm and tower stay");
}

#[test]
fn what_stays_is_named_in_the_config() {
    let plan = plan(r#"{"scheme": "w4a16", "group_size": 16}"#, 32).unwrap();
    let at = plan.text_files.iter().position(|name| name == "config.json").unwrap();
    let config: Value = serde_json::from_str(&plan.texts[at]).unwrap();
    let quantization = &config["quantization_config"];
    assert_eq!(config["model_type"], "gemma4");
    assert_eq!(quantization["format"], "pack-quantized");
    assert_eq!(quantization["config_groups"]["group_0"]["weights"]["group_size"], 16);
    assert_eq!(
        quantization["ignore"],
        json!([
            "model.language_model.layers.3.router.proj",
            "model.vision_tower.encoder.layers.3.mlp.up_proj.linear",
            "lm_head"
        ])
    );
}

#[test]
fn a_width_that_groups_do_not_divide_is_refused_by_name() {
    let error = plan(r#"{"scheme": "w4a16"}"#, 96).unwrap_err();
    assert!(error.contains("experts.down_proj is 96 columns wide") && error.contains("64"), "{error}");
}

#[test]
fn schemes_are_also_read_in_capitals() {
    for (spelled, own) in [("FP8", "fp8"), ("W4A16", "w4a16"), ("NVFP4A16", "nvfp4a16")] {
        let read = |scheme: &str| serde_json::from_value::<Config>(json!({ "scheme": scheme })).unwrap().scheme;
        assert!(read(spelled) == read(own));
    }
}

#[test]
fn a_base_that_is_quantised_or_has_no_configuration_is_refused() {
    let refused = |config: &str| {
        let base = Tuned { base_config: config.into(), ..tuned(32) };
        MergeThenQuantize::new(serde_json::from_str("{}").unwrap()).unwrap().plan(base).unwrap_err()
    };
    assert!(refused(r#"{"quantization_config": {}}"#).contains("quantised already"));
    assert!(refused("[]").contains("config.json is not an object"));
    assert!(refused("{").contains("config.json: EOF"));
}
