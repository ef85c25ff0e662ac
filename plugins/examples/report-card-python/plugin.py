"""The adapter as PEFT reads it, and a report card beside it: how large each module's update is beside its weight."""

import json

from componentize_py_types import Err
from wit_world.exports.exporting import Dtype, ExportPlan, Source, Tuned
from wit_world.exports.plugin import Info

SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "largest": {"type": "integer", "minimum": 1, "default": 10, "description": "Modules that the user is shown"}
    },
}

largest = 10


class Plugin:
    def describe(self) -> Info:
        return Info(
            name="report-card-python",
            version="0.1.0",
            description="The adapter, with a report card of how much each module changed",
            config_schema=json.dumps(SCHEMA),
        )

    def configure(self, text: str) -> None:
        global largest
        settings = json.loads(text)
        if not settings.keys() <= {"largest"}:
            raise Err("there is one setting: largest")
        largest = settings.get("largest", 10)
        if type(largest) is not int or largest < 1:
            raise Err("largest must be an integer of at least 1")


def adapter_config(tuned: Tuned) -> str:
    settings = {
        "base_model_name_or_path": tuned.base_path,
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": tuned.alpha,
        "lora_dropout": tuned.dropout,
        "peft_type": "LORA",
        "r": tuned.rank,
        "target_modules": tuned.modules_regex,
        "task_type": "CAUSAL_LM",
        "use_rslora": tuned.rslora,
    }
    return json.dumps(settings, indent=2) + "\n"


def report_card(tuned: Tuned) -> list[tuple[float, str]]:
    """How large each module's update is in parts of its weight, the largest first."""
    norms = zip(tuned.modules, tuned.weight_norms, tuned.update_norms)
    parts = [(update / weight if weight > 0 else 0.0, module) for module, weight, update in norms]
    return sorted(parts, key=lambda part: (-part[0], part[1]))


class Exporting:
    def plan(self, tuned: Tuned) -> ExportPlan:
        card = report_card(tuned)
        names, sources, indices = [], [], []
        for index, module in enumerate(tuned.modules):
            for which, source in (("lora_A", Source.LORA_A), ("lora_B", Source.LORA_B)):
                names.append(f"base_model.model.{module}.{which}.weight")
                sources.append(source)
                indices.append(index)
        rows = "".join(f"| {module} | {100 * part:.3f}% |\n" for part, module in card)
        return ExportPlan(
            names=names,
            sources=sources,
            indices=indices,
            dtypes=[Dtype.UNCHANGED] * len(names),
            strengths=[1.0] * len(names),
            constants=[],
            constant_ends=[],
            tensor_files=["adapter_model.safetensors"],
            tensor_file_ends=[len(names)],
            gguf_metadata=[],
            quantized=[],
            text_files=["adapter_config.json", "report-card.md"],
            texts=[adapter_config(tuned), "| module | update, in parts of its weight |\n|---|---|\n" + rows],
            copied_files=[],
            notes=[f"{module}: an update of {100 * part:.3f}% of its weight" for part, module in card[: min(largest, 100)]],
        )
