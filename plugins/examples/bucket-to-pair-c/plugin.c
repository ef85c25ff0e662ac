// Length bucketing with a global shuffle: micro-batches are made of records of like length, so little is padded, and the
// micro-batches are then shuffled over the whole epoch. The same plans, byte for byte, as the Rust plugin `bucket-to-pair`.
//
// `tunehost plugins build` writes sampler.h from the contract, into target/bindings.

#include <stdlib.h>
#include <string.h>

#include "sampler.h"

typedef exports_tunehost_plugin_sampling_plan_request_t request_t;
typedef exports_tunehost_plugin_sampling_epoch_plan_t plan_t;

static const char SCHEMA[] =
    "{\"type\": \"object\", \"additionalProperties\": false, \"properties\": {\"bucket\": {\"type\": \"integer\", "
    "\"minimum\": 1, \"maximum\": 4294967295, \"default\": 2, \"description\": \"Micro-batches made from one bucket of "
    "records of like length; 1 pads least, more mixes more\"}}}";

// Micro-batches made from one length bucket.
static uint32_t bucket = 2;

void exports_tunehost_plugin_plugin_describe(exports_tunehost_plugin_plugin_info_t *info) {
  sampler_string_dup(&info->name, "bucket-to-pair-c");
  sampler_string_dup(&info->version, "0.1.0");
  sampler_string_dup(&info->description, "Pairs records of like length into micro-batches, then shuffles the micro-batches");
  sampler_string_dup(&info->config_schema, SCHEMA);
}

// Move `text` past the spaces in front of it, and past `token`; false where it does not go on with that.
static bool skip(const char **text, const char *end, const char *token) {
  while (*text < end && strchr(" \t\r\n", **text)) ++*text;
  size_t length = strlen(token);
  if ((size_t)(end - *text) < length || memcmp(*text, token, length) != 0) return false;
  *text += length;
  return true;
}

// Settings are `{}` or `{"bucket": N}`.
static bool parse(const char *text, const char *end, uint32_t *value) {
  if (!skip(&text, end, "{")) return false;
  if (!skip(&text, end, "}")) {
    if (!skip(&text, end, "\"bucket\"") || !skip(&text, end, ":")) return false;
    skip(&text, end, "");
    uint64_t number = 0;
    const char *first = text;
    for (; text < end && *text >= '0' && *text <= '9'; text++) {
      number = number * 10 + (uint64_t)(*text - '0');
      if (number > UINT32_MAX) return false;
    }
    if (text == first || number == 0 || !skip(&text, end, "}")) return false;
    *value = (uint32_t)number;
  }
  skip(&text, end, "");
  return text == end;
}

bool exports_tunehost_plugin_plugin_configure(sampler_string_t *json, sampler_string_t *error) {
  const char *text = (const char *)json->ptr;
  bool good = parse(text, text + json->len, &bucket);
  if (!good) sampler_string_dup(error, "there is one setting, bucket: an integer of at least 1");
  sampler_string_free(json);
  return good;
}

