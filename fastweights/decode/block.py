"""A block of a decode model: its attention or rule, and its MLP. Shapes: hidden [B,D]"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastweights.decode.context import DecodeContext, RotaryEmbedding
from fastweights.decode.mixers import DecodeAttention, DecodeRecurrence, DecodeWindow, LayerInputs
from fastweights.decode.packing import UnsupportedModel, as_window, norm_of, weight_of
from fastweights.modeling.families import Family
from fastweights.modeling.families.base import ModulePaths
from fastweights.modeling.layer import (
    FastWeightsAttention,
)
from fastweights.ops.linear import FusedLinear, Norm, NormSums

ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}


class DecodeBlock:
    """One block of the model: a rule, a window or full attention, and the MLP."""

    def __init__(
        self,
        context: DecodeContext,
        family: Family,
        block: nn.Module,
        config: Any,
        index: int,
        rotary: RotaryEmbedding | None,
    ) -> None:
        parts = family.module_paths
        assert parts is not None
        original = family.attention_of(block)
        converted = isinstance(original, FastWeightsAttention)
        attention: Any = original if converted else as_window(family, original, config, index, context.max_length)

        self.program = context.program
        self.inputs = LayerInputs(attention, context, norm_of(block.get_submodule(parts.norm)), rotary)
        self.recurrence: DecodeRecurrence | None = None
        if attention.rule is not None:
            self.recurrence = DecodeRecurrence(attention.rule, context, self.inputs)
        self.window: DecodeWindow | None = None
        if attention.window is not None:
            kind, source = (DecodeWindow, attention.window) if converted else (DecodeAttention, attention)
            self.window = kind(source, context, self.inputs)
        self.out_proj = context.linear(*weight_of(attention.o_proj))

        self._pack_mlp(context, parts, block, config)
        self.out_norms = [
            None if path is None else norm_of(block.get_submodule(path))
            for path in (parts.attention_out_norm, parts.mlp_out_norm)
        ]
        self.branch = context.buffer(config.hidden_size)
        self.parallel = bool(getattr(config, "use_parallel_residual", False))

    def _pack_mlp(self, context: DecodeContext, parts: ModulePaths, block: nn.Module, config: Any) -> None:
        name = getattr(config, parts.activation)
        if name not in ACTIVATION_NAMES:
            raise UnsupportedModel(f"the decode engine has no activation {name!r}")
        up = [weight_of(block.get_submodule(path)) for path in parts.up]
        self.up_proj = context.linear(
            torch.cat([weight for weight, _ in up]),
            None if up[0][1] is None else torch.cat([bias for _, bias in up if bias is not None]),
            norm_of(block.get_submodule(parts.mlp_norm)),
            activation=ACTIVATION_NAMES[name],
            gated=len(up) == 2,
        )
        self.mlp_hidden = context.buffer(len(up[0][0]))
        self.down_proj = context.linear(*weight_of(block.get_submodule(parts.down)))

    def step(self, hidden: Tensor, sums: NormSums) -> None:
        """Update hidden [B,D] and the norm sums of its rows in place."""
        self.inputs.step(hidden, sums)
        if self.parallel:
            mlp = self.up_proj(hidden, self.mlp_hidden, sums=sums)
        self._add(hidden, sums, self.out_proj, self._attend().flatten(1), self.out_norms[0])
        if not self.parallel:
            mlp = self.up_proj(hidden, self.mlp_hidden, sums=sums)
        self._add(hidden, sums, self.down_proj, mlp, self.out_norms[1])

    def _attend(self) -> Tensor:
        """y [B,H,d] of the rule, of the window, or of both."""
        if self.program is not None:
            return self.program.mix(self.recurrence, self.window, self.inputs.mix_logit)
        y = None if self.recurrence is None else self.recurrence.step()
        y = y if self.window is None else self.window.step(y, self.inputs.mix_logit)
        assert y is not None
        return y

    def _add(self, hidden: Tensor, sums: NormSums, linear: FusedLinear, x: Tensor, norm: Norm | None) -> None:
        if norm is None:
            linear(x, hidden, add=True, sums=sums)
        else:
            hidden.add_(norm(linear(x, self.branch)))
            sums.parts = 0
