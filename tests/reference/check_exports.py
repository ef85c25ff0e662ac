#!/usr/bin/env python3
"""Checks with Hugging Face transformers + PEFT that what tunehost writes is what it says.

    python check_exports.py TUNEHOST [RUN]

TUNEHOST is the binary, RUN a finished run of the tiny base with both exports; without it a short one is made.  Everything is
f32 on the CPU.  One line for each check with its largest difference; the exit code is 1 when one fails.
"""
import json
import os
import random
import sys
import tempfile
from pathlib import Path

import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoTokenizer, Gemma4ForConditionalGeneration

import run_folder
from checks import ROOT, check, compare_logits, failures, load, load_adapter, tunehost

GOLDEN = ROOT / "tests/fixtures/golden/model"
RECORDS_PER_ROOT, RECORD_TOKENS_MAX = 3, 512
NEW_TOKENS = 48
PROMPTS = ["Good morning, how are you?", "What is a computer?", "Tell me a joke.", "Who art thou?", "Sing me a verse.",
           "¿Qué? 你好 🙂"]
ALL_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

GOLDEN_CONFIG = """
name = "golden"
model.base = "{base}"
[data]
max_seq_len = 64
held_out = 0.1
sources = [{{ path = "records.jsonl", root = "records" }}]
[lora]
rank = 4
alpha = 8.0
{lora}
[train]
max_steps = 8
lr = 1e-2
"""
GOLDEN_LORA = {
    "all targets": "",
    "some layers, rsLoRA": r"targets = '.*layers\.(0|5)\.(self_attn\.[qk]_proj|mlp\.down_proj)'" + "\nrslora = true",
}


def scored_records(run, tokenizer, data):
    """Writes some held-out records of every root to the file `data`; their ids as Hugging Face tokenises them."""
    corpus = run_folder.records(run_folder.config(run))
    held_out = json.loads((run / "held-out/step-000000.json").read_text())
    taken, ids_of_records, lines = {}, {}, []
    for name in (row["id"] for row in held_out):
        record = corpus[name]
        ids, _ = run_folder.encode(tokenizer, record)
        if len(ids) <= RECORD_TOKENS_MAX and taken.setdefault(record["root"], 0) < RECORDS_PER_ROOT:
            taken[record["root"]] += 1
            ids_of_records[name] = ids
            lines.append(json.dumps({"id": name, **record}))
    data.write_text("\n".join(lines), encoding="utf-8")
    return ids_of_records


def check_generation(model, tokenizer, base, adapter):
    """Greedy answers, with the adapter and without, token by token."""
    equal, tokens, differences = 0, 0, []
    for prompt in PROMPTS:
        args = ["--prompt", prompt, "--max-new-tokens", NEW_TOKENS, "--prompt-form", "generation", "--json"]
        answers = map(json.loads, tunehost("generate", base, "--adapter", adapter, *args).splitlines())
        answers = {answer["model"]: answer for answer in answers if answer["event"] == "answer"}
        ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False)

        def generate():
            settings = dict(max_new_tokens=NEW_TOKENS, do_sample=False, temperature=None, top_p=None, top_k=None)
            out = model.generate(input_ids=torch.tensor([ids]), **settings)[0, len(ids):].tolist()
            return out[:-1] if out[-1] in model.generation_config.eos_token_id else out

        theirs = {"tuned": generate()}
        with model.disable_adapter():
            theirs["base"] = generate()
        for who, expected in theirs.items():
            answer = answers[who]
            same = answer["prompt_ids"] == ids and answer["ids"] == expected
            same &= answer["text"] == tokenizer.decode(expected, skip_special_tokens=True)
            equal, tokens = equal + same, tokens + len(expected)
            if not same:
                differences.append(f"{who} on {prompt!r}: {answer['ids']} against {expected}")
    detail = "; ".join([f"{equal} of {2 * len(PROMPTS)} answers equal, {tokens} tokens", *differences])
    check("greedy answers of the base and with the adapter", not differences, detail)


