//! Which keys each query sees: found by changing keys and values and looking at what the attention kernel makes of it, and
//! held against the window and the documents that the configuration and the micro-batch ask for.
//!
//! Three looks at documents laid end to end. Every value row in turn is the only one that is not zero: an output row is then
//! not zero where its query sees that key. A key and its value, at the ends and in the middle of each document in turn, are
//! replaced: the output rows that change, to the bit, are those of the queries that see it. The gradient of such a row is pulled
//! back: only the keys and values that it saw may get one.

use crate::device;
use crate::error::{Error, Result};
use crate::model::adapter::{tensor, values};
use crate::model::config::TextConfig;
use crate::model::gemma4;
use crate::model::lora::group;
use crate::model::rng::SplitMix64;
use crate::plan::Source;
use crate::plan::work::visible_keys;
use burn::tensor::{DType, Device, Tensor};
use serde::Serialize;
use std::fmt::{self, Display, Formatter};
use tunehost_kernels::attention::{Attention, Heads, Segments, windowed_attention_output};
use tunehost_kernels::cotangent::pull_back;
use tunehost_kernels::resolve::Dtypes;

/// The window that documents are sized by where a model has none.
const WITHOUT_WINDOW: usize = 512;

/// Attention as it is called: `q`, `k`, `v`, and the documents.
type Attend<'a> = dyn Fn(Tensor<3>, Tensor<3>, Tensor<3>, &Segments) -> Tensor<3> + 'a;

/// What every layer kind of a base sees.
#[derive(Debug, Serialize)]
pub struct Report {
    /// By what the kernel computed.
    pub source: Source,
    /// Where it ran.
    pub device: String,
    /// What `windowed_attention` resolves to there.
    pub kernel: String,
    /// Lengths of the documents of the micro-batch, in tokens.
    pub documents_tokens: Vec<usize>,
    /// Rows of each layer kind whose key and value were replaced, and whose gradient was pulled back.
    pub rows_changed: usize,
    /// By layer kind.
    pub bands: Vec<Band>,
}

/// What the layers of one kind see.
#[derive(Debug, Serialize)]
pub struct Band {
    /// `sliding` or `full`.
    pub kind: &'static str,
    /// Layers of these sizes.
    pub layers: usize,
    /// The window that the base's configuration asks for, in keys.
    pub window_keys: Option<usize>,
    /// Query heads.
    pub query_heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Values of a head.
    pub head_dim: usize,
    /// The most keys that a query saw.
    pub keys_most: usize,
    /// The first row of a document, from 0, that saw as many; later rows see no more.
    pub saturated_row: usize,
    /// Pairs of query and key that were looked at, each in every head.
    pub pairs: usize,
    /// Pairs that are seen, as the configuration has it.
    pub pairs_expected: usize,
    /// Pairs that were seen in every head.
    pub pairs_seen: usize,
    /// What is not as it should be.
    pub wrong: Wrong,
}

/// Pairs that are not as they should be, by what is wrong.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize)]
pub struct Wrong {
    /// Seen although the key is further back than the window.
    pub beyond_window: usize,
    /// Seen although the key is another document's.
    pub other_document: usize,
    /// Seen although the key comes after the query.
    pub future: usize,
    /// Not seen, or a number that is none.
    pub missing: usize,
    /// The first of them.
    pub first: Option<String>,
}

impl Wrong {
    fn count(&self) -> usize {
        self.beyond_window + self.other_document + self.future + self.missing
    }
}

