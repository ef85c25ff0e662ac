use super::*;
use tunehost_plugin_sdk::GgufValue;

/// A base like Gemma-4 26B-A4B in its widths, of `layers` layers of which every sixth has full attention.
fn tuned(layers: usize, experts: u64) -> Tuned {
    let full = |layer: usize| (layer + 1).is_multiple_of(6);
    let mut tensors: Vec<(String, Vec<u64>)> = vec![
        ("model.language_model.embed_tokens.weight".into(), vec![1000, 2816]),
        ("model.language_model.norm.weight".into(), vec![2816]),
        ("model.vision_tower.std_bias".into(), vec![1152]),
    ];
    for layer in 0..layers {
        let mut add = |name: &str, dims: &[u64]| {
            tensors.push((format!("model.language_model.layers.{layer}.{name}"), dims.into()));
        };
        add("self_attn.q_proj.weight", &[4096, 2816]);
        add("self_attn.k_proj.weight", &[2048, 2816]);
        if !full(layer) {
            add("self_attn.v_proj.weight", &[2048, 2816]);
        }
        add("self_attn.o_proj.weight", &[2816, 4096]);
        add("mlp.down_proj.weight", &[2816, 2112]);
        add("router.proj.weight", &[experts, 2816]);
        add("experts.down_proj", &[experts, 2816, 704]);
        add("layer_scalar", &[1]);
    }
    let mut end = 0;
    let ends = tensors.iter().map(|(_, dims)| {
        end += dims.len() as u32;
        end
    });
    let kinds: Vec<&str> =
        (0..layers).map(|layer| if full(layer) { "full_attention" } else { "sliding_attention" }).collect();
    Tuned {
        base_dim_ends: ends.collect(),
        base_dtypes: vec!["BF16".into(); tensors.len()],
        base_dims: tensors.iter().flat_map(|(_, dims)| dims.clone()).collect(),
        base_tensors: tensors.into_iter().map(|(name, _)| name).collect(),
        base_config: serde_json::json!({"model_type": "gemma4", "tie_word_embeddings": true, "text_config": {
            "hidden_size": 2816, "intermediate_size": 2112, "num_attention_heads": 16, "num_key_value_heads": 8,
            "num_global_key_value_heads": 2, "head_dim": 256, "global_head_dim": 512, "sliding_window": 1024,
            "max_position_embeddings": 262_144, "rms_norm_eps": 1e-6, "final_logit_softcapping": 30.0, "layer_types": kinds,
            "enable_moe_block": true, "num_experts": experts, "top_k_experts": 8, "moe_intermediate_size": 704,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
            },
        }})
        .to_string(),
        base_path: "/base".into(),
        modules: vec!["model.language_model.layers.0.self_attn.q_proj".into()],
        module_tensors: vec![3],
        modules_regex: "q".into(),
        rank: 2,
        alpha: 4.0,
        rslora: false,
        dropout: 0.0,
        weight_norms: vec![1.0],
        update_norms: vec![0.1],
        chat_template: Some("{{ messages }}".into()),
    }
}

fn plan(config: &str, tuned: Tuned) -> Result<ExportPlan, String> {
    Gguf::new(serde_json::from_str(config).unwrap())?.plan(tuned)
}

fn dtype(plan: &ExportPlan, name: &str) -> Dtype {
    plan.dtypes[plan.names.iter().position(|n| n == name).unwrap_or_else(|| panic!("{name}"))]
}

#[test]
fn the_mixture_is_the_one_of_llama_cpp() {
    let plan_of_many = plan("{}", tuned(30, 128)).unwrap();
    assert_eq!(dtype(&plan_of_many, "token_embd.weight"), Dtype::Q6K);
    assert_eq!(dtype(&plan_of_many, "output_norm.weight"), Dtype::Float32);
    assert_eq!(dtype(&plan_of_many, "blk.0.ffn_gate_inp.weight"), Dtype::Float32);
    assert_eq!(dtype(&plan_of_many, "blk.0.layer_output_scale.weight"), Dtype::Float32);
    let with_more = |part: &str, more: Dtype| -> Vec<usize> {
        let name = |layer| format!("blk.{layer}.{part}.weight");
        (0..30)
            .filter(|&layer| plan_of_many.names.contains(&name(layer)) && dtype(&plan_of_many, &name(layer)) == more)
            .collect()
    };
    // Of 30 layers the first three, the last four and every third between; rows of 2,112 and 704 have no blocks of 256.
    let more = [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 26, 27, 28, 29];
    assert_eq!(with_more("ffn_down", Dtype::Q80), more);
    assert_eq!(with_more("ffn_down_exps", Dtype::Q80), more);
    assert_eq!(with_more("ffn_down", Dtype::Q50).len(), 16);
    // Of the 25 projections of values, the same by their own count: the ninth is that of layer 9.
    assert_eq!(with_more("attn_v", Dtype::Q6K), [0, 1, 2, 6, 9, 13, 16, 20, 24, 25, 26, 27, 28]);
    assert_eq!(with_more("attn_output", Dtype::Q4K).len(), 30);
    let few = plan("{}", tuned(6, 8)).unwrap();
    let of = |name: &str| dtype(&few, name);
    assert_eq!([of("blk.5.attn_k.weight"), of("blk.0.attn_v.weight")], [Dtype::Q80; 2]);
    assert_eq!(of("blk.5.attn_output.weight"), Dtype::Q5K);
}

