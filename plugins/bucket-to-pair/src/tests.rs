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
