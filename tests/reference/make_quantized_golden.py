#!/usr/bin/env python3
"""Writes tests/fixtures/quantized: a few modules as compressed-tensors packs them, and what it unpacks them to.

    python make_quantized_golden.py OUT

Each of fp8, int4 and nvfp4 gets a folder with config.json, model.safetensors (packed) and expected.safetensors (bf16).
"""
import json
import sys
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import save_file

WIDTH = 32
FORMATS = {
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "int4": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
}
MODULES = {"model.layers.0.self_attn.q_proj": 6, "model.layers.0.experts.0.gate_proj": 3,
           "model.layers.0.experts.0.up_proj": 3, "model.layers.0.experts.1.gate_proj": 3,
           "model.layers.0.experts.1.up_proj": 3, "model.layers.0.experts.0.down_proj": 5,
           "model.layers.0.experts.1.down_proj": 5}


def scales(name, weight):
    """The state that compressed-tensors packs a weight with, scales in the dtypes of a checkpoint."""
    if name == "fp8":
        return {"weight_scale": (weight.abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)}
    largest = weight.reshape(weight.shape[0], -1, 16).abs().amax(2)
    if name == "int4":
        return {"weight_scale": (largest / 7.5).to(torch.bfloat16)}
    global_scale = (448 * 6 / weight.abs().max()).reshape(1)
    scale = (global_scale * largest / 6).to(torch.float8_e4m3fn).to(torch.float32)
    return {"weight_scale": scale, "weight_global_scale": global_scale}


def main(out):
    torch.manual_seed(0)
    for name, (packing, weights) in FORMATS.items():
        config = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "format": packing,
                  "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights | {"symmetric": True}}},
                  "ignore": ["lm_head"]}
        scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
        compressor = BaseCompressor.get_value_from_registry(packing)
        packed, expected = {}, {}
        for path, rows in MODULES.items():
            weight = torch.randn(rows, WIDTH) * torch.logspace(-2, 0, rows)[:, None]
            state = compressor.compress({"weight": weight} | scales(name, weight), scheme)
            packed |= {f"{path}.{part}": tensor.contiguous() for part, tensor in state.items()}
            state = {part: tensor.to(torch.bfloat16) if part == "weight_scale" and name != "nvfp4" else tensor
                     for part, tensor in state.items()}
            expected[path] = compressor.decompress(state, scheme)["weight"].to(torch.bfloat16)
        layer = "model.layers.0"
        experts = {which: torch.stack([expected.pop(f"{layer}.experts.{e}.{which}") for e in (0, 1)])
                   for which in ("gate_proj", "up_proj", "down_proj")}
        expected = {f"{path}.weight": tensor for path, tensor in expected.items()}
        expected[f"{layer}.experts.gate_up_proj"] = torch.cat([experts["gate_proj"], experts["up_proj"]], 1)
        expected[f"{layer}.experts.down_proj"] = experts["down_proj"]
        folder = Path(out) / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}, indent=1) + "\n")
        save_file(packed, folder / "model.safetensors")
        save_file({path: tensor.contiguous() for path, tensor in expected.items()}, folder / "expected.safetensors")


if __name__ == "__main__":
    main(*sys.argv[1:])
