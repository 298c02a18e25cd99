"""fairseq's language model with adaptive input (Baevski & Auli, 2019), as Hugging Face classes.

The vocabulary is sorted by frequency and cut into clusters: the frequent words, and tails of rarer ones, whose
embeddings are narrower by a factor each. The output layer is an adaptive softmax over the same clusters. Blocks norm
before attention and before the MLP, and there is no norm after the last one. Positions are sinusoids.

Shapes: input_ids [B,T]   hidden [B,T,D] or [N,D]   labels [N]
        cluster i has words bounds[i] to bounds[i+1], Vi of them, and embeddings of width Di = D / factor**i
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GenericForSequenceClassification, GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.opt.modeling_opt import eager_attention_forward
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from fastweights.config import ADAPTIVE_INPUT, ConfigError
from fastweights.utils.errors import Argument

# fairseq numbers positions from the one after the padding token, which is token 1.
FIRST_POSITION = 2
IGNORED = -100  # the label that Hugging Face's losses leave out


class AdaptiveInputConfig(PreTrainedConfig):
    """The defaults are fairseq's `transformer_lm_wiki103`.

    Attributes:
        cutoffs: First words of the tails.
        factor: By how much each tail's embeddings are narrower than those of the cluster before.
        tie_word_embeddings: Input and output have the same embeddings.
        tie_projections: The tails' projections of input and output are the same, one transposed.
        softmax_dropout: Dropout of the output layer's input, and of the tails' projected inputs.
    """

    model_type = ADAPTIVE_INPUT
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    vocab_size: int = 267_744
    hidden_size: int = 1024
    num_hidden_layers: int = 16
    num_attention_heads: int = 8
    intermediate_size: int = 4096
    hidden_act: str = "relu"
    cutoffs: list[int] | tuple[int, ...] = (20_000, 60_000)
    factor: int = 4
    dropout: float | int = 0.3
    attention_dropout: float | int = 0.1
    activation_dropout: float | int = 0.1
    softmax_dropout: float | int = 0.2
    tie_word_embeddings: bool = True
    tie_projections: bool = True
    use_cache: bool = True
    pad_token_id: int | None = 1
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 2

    def __post_init__(self, **kwargs: Any) -> None:
        self.cutoffs = list(self.cutoffs)
        super().__post_init__(**kwargs)
        for name, value, size in (
            ("num_attention_heads", self.num_attention_heads, self.hidden_size),
            ("factor", self.factor ** len(self.cutoffs), self.hidden_size),
        ):
            if value < 1 or size % value:
                raise ConfigError(Argument(name), f": the width {size} must be divisible by {value}")
        if not self.cutoffs or not all(low < high for low, high in itertools.pairwise(self.bounds)):
            expected = f" must rise, between 1 and the {self.vocab_size} words of the vocabulary"
            raise ConfigError(Argument("cutoffs"), f"{expected}, found {self.cutoffs}")

    @property
    def bounds(self) -> tuple[int, ...]:
        """The first word of each cluster, and the size of the vocabulary."""
        return (0, *self.cutoffs, self.vocab_size)

    @property
    def cluster_sizes(self) -> list[tuple[int, int]]:
        """Vi and Di of each cluster."""
        sizes = enumerate(itertools.pairwise(self.bounds))
        return [(end - start, self.hidden_size // self.factor**i) for i, (start, end) in sizes]


class AdaptiveEmbedding(nn.Module):
    """Embeddings of several widths, each projected to the model's."""

    def __init__(self, config: AdaptiveInputConfig) -> None:
        super().__init__()
        self.bounds = config.bounds
        self.words = nn.ModuleList(nn.Embedding(*size) for size in config.cluster_sizes)
        self.projections = nn.ModuleList(
            nn.Linear(width, config.hidden_size, bias=False) for _, width in config.cluster_sizes
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        """[B,T,D]. Every cluster is computed for every token: that is cheap, and all shapes are static."""
        embedded: Any = 0
        for i, (start, end) in enumerate(itertools.pairwise(self.bounds)):
            inside = (input_ids >= start) & (input_ids < end)
            found = self.projections[i](self.words[i]((input_ids - start).clamp(0, end - start - 1)))
            embedded = embedded + torch.where(inside[..., None], found, 0.0)
        return embedded


class Matrix(nn.Module):
    """A weight of the output layer. It is no Linear: some are concatenated or transposed first, which must work after
    quantization of all Linears, too."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))


class AdaptiveSoftmax(nn.Module):
    """An output layer with two steps: a word of the first cluster or the choice of a tail, then a word of the tail.

    The model's `logits` are exact log-probabilities of all words, which `forward` returns. Losses need neither them nor
    any other tensor of the size of the vocabulary: `losses` here, and training/chunked_loss.py.
    """

    def __init__(self, config: AdaptiveInputConfig) -> None:
        super().__init__()
        self.bounds = config.bounds
        sizes = config.cluster_sizes
        self.words: Any = nn.ModuleList(Matrix(*size) for size in sizes)
        self.tails = Matrix(len(sizes) - 1, config.hidden_size)
        # Stored as those of the embedding, [D,Di], and applied transposed.
        self.projections: Any = nn.ModuleList(Matrix(config.hidden_size, width) for _, width in sizes[1:])
        self.dropout = nn.Dropout(config.softmax_dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """The log-probability of every word, [...,V], in at least float32. Dropout is for the losses alone."""
        head = _log_softmax(F.linear(hidden, self.head_weight()))
        first = self.bounds[1]
        parts = [head[..., :first]]
        for tail in range(len(self.projections)):
            share = head[..., first + tail, None]
            projected = F.linear(hidden, self.projections[tail].weight.mT)
            parts.append(share + _log_softmax(F.linear(projected, self.tail_weight(tail))))
        return torch.cat(parts, -1)

    def head_weight(self) -> Tensor:
        """[V0+tails,D]: of the words of the first cluster, then of the choice of each tail."""
        return torch.cat([self.words[0].weight, self.tails.weight])

    def tail_weight(self, tail: int) -> Tensor:
        """[Vi,Di] of a tail's words."""
        return self.words[tail + 1].weight

    def tail_input(self, tail: int, hidden: Tensor) -> Tensor:
        """What a tail's words are computed from, [...,Di]; `hidden` had its dropout already."""
        return self.dropout(F.linear(hidden, self.projections[tail].weight.mT))

    def head_labels(self, labels: Tensor) -> Tensor:
        """The head's labels for those of words: a word of the first cluster, or a tail."""
        tails = torch.bucketize(labels, torch.tensor(self.bounds[2:], device=labels.device), right=True)
        return torch.where(labels >= self.bounds[1], self.bounds[1] + tails, labels)

    def by_tail(self, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """For each tail the tokens whose label is in it, as indices [n], and their labels in the tail [n].

        There is at least one, with the label IGNORED if need be: so every parameter takes part in every step, as
        distributed training requires.
        """
        for start, end in itertools.pairwise(self.bounds[1:]):
            index = ((labels >= start) & (labels < end)).nonzero()[:, 0]
            if len(index):
                yield index, labels[index] - start
            else:
                yield labels.new_zeros(1), labels.new_full((1,), IGNORED)

    def losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The negative log-probability of each label, [N], in at least float32; 0 where it is IGNORED.

        Args:
            hidden: Inputs of the layer, [N,D].
            labels: Words [N].
        """
        hidden = self.dropout(hidden)
        losses = _losses(F.linear(hidden, self.head_weight()), self.head_labels(labels))
        for tail, (index, words) in enumerate(self.by_tail(labels)):
            logits = F.linear(self.tail_input(tail, hidden[index]), self.tail_weight(tail))
            losses = losses.index_add(0, index, _losses(logits, words))
        return losses


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy [N]. Through logsumexp, which is more precise than torch's float32 log_softmax on a CPU."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    chosen = logits.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return torch.where(labels == IGNORED, 0.0, logits.logsumexp(-1) - chosen)


class SinusoidalPositions(nn.Module):
    """fairseq's position embeddings. They are computed, so that there is no longest sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, positions: Tensor) -> Tensor:
        """[...,D] in float32, for positions that count from 0."""
        half = self.width // 2
        rate = math.log(10_000) / max(1, half - 1)
        frequencies = torch.exp(torch.arange(half, dtype=torch.float32, device=positions.device) * -rate)
        angles = (positions + FIRST_POSITION).float()[..., None] * frequencies
        return F.pad(torch.cat([angles.sin(), angles.cos()], -1), (0, self.width % 2))


class AdaptiveInputAttention(nn.Module):
    """Attention with biases everywhere."""

    def __init__(self, config: AdaptiveInputConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        width = config.hidden_size
        self.num_heads, self.head_dim = config.num_attention_heads, width // config.num_attention_heads
        self.scaling, self.dropout = self.head_dim**-0.5, config.attention_dropout
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (
            linear(hidden_states).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        attend: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.dropout if self.training else 0.0
        y, weights = attend(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return self.out_proj(y.flatten(2)), weights


class AdaptiveInputLayer(GradientCheckpointingLayer):
    """A block. Its parts have fairseq's names: `final_layer_norm` is the norm before the MLP."""

    def __init__(self, config: AdaptiveInputConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = AdaptiveInputAttention(config, layer_idx)
        self.self_attn_layer_norm = nn.LayerNorm(config.hidden_size)
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self.final_layer_norm = nn.LayerNorm(config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]
        self.dropout, self.activation_dropout = nn.Dropout(config.dropout), nn.Dropout(config.activation_dropout)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        attended, _ = self.self_attn(self.self_attn_layer_norm(hidden_states), **kwargs)
        hidden_states = hidden_states + self.dropout(attended)
        inner = self.activation_dropout(self.activation(self.fc1(self.final_layer_norm(hidden_states))))
        return hidden_states + self.dropout(self.fc2(inner))


class AdaptiveInputPreTrainedModel(PreTrainedModel):
    """What the classes below share."""

    config: AdaptiveInputConfig
    config_class = AdaptiveInputConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["AdaptiveInputLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": AdaptiveInputLayer, "attentions": AdaptiveInputAttention}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """fairseq's start: embeddings as large as their width asks for, Xavier for everything else."""
        if isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=module.embedding_dim**-0.5)
        elif isinstance(module, nn.Linear | Matrix):
            init.xavier_uniform_(module.weight)
            if getattr(module, "bias", None) is not None:
                init.zeros_(module.bias)
        elif isinstance(module, AdaptiveInputAttention):
            for linear in (module.q_proj, module.k_proj, module.v_proj):
                init.xavier_uniform_(linear.weight, gain=2**-0.5)


class AdaptiveInputModel(AdaptiveInputPreTrainedModel):
    """The blocks, without an output layer."""

    def __init__(self, config: AdaptiveInputConfig) -> None:
        super().__init__(config)
        self.embed_tokens = AdaptiveEmbedding(config)
        self.embed_positions = SinusoidalPositions(config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(AdaptiveInputLayer(config, i) for i in range(config.num_hidden_layers))
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        hidden: Any = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            seen = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None] + seen
            if attention_mask is not None and attention_mask.ndim == 2:  # padding takes no positions
                position_ids = (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, -hidden.shape[1] :]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        hidden = math.sqrt(self.config.hidden_size) * hidden + self.embed_positions(position_ids).to(hidden.dtype)
        hidden = self.dropout(hidden)
        for layer in self.layers:
            hidden = layer(
                hidden, attention_mask=mask, position_ids=position_ids, past_key_values=past_key_values, **kwargs
            )
        return BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=past_key_values)


class AdaptiveInputForCausalLM(AdaptiveInputPreTrainedModel, GenerationMixin):
    """The language model. Its `logits` are log-probabilities."""

    def __init__(self, config: AdaptiveInputConfig) -> None:
        super().__init__(config)
        self.model = AdaptiveInputModel(config)
        self.lm_head = AdaptiveSoftmax(config)
        clusters = range(len(config.cluster_sizes))
        tied = [(f"words.{i}", f"words.{i}") for i in clusters]
        if config.tie_projections:
            tied += [(f"projections.{i - 1}", f"projections.{i}") for i in clusters[1:]]
        self._tied_weights_keys = {f"lm_head.{a}.weight": f"model.embed_tokens.{b}.weight" for a, b in tied}
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """As for transformers' causal language models, but in training mode, with `labels`, no logits are computed:
        they would take far more memory than the loss."""
        count = kwargs.pop("num_items_in_batch", None)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        loss = logits = None
        if labels is not None:
            targets = labels[:, 1:].flatten()
            total = self.lm_head.losses(hidden[:, :-1].flatten(0, 1), targets).sum()
            loss = total / ((targets != IGNORED).sum() if count is None else count)
        if labels is None or not self.training:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden[:, kept])
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class AdaptiveInputForSequenceClassification(GenericForSequenceClassification, AdaptiveInputPreTrainedModel):
    """The blocks with a classifier."""


AutoConfig.register(ADAPTIVE_INPUT, AdaptiveInputConfig)
AutoModel.register(AdaptiveInputConfig, AdaptiveInputModel)
AutoModelForCausalLM.register(AdaptiveInputConfig, AdaptiveInputForCausalLM)
AutoModelForSequenceClassification.register(AdaptiveInputConfig, AdaptiveInputForSequenceClassification)