def check_found_alone(tokenizer, adapter, merged):
    """The folders stand for themselves: the adapter finds its base, the merged folder has the tokenizer and the template."""
    found = AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32)
    modules = sum(hasattr(module, "lora_A") for module in found.modules())
    check("the adapter finds its base from another folder", modules > 0, f"{modules} adapted modules")
    own = AutoTokenizer.from_pretrained(merged)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    prompts = [t.apply_chat_template(chats, add_generation_prompt=True, return_dict=False) for t in (tokenizer, own)]
    check("the merged folder renders prompts as the base does", prompts[0] == prompts[1], f"{len(PROMPTS)} prompts")


def check_tiny(run, work):
    base = Path(run_folder.config(run)["model"]["base"])
    adapter, merged = run / "export/adapter", run / "export/merged"
    tokenizer, data = AutoTokenizer.from_pretrained(base), work / "tiny.jsonl"
    ids_of_records = scored_records(run, tokenizer, data)
    compare_logits("base", load(base), base, None, data, ids_of_records)
    tuned = load_adapter("PEFT loads the adapter", load(base), adapter)
    compare_logits("base with the adapter", tuned, base, adapter, data, ids_of_records)
    check_generation(tuned, tokenizer, base, adapter)
    compare_logits("merged model", load(merged), merged, None, data, ids_of_records)
    check_found_alone(tokenizer, adapter, merged)
    check_adapters_of_peft(base, data, ids_of_records, work)


def check_adapters_of_peft(base, data, ids_of_records, work):
    settings = dict(r=8, lora_alpha=16, task_type="CAUSAL_LM")
    for name, more in {
        "names, rsLoRA": dict(target_modules=ALL_TARGETS, use_rslora=True),
        "names": dict(target_modules=["q_proj", "down_proj"]),
        "names in some layers": dict(target_modules=["self_attn.k_proj", "up_proj"], layers_to_transform=[0, 2, 5],
                                     exclude_modules=["layers.2.mlp.up_proj"]),
        "expression, rsLoRA": dict(target_modules=r".*layers\.[0-3]\.(self_attn\.[qv]_proj|mlp\.up_proj)", use_rslora=True),
    }.items():
        torch.manual_seed(1)
        model = get_peft_model(load(base), LoraConfig(**settings, **more)).eval()
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(parameter, std=0.05)
        folder = work / f"peft {name}"
        model.save_pretrained(folder)
        compare_logits(f"adapter written by PEFT ({name})", model, base, folder, data, ids_of_records)


def check_multimodal(work):
    """A checkpoint with a vision tower, whose text tensors have another prefix."""
    rnd = random.Random(7)
    ids_of_records = {f"r{i}": [2] + [rnd.randrange(3, 700) for _ in range(rnd.randrange(8, 40))] for i in range(150)}
    lines = [json.dumps({"id": name, "input_ids": ids}) for name, ids in ids_of_records.items()]
    (work / "records.jsonl").write_text("\n".join(lines))
    scored, some = work / "golden.jsonl", dict(list(ids_of_records.items())[:8])
    scored.write_text("\n".join(lines[:8]))
    compare_logits("multimodal base", load(GOLDEN, Gemma4ForConditionalGeneration), GOLDEN, None, scored, some)
    for name, lora in GOLDEN_LORA.items():
        config, run = work / "golden.toml", work / f"golden {name}"
        config.write_text(GOLDEN_CONFIG.format(base=GOLDEN, lora=lora))
        tunehost("run", config, "--run-dir", run, "--quiet")
        adapter, merged = run / "export/adapter", run / "export/merged"
        model = load_adapter(f"PEFT loads the multimodal adapter ({name})", load(GOLDEN, Gemma4ForConditionalGeneration), adapter)
        compare_logits(f"multimodal base with the adapter ({name})", model, GOLDEN, adapter, scored, some)
        model = load(merged, Gemma4ForConditionalGeneration)
        compare_logits(f"multimodal merged model ({name})", model, merged, None, scored, some)


def main():
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        os.chdir(work)
        run = RUN or work / "run"
        if not RUN:
            tunehost("run", "configs/quickstart.toml", "--set", "train.max_steps=20", "--set", "eval.max_records_per_root=10",
                     "--run-dir", run, "--quiet")
        check_tiny(run, work)
        check_multimodal(work)
    print(f"{len(failures)} checks failed" if failures else "every check holds")
    return bool(failures)


RUN = Path(sys.argv[2]).resolve() if len(sys.argv) > 2 else None
sys.exit(main())
