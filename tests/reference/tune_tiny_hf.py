#!/usr/bin/env python3
"""The training of a tunehost run once more with Hugging Face transformers + PEFT: the same records in the same steps, the same
schedule, clipping and optimiser, the same held-out records.  Only the start of A is drawn anew.

A step's loss is the mean over its trained tokens, so its records may be computed in any groups.  Here they are sorted by
length and padded in groups of ROWS_AT_ONCE, which on a CPU is faster than the run's own micro-batches of two.

    python tune_tiny_hf.py RUN [STEPS]

RUN is a finished run of the tiny base on chats and texts, without dropout.  Prints held-out loss per root before and after,
next to those of the run, and tokens and seconds; a step whose tokens are not those of the run is an error.
"""
import json
import math
import os
import sys
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import run_folder

ROWS_AT_ONCE = 8


def learning_rate(train, step, steps):
    peak, warmup, least = train["lr"], train["warmup_steps"], train["min_lr_ratio"]
    if step < warmup:
        return peak * (step + 1) / warmup
    if train["schedule"] == "constant":
        return peak
    progress = (step - warmup) / max(steps - warmup, 1)
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if train["schedule"] == "cosine" else 1 - progress
    return peak * (least + (1 - least) * shape)


def losses(model, rows):
    """Loss of every position of a padded batch of (ids, labels); 0 where nothing is trained."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows])
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows])
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], ignore_index=-100, reduction="none")


def held_out_losses(model, encoded, names):
    """Summed loss of every record."""
    sums = {}
    model.eval()
    with torch.no_grad():
        for start in range(0, len(names), ROWS_AT_ONCE):
            some = names[start:start + ROWS_AT_ONCE]
            sums.update(zip(some, losses(model, [encoded[name] for name in some]).sum(1).tolist()))
    model.train()
    return sums


def trained(rows):
    return sum(label != -100 for _, labels in rows for label in labels[1:])


def train(model, settings, steps, encoded, metrics):
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=settings["lr"], betas=settings["betas"], eps=settings["eps"], weight_decay=settings["weight_decay"])
    tokens = 0
    for index, (step, metric) in enumerate(zip(steps, metrics)):
        rows = sorted((encoded[name] for batch in step["micro_batches"] for row in batch for name in row), key=lambda r: len(r[0]))
        counts = sum(len(ids) for ids, _ in rows), trained(rows)
        if counts != (metric["tokens"], metric["trained_tokens"]):
            sys.exit(f"step {metric['step']}: {counts} tokens and trained tokens, in the run {metric}")
        tokens += counts[0]
        loss = 0.0
        for start in range(0, len(rows), ROWS_AT_ONCE):
            part = losses(model, rows[start:start + ROWS_AT_ONCE]).sum() / counts[1]
            part.backward()
            loss += part.item()
        norm = torch.nn.utils.clip_grad_norm_(parameters, settings["clip_norm"] or math.inf).item()
        optimizer.param_groups[0]["lr"] = learning_rate(settings, index, len(metrics))
        optimizer.step()
        optimizer.zero_grad()
        if index % 10 == 0 or index == len(steps) - 1:
            print(f"step {index + 1:>4}  loss {loss:.4f} (run {metric['loss']:.4f})  gradient norm {norm:.3f} "
                  f"(run {metric['grad_norm']:.3f})", flush=True)
    return tokens


def main(run, limit):
    settings = run_folder.config(run)
    steps, metrics = run_folder.json_lines(run / "order-manifest.jsonl"), run_folder.json_lines(run / "metrics.jsonl")
    before, after = (json.loads(path.read_text()) for path in sorted((run / "held-out").glob("step-*.json")))
    base, lora, cap = settings["model"]["base"], settings["lora"], settings["data"]["max_seq_len"]
    tokenizer, corpus = AutoTokenizer.from_pretrained(base), run_folder.records(settings)
    used = {name for step in steps for batch in step["micro_batches"] for row in batch for name in row} | {r["id"] for r in before}
    encoded = {name: tuple(part[:cap] for part in run_folder.encode(tokenizer, corpus[name])) for name in used}

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="sdpa")
    names = [record["id"] for record in before]
    ours = [{record["id"]: record["loss_sum"] for record in losses} for losses in (before, after)]
    theirs = [held_out_losses(model, encoded, names)]
    worst = max(abs(theirs[0][r["id"]] - r["loss_sum"]) / r["tokens"] for r in before)
    print(f"held-out loss of the base: {len(names)} records, largest difference {worst:.2e} per token")

    torch.manual_seed(settings["train"]["seed"])
    config = LoraConfig(r=lora["rank"], lora_alpha=lora["alpha"], use_rslora=lora["rslora"], lora_dropout=lora["dropout"],
                        target_modules=lora["targets"], task_type="CAUSAL_LM")
    model = get_peft_model(model, config).train()
    load, wall, cpu = os.getloadavg()[0], time.monotonic(), time.process_time()
    tokens = train(model, settings["train"], steps[:limit], encoded, metrics)
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    theirs.append(held_out_losses(model, encoded, names))

    print(f"\n{'held out':<12} {'records':>7} {'tokens':>7}   {'before':>8} {'run':>8}   {'after':>8} {'run':>8}")
    for root in dict.fromkeys(corpus[name]["root"] for name in names):
        rows = [r for r in before if corpus[r["id"]]["root"] == root]
        count = sum(r["tokens"] for r in rows)
        means = [sum(losses[r["id"]] for r in rows) / count for pair in zip(theirs, ours) for losses in pair]
        print(f"{root:<12} {len(rows):>7} {count:>7}   {means[0]:>8.4f} {means[1]:>8.4f}   {means[2]:>8.4f} {means[3]:>8.4f}")
    run_wall = sum(step["wall_ms"] for step in run_folder.json_lines(run / "timing.jsonl")) / 1e3
    print(f"\nsteps, Hugging Face: {tokens} tokens in {wall:.0f} s, {cpu:.0f} s of CPU on {torch.get_num_threads()} threads; "
          f"load {load:.1f} before, {os.getloadavg()[0]:.1f} after")
    print(f"steps, the run:      {sum(m['tokens'] for m in metrics)} tokens in {run_wall:.0f} s")


main(Path(sys.argv[1]).resolve(), int(sys.argv[2]) if len(sys.argv) > 2 else None)
