#!/usr/bin/env python3
"""Writes tests/fixtures/ggml.safetensors: for each block type random blocks, and the values that gguf (PyPI) reads of them.

    python make_ggml_golden.py OUT.safetensors
"""
import sys

import gguf
import numpy as np
from safetensors.numpy import save_file

BLOCKS = 5
# Where in a block its f16 scales are.
SCALES = {"Q8_0": [0], "Q5_0": [0], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}


def main(out):
    random, tensors = np.random.default_rng(0), {}
    for name, scales in SCALES.items():
        kind = gguf.GGMLQuantizationType[name]
        size = gguf.GGML_QUANT_SIZES[kind][1]
        blocks = random.integers(0, 256, (BLOCKS, size), dtype=np.uint8)
        for at in scales:
            blocks[:, at:at + 2] = random.normal(0, 0.01, (BLOCKS, 1)).astype(np.float16).view(np.uint8)
        tensors[f"{name}.blocks"] = blocks
        tensors[f"{name}.values"] = gguf.dequantize(blocks, kind).astype(np.float32)
    save_file(tensors, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
