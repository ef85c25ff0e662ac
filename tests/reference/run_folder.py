"""What the reference checks read of a tunehost run: its configuration and its records, encoded with Hugging Face's tokenizer."""
import json
import tomllib
from pathlib import Path


def config(run: Path) -> dict:
    return tomllib.loads((run / "config.resolved.toml").read_text(encoding="utf-8"))


def json_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def records(settings: dict) -> dict[str, dict]:
    """The corpus by record id. Only what is tokenised, and the root."""
    found = {}
    for source in settings["data"]["sources"]:
        for record in json_lines(Path(source["path"])):
            content = {key: record[key] for key in ("messages", "text") if key in record}
            found[record["id"]] = {"root": source["root"], **content}
    return found


def encode(tokenizer, record: dict) -> tuple[list[int], list[int]]:
    """Ids and unshifted labels. Trained are an assistant's words and the token that ends its turn; in a text, all but the first."""
    def ids_of(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    if "text" in record:
        ids = [tokenizer.bos_token_id] + ids_of(record["text"])
        return ids, [-100] + ids[1:]
    ids = tokenizer.apply_chat_template(record["messages"], return_dict=False)
    head, end = ids_of("<|turn>model\n"), tokenizer.convert_tokens_to_ids("<turn|>")
    labels = [-100] * len(ids)
    for start in range(len(ids) - len(head)):
        if ids[start:start + len(head)] == head:
            first = start + len(head)
            after = ids.index(end, first) + 1
            labels[first:after] = ids[first:after]
    return ids, labels