/// Looks at every kind of layer of `text` through the kernels of the device `name`, in `dtypes`.
///
/// # Errors
/// Class `device`.
pub fn probe(text: &TextConfig, name: &str, dtypes: Dtypes, kernel: String) -> Result<Report> {
    let device = device::open(name)?;
    let window = text.layers.iter().filter_map(|layer| layer.window).max();
    let documents = documents(window.unwrap_or(WITHOUT_WINDOW));
    let bands = text.attention_kinds().into_iter().map(|(layer, layers)| {
        let heads = Heads { query: text.heads, kv: layer.kv_heads, dim: layer.head_dim };
        let attend = |q, k, v, segments: &Segments| {
            let attention: Attention = gemma4::attention(layer, segments, dtypes.weights);
            let [q, k, v] = [q, k, v].map(|t: Tensor<3>| t.cast(dtypes.activations));
            windowed_attention_output(q, k, v, &attention).out.cast(DType::F32)
        };
        let look = Look { heads, window: layer.window, documents: &documents, device: &device, attend: &attend };
        look.band(layer.kind.name(), layers)
    });
    let bands = bands.collect();
    let rows_changed = Rows::new(&documents, window).edges_and_middles().len();
    let (source, device) = (Source::Measured, name.into());
    Ok(Report { source, device, kernel, documents_tokens: documents, rows_changed, bands })
}

impl Report {
    /// The first layer kind that does not see what it should.
    ///
    /// # Errors
    /// `probe::mask`.
    pub fn verdict(&self) -> Result<()> {
        let Some(band) = self.bands.iter().find(|band| band.wrong.count() > 0) else { return Ok(()) };
        let Band { kind, layers, wrong, .. } = band;
        let first = wrong.first.as_deref().unwrap_or_default();
        let message = format!(
            "the band of the {layers} {kind} layers is broken at {} places; the first: {first}",
            group(wrong.count())
        );
        let window = band.window_keys.map_or("all keys up to its own".into(), |w| format!("{} keys", group(w)));
        Err(Error::new("probe::mask", message)
            .expected(format!("each query to see {window} within its document"))
            .help(format!(
                "do not train with {} on {}: it is not the model that is asked for",
                self.kernel, self.device
            )))
    }
}

/// Documents in which a window is reached, kept to, and not reached, and one of a single token.
fn documents(window: usize) -> Vec<usize> {
    vec![window + window / 4 + 2, window / 2 + 1, 1, window + 1]
}

struct Look<'a> {
    heads: Heads,
    window: Option<usize>,
    documents: &'a [usize],
    device: &'a Device,
    attend: &'a Attend<'a>,
}

/// What attention is called with, and what of it each query should see.
struct Inputs {
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    segments: Segments,
    rows: Rows,
}

