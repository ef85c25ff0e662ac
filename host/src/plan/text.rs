//! The report as a person reads it.

use super::Source;
use super::blocks::BlockSize;
use super::memory::COMPUTING_BYTES;
use super::report::{MeasuredShape, Report, Sized};
use crate::model::lora::group;
use crate::report::{bytes, duration};
use std::fmt::{self, Display, Formatter};
use std::time::Duration;

impl Display for Report {
    fn fmt(&self, out: &mut Formatter) -> fmt::Result {
        self.base(out)?;
        let a = &self.adapters;
        writeln!(
            out,
            "\nadapters (computed from shapes), rank {}, {:.3}% of the base trainable",
            a.rank,
            a.trainable_share * 100.0
        )?;
        write!(out, "{}", self.adapter_table())?;
        self.memory(out)?;
        self.measured(out)?;
        self.corpus(out)?;
        self.steps(out)?;
        self.disk(out)
    }
}

impl Report {
    fn base(&self, out: &mut Formatter) -> fmt::Result {
        let schemes: Vec<&String> = self.base.blocks.iter().flat_map(|b| b.quantised_bytes.keys()).collect();
        let schemes: Vec<&String> = schemes.into_iter().take(self.base.blocks[0].quantised_bytes.len()).collect();
        writeln!(
            out,
            "base (computed from the headers), {} parameters; a token is multiplied with {} of the layers, {} with the head",
            group(self.base.parameters),
            group(self.base.active_layer_parameters),
            group(self.base.active_parameters)
        )?;
        write!(out, "{:<14} {:>7} {:>15} {:>10} {:>10}", "block", "tensors", "parameters", "on disk", "on device")?;
        schemes.iter().try_for_each(|scheme| write!(out, " {scheme:>19}"))?;
        let row = |out: &mut Formatter, block: &BlockSize| {
            let (disk, device) = (bytes(block.disk_bytes), bytes(block.device_bytes));
            let (name, parameters) = (block.block.name(), group(block.parameters));
            write!(out, "\n{name:<14} {:>7} {parameters:>15} {disk:>10} {device:>10}", block.tensors)?;
            block
                .quantised_bytes
                .values()
                .try_for_each(|quantised| write!(out, " {:>19}", quantised.map_or_else(|| "as it is".into(), bytes)))
        };
        self.base.blocks.iter().try_for_each(|block| row(out, block))?;
        let tensors: usize = self.base.blocks.iter().map(|block| block.tensors).sum();
        let (disk, device) = (bytes(self.base.disk_bytes), bytes(self.base.device_bytes()));
        write!(out, "\n{:<14} {tensors:>7} {:>15} {disk:>10} {device:>10}", "total", group(self.base.parameters))?;
        schemes.iter().try_for_each(|scheme| write!(out, " {:>19}", bytes(self.base.quantised_bytes(scheme))))?;
        writeln!(
            out,
            "\nexperts are fused 3-D tensors: what replaces linear modules by 4-bit ones (its scales not counted) leaves them as they are"
        )
    }

