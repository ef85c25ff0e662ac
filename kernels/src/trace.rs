//! What ran, when, and how much it did: spans of kernels and of whoever calls them, recorded while somebody asks.
//!
//! Spans belong to the thread that calls: a kernel starts its threads inside its own span, and the backward pass runs where it
//! was asked for. A device that computes beside the calling thread is waited for where a span starts and where it ends, so what
//! was asked of it in a span is done in it, and nothing else is; nothing then runs beside anything else. While nobody records, a
//! span is one look at a thread's variable, and nothing is waited for.

use burn::tensor::DType;
use std::cell::RefCell;
use std::time::{Duration, Instant};

/// What a kernel computes and moves at least.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Work {
    /// Operations of its matrix products, a multiplication and an addition being two; of what is bound by memory, none.
    pub flop: usize,
    /// Bytes of its inputs and results.
    pub bytes: usize,
}

impl Work {
    /// `flop` operations over `values` f32 values.
    pub fn f32(flop: usize, values: usize) -> Self {
        Self::of(flop, values, DType::F32)
    }

    /// `flop` operations over `values` values of `dtype`.
    pub fn of(flop: usize, values: usize, dtype: DType) -> Self {
        Self { flop, bytes: values * dtype.size() }
    }

    /// The same with the `values` of a weight, each of `value_bytes`.
    pub fn with_weight(self, values: usize, value_bytes: usize) -> Self {
        Self { bytes: self.bytes + values * value_bytes, ..self }
    }
}

/// Something that ran.
#[derive(Debug, Clone, PartialEq)]
pub struct Span {
    /// What it was.
    pub name: &'static str,
    /// Which one of several, such as the number of a layer.
    pub index: Option<usize>,
    /// What it did, for a kernel.
    pub work: Option<Work>,
    /// When it started, from the start of the recording.
    pub start: Duration,
    /// When it ended.
    pub end: Duration,
    /// The span around it, as an index into the recorded spans.
    pub parent: Option<usize>,
}

impl Span {
    /// How long it took.
    pub fn duration(&self) -> Duration {
        self.end - self.start
    }
}

struct Recorder {
    began: Instant,
    /// Waits for the device, before a clock is read.
    sync: Box<dyn Fn()>,
    spans: Vec<Span>,
    open: Vec<usize>,
}

thread_local! {
    static RECORDER: RefCell<Option<Recorder>> = const { RefCell::new(None) };
}

/// Runs `f` on this thread and records its spans, in the order in which they started. `sync` waits for the device.
pub fn record<T>(sync: impl Fn() + 'static, f: impl FnOnce() -> T) -> (T, Vec<Span>) {
    let recorder = Recorder { began: Instant::now(), sync: Box::new(sync), spans: Vec::new(), open: Vec::new() };
    RECORDER.replace(Some(recorder));
    let result = f();
    let spans = RECORDER.take().map(|recorder| recorder.spans).unwrap_or_default();
    (result, spans)
}

/// A part of a step, until the result is dropped.
pub fn scope(name: &'static str) -> Open {
    open(name, None, || None)
}

/// One of several parts of a step.
pub fn scope_of(name: &'static str, index: usize) -> Open {
    open(name, Some(index), || None)
}

/// A kernel: opened where its operation is called, for every device at once.
pub fn kernel(name: &'static str, work: impl FnOnce() -> Work) -> Open {
    open(name, None, || Some(work()))
}

/// A span that ends when this is dropped.
#[must_use = "a span ends where it is dropped"]
pub struct Open {
    /// Its place among the recorded spans; nothing where nobody records.
    place: Option<usize>,
}

fn open(name: &'static str, index: Option<usize>, work: impl FnOnce() -> Option<Work>) -> Open {
    let place = RECORDER.with_borrow_mut(|recorder| {
        let recorder = recorder.as_mut()?;
        (recorder.sync)();
        let (place, parent, work) = (recorder.spans.len(), recorder.open.last().copied(), work());
        recorder.open.push(place);
        let start = recorder.began.elapsed();
        recorder.spans.push(Span { name, index, work, start, end: start, parent });
        Some(place)
    });
    Open { place }
}

impl Drop for Open {
    fn drop(&mut self) {
        let Some(place) = self.place else { return };
        RECORDER.with_borrow_mut(|recorder| {
            // The recording may have ended, or another begun, while the span was open.
            let Some(recorder) = recorder.as_mut().filter(|recorder| recorder.open.last() == Some(&place)) else {
                return;
            };
            (recorder.sync)();
            recorder.open.pop();
            recorder.spans[place].end = recorder.began.elapsed();
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::{Segments, windowed_attention};
    use crate::testing::device;
    use burn::tensor::Tensor;
    use std::cell::Cell;
    use std::rc::Rc;

    #[test]
    fn spans_nest_and_nothing_is_recorded_unasked() {
        drop(scope("before"));
        let waits = Rc::new(Cell::new(0));
        let counted = waits.clone();
        let ((), spans) = record(
            move || counted.set(counted.get() + 1),
            || {
                let _outer = scope("outer");
                drop(kernel("inner", || Work::f32(6, 2).with_weight(3, 2)));
                let _layer = scope_of("layer", 4);
            },
        );
        let names: Vec<_> = spans.iter().map(|span| (span.name, span.index, span.parent)).collect();
        assert_eq!(names, [("outer", None, None), ("inner", None, Some(0)), ("layer", Some(4), Some(0))]);
        assert_eq!(spans[1].work, Some(Work { flop: 6, bytes: 14 }));
        assert!(spans[0].start <= spans[1].start && spans[1].end <= spans[2].start && spans[2].end <= spans[0].end);
        assert!(scope("after").place.is_none());
        assert_eq!(waits.get(), 6, "the device is waited for where each span starts and ends, and nowhere else");
    }

    #[test]
    fn both_passes_of_a_kernel_are_seen_on_the_thread_that_asked() {
        let tensor = |heads| Tensor::<3>::ones([6, heads, 16], &device().autodiff()).require_grad();
        let segments = Segments::new(vec![0, 4, 6], 6).unwrap();
        let ((), spans) = record(
            || (),
            || {
                let out = windowed_attention(tensor(2), tensor(1), tensor(1), &segments, Some(3), 1.0);
                drop(out.sum().backward());
            },
        );
        // 1 + 2 + 3 + 3 keys, and 1 + 2, seen in two heads of 16 values
        let pairs = 12;
        let found: Vec<_> = spans.iter().map(|span| (span.name, span.work.unwrap().flop)).collect();
        let products = |count: usize| count * 2 * pairs * 2 * 16;
        assert_eq!(
            found,
            [("windowed_attention", products(2)), ("windowed_attention, backward", products(5))],
            "two products forward, five backward"
        );
    }
}