// SplitMix64 (Steele, Lea and Flood 2014).
static uint64_t next(uint64_t *state) {
  uint64_t z = *state += 0x9E3779B97F4A7C15;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

static uint64_t below(uint64_t *state, uint64_t bound) {
  return (uint64_t)(((unsigned __int128)next(state) * bound) >> 64);
}

static void shuffle(uint64_t *state, uint32_t *items, size_t count) {
  for (size_t i = count; i-- > 1;) {
    size_t j = (size_t)below(state, i + 1);
    uint32_t item = items[i];
    items[i] = items[j];
    items[j] = item;
  }
}

static int rising(const void *left, const void *right) {
  uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
  return (a > b) - (a < b);
}

static void *allocate(size_t count, size_t size) {
  void *memory = calloc(count ? count : 1, size);
  if (!memory) {
    sampler_string_t why;
    sampler_string_set(&why, "out of memory");
    tunehost_plugin_host_report_panic(&why);
    __builtin_trap();
  }
  return memory;
}

// Shortest first; records of equal length in random order.
static void sort_by_length(uint32_t *records, size_t count, const uint32_t *lengths, uint64_t *random) {
  shuffle(random, records, count);
  uint64_t *keys = allocate(count, sizeof *keys);
  for (size_t i = 0; i < count; i++) keys[i] = (uint64_t)lengths[records[i]] << 32 | i;
  qsort(keys, count, sizeof *keys, rising);
  uint32_t *shuffled = allocate(count, sizeof *shuffled);
  memcpy(shuffled, records, count * sizeof *records);
  for (size_t i = 0; i < count; i++) records[i] = shuffled[(uint32_t)keys[i]];
  free(keys);
  free(shuffled);
}

// Cut records into micro-batches of neighbours, and add where each starts. `*batches` counts them.
static void cut(const request_t *request, const uint32_t *records, uint32_t first, uint32_t last, uint32_t *starts,
                size_t *batches) {
  uint64_t budget = request->token_budget.is_some ? request->token_budget.val : UINT64_MAX;
  uint32_t start = first, width = 0;
  for (uint32_t at = first; at < last; at++) {
    uint32_t length = request->lengths.ptr[records[at]];
    uint32_t wider = length > width ? length : width;
    uint32_t rows = at - start + 1;
    if (rows > request->rows_per_batch || (uint64_t)rows * wider > budget) {
      starts[(*batches)++] = start;
      start = at;
      width = length;
    } else {
      width = wider;
    }
  }
  if (start < last) starts[(*batches)++] = start;
}

static bool refuse_over_budget(const request_t *request, const uint32_t *records, size_t count, sampler_string_t *error) {
  for (size_t i = 0; i < count && request->token_budget.is_some; i++) {
    if (request->lengths.ptr[records[i]] > request->token_budget.val) {
      sampler_string_dup(error, "a record has more tokens than the token budget");
      return true;
    }
  }
  return false;
}

bool exports_tunehost_plugin_sampling_plan(request_t *request, plan_t *plan, sampler_string_t *error) {
  const uint32_t *lengths = request->lengths.ptr;
  size_t all = request->lengths.len, count = 0, dropped = 0;
  if (request->rows_per_batch == 0) request->rows_per_batch = 1;
  uint64_t mixed = request->seed;
  uint64_t random = next(&mixed) ^ (uint64_t)request->epoch * 0xD6051A2F5C4B8E43;

  uint32_t *records = allocate(all, sizeof *records);
  plan->dropped.ptr = allocate(all, sizeof *records);
  for (uint32_t record = 0; record < all; record++) {
    if (lengths[record] <= request->max_seq_len) records[count++] = record;
    else plan->dropped.ptr[dropped++] = record;
  }
  sort_by_length(records, count, lengths, &random);
  if (refuse_over_budget(request, records, count, error)) return false;

  // Where each micro-batch starts, and, at its end in `records`, where the next one does.
  uint32_t *starts = allocate(count, sizeof *starts);
  size_t batches = 0;
  uint64_t bucket_records = (uint64_t)bucket * request->rows_per_batch;
  for (uint64_t first = 0; first < count; first += bucket_records) {
    uint64_t last = first + bucket_records < count ? first + bucket_records : count;
    shuffle(&random, records + first, last - first);
    cut(request, records, (uint32_t)first, (uint32_t)last, starts, &batches);
  }
  uint32_t *ends = allocate(count, sizeof *ends);
  for (size_t b = 0; b < batches; b++) ends[starts[b]] = b + 1 < batches ? starts[b + 1] : (uint32_t)count;
  shuffle(&random, starts, batches);

  plan->records.ptr = allocate(count, sizeof *records);
  plan->row_ends.ptr = allocate(count, sizeof *records);
  plan->batch_ends.ptr = allocate(batches, sizeof *records);
  uint32_t placed = 0;
  for (size_t b = 0; b < batches; b++) {
    for (uint32_t at = starts[b]; at < ends[starts[b]]; at++) {
      plan->records.ptr[placed] = records[at];
      plan->row_ends.ptr[placed] = placed + 1;
      placed++;
    }
    plan->batch_ends.ptr[b] = placed;
  }
  plan->records.len = plan->row_ends.len = count;
  plan->batch_ends.len = batches;
  plan->dropped.len = dropped;
  free(records);
  free(starts);
  free(ends);
  exports_tunehost_plugin_sampling_plan_request_free(request);
  return true;
}
