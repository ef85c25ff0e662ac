"""tunehost's operations and PyTorch's at the shapes of Gemma-4 26B-A4B, in turn, on one GPU; a table.

For each operation and length our program runs first (kernels/examples/operation_times.rs) and PyTorch right after it, so that both find
the same clocks and temperatures. Times are medians of as many runs, with the least and the most. Without PyTorch the table has ours
alone. Run by `tests/gpu/bench`, which says how.
"""
import argparse
import json
import statistics
import subprocess
import sys
import time

try:
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:
    torch = None

# As in kernels/examples/operation_times.rs. Heads: of queries, of keys and values, their size, the window.
LARGE = dict(hidden=2816, experts=128, top_k=8, expert=704, vocabulary=262144, rank=64, runs=5,
             heads={"windowed": (16, 8, 256, 1024), "full": (16, 2, 512, None)})
SMALL = dict(hidden=64, experts=8, top_k=2, expert=32, vocabulary=512, rank=4, runs=3,
             heads={"windowed": (4, 2, 64, 16), "full": (4, 1, 128, None)})
OPERATIONS = ["windowed", "full", "experts", "linear", "loss"]
PASSES = ["forward", "forward and backward"]


class Torch:
    """PyTorch's side: the results of one operation at one length."""

    def __init__(self, sizes, cuda):
        self.sizes, self.cuda = sizes, cuda
        self.device, self.dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)

    def random(self, *shape, grad=True):
        values = torch.randn(*shape, device=self.device, dtype=self.dtype).mul_(0.1)
        return values.requires_grad_(grad)

    def wait(self):
        if self.cuda:
            torch.cuda.synchronize()

    def time(self, by, forward, inputs, passes=PASSES):
        """Times `forward`, and it with its backward pass; what it refuses is said, and is no row."""
        for name in passes:
            def run():
                for tensor in inputs:
                    tensor.grad = None
                out = forward()
                if name != "forward":
                    out.backward(torch.ones_like(out))

            try:
                # Once to compile and to choose, once to see what it takes.
                run()
                self.wait()
                if self.cuda:
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                run()
                self.wait()
                extra = torch.cuda.max_memory_allocated() - before if self.cuda else None
                times = []
                for _ in range(self.sizes["runs"]):
                    started = time.perf_counter()
                    run()
                    self.wait()
                    times.append(1e3 * (time.perf_counter() - started))
            except Exception as error:  # Every backend has its own way to refuse a shape.
                print(f"{by}, {name}: {(str(error).splitlines() or [repr(error)])[0]}", file=sys.stderr)
                return
            finally:
                if self.cuda:
                    torch.cuda.empty_cache()
            yield dict(by=by, name=name, ms=times, extra_bytes=extra)

    def run(self, operation, tokens):
        if operation in self.sizes["heads"]:
            return self.attention(tokens, *self.sizes["heads"][operation])
        return getattr(self, operation)(tokens)

    def attention(self, tokens, heads, kv, dim, window):
        q, k, v = self.random(1, heads, tokens, dim), self.random(1, kv, tokens, dim), self.random(1, kv, tokens, dim)
        inputs = (q, k, v)
        mask = None
        if window:
            row = torch.arange(tokens, device=self.device)
            distance = row[:, None] - row[None, :]
            mask = (distance >= 0) & (distance < window)

        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH):
            def scaled(backend=backend):
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)

            yield from self.time(f"SDPA {backend.name.lower().removesuffix('_attention')}", scaled, inputs)
        if window:
            # Flash takes no mask: what it does for a full context is how fast PyTorch could be with the window's work.
            def unwindowed():
                with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

            yield from self.time("SDPA flash, no window", unwindowed, inputs)
        if self.cuda:
            from torch.nn.attention.flex_attention import create_block_mask, flex_attention

            def visible(_, __, query, key):
                seen = query >= key
                return seen & (query - key < window) if window else seen

            blocks = create_block_mask(visible, None, None, tokens, tokens, device=self.device)
            flex = torch.compile(flex_attention)
            yield from self.time("FlexAttention", lambda: flex(q, k, v, block_mask=blocks, enable_gqa=True), inputs)

    def experts(self, tokens):
        count, top_k, hidden, expert = (self.sizes[key] for key in ("experts", "top_k", "hidden", "expert"))
        x = self.random(tokens, hidden)
        gate_up, down = self.random(count, hidden, 2 * expert, grad=False), self.random(count, expert, hidden, grad=False)
        weights, chosen = torch.randn(tokens, count, device=self.device).softmax(-1).topk(top_k)
        weights = (weights / weights.sum(-1, keepdim=True)).to(self.dtype)
        order = chosen.flatten().argsort(stable=True)
        ends = chosen.flatten().bincount(minlength=count).cumsum(0).to(torch.int32)
        grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm

        def forward():
            gate, up = grouped_mm(x[order // top_k], gate_up, offs=ends).chunk(2, -1)
            made = grouped_mm(F.gelu(gate, approximate="tanh") * up, down, offs=ends)
            return torch.zeros_like(x).index_add(0, order // top_k, made * weights.flatten()[order, None])

        yield from self.time("grouped_mm", forward, (x,))

    def linear(self, tokens):
        (heads, _, dim, _), hidden, rank = self.sizes["heads"]["windowed"], self.sizes["hidden"], self.sizes["rank"]
        x, weight = self.random(tokens, hidden), self.random(heads * dim, hidden, grad=False)
        a, b = self.random(rank, hidden), self.random(heads * dim, rank)
        yield from self.time("PyTorch", lambda: x @ weight.T + (x @ a.T) @ b.T, (x, a, b))

    def loss(self, tokens):
        from torch.utils.checkpoint import checkpoint
        hidden, weight = self.random(tokens, self.sizes["hidden"]), self.random(self.sizes["vocabulary"], self.sizes["hidden"], grad=False)
        targets = torch.arange(tokens, device=self.device) * 7919 % self.sizes["vocabulary"]

        def loss(rows, labels):
            return F.cross_entropy(30 * torch.tanh((rows @ weight.T).float() / 30), labels, reduction="sum")

        def chunked():
            parts = zip(hidden.split(512), targets.split(512))
            return sum(checkpoint(loss, rows, labels, use_reentrant=False) for rows, labels in parts)

        yield from self.time("naive", lambda: loss(hidden, targets), (hidden,))
        yield from self.time("chunked", chunked, (hidden,))

    def peak(self):
        """TFLOP/s of the largest of five square products, what shares are of."""
        side = 8192 if self.cuda else 512
        a, b = self.random(side, side, grad=False), self.random(side, side, grad=False)
        [product] = self.time("peak", lambda: a @ b, (), passes=["forward"])
        return 2 * side**3 / min(product["ms"]) / 1e9


def ours(args, operation, tokens):
    command = [args.ours, args.device, operation, str(tokens)] + (["--small"] if args.small else [])
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode or len(results) != len(PASSES):
        print(f"tunehost, {operation}: exit code {done.returncode}, {len(results)} results", file=sys.stderr)
        return None
    return results


def line(operation, tokens, result, flops, mine, peak):
    times, median = result["ms"], statistics.median(result["ms"])
    rate = flops / median / 1e9
    share = f"{100 * rate / peak:.0f}%" if peak else ""
    extra = "" if result["extra_bytes"] is None else f"{result['extra_bytes'] / 2**20:,.0f}"
    return (f"| {operation} | {result['name']} | {tokens:,} | {result['by']} | {median:.3f} ({min(times):.3f} to {max(times):.3f}, "
            f"n = {len(times)}) | {rate:.1f} | {share} | {extra} | {median / mine:.2f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ours", help="the program operation_times, built")
    parser.add_argument("device", help="the device as tunehost names it")
    parser.add_argument("tokens", type=int, nargs="+")
    parser.add_argument("--small", action="store_true", help="small shapes, to see that it works")
    args = parser.parse_args()
    cuda = args.device.startswith("cuda")
    peers = Torch(SMALL if args.small else LARGE, cuda) if torch else None
    peak = peers.peak() if peers else None
    if torch:
        print(f"PyTorch {torch.__version__}; peak: {peak:.1f} TFLOP/s, its largest {peers.dtype} product\n")
    else:
        print("PyTorch is not installed: ours alone\n")
    print("| operation | pass | tokens | by | ms: median (least to most, n) | TFLOP/s | share of peak | extra MiB | its time over ours |")
    print("|---|---|---|---|---|---|---|---|---|")
    failed = False
    for tokens in args.tokens:
        for operation in OPERATIONS:
            mine = ours(args, operation, tokens)
            if mine is None:
                failed = True
                continue
            own = {result["name"]: result for result in mine}
            for result in mine + (list(peers.run(operation, tokens)) if peers else []):
                median = statistics.median(own[result["name"]]["ms"])
                print(line(operation, tokens, result, own[result["name"]]["flops"], median, peak), flush=True)
    sys.exit(failed)


main()
