"""Length bucketing with a global shuffle: micro-batches are made of records of like length, so little is padded, and the
micro-batches are then shuffled over the whole epoch. The same plans, byte for byte, as the Rust plugin `bucket-to-pair`."""

import json

from componentize_py_types import Err
from wit_world.exports.plugin import Info
from wit_world.exports.sampling import EpochPlan, PlanRequest

SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "bucket": {
            "type": "integer",
            "minimum": 1,
            "maximum": 4294967295,
            "default": 2,
            "description": "Micro-batches made from one bucket of records of like length; 1 pads least, more mixes more",
        }
    },
}

# Micro-batches made from one length bucket.
bucket = 2


class Plugin:
    def describe(self) -> Info:
        return Info(
            name="bucket-to-pair-python",
            version="0.1.0",
            description="Pairs records of like length into micro-batches, then shuffles the micro-batches",
            config_schema=json.dumps(SCHEMA),
        )

    def configure(self, text: str) -> None:
        global bucket
        settings = json.loads(text)
        for name in settings:
            if name != "bucket":
                raise Err(f"unknown setting {name}; there is one, bucket")
        bucket = settings.get("bucket", 2)
        if type(bucket) is not int or not 1 <= bucket <= 4294967295:
            raise Err("bucket must be an integer from 1 to 4294967295")


class Sampling:
    def plan(self, request: PlanRequest) -> EpochPlan:
        lengths = request.lengths
        rows_per_batch = max(request.rows_per_batch, 1)
        random = SplitMix64(request.seed, request.epoch)
        records = [record for record, length in enumerate(lengths) if length <= request.max_seq_len]
        dropped = [record for record, length in enumerate(lengths) if length > request.max_seq_len]
        random.shuffle(records)
        # Stable, so records of equal length stay in random order.
        records.sort(key=lengths.__getitem__)

        batches = []
        step = bucket * rows_per_batch
        for first in range(0, len(records), step):
            neighbours = records[first : first + step]
            random.shuffle(neighbours)
            cut(neighbours, lengths, rows_per_batch, request.token_budget, batches)
        random.shuffle(batches)

        planned, batch_ends = [], []
        for batch in batches:
            planned += batch
            batch_ends.append(len(planned))
        row_ends = list(range(1, len(planned) + 1))
        return EpochPlan(records=planned, row_ends=row_ends, batch_ends=batch_ends, dropped=dropped)


def cut(records: list, lengths: list, rows_per_batch: int, budget: int | None, batches: list) -> None:
    """Add micro-batches of neighbours, one record a row, within the token budget, padding counted."""
    start = width = 0
    for at, record in enumerate(records):
        length = lengths[record]
        if budget is not None and length > budget:
            raise Err(f"record {record} has {length} tokens, more than the token budget of {budget}")
        wider = length if length > width else width
        rows = at - start + 1
        if rows > rows_per_batch or (budget is not None and rows * wider > budget):
            batches.append(records[start:at])
            start, width = at, length
        else:
            width = wider
    if start < len(records):
        batches.append(records[start:])


MASK = (1 << 64) - 1


class SplitMix64:
    """Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014."""

    def __init__(self, seed: int, epoch: int):
        self.state = seed
        self.state = self.next() ^ (epoch * 0xD6051A2F5C4B8E43 & MASK)

    def next(self) -> int:
        self.state = z = self.state + 0x9E3779B97F4A7C15 & MASK
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
        return z ^ z >> 31

    def shuffle(self, items: list) -> None:
        """Fisher-Yates: every order equally likely."""
        for i in range(len(items) - 1, 0, -1):
            j = self.next() * (i + 1) >> 64
            items[i], items[j] = items[j], items[i]