    fn memory(&self, out: &mut Formatter) -> fmt::Result {
        let memory = &self.memory;
        let limit = match memory.limit.bytes {
            Some(limit) => {
                let once = if memory.limit.source == Some(Source::Measured) { ", n = 1" } else { "" };
                format!("{} of memory ({}{once})", bytes(limit), memory.limit.source.map_or("", Source::name))
            }
            None => "memory not known: --device-memory SIZE".into(),
        };
        writeln!(
            out,
            "\nmemory (computed; workspaces as the {} kernels tell them, {:.0}% slack assumed), device {}, {limit}",
            memory.kernels,
            memory.slack_share * 100.0,
            memory.device
        )?;
        if memory.device != "cpu" {
            writeln!(out, "note: no measurement on {} is behind this", memory.device)?;
        }
        let Sized { shape, memory: m, .. } = memory.configured;
        writeln!(out, "one step of {} rows of {} tokens, all full:", shape.micro_batch, group(shape.seq_len_tokens))?;
        let process = match &*memory.device {
            "cpu" => {
                format!("program, plugins, tokenizer, corpus (measured, n = 1, + {} assumed)", bytes(COMPUTING_BYTES))
            }
            _ => "program, plugins, tokenizer, corpus: in the host's memory".into(),
        };
        let naive = format!("loss head, if it made full logits, {:.3e} of them", m.naive_logits as f64);
        for (what, size) in [
            ("base", m.base_bytes),
            ("adapters, gradients, AdamW", m.adapters_gradients_adamw_bytes),
            ("snapshot while a checkpoint is written", m.checkpoint_snapshot_bytes),
            ("layer inputs", m.layer_inputs_bytes),
            ("kept by layers", m.kept_bytes),
            ("one layer: attention", m.attention_bytes),
            ("one layer: dense MLP and experts", m.feed_forward_bytes),
            ("loss head, by chunks", m.loss_head_bytes),
            (&*naive, m.naive_loss_head_bytes),
            (&*process, m.process_bytes),
            ("slack", m.slack_bytes),
        ] {
            writeln!(out, "  {what:<66} {:>10}", bytes(size))?;
        }
        let peak = "peak of the steps: of one layer and the loss head, the larger";
        writeln!(out, "  {peak:<66} {:>10}{}", bytes(m.peak_bytes), verdict(memory.configured.fits))?;
        let planned = memory.planned;
        writeln!(
            out,
            "  {:<66} {:>10}{}",
            format!("peak of the largest planned micro-batch, {} tokens", group(planned.shape.seq_len_tokens)),
            bytes(planned.memory.peak_bytes),
            verdict(planned.fits)
        )?;
        let evaluation = memory.evaluation.map(|of| {
            let tokens = group(of.batch_tokens);
            (format!("peak while held-out records are evaluated, {tokens} tokens at once"), of.peak_bytes)
        });
        let export =
            memory.export.map(|of| ("peak while the merged model is written and judged".to_string(), of.peak_bytes));
        for (what, peak) in evaluation.into_iter().chain(export) {
            writeln!(out, "  {what:<66} {:>10}", bytes(peak))?;
        }
        let run = memory.run;
        let of = if run.of == "steps" { "the largest planned micro-batch" } else { run.of };
        let what = format!("peak of this run: that of {of}");
        writeln!(out, "  {what:<66} {:>10}{}", bytes(run.peak_bytes), verdict(run.fits))?;
        let (rows, length) = (memory.configured.shape.micro_batch, memory.configured.shape.seq_len_tokens);
        if let Some(most) = memory.most_rows {
            writeln!(
                out,
                "most rows of {} tokens that fit, of 1 to 8: train.micro_batch {}",
                group(length),
                most.shape.micro_batch
            )?;
        }
        if let Some(longest) = memory.longest {
            let length = longest.shape.seq_len_tokens;
            writeln!(out, "longest at which {rows} rows fit, of the lengths below: data.max_seq_len {length}")?;
        }
        match memory.shapes.iter().any(|sized| sized.fits == Some(true)) {
            false if memory.limit.bytes.is_some() => writeln!(
                out,
                "no shape fits: model.weights = \"bf16\" takes two bytes a parameter, train.recompute_granularity = \"full\" keeps the least"
            )?,
            _ => {}
        }
        let mut lengths: Vec<usize> = memory.shapes.iter().map(|s| s.shape.seq_len_tokens).collect();
        lengths.dedup();
        write!(out, "{:<12}", "micro-batch")?;
        lengths.iter().try_for_each(|length| write!(out, " {:>14}", format!("x {}", group(*length))))?;
        let mut rows: Vec<usize> = memory.shapes.iter().map(|s| s.shape.micro_batch).collect();
        rows.sort_unstable();
        rows.dedup();
        for row in rows {
            write!(out, "\n{row:<12}")?;
            for sized in memory.shapes.iter().filter(|s| s.shape.micro_batch == row) {
                let mark = if sized.fits == Some(false) { " no" } else { "   " };
                write!(out, " {:>14}", format!("{}{mark}", bytes(sized.memory.peak_bytes)))?;
            }
        }
        writeln!(out)
    }

