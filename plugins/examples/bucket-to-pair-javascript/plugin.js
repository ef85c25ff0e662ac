// Length bucketing with a global shuffle: micro-batches are made of records of like length, so little is padded, and the
// micro-batches are then shuffled over the whole epoch. The same plans, byte for byte, as the Rust plugin `bucket-to-pair`.

const SCHEMA = {
  type: 'object',
  additionalProperties: false,
  properties: {
    bucket: {
      type: 'integer',
      minimum: 1,
      maximum: 4294967295,
      default: 2,
      description: 'Micro-batches made from one bucket of records of like length; 1 pads least, more mixes more',
    },
  },
};

// Micro-batches made from one length bucket.
let bucket = 2;

export const plugin = {
  describe() {
    return {
      name: 'bucket-to-pair-javascript',
      version: '0.1.0',
      description: 'Pairs records of like length into micro-batches, then shuffles the micro-batches',
      configSchema: JSON.stringify(SCHEMA),
    };
  },

  configure(json) {
    const settings = JSON.parse(json);
    for (const name of Object.keys(settings)) {
      if (name !== 'bucket') throw `unknown setting ${name}; there is one, bucket`;
    }
    bucket = settings.bucket ?? 2;
    if (!Number.isInteger(bucket) || bucket < 1 || bucket > 4294967295) {
      throw 'bucket must be an integer from 1 to 4294967295';
    }
  },
};

export const sampling = {
  plan(request) {
    const { lengths, maxSeqLen } = request;
    const rowsPerBatch = Math.max(request.rowsPerBatch, 1);
    const budget = request.tokenBudget ?? Infinity;
    const random = new SplitMix64(request.seed, request.epoch);
    const records = lengths.map((_, record) => record).filter((record) => lengths[record] <= maxSeqLen);
    const dropped = lengths.map((_, record) => record).filter((record) => lengths[record] > maxSeqLen);
    random.shuffle(records, 0, records.length);
    sortByLength(records, lengths);

    // Micro-batch `b` holds the records starts[b] .. ends[b].
    const batches = { starts: new Uint32Array(records.length), ends: new Uint32Array(records.length), count: 0 };
    const step = bucket * rowsPerBatch;
    for (let first = 0; first < records.length; first += step) {
      const last = Math.min(first + step, records.length);
      random.shuffle(records, first, last);
      cut(records, first, last, lengths, rowsPerBatch, budget, batches);
    }
    const { starts, ends, count } = batches;
    const order = new Uint32Array(count).map((_, batch) => batch);
    random.shuffle(order, 0, count);

    const planned = new Uint32Array(records.length);
    const batchEnds = new Uint32Array(count);
    let end = 0;
    for (let place = 0; place < count; place++) {
      const batch = order[place];
      for (let at = starts[batch]; at < ends[batch]; at++) planned[end++] = records[at];
      batchEnds[place] = end;
    }
    const rowEnds = planned.map((_, row) => row + 1);
    return { records: planned, rowEnds, batchEnds, dropped };
  },
};

// Shortest first; records of equal length stay in the order they have. Sorting integers without a comparator is many times
// faster: the length above, the place below.
function sortByLength(records, lengths) {
  const keys = new BigUint64Array(records.length);
  const halves = new Uint32Array(keys.buffer); // WebAssembly is little-endian: the low half comes first
  for (let place = 0; place < records.length; place++) {
    halves[2 * place] = place;
    halves[2 * place + 1] = lengths[records[place]];
  }
  keys.sort();
  const before = records.slice();
  for (let place = 0; place < records.length; place++) records[place] = before[halves[2 * place]];
}

// Add micro-batches of the neighbours records[first .. last], one record a row, within the token budget, padding counted.
function cut(records, first, last, lengths, rowsPerBatch, budget, batches) {
  let start = first;
  let width = 0;
  for (let at = first; at < last; at++) {
    const length = lengths[records[at]];
    if (length > budget) throw `record ${records[at]} has ${length} tokens, more than the token budget of ${budget}`;
    const wider = length > width ? length : width;
    const rows = at - start + 1;
    if (rows > rowsPerBatch || rows * wider > budget) {
      batches.starts[batches.count] = start;
      batches.ends[batches.count++] = at;
      start = at;
      width = length;
    } else {
      width = wider;
    }
  }
  batches.starts[batches.count] = start;
  batches.ends[batches.count++] = last;
}

// Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
class SplitMix64 {
  constructor(seed, epoch) {
    this.state = seed;
    this.state = this.next() ^ BigInt.asUintN(64, BigInt(epoch) * 0xD6051A2F5C4B8E43n);
  }

  next() {
    let z = (this.state = BigInt.asUintN(64, this.state + 0x9E3779B97F4A7C15n));
    z = BigInt.asUintN(64, (z ^ (z >> 30n)) * 0xBF58476D1CE4E5B9n);
    z = BigInt.asUintN(64, (z ^ (z >> 27n)) * 0x94D049BB133111EBn);
    return z ^ (z >> 31n);
  }

  // Fisher-Yates over items[first .. last]: every order equally likely.
  shuffle(items, first, last) {
    for (let count = last - first; count > 1; count--) {
      const i = first + count - 1;
      const j = first + Number((this.next() * BigInt(count)) >> 64n);
      const item = items[i];
      items[i] = items[j];
      items[j] = item;
    }
  }
}
