// Drops records that are too short or too long, and those that are copies of a record kept before. The same verdicts as
// the Rust plugin `length-and-dedup`.

const COUNT_MAX = 4294967295;
const PROPERTIES = {
  min_tokens: {
    type: 'integer',
    minimum: 0,
    maximum: COUNT_MAX,
    default: 0,
    description: 'Fewest tokens of a record',
  },
  max_tokens: {
    type: 'integer',
    minimum: 1,
    maximum: COUNT_MAX,
    description: 'Most tokens of a record, before it is cut to data.max_seq_len; any number where it is not given',
  },
  min_trained_tokens: {
    type: 'integer',
    minimum: 0,
    maximum: COUNT_MAX,
    default: 1,
    description: 'Fewest trained tokens of a record',
  },
  dedup: {
    type: 'string',
    enum: ['exact', 'none'],
    default: 'exact',
    description:
      'Which copies of an earlier record are dropped: exact are those of the same messages and tools, text, or tokens and labels',
  },
};

const settings = {};
// What the records kept so far hold.
const kept = new Set();

export const plugin = {
  describe() {
    return {
      name: 'length-and-dedup-javascript',
      version: '0.1.0',
      description: 'Drops records that are too short or too long, and copies of earlier records',
      configSchema: JSON.stringify({ type: 'object', additionalProperties: false, properties: PROPERTIES }),
    };
  },

  configure(json) {
    const given = JSON.parse(json);
    for (const name of Object.keys(given)) {
      if (!(name in PROPERTIES)) throw `unknown setting ${name}; there are ${Object.keys(PROPERTIES).join(', ')}`;
    }
    for (const [name, schema] of Object.entries(PROPERTIES)) settings[name] = given[name] ?? schema.default;
    if (settings.dedup !== 'exact' && settings.dedup !== 'none') throw 'dedup must be exact or none';
    for (const name of ['min_tokens', 'min_trained_tokens']) {
      if (!isCount(settings[name], 0)) throw `${name} must be an integer from 0 to ${COUNT_MAX}`;
    }
    if (settings.max_tokens !== undefined && !isCount(settings.max_tokens, Math.max(settings.min_tokens, 1))) {
      throw `max_tokens must be an integer of at least 1 and min_tokens, at most ${COUNT_MAX}`;
    }
  },
};

function isCount(value, least) {
  return Number.isInteger(value) && value >= least && value <= COUNT_MAX;
}

export const filtering = {
  filter(chunk) {
    if (chunk.first === 0n) kept.clear();
    const reasons = chunk.records.map((record, at) => wrongLength(chunk.tokens[at], chunk.trainedTokens[at]) ?? copied(record));
    return {
      actions: reasons.map((reason) => (reason ? 'drop' : 'keep')),
      texts: reasons.filter((reason) => reason),
    };
  },
};

function wrongLength(tokens, trained) {
  const { min_tokens, max_tokens, min_trained_tokens } = settings;
  if (tokens < min_tokens) return `shorter than ${min_tokens} tokens`;
  if (tokens > max_tokens) return `longer than ${max_tokens} tokens`; // never where it is not given
  if (trained < min_trained_tokens) return `fewer than ${min_trained_tokens} trained tokens`;
}

// Why the record is a copy, if it is; otherwise it is remembered.
function copied(record) {
  if (settings.dedup === 'none') return;
  const { messages, tools, text, input_ids, labels } = JSON.parse(record);
  const content = JSON.stringify([messages, tools, text, input_ids, labels].map(sorted));
  if (kept.has(content)) return 'copy of an earlier record';
  kept.add(content);
}

// The value with the keys of every object in one order.
function sorted(value) {
  if (Array.isArray(value)) return value.map(sorted);
  if (value === null || typeof value !== 'object') return value;
  return Object.fromEntries(Object.keys(value).sort().map((key) => [key, sorted(value[key])]));
}
