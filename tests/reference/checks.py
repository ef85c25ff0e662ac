"""What the reference checks share: a line for each, the binary, and logits and adapters held against transformers and PEFT."""
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
TUNEHOST = str(Path(sys.argv[1]).resolve())
LOGITS_DIFF_MAX = 1e-3

failures = []


def check(name, holds, detail):
    print(f"{'ok    ' if holds else 'FAILED'}  {name}: {detail}", flush=True)
    if not holds:
        failures.append(name)


def tunehost(*args, allowed=(0,)):
    done = subprocess.run([TUNEHOST, *map(str, args)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in allowed:
        sys.exit(f"tunehost {' '.join(map(str, args))}\n{done.stderr}")
    return done.stdout


def load(folder, model_class=AutoModelForCausalLM):
    return model_class.from_pretrained(folder, dtype=torch.float32).eval()


def compare_logits(name, model, model_folder, adapter, data, ids_of_records):
    """Logits of `model` on Hugging Face's ids against what `tunehost score` makes of the records in the file `data`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "logits.safetensors")
        template = ["--template", "base"] if Path(model_folder, "chat_template.jinja").exists() else []
        with_adapter = ["--adapter", adapter] if adapter else []
        tunehost("score", model_folder, *with_adapter, *template, "--data", data, "--logits", out, "--quiet")
        ours = load_file(out)
    worst = largest = 0.0
    for record, ids in ids_of_records.items():
        with torch.no_grad():
            theirs = model(input_ids=torch.tensor([ids])).logits[0].float()
        if ours[record].shape != theirs.shape:
            return check(name, False, f"record {record}: {tuple(ours[record].shape)} against {tuple(theirs.shape)}")
        worst = max(worst, (ours[record] - theirs).abs().max().item())
        largest = max(largest, theirs.abs().max().item())
    tokens = sum(map(len, ids_of_records.values()))
    detail = f"max abs diff {worst:.2e} of logits up to {largest:.1f}, {len(ids_of_records)} records, {tokens} tokens"
    check(name, worst <= LOGITS_DIFF_MAX, detail)


def load_adapter(name, model, folder):
    """PEFT loads the folder; every tensor of the file is used, and every adapter tensor of the model comes from the file."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        adapted = PeftModel.from_pretrained(model, folder).eval()
    missing = [str(w.message) for w in said if "adapter keys" in str(w.message)]
    loaded = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    file = load_file(Path(folder, "adapter_model.safetensors"))
    same = loaded.keys() == file.keys() and all(torch.equal(loaded[key], file[key]) for key in file)
    moved = sum(bool(t.any()) for key, t in file.items() if "lora_B" in key)
    detail = f"{len(loaded)} tensors in the model, {len(file)} in the file, {moved} B not zero; warnings: {missing or 'none'}"
    check(name, same and not missing and moved > 0, detail)
    return adapted
