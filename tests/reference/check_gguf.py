"""What others read of a GGUF file: the package gguf its tensors and metadata, llama.cpp (prebuilt in npm's node-llama-cpp) all of
it: which types it would choose, and the tokens that it answers with."""
import ctypes
import json
import subprocess
from pathlib import Path

import gguf
import numpy as np

from checks import check, tunehost

HERE = Path(__file__).parent
NEW_TOKENS = 24
LLAMA_FTYPE_Q4_K_M = 15


def read(file):
    """Values, shapes and types by name."""
    tensors = {}
    for tensor in gguf.GGUFReader(file).tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        data, kind = tensor.data, tensor.tensor_type
        values = data if kind.name in ("F32", "F16") else gguf.dequantize(data, kind)
        tensors[tensor.name] = np.asarray(values, np.float32).reshape(shape), kind.name
    return tensors


def names(layers):
    """llama.cpp's name of each of Hugging Face's, by the tables of the package."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, layers)

    def of(name):
        if name.endswith("router.scale"):
            return f"blk.{name.split('.')[2]}.ffn_gate_inp.scale"
        if name.endswith("per_expert_scale"):
            return f"blk.{name.split('.')[2]}.ffn_down_exps.scale"
        # Buffers and fused experts have no suffix in training.
        return f"{table.get_name(name.removesuffix('.weight'))}.weight"

    return of


def check_read(name, folder, ours):
    [file] = folder.glob("*.gguf")
    theirs, layers = read(file), json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    of = names(layers)
    differ = [key for key, values in ours.items()
              if of(key) not in theirs or not np.array_equal(theirs[of(key)][0], values.numpy())]
    alone = theirs.keys() - {of(key) for key in ours} - {"rope_freqs.weight"}
    reader = gguf.GGUFReader(file)
    unknown = [key for key in reader.fields if key.startswith("gemma4.") and not known(key)]
    kinds = sorted({kind for _, kind in theirs.values()})
    detail = f"{len(theirs)} tensors as {', '.join(kinds)}; differing: {differ or 'none'}, unknown: {[*alone, *unknown] or 'none'}"
    check(f"{name}: gguf", not differ and not alone and not unknown, detail)


def known(key):
    """Whether the package has the key for some architecture."""
    spelt = key.replace("gemma4.", "{arch}.")
    keys = gguf.constants.Keys
    return any(spelt == value for group in vars(keys).values() if isinstance(group, type) for value in vars(group).values())


def llama_types(folder, library):
    """The type of each tensor of the BF16 file once llama.cpp has quantised it."""
    class Parameters(ctypes.Structure):
        _fields_ = [("nthread", ctypes.c_int32), ("ftype", ctypes.c_int32), ("others", ctypes.c_char * 248)]

    llama = ctypes.CDLL(str(library))
    llama.llama_model_quantize_default_params.restype = Parameters
    parameters = llama.llama_model_quantize_default_params()
    parameters.nthread, parameters.ftype = 2, LLAMA_FTYPE_Q4_K_M
    out = folder / "by-llama.cpp"
    status = llama.llama_model_quantize(str(folder / "model-BF16.gguf").encode(), str(out).encode(), ctypes.byref(parameters))
    if status != 0:
        raise RuntimeError(f"llama.cpp could not quantise {folder}")
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(out).tensors}


def check_types(name, bf16, q4_k_m, library):
    theirs = llama_types(bf16, library)
    ours = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(q4_k_m / "model-Q4_K_M.gguf").tensors}
    differ = {key: (ours.get(key), theirs.get(key)) for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
    check(f"{name}: the types that llama.cpp chooses", not differ, f"{len(ours)} tensors; differing: {differ or 'none'}")


def check_answers(name, folder, modules, prompts, tokens=NEW_TOKENS):
    """The greedy tokens of llama.cpp are those of `tunehost generate`."""
    [file] = folder.glob("*.gguf")
    ours = []
    for prompt in prompts:
        args = ["--prompt", prompt, "--max-new-tokens", tokens, "--json"]
        [answer] = [a for a in map(json.loads, tunehost("generate", folder, *args).splitlines()) if a["event"] == "answer"]
        ours.append({"prompt": answer["prompt_ids"], "ids": answer["ids"]})
    asked = json.dumps({"file": str(file), "tokens": tokens, "prompts": [answer["prompt"] for answer in ours]})
    done = subprocess.run(["node", HERE / "llama.mjs", modules], input=asked, capture_output=True, text=True)
    if done.returncode != 0:
        return check(f"{name}: llama.cpp", False, done.stderr[-2000:])
    theirs = json.loads(done.stdout.splitlines()[-1])
    equal = [answer["ids"] == ids[:len(answer["ids"])] for answer, ids in zip(ours, theirs)]
    differ = [(answer["ids"], ids) for answer, ids, same in zip(ours, theirs, equal) if not same]
    answered = sum(len(answer["ids"]) for answer in ours)
    check(f"{name}: llama.cpp answers", not differ, f"{sum(equal)} of {len(ours)} equal, {answered} tokens; differing: {differ or 'none'}")
