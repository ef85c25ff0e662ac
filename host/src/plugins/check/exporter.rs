//! Properties of an exporter. The host checks each plan against the rules of `wit/exporter.wit` as it comes.

use serde_json::Value;

use super::inputs::tuned;
use super::{Outcome, Report};
use crate::plugins::{ExportPlan, Exporter, PluginRef, Tuned};

pub fn check(plugin: &PluginRef, config: &Value, report: &mut Report) {
    let subject = Subject { plugin, config };
    report.add("models of every size are laid out by the rules", subject.sizes());
    report.add("names that JSON has to escape come through", subject.odd_names());
    report.add("two instances lay out the same", subject.instances_agree());
    report.add("nothing is remembered from call to call", subject.remembers_nothing());
    report.add("a model of 20,000 tensors is laid out within the limits", subject.plan(&tuned(20_000, 5)).map(drop));
}

struct Subject<'a> {
    plugin: &'a PluginRef,
    config: &'a Value,
}

impl Subject<'_> {
    fn start(&self) -> Result<Exporter, String> {
        Exporter::load(self.plugin, Some(self.config)).map_err(|error| error.to_string())
    }

    fn plan(&self, tuned: &Tuned) -> Result<ExportPlan, String> {
        plan(&mut self.start()?, tuned)
    }

    fn sizes(&self) -> Outcome {
        let mut exporter = self.start()?;
        for (tensors, each) in [(1, 1), (2, 2), (30, 1), (657, 3)] {
            plan(&mut exporter, &tuned(tensors, each)).map_err(|error| format!("{tensors} tensors: {error}"))?;
        }
        Ok(())
    }

    fn odd_names(&self) -> Outcome {
        let mut tuned = tuned(4, 1);
        tuned.modules[0] = "model.\"quoted\".\\back.Ü.self_attn".into();
        tuned.base_path = "/a \"path\"/with\\all/of/it/ü".into();
        tuned.modules_regex = r"model\.(?:a|b)\.\d+\\".into();
        self.plan(&tuned).map(drop)
    }

    fn instances_agree(&self) -> Outcome {
        same(&self.plan(&tuned(30, 2))?, &self.plan(&tuned(30, 2))?)
    }

    fn remembers_nothing(&self) -> Outcome {
        let mut exporter = self.start()?;
        let first = plan(&mut exporter, &tuned(30, 2))?;
        plan(&mut exporter, &tuned(3, 1))?;
        same(&first, &plan(&mut exporter, &tuned(30, 2))?)
    }
}

fn plan(exporter: &mut Exporter, tuned: &Tuned) -> Result<ExportPlan, String> {
    exporter.plan(tuned).map_err(|error| error.to_string())
}

fn same(first: &ExportPlan, second: &ExportPlan) -> Outcome {
    match first == second {
        true => Ok(()),
        false => Err("the same model has two plans".into()),
    }
}