    fn measured(&self, out: &mut Formatter) -> fmt::Result {
        let Some(measured) = &self.measured else {
            return writeln!(
                out,
                "\nnothing was measured: tunehost smoke CONFIG computes these shapes on this machine"
            );
        };
        let path = measured.path.display();
        if let Some(why) = &measured.unused {
            return writeln!(out, "\n{path} is not used: {why}");
        }
        writeln!(out, "\nmeasured on {} ({path})", measured.measured.as_deref().unwrap_or_default())?;
        let size = |peak: Option<usize>| peak.map_or_else(|| "not known".into(), bytes);
        for MeasuredShape { shape, outcome, computed_peak_bytes, peak_bytes, micro_batch_s } in &measured.shapes {
            let (rows, width) = (shape.micro_batch, group(shape.seq_len_tokens));
            write!(out, "  {:<14} {outcome:<14}", format!("{rows} x {width}"))?;
            match micro_batch_s {
                Some(time) => writeln!(
                    out,
                    "peak {} measured (n = 1), {} computed; {time} s a micro-batch (measured)",
                    size(*peak_bytes),
                    bytes(*computed_peak_bytes)
                )?,
                None => writeln!(out, "peak {} computed", bytes(*computed_peak_bytes))?,
            }
        }
        Ok(())
    }

    fn corpus(&self, out: &mut Formatter) -> fmt::Result {
        let c = &self.corpus;
        writeln!(
            out,
            "\ncorpus ({}{}), {} records to train on, {} held out, {} left out by the sampler; lengths in tokens",
            c.source.name(),
            if c.sample.is_none() {
                format!(": every record encoded, n = {}", group(c.encoded_records))
            } else {
                String::new()
            },
            group(c.records),
            group(c.held_out_records),
            group(c.left_out_records)
        )?;
        if let Some(sample) = &c.sample {
            writeln!(
                out,
                "estimated from {} of {} rows, spread evenly; what is below is of those. --exact encodes all of them",
                group(sample.rows as usize),
                group(sample.of_rows as usize)
            )?;
        }
        writeln!(out, "{}", c.truncation)?;
        writeln!(out, "padding with {}: {:.1}%, which this engine does not compute", c.sampler, c.padding_share * 100.0)
    }

    fn steps(&self, out: &mut Formatter) -> fmt::Result {
        let s = &self.steps;
        writeln!(
            out,
            "\nsteps ({}), {} of {} micro-batches, {} in the last",
            s.source.name(),
            group(s.optimiser_steps),
            group(s.micro_batches),
            s.last_step_micro_batches
        )?;
        writeln!(
            out,
            "tokens {}, trained {}; FLOP nominal {:.3e}, performed {:.3e}",
            group(s.tokens),
            group(s.trained_tokens),
            s.work.nominal_flop,
            s.work.performed_flop
        )?;
        match self.schedules.is_empty() {
            true => writeln!(
                out,
                "time and checkpoints: not told without a speed: tunehost smoke CONFIG measures it; --peak-tflops, --utilisation assume it"
            )?,
            false => writeln!(
                out,
                "time and checkpoints, without evaluation and export (the same loss after every step and saves that take no time: assumed)"
            )?,
        }
        for schedule in &self.schedules {
            let stopped = schedule.stopped.as_ref().map(|why| format!("; stopped {why}")).unwrap_or_default();
            let late = if schedule.checkpoints.len() == 1 { ": none before the end" } else { "" };
            writeln!(
                out,
                "  {} ({}): {} of training, {} checkpoints, the first after step {}{late}{stopped}",
                schedule.at,
                schedule.source.name(),
                duration(Duration::from_secs_f64(schedule.training_s)),
                schedule.checkpoints.len(),
                schedule.checkpoints.first().copied().unwrap_or_default()
            )?;
        }
        Ok(())
    }

    fn disk(&self, out: &mut Formatter) -> fmt::Result {
        let d = &self.disk;
        let checkpoints = d.checkpoints_bytes.map_or_else(|| "not told without a speed".into(), bytes);
        writeln!(
            out,
            "\ndisk (computed): a checkpoint {}, all that stay {checkpoints}, adapter {}, merged model {}",
            bytes(d.checkpoint_bytes),
            bytes(d.adapter_bytes),
            bytes(d.merged_bytes)
        )?;
        let enough = d.free_bytes.map_or(String::new(), |free| {
            let fits = if d.run_bytes as u64 <= free { "fits" } else { "does not fit" };
            format!(", {} free (measured, n = 1): {fits}", bytes(free as usize))
        });
        write!(
            out,
            "  {} for the run{enough}; encode cache {} in the user's cache folder",
            bytes(d.run_bytes),
            bytes(d.encode_cache_bytes)
        )
    }
}

fn verdict(fits: Option<bool>) -> &'static str {
    match fits {
        Some(true) => "  fits",
        Some(false) => "  does not fit",
        None => "",
    }
}
