//! A sampler that misbehaves as its setting `act` says. Where it plans at all, it starts from the corpus's order and
//! spoils one thing.

use std::hint::black_box;

use serde::Deserialize;
use tunehost_plugin_sdk::{Plan, PlanRequest, Plugin, Sampler, log};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    act: Act,
}

#[derive(Deserialize, Clone, Copy, PartialEq)]
#[serde(rename_all = "kebab-case")]
enum Act {
    // Failures of the call.
    Loop,
    LoopInConfigure,
    MemoryBomb,
    DeepRecursion,
    Panic,
    PanicInConfigure,
    PanicInEpoch1,
    HugeAnswer,
    GigabyteAnswer,
    InvalidUtf8,
    RudeText,
    LogFlood,
    // Plans against the rules.
    Duplicate,
    DroppedAndPlanned,
    Missing,
    OutOfRange,
    OneLongRow,
    OneWideBatch,
    EmptyRow,
    FallingEnds,
    EndsTooShort,
}

struct Hostile {
    act: Act,
}

impl Plugin for Hostile {
    type Config = Config;

    const CONFIG_SCHEMA: &str = r#"{"type": "object", "required": ["act"], "properties": {"act": {"type": "string"}}}"#;

    fn new(config: Config) -> Result<Self, String> {
        match config.act {
            Act::PanicInConfigure => panic!("not even started"),
            Act::LoopInConfigure => spin(),
            act => Ok(Self { act }),
        }
    }
}

impl Sampler for Hostile {
    fn plan(&mut self, request: PlanRequest) -> Result<Plan, String> {
        let (records, dropped) = request.split_by_fit();
        let mut batch_ends = Vec::new();
        request.cut(&records, &mut batch_ends)?;
        let mut plan = Plan::one_record_per_row(records, batch_ends, dropped);
        match self.act {
            Act::Loop => spin(),
            Act::MemoryBomb => eat(),
            Act::DeepRecursion => drop(black_box(recurse(black_box(1)))),
            Act::Panic => panic!("record {} is cursed", request.lengths.len()),
            Act::PanicInEpoch1 if request.epoch == 1 => panic!("not this epoch"),
            Act::HugeAnswer => plan.records = vec![0; 1 << 20],
            Act::GigabyteAnswer => plan.records = vec![0; 1 << 28],
            Act::InvalidUtf8 => return Err(invalid_utf8()),
            Act::RudeText => return Err(format!("\u{1b}[2Jgone\n{}", "x".repeat(1 << 16))),
            Act::LogFlood => (0..100_000).for_each(|line| log::debug(&format!("line {line}"))),
            Act::Duplicate => plan.records[3] = plan.records[1],
            Act::DroppedAndPlanned => plan.dropped.push(plan.records[2]),
            Act::Missing => {
                plan.records.pop();
                plan.row_ends.pop();
                *plan.batch_ends.last_mut().expect("a batch") -= 1;
            }
            Act::OutOfRange => plan.records[0] = u32::MAX,
            Act::OneLongRow => {
                plan.row_ends = vec![plan.records.len() as u32];
                plan.batch_ends = vec![1];
            }
            Act::OneWideBatch => plan.batch_ends = vec![plan.row_ends.len() as u32],
            Act::EmptyRow => plan.row_ends.insert(1, 1),
            Act::FallingEnds => plan.batch_ends.swap(0, 1),
            Act::EndsTooShort => drop(plan.row_ends.pop()),
            Act::PanicInEpoch1 | Act::PanicInConfigure | Act::LoopInConfigure => {}
        }
        Ok(plan)
    }
}

fn spin() -> ! {
    let mut turns = 0u64;
    loop {
        turns = black_box(turns.wrapping_add(1));
    }
}

fn eat() -> ! {
    let mut eaten = Vec::new();
    loop {
        eaten.push(black_box(vec![1u8; 1 << 20]));
    }
}

#[inline(never)]
fn recurse(depth: u64) -> u64 {
    if depth == 0 { 0 } else { recurse(black_box(depth + 1)).wrapping_add(depth) }
}

fn invalid_utf8() -> String {
    // SAFETY: the bytes are never read as text in here. They only move to the host, which has to notice: a guest in
    // another language can hand over any bytes as a string.
    unsafe { String::from_utf8_unchecked(vec![0xff, 0xfe, 0xfd]) }
}

tunehost_plugin_sdk::export_sampler!(Hostile);
