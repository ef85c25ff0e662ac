//! What an export is worth, judged on its files: the losses of base, base + adapter and export on the same records.
//!
//! One layer of one model is in memory at a time, so that a model can be judged that does not fit: the residual streams of all
//! records, or of as many as take no more than the base's files, go through a layer before the next one is read.

use crate::config::WeightDtype;
use crate::corpus::Record;
use crate::error::{Error, Result};
use crate::model::adapter::{Adapter, LayerAdapters, values};
use crate::model::checkpoint::{Checkpoint, TensorEntry};
use crate::model::config::TextConfig;
use crate::model::gemma4::{Layer, Positions, embedded};
use crate::model::products::Products;
use crate::model::weights::{LayerWeights, WeightReader};
use crate::train::batch::{Batch, IGNORED};
use crate::train::evaluate::{RecordLoss, batches, compare};
use burn::tensor::activation::log_softmax;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use serde::Serialize;
use tunehost_kernels::cross_entropy::logits;
use tunehost_kernels::norm::rms_norm;

/// Most logits of one model that are looked at together.
const LOGITS_AT_ONCE: usize = 1 << 22;

/// Rows whose logits over a vocabulary of `vocab` tokens are looked at together.
pub(crate) fn rows_at_once(vocab: usize) -> usize {
    (LOGITS_AT_ONCE / vocab).max(1)
}

/// Most tokens that are judged at once, beyond one record: the residual streams of two models, `hidden` wide, take no more than the
/// files of the base, however many records there are.
pub(crate) fn tokens_at_once(base: &Checkpoint, hidden: usize) -> usize {
    let base_bytes: usize = base.entries().values().map(TensorEntry::size_bytes).sum();
    base_bytes / (2 * hidden * size_of::<f32>())
}

/// A model on disk, with an adapter where it has one.
#[derive(Clone, Copy)]
pub struct OnDisk<'a> {
    /// Its weights.
    pub checkpoint: &'a Checkpoint,
    /// Its shape.
    pub config: &'a TextConfig,
    /// What is added to it.
    pub adapter: Option<&'a Adapter>,
}

/// Where and how the models are judged.
#[derive(Clone, Copy)]
pub struct Judge<'a> {
    /// Where it is computed.
    pub device: &'a Device,
    /// How matrices are kept.
    pub weights: WeightDtype,
}

/// What came of base, base + adapter and export.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Proof {
    /// Records judged.
    pub records: usize,
    /// Their trained tokens.
    pub tokens: usize,
    /// Mean loss of the base over those tokens, in nats.
    pub base: f64,
    /// Of base + adapter.
    pub tuned: f64,
    /// Of the export.
    pub export: f64,
    /// Mean divergence KL(base + adapter || export) over those tokens, in nats.
    pub kl: f64,
    /// Standard error of the gain `base - tuned`, records paired; none with one record only.
    pub standard_error: Option<f64>,
    /// (base - export) / (base - tuned); none where there is no gain.
    pub retained_gain: Option<f64>,
    /// What follows from it.
    pub verdict: Verdict,
}

/// Whether an export holds what was tuned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It retains at least the asked-for part of the gain.
    Passed,
    /// It retains less.
    Failed,
    /// Base and tuned model differ by less than two standard errors, so nothing can be said of what was retained.
    NoMeasurableGain,
    /// It answers as the base does, to the last bit.
    EqualToTheBase,
}

/// Losses of each record by model, and of the tuned model's distribution what the export loses of it.
#[derive(Default)]
struct Losses {
    records: [Vec<RecordLoss>; 3],
    kl_sum: f64,
}

/// Norm and matrix of a model's head.
type Head = (Tensor<1>, Tensor<2>);