#[test]
fn what_a_type_does_not_fit_is_said() {
    let plan = plan("{}", tuned(30, 128)).unwrap();
    assert!(plan.notes[0].contains("Q4_K"), "{:?}", plan.notes);
    let said = "Q5_0 for Q4_K, whose blocks do not divide rows of 704 values: 16 tensors";
    assert!(plan.notes.iter().any(|note| note == said), "{:?}", plan.notes);
    assert!(plan.notes.last().unwrap().contains("not in the file, 1 tensor:"), "{:?}", plan.notes);
    assert!(!plan.names.iter().any(|name| name.contains("vision")));
}

#[test]
fn other_types_keep_norms_and_router_in_f32() {
    for (config, matrices, file) in [
        (r#"{"type": "bf16"}"#, Dtype::Bfloat16, "model-BF16.gguf"),
        (r#"{"type": "q8_0"}"#, Dtype::Q80, "model-Q8_0.gguf"),
    ] {
        let plan = plan(config, tuned(6, 8)).unwrap();
        assert_eq!(plan.tensor_files, [file]);
        assert_eq!(dtype(&plan, "blk.0.ffn_down_exps.weight"), matrices);
        assert_eq!(dtype(&plan, "token_embd.weight"), matrices);
        assert_eq!(dtype(&plan, "blk.0.ffn_gate_inp.weight"), Dtype::Float32);
        assert_eq!(plan.sources.iter().filter(|source| **source == Source::Merged).count(), 1);
    }
}

#[test]
fn both_spellings_of_a_layer_are_read() {
    let published = tuned(6, 8);
    let mut saved = published.clone();
    let mut config: serde_json::Value = serde_json::from_str(&saved.base_config).unwrap();
    let text = config["text_config"].as_object_mut().unwrap();
    text.remove("global_head_dim");
    text.remove("num_global_key_value_heads");
    text.insert("per_layer_config".into(), serde_json::json!({"5": {"head_dim": 512, "num_key_value_heads": 2}}));
    saved.base_config = config.to_string();
    let of = |tuned: Tuned| {
        let plan = plan("{}", tuned).unwrap();
        let value = |key: &str| {
            let entry = plan.gguf_metadata.iter().find(|entry| entry.key == key).unwrap_or_else(|| panic!("{key}"));
            format!("{:?}", entry.value)
        };
        let keys = ["gemma4.attention.head_count_kv", "gemma4.attention.key_length", "gemma4.attention.key_length_swa"];
        (keys.map(value), plan.constants)
    };
    let (values, constants) = of(published);
    assert_eq!(values[0], format!("{:?}", GgufValue::Counts(vec![8, 8, 8, 8, 8, 2])));
    assert_eq!([constants.len(), constants.iter().filter(|factor| **factor == 1.0).count()], [256, 64]);
    assert_eq!(of(saved), (values, constants));
}

#[test]
fn what_is_no_gemma_4_is_refused() {
    let refused = |key: &str, value: serde_json::Value| {
        let mut tuned = tuned(6, 8);
        let mut config: serde_json::Value = serde_json::from_str(&tuned.base_config).unwrap();
        let place = if key == "model_type" { &mut config } else { &mut config["text_config"] };
        place[key] = value;
        tuned.base_config = config.to_string();
        plan("{}", tuned).unwrap_err()
    };
    assert!(refused("model_type", "llama".into()).contains("model_type \"llama\""));
    assert!(refused("hidden_size_per_layer_input", 256.into()).contains("per-layer embeddings"));
    assert!(refused("sliding_window", serde_json::Value::Null).contains("no sliding_window"));
}

#[test]
fn types_are_also_read_as_llama_cpp_spells_them() {
    for (spelled, own) in [("BF16", "bf16"), ("Q8_0", "q8_0"), ("Q4_K_M", "q4_k_m")] {
        let read =
            |kind: &str| serde_json::from_value::<Config>(serde_json::json!({ "type": kind })).unwrap().file_type;
        assert_eq!((read(spelled), read(spelled).label()), (read(own), spelled));
    }
}
