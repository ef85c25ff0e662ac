"""Saves every n optimiser steps. The same decisions as the Rust plugin `every-n-steps`."""

import json

from componentize_py_types import Err
from wit_world.exports.plugin import Info
from wit_world.exports.scheduling import Decision, StepInfo

SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["n"],
    "properties": {
        "n": {"type": "integer", "minimum": 1, "description": "Optimiser steps between two saves"}
    },
}

n = 1


class Plugin:
    def describe(self) -> Info:
        return Info(
            name="every-n-steps-python",
            version="0.1.0",
            description="Saves every n optimiser steps",
            config_schema=json.dumps(SCHEMA),
        )

    def configure(self, text: str) -> None:
        global n
        settings = json.loads(text)
        if list(settings) != ["n"]:
            raise Err("there is one setting, and it must be given: n")
        n = settings["n"]
        if type(n) is not int or n < 1:
            raise Err("n must be an integer of at least 1")


class Scheduling:
    def after_step(self, info: StepInfo) -> Decision:
        save = info.step % n == 0
        reason = f"step {info.step} is a multiple of {n}" if save else ""
        return Decision(save=save, stop=False, reason=reason)