impl Look<'_> {
    fn band(&self, kind: &'static str, layers: usize) -> Band {
        let rows = Rows::new(self.documents, self.window);
        let n = rows.document.len();
        let segments = Segments::new(rows.offsets.clone(), n).expect("documents have tokens");
        let [q, k, v] = [self.heads.query, self.heads.kv, self.heads.kv].map(|heads| self.random(n, heads));
        let inputs = Inputs { q, k, v, segments, rows };
        let mut wrong = Wrong::default();
        let mut keys_seen = vec![0; n];
        self.single_values(&inputs, &mut keys_seen, &mut wrong);
        self.changed_rows(&inputs, &mut wrong);
        self.gradients(&inputs, &mut wrong);

        let keys_most = keys_seen.iter().copied().max().unwrap_or(0);
        let saturated = keys_seen.iter().position(|seen| *seen == keys_most).unwrap_or(0);
        Band {
            kind,
            layers,
            window_keys: self.window,
            query_heads: self.heads.query,
            kv_heads: self.heads.kv,
            head_dim: self.heads.dim,
            keys_most,
            saturated_row: saturated - inputs.rows.start(saturated),
            pairs: n * n,
            pairs_expected: self.documents.iter().map(|tokens| visible_keys(*tokens, self.window)).sum(),
            pairs_seen: keys_seen.iter().sum(),
            wrong,
        }
    }

    /// Values of `[n, heads, dim]` that give scores of about 1, the same every time.
    fn random(&self, n: usize, heads: usize) -> Tensor<3> {
        let mut rng = SplitMix64::new(n as u64, &format!("probe of {heads} heads"));
        let scale = (3.0 / (self.heads.dim as f64).sqrt()).sqrt();
        let values = (0..n * heads * self.heads.dim).map(|_| (scale * (2.0 * rng.next_f64() - 1.0)) as f32).collect();
        tensor([n, heads, self.heads.dim], values, self.device)
    }

    /// One value row after the other that is not zero, as many at a time as a head has columns: each in its own.
    fn single_values(&self, inputs: &Inputs, keys_seen: &mut [usize], wrong: &mut Wrong) {
        let Inputs { q, k, segments, rows, .. } = inputs;
        let (n, Heads { query, kv, dim }) = (keys_seen.len(), self.heads);
        for first in (0..n).step_by(dim) {
            let keys = first..n.min(first + dim);
            let mut single = vec![0.0; n * kv * dim];
            for key in keys.clone() {
                (0..kv).for_each(|head| single[(key * kv + head) * dim + key - first] = 1.0);
            }
            let out = (self.attend)(q.clone(), k.clone(), tensor([n, kv, dim], single, self.device), segments);
            for (row, of_row) in values(&out).chunks_exact(query * dim).enumerate() {
                for key in keys.clone() {
                    let weights = || of_row.iter().skip(key - first).step_by(dim);
                    keys_seen[row] += usize::from(weights().all(|weight| *weight > 0.0));
                    let seen = rows.sees(row, key);
                    if !weights().all(|weight| if seen { *weight > 0.0 } else { *weight == 0.0 }) {
                        rows.note(wrong, row, key);
                    }
                }
            }
        }
    }

    /// One key and value row that is another: which output rows change.
    fn changed_rows(&self, inputs: &Inputs, wrong: &mut Wrong) {
        let Inputs { q, k, v, segments, rows } = inputs;
        let width = self.heads.query * self.heads.dim;
        let before = values(&(self.attend)(q.clone(), k.clone(), v.clone(), segments));
        for key in rows.edges_and_middles() {
            let change = |t: &Tensor<3>| {
                let (shape, mut changed) = (t.dims(), values(t));
                let row = self.heads.kv * self.heads.dim;
                changed[key * row..][..row].iter_mut().for_each(|x| *x = 0.5 - *x);
                tensor(shape, changed, self.device)
            };
            let after = values(&(self.attend)(q.clone(), change(k), change(v), segments));
            let pairs = before.chunks_exact(width).zip(after.chunks_exact(width));
            for (row, (before, after)) in pairs.enumerate() {
                let changed = before.iter().zip(after).any(|(b, a)| b.to_bits() != a.to_bits());
                if changed != rows.sees(row, key) {
                    rows.note(wrong, row, key);
                }
            }
        }
    }

    /// The gradient of one output row: which keys and values get one.
    fn gradients(&self, inputs: &Inputs, wrong: &mut Wrong) {
        let Inputs { q, k, v, segments, rows } = inputs;
        let (n, width) = (rows.document.len(), self.heads.query * self.heads.dim);
        for query in rows.edges_and_middles() {
            let [q, k, v] = [q, k, v].map(|t| t.clone().autodiff().require_grad());
            let out = (self.attend)(q, k.clone(), v.clone(), segments).reshape([n, width]);
            let mut d_out = vec![0.0; n * width];
            d_out[query * width..][..width].fill(1.0);
            let mut tape = pull_back(out, tensor([n, width], d_out, self.device));
            let [d_k, d_v] = [k, v].map(|leaf| values(&leaf.grad_remove(&mut tape).expect("attention reads it")));
            let row = self.heads.kv * self.heads.dim;
            for (key, (d_k, d_v)) in d_k.chunks_exact(row).zip(d_v.chunks_exact(row)).enumerate() {
                let as_it_should = match rows.sees(query, key) {
                    // A key that is alone in its band has a weight of 1 whatever it is.
                    true => d_v.iter().any(|g| *g != 0.0) && d_k.iter().chain(d_v).all(|g| g.is_finite()),
                    false => d_k.iter().chain(d_v).all(|g| *g == 0.0),
                };
                if !as_it_should {
                    rows.note(wrong, query, key);
                }
            }
        }
    }
}

/// Rows of documents laid end to end, and what each should see.
struct Rows {
    window: usize,
    /// Offsets of the documents, and the end.
    offsets: Vec<u32>,
    /// Document of each row.
    document: Vec<usize>,
}

