"""tunehost and Hugging Face + PEFT on the same work: LoRA forward and backward of a mid-size Gemma-4 MoE on the CPU.

Both engines run in turn, each in a process of its own: same checkpoint, same adapter, same tokens, same number of threads.
Printed are, for each shape and number format, tokens/s of both (medians), the median of the ratios of neighbouring runs, peak
resident memory, and the losses. Run by `tests/bench/vs_hf`, which says how.
"""
import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VOCAB = 32768
SOFTCAP = 30.0
RANK = 16
# 57 M parameters: small enough for a CPU, shaped like the 26B-A4B (sliding and full layers, shared keys and values, experts).
SHAPE = dict(
    vocab_size=VOCAB, hidden_size=512, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8,
    num_key_value_heads=4, num_global_key_value_heads=2, head_dim=64, global_head_dim=128, sliding_window=256,
    attention_k_eq_v=True, hidden_size_per_layer_input=0, num_kv_shared_layers=0, enable_moe_block=True, num_experts=16,
    top_k_experts=4, moe_intermediate_size=176, final_logit_softcapping=SOFTCAP, max_position_embeddings=16384,
    tie_word_embeddings=True)
MODULES = r"model\.language_model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"


def make(folder):
    """A random checkpoint in float32 and an adapter whose B is not zero, so that both factors matter."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration
    torch.manual_seed(3)
    model = Gemma4ForConditionalGeneration(Gemma4Config(text_config=dict(SHAPE), vision_config=None, audio_config=None)).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("router.proj.weight"):
                parameter.normal_()  # the default makes all experts alike
    model.save_pretrained(folder / "base")
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, bias="none", target_modules=MODULES))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.01)
    model.save_pretrained(folder / "adapter")


def tokens_file(folder, length):
    path = folder / f"tokens-{length}.json"
    if not path.exists():
        import random
        draw = random.Random(length)
        path.write_text(json.dumps([[draw.randrange(3, VOCAB) for _ in range(length)]]))
    return path


def hugging_face(args):
    """One process of the peer; one JSON line."""
    import torch
    import torch.nn.functional as functional
    from peft import PeftModel
    from torch.utils.checkpoint import checkpoint
    from transformers import Gemma4ForConditionalGeneration, logging
    logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    dtype = dict(f32=torch.float32, bf16=torch.bfloat16)[args.dtype]
    base = Gemma4ForConditionalGeneration.from_pretrained(args.folder / "base", attn_implementation="sdpa", dtype=dtype)
    model = PeftModel.from_pretrained(base, args.folder / "adapter", is_trainable=True)
    model.train()
    lean = args.variant == "lean"
    if lean:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
        model.enable_input_require_grads()
    ids = torch.tensor(json.loads(tokens_file(args.folder, args.length).read_text()))
    targets = functional.pad(ids, (0, 1), value=-100)[:, 1:].flatten()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def chunk_loss(hidden, targets):
        logits = (hidden @ base.lm_head.weight.t()).float()
        return functional.cross_entropy(torch.tanh(logits / SOFTCAP) * SOFTCAP, targets, reduction="sum", ignore_index=-100)

    def loss():
        if not lean:
            return model(input_ids=ids, labels=ids, use_cache=False).loss
        hidden = base.model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
        parts = zip(hidden.split(256), targets.split(256))
        return sum(checkpoint(chunk_loss, *part, use_reentrant=False) for part in parts) / (targets != -100).sum()

    walls = []
    for step in range(args.warmup + args.reps):
        for parameter in trained:
            parameter.grad = None
        started = time.perf_counter()
        value = loss()
        value.backward()
        if step >= args.warmup:
            walls.append(time.perf_counter() - started)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(dict(wall_s=statistics.median(walls), loss=value.item(), peak_mib=peak_mib)))


def run(command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{command[0]} failed: {done.stderr.strip()[-800:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def compare(args, dtype, variant, length):
    ours_command = [args.step_speed, args.folder / "base", "--adapter", args.folder / "adapter", "--tokens",
                    tokens_file(args.folder, length), "--threads", args.threads, "--reps", args.reps, "--warmup", args.warmup,
                    "--dtype", dtype, "--recompute", "none" if variant == "naive" else "selective"]
    theirs_command = [sys.executable, __file__, "--peer", "--folder", args.folder, "--dtype", dtype, "--variant", variant,
                      "--length", length, "--threads", args.threads, "--reps", args.reps, "--warmup", args.warmup]
    ours, theirs = [], []
    for pair in range(args.pairs):
        # Whoever goes second may find a warmer or a busier machine: take turns.
        order = [(ours, ours_command), (theirs, theirs_command)]
        for results, command in order if pair % 2 == 0 else reversed(order):
            results.append(run(command))
    speed = lambda results: statistics.median(length / result["wall_s"] for result in results)
    ratios = [b["wall_s"] / a["wall_s"] for a, b in zip(ours, theirs)]
    row = dict(
        dtype=dtype, peer=variant, length=length, pairs=args.pairs, threads=args.threads, kernels=ours[0]["kernels"],
        tokens_per_s=round(speed(ours)), peer_tokens_per_s=round(speed(theirs)), ratio=round(statistics.median(ratios), 2),
        ratio_least=round(min(ratios), 2), ratio_most=round(max(ratios), 2),
        peak_mib=round(max(result["peak_mib"] for result in ours)),
        peer_peak_mib=round(max(result["peak_mib"] for result in theirs)),
        loss=ours[0]["loss"], peer_loss=theirs[0]["loss"])
    print(json.dumps(row) if args.json else text(row), flush=True)


def text(row):
    return ("{dtype} {length:>6} tokens, {threads} threads ({kernels}): {tokens_per_s:>6} tokens/s, peer ({peer}) "
            "{peer_tokens_per_s:>6}: x {ratio:.2f} ({ratio_least:.2f} to {ratio_most:.2f}, n = {pairs}); peak {peak_mib} MiB, "
            "peer {peer_peak_mib}; loss {loss:.6f}, peer {peer_loss:.6f}").format(**row)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where checkpoint, adapter and tokens lie, made where they are missing")
    parser.add_argument("--step-speed", type=Path, help="tunehost's example of that name, built")
    parser.add_argument("--dtype", choices=["f32", "bf16"], action="append")
    parser.add_argument("--length", type=int, action="append")
    parser.add_argument("--variant", choices=["lean", "naive"], default=None,
                        help="the peer: lean = checkpointing and chunked loss, naive = neither (default: lean for f32, naive for bf16); tunehost recomputes beside lean alone")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        args.dtype, args.length = args.dtype[0], args.length[0]
        return hugging_face(args)
    args.folder = args.folder or Path(tempfile.gettempdir()) / "tunehost-vs-hf"
    if not (args.folder / "adapter").exists():
        args.folder.mkdir(parents=True, exist_ok=True)
        make(args.folder)
    for dtype in args.dtype or ["f32"]:
        for length in args.length or [2048, 4096]:
            compare(args, dtype, args.variant or dict(f32="lean", bf16="naive")[dtype], length)


if __name__ == "__main__":
    main()
