#!/usr/bin/env python3
"""Exports the fixed tune of tests/fixtures/tune in every format of formats.json, has each read by the packages that it is
written for, and records the sha256 of every file that passed in passed.sha256.

    python check_formats.py TUNEHOST DEQUANTIZE

DEQUANTIZE is the example `dequantize`: what tunehost itself reads of the files.  Where a check fails nothing is recorded and
the exit code is 1.
"""
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file
from transformers import AutoTokenizer

import run_folder
from checks import ROOT, check, compare_logits, failures, load, load_adapter, tunehost

HERE = Path(__file__).parent
TUNE, BASE = ROOT / "tests/fixtures/tune", ROOT / "tests/fixtures/tiny-base"
DATA = TUNE / "held-out.jsonl"
DEQUANTIZE = str(Path(sys.argv[2]).resolve())


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
    elif exporter == "merge-bf16":
        compare_logits(f"{name}: transformers, logits", load(folder), folder, None, DATA, ids_of_records)
    else:
        check_compressed(name, folder)


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
    if failures:
        print(f"{len(failures)} checks failed; nothing is recorded")
        return 1
    (HERE / "passed.sha256").write_text("".join(passed))
    print(f"every check holds; {len(passed)} files recorded")
    return 0


sys.exit(main())
