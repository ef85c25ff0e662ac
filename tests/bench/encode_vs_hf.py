"""tunehost's `cache fill` and Hugging Face's `datasets.map` with `apply_chat_template` on the same conversations.

Both run in turn, with as many threads as the peer has processes: same tokenizer, same template, same file; both write what they
encode to disk, neither has seen the file before. Compared are the token ids, every one of them. Of tunehost the whole process is
timed, which also finds what is trained; of the peer the call of `map` alone. Run by `tests/bench/encode_vs_hf`, which says how.
"""
import argparse
import json
import os
import random
import resource
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def conversations(mib):
    """Chats of two to twelve messages out of the bundled corpora's lines, no two alike."""
    lines = []
    for name in ["stage", "smalltalk", "verse"]:
        for row in (REPOSITORY / f"tests/fixtures/corpus/{name}.jsonl").read_text().splitlines():
            record = json.loads(row)
            texts = [record["text"]] if "text" in record else [message["content"] for message in record["messages"]]
            lines += [line for text in texts for line in text.splitlines() if line]
    draw, size = random.Random(mib), 0
    while size < mib << 20:
        roles = ["user", "assistant"] * draw.randint(1, 6)
        said = lambda: "\n".join(draw.choices(lines, k=draw.randint(1, 8)))
        row = json.dumps({"messages": [{"role": role, "content": said()} for role in roles]}, ensure_ascii=False)
        size += len(row.encode()) + 1
        yield row


def cpu_seconds():
    """Of this process and of the children that it waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def hugging_face(args):
    """One process of the peer; one JSON line."""
    from datasets import disable_progress_bars, load_dataset
    from transformers import AutoTokenizer
    disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    started = time.perf_counter()
    rows = load_dataset("json", data_files=str(args.data), split="train", cache_dir=str(args.cache))
    loaded, cpu = time.perf_counter(), cpu_seconds()
    encode = lambda row: {"input_ids": tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"]}
    rows = rows.map(encode, num_proc=args.processes, remove_columns=rows.column_names)
    seconds, cpu = time.perf_counter() - loaded, cpu_seconds() - cpu
    ids = rows.with_format("numpy")["input_ids"]
    with open(args.ids, "wb") as out:
        for record in ids:
            out.write(struct.pack("<I", len(record)) + record.astype("<u4").tobytes())
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 1024
    print(json.dumps(dict(seconds=seconds, cpu_seconds=cpu, load_seconds=loaded - started, peak_mib=peak)))


def tunehost(args, config, folder):
    """One fill of an empty cache; its time, tokens and peak memory."""
    command = [args.tunehost, "cache", "fill", config, "--set", f'data.cache="{folder}"', "--json"]
    started = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ, RAYON_NUM_THREADS=str(args.processes)))
    output = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - started
    if status:
        sys.exit(f"tunehost failed: {output}")
    event = json.loads(output.splitlines()[-1])
    return dict(seconds=seconds, cpu_seconds=usage.ru_utime + usage.ru_stime, peak_mib=usage.ru_maxrss / 1024, tokens=event["tokens"], encoded=event["encoded"])


def cached_ids(folder):
    """The ids of a cache's one file: a line of JSON, then entries of 32 bytes and what follows them."""
    data = next(Path(folder).glob("*.encodings")).read_bytes()
    at = data.index(b"\n") + 1
    while at < len(data):
        count = struct.unpack_from("<I", data, at + 4)[0]
        at += 32
        yield data[at:at + 4 * count]
        at += 4 * count + (count + 31) // 32 * 4


def peer_ids(path):
    data, at = path.read_bytes(), 0
    while at < len(data):
        count = struct.unpack_from("<I", data, at)[0]
        yield data[at + 4:at + 4 + 4 * count]
        at += 4 + 4 * count


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tunehost", type=Path, help="the program, built")
    parser.add_argument("--base", type=Path, default=REPOSITORY / "tests/fixtures/tiny-base")
    parser.add_argument("--mib", type=int, default=16, help="size of the file of conversations")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--pairs", type=int, default=3)
    for hidden in ["--data", "--cache", "--ids"]:
        parser.add_argument(hidden, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.data:
        return hugging_face(args)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        data, config, ids = folder / "chats.jsonl", folder / "bench.toml", folder / "ids"
        data.write_text("\n".join(conversations(args.mib)) + "\n")
        config.write_text(f'name = "bench"\nmodel.base = "{args.base}"\n[data]\ntemplate = "base"\nmax_seq_len = 4096\n'
                          f'sources = [{{ path = "{data}", root = "chats" }}]\n')
        peer = [sys.executable, __file__, "--data", data, "--base", args.base, "--ids", ids, "--processes", args.processes]
        ours, theirs = [], []

        def run_ours():
            shutil.rmtree(folder / "ours", ignore_errors=True)
            ours.append(tunehost(args, config, folder / "ours"))

        def run_theirs():
            shutil.rmtree(folder / "theirs", ignore_errors=True)
            done = subprocess.run([str(part) for part in peer + ["--cache", folder / "theirs"]], capture_output=True, text=True,
                                  env=dict(os.environ, TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1"))
            if done.returncode:
                sys.exit(f"the peer failed: {done.stderr.strip()[-800:]}")
            theirs.append(json.loads(done.stdout.splitlines()[-1]))

        for pair in range(args.pairs):
            # whoever goes second may find a warmer or a busier machine: take turns
            for run in (run_ours, run_theirs) if pair % 2 == 0 else (run_theirs, run_ours):
                run()
        alike = list(cached_ids(folder / "ours")) == list(peer_ids(ids))
        # the time of the CPUs says more where others use them too
        ratios, cpu_ratios = ([b[key] / a[key] for a, b in zip(ours, theirs)] for key in ["seconds", "cpu_seconds"])
        tokens = ours[0]["tokens"]
        speed = lambda results: tokens / statistics.median(result["seconds"] for result in results)
        print(f"{ours[0]['encoded']} conversations, {tokens} tokens, {args.processes} processes or threads, n = {args.pairs}: "
              f"{speed(ours):.0f} tokens/s, peer {speed(theirs):.0f}: x {statistics.median(ratios):.2f} "
              f"({min(ratios):.2f} to {max(ratios):.2f}), by CPU time x {statistics.median(cpu_ratios):.2f} "
              f"({min(cpu_ratios):.2f} to {max(cpu_ratios):.2f}); peak {max(r['peak_mib'] for r in ours):.0f} MiB, "
              f"peer {max(r['peak_mib'] for r in theirs):.0f} a process; "
              f"reading the file takes the peer another {statistics.median(r['load_seconds'] for r in theirs):.1f} s; "
              f"ids {'identical' if alike else 'DIFFER'}")
        sys.exit(0 if alike else 1)


if __name__ == "__main__":
    main()
