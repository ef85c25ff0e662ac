//! Properties of a sampler. The host checks each plan against the rules of `wit/sampler.wit` as it comes, so a plan that
//! is here has kept them.

use serde_json::Value;

use super::inputs::{self, MAX_SEQ_LEN};
use super::{Outcome, Report};
use crate::plugins::{Plan, PlanRequest, PluginRef, Sampler};

const HUGE: usize = 1_000_000;

pub fn check(plugin: &PluginRef, config: &Value, same_order: bool, report: &mut Report) {
    let subject = Subject { plugin, config };
    report.add("an empty corpus has an empty plan", subject.empty());
    report.add("corpora of every shape and size are planned by the rules", subject.shapes());
    report.add("a token budget that every record fits is kept to", subject.budget());
    report.add("records too long for a row are dropped", subject.too_long());
    report.add("two instances give the same plan", subject.instances_agree());
    report.add("nothing is remembered from call to call", subject.remembers_nothing());
    match same_order {
        true => report.add("every epoch has the same order, as its schema says", subject.same_order()),
        false => report.add("each epoch and each seed has its own order", subject.orders_differ()),
    }
    report.add("1,000,000 records are planned within the limits", subject.huge());
}

struct Subject<'a> {
    plugin: &'a PluginRef,
    config: &'a Value,
}

impl Subject<'_> {
    fn start(&self) -> Result<Sampler, String> {
        Sampler::load(self.plugin, Some(self.config)).map_err(|error| error.to_string())
    }

    fn empty(&self) -> Outcome {
        let plan = plan(&mut self.start()?, &request(&[], &[]))?;
        match plan.records.is_empty() && plan.dropped.is_empty() {
            true => Ok(()),
            false => Err("it plans records that do not exist".into()),
        }
    }

    fn shapes(&self) -> Outcome {
        let mut sampler = self.start()?;
        for count in [1, 2, 3, 7, 64, 1001] {
            let roots = inputs::roots(count);
            for lengths in inputs::shapes(count) {
                for rows_per_batch in [1, 2, 3, 8] {
                    let request = PlanRequest { rows_per_batch, ..request(&lengths.of_records, &roots) };
                    plan(&mut sampler, &request).map_err(|error| {
                        format!("{count} records, {}, {rows_per_batch} rows a micro-batch: {error}", lengths.name)
                    })?;
                }
            }
        }
        Ok(())
    }

    fn budget(&self) -> Outcome {
        let mut sampler = self.start()?;
        let (lengths, roots) = (inputs::skewed(500, MAX_SEQ_LEN), inputs::roots(500));
        for token_budget in [MAX_SEQ_LEN, MAX_SEQ_LEN * 3 / 2, u32::MAX] {
            let request =
                PlanRequest { token_budget: Some(token_budget), rows_per_batch: 8, ..request(&lengths, &roots) };
            plan(&mut sampler, &request).map_err(|error| format!("a budget of {token_budget} tokens: {error}"))?;
        }
        Ok(())
    }

    fn too_long(&self) -> Outcome {
        let lengths = [MAX_SEQ_LEN + 1, u32::MAX, u32::MAX];
        let plan = plan(&mut self.start()?, &request(&lengths, &[0, 0, 0]))?;
        match plan.dropped.len() {
            3 => Ok(()),
            dropped => Err(format!("{dropped} of 3 are dropped")),
        }
    }

    fn instances_agree(&self) -> Outcome {
        let (lengths, roots) = (inputs::skewed(500, MAX_SEQ_LEN), inputs::roots(500));
        let plan_anew = || plan(&mut self.start()?, &request(&lengths, &roots));
        same(&plan_anew()?, &plan_anew()?)
    }

    fn remembers_nothing(&self) -> Outcome {
        let mut sampler = self.start()?;
        let (lengths, roots) = (inputs::skewed(500, MAX_SEQ_LEN), inputs::roots(500));
        let first = plan(&mut sampler, &request(&lengths, &roots))?;
        plan(&mut sampler, &PlanRequest { epoch: 9, seed: 1, ..request(&lengths[..100], &roots[..100]) })?;
        same(&first, &plan(&mut sampler, &request(&lengths, &roots))?)
    }

    fn orders_differ(&self) -> Outcome {
        let orders = self.orders()?;
        for (at, order) in orders.iter().enumerate() {
            if orders[..at].contains(order) {
                return Err("two of epoch 0, 1, 2 of a seed and epoch 0 of another have the same order; a sampler \
                            that means that says `\"x-same-order\": true` at the top of its schema"
                    .into());
            }
        }
        Ok(())
    }

    fn same_order(&self) -> Outcome {
        let orders = self.orders()?;
        match orders.iter().all(|order| *order == orders[0]) {
            true => Ok(()),
            false => {
                Err("the order changes with the epoch or the seed, but its schema says `\"x-same-order\": true`".into())
            }
        }
    }

    fn orders(&self) -> Result<Vec<Vec<u32>>, String> {
        let mut sampler = self.start()?;
        let (lengths, roots) = (inputs::skewed(500, MAX_SEQ_LEN), inputs::roots(500));
        let mut order =
            |epoch, seed| Ok(plan(&mut sampler, &PlanRequest { epoch, seed, ..request(&lengths, &roots) })?.records);
        [(0, 42), (1, 42), (2, 42), (0, 43)].into_iter().map(|(epoch, seed)| order(epoch, seed)).collect()
    }

    fn huge(&self) -> Outcome {
        let (lengths, roots) = (inputs::skewed(HUGE, MAX_SEQ_LEN), inputs::roots(HUGE));
        plan(&mut self.start()?, &request(&lengths, &roots)).map(|_| ())
    }
}

fn request<'a>(lengths: &'a [u32], roots: &'a [u32]) -> PlanRequest<'a> {
    PlanRequest {
        lengths,
        roots,
        epoch: 0,
        seed: 42,
        max_seq_len: MAX_SEQ_LEN,
        rows_per_batch: 2,
        accumulation: 8,
        token_budget: None,
    }
}

fn plan(sampler: &mut Sampler, request: &PlanRequest) -> Result<Plan, String> {
    sampler.plan(request).map_err(|error| error.to_string())
}

fn same(first: &Plan, second: &Plan) -> Outcome {
    match first == second {
        true => Ok(()),
        false => Err("the same request has two answers".into()),
    }
}
