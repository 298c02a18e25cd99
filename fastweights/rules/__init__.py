"""The update rules in plain torch, for any float dtype and device: a step for each rule, and the loop over time."""

from fastweights.rules.add import ADD
from fastweights.rules.base import Rule, loop
from fastweights.rules.decay import DECAY
from fastweights.rules.delta import DELTA
from fastweights.rules.gated import GATED
from fastweights.rules.gated_delta import GATED_DELTA

RULES: dict[str, Rule] = {rule.name: rule for rule in (ADD, GATED, DELTA, DECAY, GATED_DELTA)}
# Rules that write the difference from what the state holds under the key. Their chunked form is the WY form.
DELTA_RULES = (DELTA.name, GATED_DELTA.name)

__all__ = ["DELTA_RULES", "RULES", "Rule", "loop"]