impl Judge<'_> {
    /// Judges `export` beside `base` and `tuned` on `records`. `progress` is told the layers done, of how many.
    ///
    /// # Errors
    /// Class `model`; `export::no_records` where no token of the records is trained; `model::not_finite` naming the model.
    pub fn prove(
        &self,
        models: [OnDisk; 3],
        records: &[&Record],
        min_retained_gain: f64,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Proof> {
        let tokens: usize = records.iter().map(|record| Batch::of([*record]).trained()).sum();
        if tokens == 0 {
            return Err(Error::new("export::no_records", "no token of the records to judge by is trained")
                .expected("held-out records with something to predict")
                .help("name records with --data"));
        }
        let most = tokens_at_once(models[0].checkpoint, models[0].config.hidden_size);
        let groups: Vec<&[&Record]> = batches(records, most).collect();
        let total = groups.len() * models.iter().map(|model| model.config.layers.len()).sum::<usize>();
        let mut done = 0;
        let mut losses = Losses::default();
        for group in groups {
            self.judge(models, group, &mut losses, &mut || {
                done += 1;
                progress(done, total);
            })?;
        }
        let Losses { records, kl_sum } = losses;
        let causes = [
            ("base", "its weights hold NaN or infinity, or numbers that overflow: compare its files with the original"),
            (
                "base + adapter",
                "the adapter's numbers, or its `lora_alpha`, are too large: take it again from its training",
            ),
            ("export", "the format cannot hold such weights: export as bfloat16 or float32"),
        ];
        for ((model, cause), losses) in causes.iter().zip(&records) {
            if let Some(bad) = losses.iter().find(|loss| !loss.loss_sum.is_finite()) {
                let message = format!("the loss of {model} on record {} is not finite", bad.id);
                return Err(Error::new("model::not_finite", message).expected("finite losses").help(*cause));
            }
        }
        Ok(verdict(&records, tokens, kl_sum, min_retained_gain))
    }

    /// Adds the losses of some records to `losses`.
    fn judge(
        &self,
        [base, tuned, export]: [OnDisk; 3],
        records: &[&Record],
        losses: &mut Losses,
        layer_done: &mut dyn FnMut(),
    ) -> Result<()> {
        let laid_out: Vec<Batch> = records.iter().map(|record| Batch::of([*record])).collect();
        // The base's are needed for its own losses alone, and gone before the others are made.
        let of_base = self.hidden(base, &laid_out, layer_done)?;
        let head = self.head(base)?;
        for ((record, batch), stream) in records.iter().zip(&laid_out).zip(of_base) {
            let mut loss_sum = 0.0;
            self.each_rows(batch, base.config.vocab_size, &mut |rows, targets| {
                loss_sum -= sum_of(&self.log_probabilities(base.config, &stream, &head, rows).gather(1, targets));
            });
            losses.records[0].push(loss_of(record, batch, loss_sum));
        }
        let streams = [self.hidden(tuned, &laid_out, layer_done)?, self.hidden(export, &laid_out, layer_done)?];
        // No adapter reaches the head, so base and tuned model share it.
        let heads = [head, self.head(export)?];
        for (at, (record, batch)) in records.iter().zip(&laid_out).enumerate() {
            let mut sums = [0.0; 2];
            self.each_rows(batch, base.config.vocab_size, &mut |rows, targets| {
                let [tuned, export] = [0, 1].map(|which: usize| {
                    let (stream, head) = (&streams[which][at], &heads[which]);
                    self.log_probabilities(base.config, stream, head, rows.clone())
                });
                for (sum, log_p) in sums.iter_mut().zip([&tuned, &export]) {
                    *sum -= sum_of(&log_p.clone().gather(1, targets.clone()));
                }
                losses.kl_sum += sum_of(&(tuned.clone().exp() * (tuned - export)).sum_dim(1));
            });
            for (losses, loss_sum) in losses.records[1..].iter_mut().zip(sums) {
                losses.push(loss_of(record, batch, loss_sum));
            }
        }
        Ok(())
    }

    /// The residual stream `[N, H]` of each batch after the last layer.
    fn hidden(&self, model: OnDisk, batches: &[Batch], layer_done: &mut dyn FnMut()) -> Result<Vec<Tensor<2>>> {
        self.through_layers(model, batches, &mut |_, _, streams, forward| {
            for (stream, batch) in streams.iter_mut().zip(batches) {
                *stream = forward(stream.clone(), batch, &mut Products::default());
            }
            layer_done();
        })
    }

    /// Takes the residual streams of `batches` through one layer after the other: `each` is given the layer's index, its
    /// weights, the streams, and the layer itself. The streams after the last layer.
    #[allow(clippy::type_complexity)]
    pub(super) fn through_layers(
        &self,
        model: OnDisk,
        batches: &[Batch],
        each: &mut dyn FnMut(
            usize,
            &LayerWeights,
            &mut [Tensor<2>],
            &dyn Fn(Tensor<2>, &Batch, &mut Products) -> Tensor<2>,
        ),
    ) -> Result<Vec<Tensor<2>>> {
        let config = model.config;
        let mut ignore = |_| {};
        let mut reader = WeightReader::open(config, model.checkpoint, self.device, self.weights, &mut ignore)?;
        let embed = reader.embed()?;
        let mut streams: Vec<Tensor<2>> = batches.iter().map(|batch| embedded(&embed, &batch.ids)).collect();
        drop(embed);
        for index in 0..config.layers.len() {
            let weights = reader.layer(index)?;
            let layer = Layer {
                config: &config.layers[index],
                heads: config.heads,
                eps: config.rms_norm_eps,
                weights: &weights,
                activations: DType::F32,
            };
            let adapters = model.adapter.map_or_else(LayerAdapters::default, |adapter| adapter.layer(index, None));
            let forward = |stream: Tensor<2>, batch: &Batch, products: &mut Products| {
                let positions = Positions::new(config, batch.segments.clone(), &batch.position_ids, self.device);
                layer.forward(stream, &adapters, &positions, products)
            };
            each(index, &weights, &mut streams, &forward);
        }
        Ok(streams)
    }

    fn head(&self, model: OnDisk) -> Result<Head> {
        let mut ignore = |_| {};
        let mut reader = WeightReader::open(model.config, model.checkpoint, self.device, self.weights, &mut ignore)?;
        Ok((reader.norm()?, reader.head()?))
    }

    /// Calls `each` with the rows of `batch` that have a target, some at a time, and with the targets, `[n, 1]`.
    fn each_rows(&self, batch: &Batch, vocab: usize, each: &mut dyn FnMut(Tensor<1, Int>, Tensor<2, Int>)) {
        let places: Vec<i32> =
            (0..batch.targets.len()).filter(|t| batch.targets[*t] != IGNORED).map(|t| t as i32).collect();
        for places in places.chunks(rows_at_once(vocab)) {
            let targets: Vec<i32> = places.iter().map(|t| batch.targets[*t as usize]).collect();
            let count = places.len();
            each(
                Tensor::from_data(TensorData::new(places.to_vec(), [count]), self.device),
                Tensor::from_data(TensorData::new(targets, [count, 1]), self.device),
            );
        }
    }

    /// Of every token, for `rows` of a residual stream after the last layer: `[rows, vocabulary]`.
    fn log_probabilities(
        &self,
        config: &TextConfig,
        stream: &Tensor<2>,
        (norm, head): &Head,
        rows: Tensor<1, Int>,
    ) -> Tensor<2> {
        let normed = rms_norm(stream.clone().select(0, rows), Some(norm.clone()), config.rms_norm_eps, DType::F32);
        log_softmax(logits(normed, head.clone(), config.final_logit_softcapping), 1)
    }
}

