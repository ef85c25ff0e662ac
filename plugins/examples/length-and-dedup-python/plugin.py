"""Drops records that are too short or too long, and those that are copies of a record kept before. The same verdicts as
the Rust plugin `length-and-dedup`."""

import hashlib
import json

from componentize_py_types import Err
from wit_world.exports.filtering import Action, Chunk, Verdicts
from wit_world.exports.plugin import Info

COUNT_MAX = 4294967295
PROPERTIES = {
    "min_tokens": {
        "type": "integer",
        "minimum": 0,
        "maximum": COUNT_MAX,
        "default": 0,
        "description": "Fewest tokens of a record",
    },
    "max_tokens": {
        "type": "integer",
        "minimum": 1,
        "maximum": COUNT_MAX,
        "description": "Most tokens of a record, before it is cut to data.max_seq_len; any number where it is not given",
    },
    "min_trained_tokens": {
        "type": "integer",
        "minimum": 0,
        "maximum": COUNT_MAX,
        "default": 1,
        "description": "Fewest trained tokens of a record",
    },
    "dedup": {
        "type": "string",
        "enum": ["exact", "none"],
        "default": "exact",
        "description": "Which copies of an earlier record are dropped: exact are those of the same messages and tools, "
        "text, or tokens and labels",
    },
}

settings = {}
# What the records kept so far hold.
kept = set()


class Plugin:
    def describe(self) -> Info:
        schema = {"type": "object", "additionalProperties": False, "properties": PROPERTIES}
        return Info(
            name="length-and-dedup-python",
            version="0.1.0",
            description="Drops records that are too short or too long, and copies of earlier records",
            config_schema=json.dumps(schema),
        )

    def configure(self, text: str) -> None:
        global settings
        given = json.loads(text)
        for name in given:
            if name not in PROPERTIES:
                raise Err(f"unknown setting {name}; there are {', '.join(PROPERTIES)}")
        settings = {name: given.get(name, schema.get("default")) for name, schema in PROPERTIES.items()}
        if settings["dedup"] not in ("exact", "none"):
            raise Err("dedup must be exact or none")
        for name in ("min_tokens", "min_trained_tokens"):
            if type(settings[name]) is not int or not 0 <= settings[name] <= COUNT_MAX:
                raise Err(f"{name} must be an integer from 0 to {COUNT_MAX}")
        most, least = settings["max_tokens"], max(settings["min_tokens"], 1)
        if most is not None and (type(most) is not int or not least <= most <= COUNT_MAX):
            raise Err(f"max_tokens must be an integer of at least 1 and min_tokens, at most {COUNT_MAX}")


class Filtering:
    def filter(self, chunk: Chunk) -> Verdicts:
        if chunk.first == 0:
            kept.clear()
        actions, texts = [], []
        for record, tokens, trained in zip(chunk.records, chunk.tokens, chunk.trained_tokens):
            reason = wrong_length(tokens, trained) or copied(record)
            actions.append(Action.DROP if reason else Action.KEEP)
            if reason:
                texts.append(reason)
        return Verdicts(actions=actions, texts=texts)


def wrong_length(tokens: int, trained: int) -> str | None:
    least, most, least_trained = settings["min_tokens"], settings["max_tokens"], settings["min_trained_tokens"]
    if tokens < least:
        return f"shorter than {least} tokens"
    if most is not None and tokens > most:
        return f"longer than {most} tokens"
    if trained < least_trained:
        return f"fewer than {least_trained} trained tokens"
    return None


def copied(record: str) -> str | None:
    """Why the record is a copy, if it is; otherwise it is remembered."""
    if settings["dedup"] == "none":
        return None
    parts = json.loads(record)
    content = [parts.get(part) for part in ("messages", "tools", "text", "input_ids", "labels")]
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()
    if key in kept:
        return "copy of an earlier record"
    kept.add(key)
    return None
