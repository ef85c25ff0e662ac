#!/usr/bin/env python3
"""Exports the fixed tune of tests/fixtures/tune in every format of formats.json, has each read by the packages that it is
written for, and records the sha256 of every file that passed in passed.sha256.

    python check_formats.py TUNEHOST DEQUANTIZE [NODE_MODULES]

DEQUANTIZE is the example `dequantize`: what tunehost itself reads of the files; NODE_MODULES a folder with node-llama-cpp.  Where a check fails nothing is recorded and
the exit code is 1.
"""
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import check_gguf
import run_folder
from checks import ROOT, check, compare_logits, failures, load, load_adapter, tunehost

HERE = Path(__file__).parent
TUNE, BASE = ROOT / "tests/fixtures/tune", ROOT / "tests/fixtures/tiny-base"
DATA = TUNE / "held-out.jsonl"
DEQUANTIZE = str(Path(sys.argv[2]).resolve())
NODE_MODULES = Path(sys.argv[3]).resolve() if len(sys.argv) > 3 else None
PROMPTS = ["Good morning, how are you?", "What is a computer?", "Tell me a joke.", "Who art thou?"]


def read_by_tunehost(folder):
    with tempfile.TemporaryDirectory() as work:
        out = Path(work, "values.safetensors")
        subprocess.run([DEQUANTIZE, folder, out], check=True)
        return load_file(out)


def stored(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def fuse_experts(modules):
    """Experts that lie one by one as the tensors of training: gate rows, then up rows."""
    layers = sorted({path.split(".experts.")[0] for path in modules if ".experts." in path})
    for layer in layers:
        count = sum(path.startswith(f"{layer}.experts.") for path in modules) // 3
        gate, up, down = (torch.stack([modules.pop(f"{layer}.experts.{e}.{which}_proj") for e in range(count)])
                          for which in ("gate", "up", "down"))
        modules |= {f"{layer}.experts.gate_up_proj": torch.cat([gate, up], 1), f"{layer}.experts.down_proj": down}
    return {path if ".experts." in path else f"{path}.weight": tensor for path, tensor in modules.items()}


def check_compressed(name, folder):
    """compressed-tensors decompresses every module to what tunehost reads; every other tensor is read as it is stored."""
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(settings).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(settings["format"])
    tensors, states = stored(folder), {}
    for path in [key.removesuffix(".weight_scale") for key in tensors if key.endswith(".weight_scale")]:
        states[path] = {key.removeprefix(f"{path}."): tensors.pop(key) for key in list(tensors) if key.rpartition(".")[0] == path}
    modules = {path: compressor.decompress(state, scheme)["weight"] for path, state in states.items()}
    theirs, ours = fuse_experts(modules) | tensors, read_by_tunehost(folder)
    differ = [key for key in ours if key not in theirs or not torch.equal(ours[key].to(theirs[key].dtype), theirs[key])]
    detail = f"{len(states)} modules, {len(ours)} tensors; differing: {differ or 'none'}"
    check(f"{name}: compressed-tensors", not differ and ours.keys() == theirs.keys(), detail)


def check_format(name, exporter, folder, ids_of_records):
    if exporter == "peft-adapter":
        tuned = load_adapter(f"{name}: PEFT", load(BASE), folder)
        compare_logits(f"{name}: logits", tuned, BASE, folder, DATA, ids_of_records)
    elif exporter == "gguf":
        check_gguf.check_read(name, folder, read_by_tunehost(folder))
        if NODE_MODULES:
            check_gguf.check_answers(name, folder, NODE_MODULES, PROMPTS)
    elif exporter == "merge-bf16":
        compare_logits(f"{name}: transformers, logits", load(folder), folder, None, DATA, ids_of_records)
    else:
        check_compressed(name, folder)


def check_wide(work):
    """A base whose rows blocks of 256 divide, with random weights: every K type is read and multiplied with."""
    base, adapter = work / "wide", work / "wide adapter"
    config = AutoConfig.from_pretrained(BASE)
    config.hidden_size = config.intermediate_size = config.moe_intermediate_size = 256
    config.num_experts, config.head_dim, config.per_layer_config = 4, 64, {5: {"head_dim": 128, "num_key_value_heads": 1}}
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(base)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(BASE / file, base)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(adapter)
    for kind in ("bf16", "q4_k_m"):
        # A tune of noise gains nothing, and says so.
        tunehost("export", adapter, "--base", base, "--exporter", "gguf", "--set", f"type={kind}", "--data", DATA,
                 "--template", "base", "--quiet", "--out", work / f"wide {kind}", allowed=(0, 10))
    folder = work / "wide q4_k_m"
    check_gguf.check_read("wide q4_k_m", folder, read_by_tunehost(folder))
    if NODE_MODULES:
        # llama.cpp rounds activations too, which soon tells in answers that are noise.
        check_gguf.check_answers("wide q4_k_m", folder, NODE_MODULES, PROMPTS, tokens=1)
        check_gguf.check_types("wide q4_k_m", work / "wide bf16", folder, library())


def library():
    """llama.cpp itself, as node-llama-cpp ships it for this system."""
    return next(NODE_MODULES.glob("@node-llama-cpp/linux-x64/bins/*/libllama.*"))


def hashes(name, folder):
    """The sha256 of each file; where the base lies on this machine is not part of it, nor is what was judged."""
    for file in sorted(folder.iterdir()):
        if file.name != "export.json":
            content = file.read_bytes().replace(str(BASE).encode(), b"BASE")
            yield f"{hashlib.sha256(content).hexdigest()}  {name}/{file.name}\n"


def main():
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    ids_of_records = {record["id"]: run_folder.encode(tokenizer, record)[0] for record in run_folder.json_lines(DATA)}
    passed = []
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)
        for form in json.loads((HERE / "formats.json").read_text()):
            name, exporter, folder = form["name"], form["exporter"], Path(work, form["name"])
            settings = [word for setting in form["settings"] for word in ("--set", setting)]
            judged = ["--data", DATA, "--template", "base", "--quiet"]
            tunehost("export", TUNE, "--base", BASE, "--exporter", exporter, *settings, *judged, "--out", folder)
            check_format(name, exporter, folder, ids_of_records)
            passed += hashes(name, folder)
        if NODE_MODULES:
            check_gguf.check_types("q4_k_m", Path(work, "bf16"), Path(work, "q4_k_m"), library())
        check_wide(Path(work))
    if failures:
        print(f"{len(failures)} checks failed; nothing is recorded")
        return 1
    (HERE / "passed.sha256").write_text("".join(passed))
    print(f"every check holds; {len(passed)} files recorded")
    return 0


sys.exit(main())
