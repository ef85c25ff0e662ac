use super::*;

fn request(lengths: Vec<u32>) -> PlanRequest {
    PlanRequest {
        roots: vec![0; lengths.len()],
        lengths,
        epoch: 0,
        seed: 42,
        max_seq_len: 4096,
        rows_per_batch: 2,
        accumulation: 4,
        token_budget: None,
    }
}

/// Lengths spread evenly over 1..=4000.
fn spread(count: u32) -> Vec<u32> {
    (0..count).map(|i| i.wrapping_mul(2_654_435_761) % 4000 + 1).collect()
}

fn plan(bucket: u32, request: PlanRequest) -> Plan {
    BucketToPair::new(Config { bucket }).unwrap().plan(request).unwrap()
}

/// Padding tokens as a share of all tokens, for plans with one record per row.
fn padding(plan: &Plan, lengths: &[u32]) -> f64 {
    let (mut real, mut padded, mut start) = (0, 0, 0);
    for &end in &plan.batch_ends {
        let rows: Vec<u32> = plan.records[start..end as usize].iter().map(|&r| lengths[r as usize]).collect();
        real += rows.iter().sum::<u32>();
        padded += rows.len() as u32 * rows.iter().max().unwrap();
        start = end as usize;
    }
    1.0 - f64::from(real) / f64::from(padded)
}

#[test]
fn each_record_is_planned_once_in_full_micro_batches() {
    let plan = plan(2, request(spread(1001)));
    let mut records = plan.records.clone();
    records.sort_unstable();
    assert_eq!(records, (0..1001).collect::<Vec<u32>>());
    assert_eq!(plan.batch_ends.len(), 501, "500 pairs and one single");
}

#[test]
fn small_buckets_pad_almost_nothing_and_large_ones_more() {
    let lengths = spread(4000);
    let share = |bucket| padding(&plan(bucket, request(lengths.clone())), &lengths);
    assert!(share(1) < 0.001, "{}", share(1));
    assert!(share(2) < 0.002, "{}", share(2));
    assert!(share(1000) > 0.1, "{}", share(1000));
}

#[test]
fn micro_batches_are_shuffled_over_the_whole_epoch() {
    let lengths = spread(4000);
    let plan = plan(2, request(lengths.clone()));
    let early: u32 = plan.records[..400].iter().map(|&record| lengths[record as usize]).sum();
    assert!((1700..2300).contains(&(early / 400)), "the first tenth has mean length {}", early / 400);
}

#[test]
fn an_epoch_has_its_own_order_and_its_own_pairs() {
    let of_epoch = |epoch| plan(2, PlanRequest { epoch, ..request(vec![8; 100]) }).records;
    assert_eq!(of_epoch(0), of_epoch(0));
    let partner = |records: &[u32]| records.chunks(2).find(|pair| pair.contains(&0)).unwrap().iter().sum::<u32>();
    let partners: std::collections::BTreeSet<u32> = (0..5).map(|epoch| partner(&of_epoch(epoch))).collect();
    assert!(partners.len() > 1, "record 0 always has the same partner");
}

#[test]
fn a_record_too_long_for_a_row_is_declared_dropped() {
    let plan = plan(2, request(vec![10, 5000, 4096]));
    assert_eq!(plan.dropped, [1]);
    assert_eq!(plan.records.len(), 2);
}

#[test]
fn a_bucket_of_nothing_is_refused() {
    let refusal = BucketToPair::new(Config { bucket: 0 }).err().unwrap();
    assert!(refusal.contains("bucket must be at least 1"), "{refusal}");
}

#[test]
fn an_empty_corpus_gives_an_empty_plan() {
    assert!(plan(2, request(Vec::new())).batch_ends.is_empty());
}

/// The algorithm as the module's doc says it, with a list for every micro-batch.
fn plain(batches_per_bucket: usize, request: &PlanRequest) -> (Vec<u32>, Vec<u32>) {
    let length = |record: u32| request.lengths[record as usize];
    let mut rng = SplitMix64::new(request.seed, request.epoch);
    let mut records: Vec<u32> = (0..request.lengths.len() as u32).collect();
    records.retain(|&record| length(record) <= request.max_seq_len);
    rng.shuffle(&mut records);
    records.sort_by_key(|&record| length(record));
    let mut batches: Vec<Vec<u32>> = Vec::new();
    for bucket in records.chunks_mut(batches_per_bucket * request.rows_per_batch as usize) {
        rng.shuffle(bucket);
        let mut batch: Vec<u32> = Vec::new();
        for &record in &*bucket {
            let widest = batch.iter().chain([&record]).map(|&record| length(record)).max().unwrap();
            let full = batch.len() as u32 == request.rows_per_batch;
            if full || request.token_budget.is_some_and(|budget| (batch.len() as u32 + 1) * widest > budget) {
                batches.push(std::mem::take(&mut batch));
            }
            batch.push(record);
        }
        batches.push(batch);
    }
    rng.shuffle(&mut batches);
    let ends = batches.iter().scan(0, |end, batch| {
        *end += batch.len() as u32;
        Some(*end)
    });
    let ends = ends.collect();
    (batches.concat(), ends)
}

#[test]
fn the_plan_is_that_of_the_plain_algorithm() {
    let mut rng = SplitMix64::new(5, 0);
    for round in 0..400 {
        let longest = [3, 40, 4000, 1 << 19, 1 << 22][round % 5];
        let request = PlanRequest {
            max_seq_len: longest - longest / 8,
            rows_per_batch: 1 + rng.below(5) as u32,
            token_budget: (round % 2 == 0).then_some(longest * 2),
            epoch: round as u32,
            ..request((0..rng.below(300)).map(|_| rng.below(u64::from(longest)) as u32 + 1).collect())
        };
        let expected = plain(1 + round % 3, &request);
        let plan = plan(1 + round as u32 % 3, request);
        assert_eq!((plan.records, plan.batch_ends), expected, "round {round}");
    }
}