impl Rows {
    fn new(documents: &[usize], window: Option<usize>) -> Self {
        let mut offsets = vec![0];
        let mut document = Vec::new();
        for (index, tokens) in documents.iter().enumerate() {
            document.extend(std::iter::repeat_n(index, *tokens));
            offsets.push(document.len() as u32);
        }
        Self { window: window.unwrap_or(usize::MAX), offsets, document }
    }

    fn start(&self, row: usize) -> usize {
        self.offsets[self.document[row]] as usize
    }

    fn sees(&self, row: usize, key: usize) -> bool {
        self.document[row] == self.document[key] && key <= row && row - key < self.window
    }

    /// The first, the middle and the last row of every document.
    fn edges_and_middles(&self) -> Vec<usize> {
        let spans = self.offsets.windows(2).map(|pair| (pair[0] as usize, pair[1] as usize));
        let mut rows: Vec<usize> = spans.flat_map(|(start, end)| [start, (start + end) / 2, end - 1]).collect();
        rows.dedup();
        rows
    }

    fn note(&self, wrong: &mut Wrong, row: usize, key: usize) {
        let (count, what) = match () {
            () if self.sees(row, key) => (&mut wrong.missing, "does not see"),
            () if self.document[row] != self.document[key] => (&mut wrong.other_document, "sees, in another document,"),
            () if key > row => (&mut wrong.future, "sees, before it comes,"),
            () => (&mut wrong.beyond_window, "sees, beyond the window,"),
        };
        *count += 1;
        let place = |at: usize| format!("{} of document {}", group(at - self.start(at)), self.document[at] + 1);
        wrong.first.get_or_insert_with(|| format!("row {} {what} key {}", place(row), place(key)));
    }
}

