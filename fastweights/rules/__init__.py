"""The update rules in plain torch, for any float dtype and device: a step for each rule, and the loop over time."""

from fastweights.rules.add import ADD
from fastweights.rules.base import Rule, loop
from fastweights.rules.decay import DECAY
from fastweights.rules.delta import DELTA
from fastweights.rules.gated import GATED

RULES: dict[str, Rule] = {rule.name: rule for rule in (ADD, GATED, DELTA, DECAY)}

__all__ = ["RULES", "Rule", "loop"]
