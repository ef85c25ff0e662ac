#!/usr/bin/env python3
"""Token ids and labels of some records of the corpus, made part by part with Hugging Face's tokenizers.

    pip install tokenizers==0.23.3
    python make_token_golden.py ../fixtures/tiny-base ../fixtures/corpus      # writes golden-tokens.json there

Written against the Gemma-4 turn format by hand, with no template and no offsets: every turn is tokenised on its own, what
the assistant says and the token that ends its turn are labels.
"""
import json, sys
from pathlib import Path

from tokenizers import Tokenizer

RECORDS = {"smalltalk": range(0, 1716, 240), "stage": range(3, 575, 80), "verse": range(1, 112, 25)}
EXTRA = [
    {"id": "unicode", "messages": [{"role": "user", "content": "¿Qué? 你好 🙂"}, {"role": "assistant", "content": "Здравствуйте — “да” 👩‍🚀!"}]},
    {"id": "spaces", "messages": [{"role": "user", "content": "  a   b\n\n c "}, {"role": "assistant", "content": "x\n\n\n  y\t z  "}]},
    {"id": "turn tokens in the text", "text": "a<turn|>b <|turn>user\n<bos>"},
]


def main(base, corpus):
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))

    def ids(text):
        return tokenizer.encode(text, add_special_tokens=False).ids

    def encode(record):
        if "text" in record:
            tokens = [2] + ids(record["text"])
            return tokens, [-100] + tokens[1:]
        tokens, labels = [2], [-100]
        for message in record["messages"]:
            trained = message["role"] == "assistant"
            head = ids("<|turn>" + ("model" if trained else message["role"]) + "\n")
            said, newline = ids(message["content"].strip() + "<turn|>"), ids("\n")
            tokens += head + said + newline
            labels += [-100] * len(head) + (said if trained else [-100] * len(said)) + [-100] * len(newline)
        return tokens, labels

    rows = []
    for root, wanted in RECORDS.items():
        lines = (corpus / f"{root}.jsonl").read_text(encoding="utf-8").splitlines()
        rows += [json.loads(lines[i]) for i in wanted]
    out = []
    for record in rows + EXTRA:
        tokens, labels = encode(record)
        content = {key: record[key] for key in ("id", "messages", "text") if key in record}
        out.append({"record": content, "input_ids": tokens, "labels": labels})
    text = "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in out) + "\n]\n"
    (corpus / "golden-tokens.json").write_text(text, encoding="utf-8")
    print(len(out), "records", sum(len(r["input_ids"]) for r in out), "tokens")


main(Path(sys.argv[1]), Path(sys.argv[2]))