impl Display for Report {
    fn fmt(&self, out: &mut Formatter) -> fmt::Result {
        let tokens: Vec<String> = self.documents_tokens.iter().map(|tokens| group(*tokens)).collect();
        writeln!(
            out,
            "mask (measured), {} on {}, documents of {} tokens end to end",
            self.kernel,
            self.device,
            tokens.join(", ")
        )?;
        writeln!(
            out,
            "{:<11} {:>16} {:>9} {:>10} {:>15} {:>11} {:>11} {:>9}",
            "layers", "heads x dim", "window", "most keys", "first at row", "pairs seen", "expected", "wrong"
        )?;
        for band in &self.bands {
            writeln!(
                out,
                "{:<11} {:>16} {:>9} {:>10} {:>15} {:>11} {:>11} {:>9}",
                format!("{} {}", band.layers, band.kind),
                format!("{}/{} x {}", band.query_heads, band.kv_heads, band.head_dim),
                band.window_keys.map_or("none".into(), group),
                group(band.keys_most),
                group(band.saturated_row),
                group(band.pairs_seen),
                group(band.pairs_expected),
                group(band.wrong.count()),
            )?;
        }
        for Band { kind, wrong, .. } in self.bands.iter().filter(|band| band.wrong.count() > 0) {
            writeln!(
                out,
                "{kind}: {} keys beyond the window, {} of another document, {} of the future seen; {} not seen",
                group(wrong.beyond_window),
                group(wrong.other_document),
                group(wrong.future),
                group(wrong.missing)
            )?;
        }
        write!(
            out,
            "rows and keys count from 0 in their document; every pair of rows was looked at by its value in every head, {} rows by \
             their key and by their gradient",
            self.rows_changed
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::WeightDtype;
    use crate::model::fixtures::large_model_headers;

    const HEADS: Heads = Heads { query: 4, kv: 2, dim: 16 };

    fn look(window: Option<usize>, attend: &Attend) -> Wrong {
        let (device, documents) = (Device::flex(), documents(16));
        let look = Look { heads: HEADS, window, documents: &documents, device: &device, attend };
        look.band("sliding", 1).wrong
    }

    fn attend(window: Option<usize>) -> impl Fn(Tensor<3>, Tensor<3>, Tensor<3>, &Segments) -> Tensor<3> {
        move |q, k, v, segments| {
            windowed_attention_output(
                q,
                k,
                v,
                &Attention { segments: segments.clone(), window, scale: 1.0, operands: DType::F32 },
            )
            .out
        }
    }

    #[test]
    fn the_bands_of_26b_a4b_saturate_at_row_1023() {
        let (mut text, _) = large_model_headers();
        // as published but for the heads, which only repeat the work
        text.heads = 2;
        text.layers.iter_mut().for_each(|layer| (layer.kv_heads, layer.head_dim) = (1, 64));
        let report = probe(&text, "cpu", WeightDtype::F32.beside_f32(), "cpu".into()).unwrap();
        report.verdict().unwrap();
        let [sliding, full] = &report.bands[..] else { panic!("{report}") };
        assert_eq!((sliding.layers, sliding.window_keys, full.layers, full.window_keys), (25, Some(1024), 5, None));
        assert_eq!((sliding.keys_most, sliding.saturated_row), (1024, 1023));
        assert_eq!((full.keys_most, full.saturated_row), (1282, 1281));
        // documents of 1,282, 513, 1 and 1,025 tokens
        let triangle = |n: usize| n * (n + 1) / 2;
        assert_eq!(full.pairs_seen, triangle(1282) + triangle(513) + 1 + triangle(1025));
        assert_eq!(full.pairs_seen - sliding.pairs_seen, triangle(1282 - 1024) + triangle(1025 - 1024));
    }

    #[test]
    fn what_a_kernel_sees_too_much_or_too_little_is_found_and_named() {
        assert_eq!(look(Some(16), &attend(Some(16))), Wrong::default());
        assert_eq!(look(None, &attend(None)), Wrong::default());
        let wide = look(Some(16), &attend(Some(17)));
        // one key for each of the six rows that are past the window, and for the one of the last document
        assert!(wide.beyond_window >= 7 && wide.other_document + wide.future + wide.missing == 0, "{wide:?}");
        assert_eq!(wide.first.unwrap(), "row 16 of document 1 sees, beyond the window, key 0 of document 1");
        let narrow = look(Some(16), &attend(Some(15)));
        assert!(narrow.missing >= 8 && narrow.beyond_window + narrow.other_document + narrow.future == 0, "{narrow:?}");
        let merged = look(None, &|q, k, v, segments| {
            let one = Segments::new(vec![0, segments.tokens() as u32], segments.tokens()).unwrap();
            attend(None)(q, k, v, &one)
        });
        assert!(merged.other_document > 0 && merged.missing == 0 && merged.future == 0, "{merged:?}");
        let report = Report {
            source: Source::Measured,
            device: "cpu".into(),
            kernel: "a kernel".into(),
            documents_tokens: documents(16),
            rows_changed: 10,
            bands: vec![Band {
                kind: "sliding",
                layers: 25,
                window_keys: Some(16),
                query_heads: 4,
                kv_heads: 2,
                head_dim: 16,
                keys_most: 17,
                saturated_row: 16,
                pairs: 1,
                pairs_expected: 1,
                pairs_seen: 1,
                wrong: look(Some(16), &attend(Some(17))),
            }],
        };
        let error = report.verdict().unwrap_err();
        assert_eq!((error.code(), error.exit_code()), ("probe::mask", 7));
        assert!(
            error.to_string().contains("the 25 sliding layers") && error.to_string().contains("16 keys"),
            "{error}"
        );
        let no_number = look(None, &|q, k, v, segments| attend(None)(q, k, v, segments) * f32::NAN);
        assert!(no_number.missing > 0 && no_number.other_document > 0, "{no_number:?}");
    }

    #[test]
    fn a_gradient_outside_the_band_is_found_where_the_result_is_right() {
        // Nothing is added but a gradient to every key.
        let leaking = |q: Tensor<3>, k: Tensor<3>, v: Tensor<3>, segments: &Segments| {
            let nothing = (k.clone() - k.clone().detach()).sum().reshape([1, 1, 1]);
            attend(Some(16))(q, k, v, segments) + nothing
        };
        let wrong = look(Some(16), &leaking);
        assert!(wrong.beyond_window > 0 && wrong.other_document > 0 && wrong.missing == 0, "{wrong:?}");
        let looks = 10 * documents(16).iter().sum::<usize>();
        assert!(wrong.count() <= looks, "in the gradients of ten rows alone: {wrong:?}");
    }
}
