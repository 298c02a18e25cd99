"""The update rules in plain torch, for any float dtype and device: a step for each rule, and the loop over time."""

from fastweights.rules.abc import ABC
from fastweights.rules.add import ADD
from fastweights.rules.base import Rule, loop
from fastweights.rules.decay import DECAY
from fastweights.rules.delta import DELTA
from fastweights.rules.gated import GATED
from fastweights.rules.gated_delta import GATED_DELTA
from fastweights.rules.linformer import LINFORMER

RULES: dict[str, Rule] = {rule.name: rule for rule in (ADD, GATED, DELTA, DECAY, GATED_DELTA, ABC, LINFORMER)}
# Rules whose state is a matrix. They have chunked forms and kernels of their own; rules with slots are calls of these.
MATRIX_RULES = tuple(name for name, rule in RULES.items() if not rule.slots)
# Rules that write the difference from what the state holds under the key. Their chunked form is the WY form.
DELTA_RULES = (DELTA.name, GATED_DELTA.name)

__all__ = ["DELTA_RULES", "MATRIX_RULES", "RULES", "Rule", "loop"]