fn loss_of(record: &Record, batch: &Batch, loss_sum: f64) -> RecordLoss {
    RecordLoss { id: record.id.to_string(), root: 0, loss_sum, tokens: batch.trained() }
}

fn sum_of(tensor: &Tensor<2>) -> f64 {
    values(tensor).into_iter().map(f64::from).sum()
}

fn verdict([base, tuned, export]: &[Vec<RecordLoss>; 3], tokens: usize, kl_sum: f64, min_retained_gain: f64) -> Proof {
    let mean = |losses: &[RecordLoss]| losses.iter().map(|loss| loss.loss_sum).sum::<f64>() / tokens as f64;
    let standard_error = compare(&["all".into()], base, tuned).first().and_then(|change| change.standard_error);
    let (base_loss, tuned_loss, export_loss) = (mean(base), mean(tuned), mean(export));
    let gain = base_loss - tuned_loss;
    let measurable = standard_error.is_some_and(|error| gain > 2.0 * error);
    let retained_gain = measurable.then(|| (base_loss - export_loss) / gain);
    let verdict = match retained_gain {
        _ if base.iter().zip(export).all(|(b, e)| b.loss_sum == e.loss_sum) => Verdict::EqualToTheBase,
        None => Verdict::NoMeasurableGain,
        Some(retained) if retained < min_retained_gain => Verdict::Failed,
        Some(_) => Verdict::Passed,
    };
    Proof {
        records: base.len(),
        tokens,
        base: base_loss,
        tuned: tuned_loss,
        export: export_loss,
        // Rounding can leave a tiny negative number of what is zero.
        kl: kl_sum.max(0.0) / tokens as f64,
        standard_error,
        retained_gain,
        verdict,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn losses(sums: [f64; 4]) -> Vec<RecordLoss> {
        let record = |(at, loss_sum): (usize, f64)| RecordLoss { id: at.to_string(), root: 0, loss_sum, tokens: 10 };
        sums.into_iter().enumerate().map(record).collect()
    }

    fn proof(tuned: [f64; 4], export: [f64; 4]) -> Proof {
        verdict(&[losses([40.0, 41.0, 39.0, 40.0]), losses(tuned), losses(export)], 40, 4.0, 0.8)
    }

    #[test]
    fn what_is_retained_decides() {
        let tuned = [30.0, 31.0, 29.5, 30.5];
        let passed = proof(tuned, [31.0, 32.0, 30.5, 31.5]);
        assert_eq!(passed.verdict, Verdict::Passed);
        assert!((passed.retained_gain.unwrap() - 35.0 / 39.0).abs() < 1e-12, "{passed:?}");
        assert_eq!((passed.base, passed.kl), (4.0, 0.1));
        assert_eq!(proof(tuned, [35.0, 36.0, 34.5, 35.5]).verdict, Verdict::Failed);
        assert_eq!(proof(tuned, [40.0, 41.0, 39.0, 40.0]).verdict, Verdict::EqualToTheBase);
    }

    #[test]
    fn a_gain_within_two_standard_errors_says_nothing() {
        let noise = proof([30.0, 50.0, 30.0, 48.0], [30.0, 50.0, 30.0, 48.0]);
        assert_eq!((noise.verdict, noise.retained_gain), (Verdict::NoMeasurableGain, None));
        let worse = proof([42.0, 43.0, 41.0, 42.0], [42.0, 43.0, 41.0, 42.0]);
        assert_eq!(worse.verdict, Verdict::NoMeasurableGain);
    }
}
