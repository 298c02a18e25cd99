"""FastWeightsConfig: how attention is replaced. Each field is documented once, here; the command line shows the same
descriptions as help."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from numbers import Integral, Real
from typing import Any, get_type_hints

from fastweights.utils.errors import Argument, FastWeightsError
from fastweights.utils.settings import check_names, check_settings, setting, setting_help

# model_type of a converted model: this and its family's name
MODEL_TYPE_PREFIX = "fastweights_"
# model_type of the one pretrained architecture that transformers does not have (modeling/adaptive_input.py)
ADAPTIVE_INPUT = "adaptive_input"
LOCAL = "local"
DEFAULT_LOCAL_WINDOW = 32
LARGEST_M, LARGEST_WINDOW, LARGEST_LENGTH, LARGEST_SEED = 2**16, 2**20, 2**31, 2**31
LARGEST_TABLE = 2**20

RULES = ("decay", "gated", "delta", "gated_delta", "add", LOCAL, "abc", "linformer")
FEATURE_MAPS = ("none", "relu", "elu", "dpfp", "favor+", "rfa")
POSITIVE_MAPS = ("relu", "elu", "dpfp", "favor+")
NORMALIZERS = ("none", "attention", "sum", "attention+sum", "unit")
GATE_INITS = ("uniform", "log", "teacher")
MIXES = ("constant", "token")
PROJECTIONS = ("own", "shared")
LINEAR_GATES, GATED_WRITE, PRETRAINED_VALUES = "linear_gates", "gated_write", "pretrained_values"
ONE_GATE = "one_gate"
ABLATIONS = (LINEAR_GATES, GATED_WRITE, PRETRAINED_VALUES, f"{GATED_WRITE}+{PRETRAINED_VALUES}", ONE_GATE)
FORGETTING_RULES = ("decay", "gated", "gated_delta")
UNIT_RULES = ("delta", "gated_delta")
RULES_WITHOUT_GATES = ("add", LOCAL, "linformer")
# Settings that name layers.
LAYER_LISTS = ("layers", "wide_layers")
# Bounded memories of m slots, each with a key and a value, which softmax attention reads.
SLOT_RULES = ("abc", "linformer")

# The best configuration of each rule in the paper's Table 1. gated_delta is not in the paper.
_BEST_MAP = {"delta": "relu"}
_BEST_NORMALIZER = {"delta": "sum", "gated_delta": "unit"}
_BEST_GATE_INIT = {"gated_delta": "log"}


class ConfigError(FastWeightsError):
    """A configuration that is not defined, with the reason."""


@dataclass(frozen=True)
class FastWeightsConfig:
    """The settings of a conversion. They are checked when the object is made, and cannot be changed afterwards.

    The command line has an option for each field. `help(name)` returns the description of a field.

    Raises:
        ConfigError: A setting is unknown, has a wrong type or value, or does not fit the others.
    """

    rule: str = setting("decay", "Update rule that replaces softmax attention.", RULES)
    m: int = setting(
        32,
        "State width: each head has a state of d x m. For abc and linformer the number of slots, each with a key and a "
        "value. Not used by the local rule.",
        ge=1,
        le=LARGEST_M,
    )
    feature_map: str | None = setting(
        None, "Feature map of queries and keys; by default the best one for the rule in the paper.", FEATURE_MAPS
    )
    normalize: str | None = setting(
        None,
        "Normalization of outputs (attention), of features (sum, or unit for unit length), or of both; by default unit "
        "for gated_delta, and for other rules the best one in the paper.",
        NORMALIZERS,
    )
    gate_init: str | None = setting(
        None,
        "Initialization of the forget gates: uniform (as in the paper), log (memory lengths spread "
        "logarithmically from one token to train_length), or teacher (as log, until the fit of a training spreads them "
        "around how far back each head of the teacher attends); by default log for gated_delta, and uniform for other "
        "rules.",
        GATE_INITS,
    )
    projection_init: str = setting(
        "attention",
        "Initialization of queries and keys: from the pretrained attention (approximated if m is smaller), or random.",
        ("attention", "random"),
    )
    window: int | None = setting(
        None,
        "Tokens in the softmax window that is mixed with the state, 0 for no window; by default 0 "
        f"({DEFAULT_LOCAL_WINDOW} for the local rule, which is the window alone).",
        ge=0,
        le=LARGEST_WINDOW,
    )
    sinks: int = setting(
        0,
        "First tokens of each document that the window sees at any distance; fewer than window.",
        ge=0,
        le=LARGEST_WINDOW,
    )
    wide_window: int = setting(
        0,
        "Tokens in the window of the layers in wide_layers, more than in window; 0 for no such layers.",
        ge=0,
        le=LARGEST_WINDOW,
    )
    wide_layers: tuple[int, ...] | None = setting(
        None,
        "Converted layers with the window wide_window, counted from 0. By default one converted layer in four: those "
        "whose heads attend most to an earlier occurrence of the token and to what followed it, measured on repeated "
        "random tokens.",
    )
    mix: str = setting(
        "constant",
        "The window's share in its mix with the state: constant (a number for each head), or token (for each head and "
        "token, computed from the layer's input).",
        MIXES,
    )
    projections: str = setting(
        "own",
        "Queries, keys and values of the state: from projections of its own, or shared with the window. Sharing needs "
        "a window, no feature map, and m equal to the model's head dimension (any m for abc and linformer).",
        PROJECTIONS,
    )
    gate_rank: int | None = setting(
        None,
        "Rank of the linear maps from a layer's input to its gates and to the share of mix=token, which have one "
        "projection to this many numbers in common; at most the model's width. 0, the default, for full rank.",
        ge=0,
        le=LARGEST_M,
    )
    output_norm: bool = setting(False, "Apply an RMS norm to the output of each head.")
    rotary: str = setting(
        "keep", "Whether queries and keys of the state keep rotary embeddings, if the model has them.", ("keep", "drop")
    )
    state_heads: str = setting(
        "query", "One state per query head, or one per key-value head, shared by its group.", ("query", "kv")
    )
    ablation: str | None = setting(
        None,
        "Ablation, for experiments with uniform gates. Of decay: linear_gates (no sigmoid in the gates; slow), "
        "gated_write (what is written is multiplied by one minus the gate, as by gated), pretrained_values (values are "
        "not rescaled at the start; also of add without a map), or the last two together. Of gated: one_gate (one gate "
        "for all heads of a layer).",
        ABLATIONS,
    )
    layers: tuple[int, ...] | None = setting(
        None, "Layers to convert, counted from 0; the others remain attention. By default all layers."
    )
    train_length: int = setting(
        1024,
        "Longest memory of log gates, in tokens; for linformer the number of tokens of a document that its slots take.",
        ge=1,
        le=LARGEST_LENGTH,
    )
    positions: str = setting(
        "error",
        "What to do beyond the end of a learned position table (GPT-2, OPT): raise an error, or clamp "
        "(every later token gets the last position).",
        ("error", "clamp"),
    )
    seed: int = setting(0, "Seed for the initialization of new parameters.", ge=0, le=LARGEST_SEED)

    def __post_init__(self) -> None:
        for name in LAYER_LISTS:
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        check_settings(self, ConfigError)
        self._resolve_defaults()
        for name in LAYER_LISTS:
            self._check_layers(name)
        self._check_window()
        self._check_wide_window()
        self._check_combination()
        self._check_sharing()
        self._check_gate_rank()
        self._check_ablation()
        self._check_table()

    def _resolve_defaults(self) -> None:
        defaults = {
            "feature_map": _BEST_MAP.get(self.rule, "none"),
            "normalize": _BEST_NORMALIZER.get(self.rule, "none"),
            "gate_init": _BEST_GATE_INIT.get(self.rule, "uniform"),
            "window": DEFAULT_LOCAL_WINDOW if self.rule == LOCAL else 0,
        }
        for name, default in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        if self.gate_rank == 0:
            object.__setattr__(self, "gate_rank", None)

    def _check_window(self) -> None:
        if self.rule == LOCAL and self.window == 0:
            raise ConfigError(Argument("window"), " must be at least 1 for the local rule, found 0")
        if self.sinks and self.sinks >= int(self.window or 0):
            reason = "sinks are the first tokens that a window of the last ones sees, too"
            found = (Argument("sinks"), f"={self.sinks}, ", Argument("window"), f"={self.window}")
            raise ConfigError(
                Argument("sinks"), " must be fewer than ", Argument("window"), ", found ", *found, f": {reason}"
            )
        if self.mix == "token" and (self.rule == LOCAL or not self.window):
            found = (Argument("rule"), f"={self.rule!r}, ", Argument("window"), f"={self.window}")
            reason = "'token' is the window's share in its mix with a state: it needs both, found "
            raise ConfigError(Argument("mix"), f"={reason}", *found)

    def _check_sharing(self) -> None:
        """Shared projections remain those of the pretrained attention, as the window needs them."""
        if not self.shares_projections:
            return
        if self.rule == LOCAL or not self.window:
            found = (Argument("rule"), f"={self.rule!r}, ", Argument("window"), f"={self.window}")
            raise ConfigError(Argument("projections"), "='shared' needs a window and a state, found ", *found)
        for name, needed, refused, reason in (
            ("feature_map", "none", self.feature_map != "none", "the window has no feature map"),
            ("rotary", "keep", self.rotary != "keep", "the window keeps rotary embeddings"),
            (
                "projection_init",
                "attention",
                self.projection_init != "attention",
                "the window starts as the pretrained attention",
            ),
            (
                "gate_init",
                "log",
                self.rule == "decay" and self.gate_init != "log",
                "uniform gates of the decay rule need values that start smaller than the window's",
            ),
        ):
            if refused:
                needs = ("='shared' needs ", Argument(name), f"={needed!r}, found {getattr(self, name)!r}: {reason}")
                raise ConfigError(Argument("projections"), *needs)

    def _check_table(self) -> None:
        if self.rule == "linformer" and self.train_length > LARGEST_TABLE:
            needs = f" must be at most {LARGEST_TABLE:,} for linformer, which has weights for each position"
            raise ConfigError(Argument("train_length"), needs, f", found {self.train_length:,}")

    def _check_gate_rank(self) -> None:
        if self.gate_rank is not None and self.rule in RULES_WITHOUT_GATES and self.mix == "constant":
            found = (Argument("rule"), f"={self.rule!r}, ", Argument("mix"), f"={self.mix!r}")
            reason = " is for gates, and this model has none: leave it out; found "
            raise ConfigError(Argument("gate_rank"), reason, *found)

    def _check_ablation(self) -> None:
        if self.ablation is None:
            return
        sums = self.rule == "add" and (self.feature_map, self.normalize, self.projections) == ("none", "none", "own")
        rule = "gated" if self.ablation == ONE_GATE else "decay"
        if (self.rule != rule or self.gate_init != "uniform") and not (sums and self.ablation == PRETRAINED_VALUES):
            found = (Argument("rule"), f"={self.rule!r}, ", Argument("gate_init"), f"={self.gate_init!r}")
            also = " (or add without a map)" if self.ablation == PRETRAINED_VALUES else ""
            reason = f"={self.ablation!r} is of the {rule} rule with uniform gates{also}, found "
            raise ConfigError(Argument("ablation"), reason, *found)

    def _check_layers(self, name: str) -> None:
        layers = getattr(self, name)
        if layers is None:
            return
        if any(layer < 0 for layer in layers):
            raise ConfigError(Argument(name), f" must be layer numbers from 0 up, found {layers!r}")
        if not layers or len(set(layers)) != len(layers):
            raise ConfigError(Argument(name), f" must name at least one layer and each only once, found {layers!r}")

    def _check_wide_window(self) -> None:
        wide, layers = Argument("wide_window"), Argument("wide_layers")
        if not self.wide_window:
            if self.wide_layers is not None:
                raise ConfigError(layers, f"={self.wide_layers!r} needs ", wide, ", their window, found 0")
            return
        if not 0 < int(self.window or 0) < self.wide_window:
            found = (f", found {self.wide_window} and ", Argument("window"), f"={self.window}")
            raise ConfigError(wide, " must be larger than ", Argument("window"), ", which must not be 0", *found)
        attention = [layer for layer in self.wide_layers or () if not self.converts(layer)]
        if attention:
            raise ConfigError(layers, f"={attention} remain attention: name layers that are converted")

    def _check_combination(self) -> None:
        """Each case has the settings that are in conflict, whether they are, and why."""
        normalize, feature_map = Argument("normalize"), Argument("feature_map")
        cases: tuple[tuple[tuple[str, ...], bool, tuple[Any, ...]], ...] = (
            (
                ("rule", "normalize"),
                self.rule == "decay" and self.normalize != "none",
                ("the decay rule has no normalizer: its gates bound the state (use ", normalize, "='none')"),
            ),
            (
                ("rule", "feature_map", "normalize"),
                self.rule == LOCAL and (self.feature_map, self.normalize) != ("none", "none"),
                (
                    "local attention is a softmax over its window: it has no feature map and no normalizer of its own",
                    *(" (use ", feature_map, "='none', ", normalize, "='none')"),
                ),
            ),
            (
                ("rule", "output_norm", "rotary", "projection_init"),
                self.rule == LOCAL
                and (self.output_norm, self.rotary, self.projection_init) != (False, "keep", "attention"),
                (
                    "local attention is the pretrained attention within a window: it takes no ",
                    *(Argument("output_norm"), ", keeps ", Argument("rotary"), " and has no "),
                    *(Argument("projection_init"), ": leave them out"),
                ),
            ),
            (
                ("rule", "feature_map", "normalize"),
                self.has_slots and (self.feature_map, self.normalize) != ("none", "none"),
                (
                    f"{self.rule} reads its slots by softmax attention: it has no feature map and no normalizer (use ",
                    *(feature_map, "='none', ", normalize, "='none')"),
                ),
            ),
            (
                ("rule", "normalize"),
                self.rule == "gated_delta" and self.normalizes_attention,
                (
                    "the gated_delta rule has no attention normalization: its keys should have unit length (use ",
                    *(normalize, "='unit')"),
                ),
            ),
            (
                ("rule", "normalize"),
                self.normalizes_unit and self.rule not in UNIT_RULES,
                (
                    "unit length is for rules that overwrite what the state holds under a key: use one of the rules "
                    f"{', '.join(UNIT_RULES)}, or another ",
                    normalize,
                ),
            ),
            (
                ("feature_map", "normalize"),
                self.normalizes_sum and self.feature_map not in POSITIVE_MAPS,
                (
                    "sum normalization divides by the sum of the features, which must be positive: use one of the maps "
                    f"{', '.join(POSITIVE_MAPS)}, or another ",
                    normalize,
                ),
            ),
            (
                ("m", "feature_map"),
                self.feature_map == "dpfp" and bool(self.m % 2 or self.m < 4),
                ("dpfp makes an even number of features, at least 4: choose such an ", Argument("m")),
            ),
            (
                ("m", "feature_map"),
                self.feature_map == "rfa" and bool(self.m % 2),
                ("rfa makes a sine and a cosine for each random direction: ", Argument("m"), " must be even"),
            ),
            (
                ("rule", "gate_init"),
                self.spreads_gates and self.rule not in FORGETTING_RULES,
                (
                    Argument("gate_init"),
                    f"={self.gate_init!r} spreads forget gates: use one of the rules {', '.join(FORGETTING_RULES)}, or "
                    "leave it out",
                ),
            ),
        )
        for names, in_conflict, reason in cases:
            if in_conflict:
                parts = [part for name in names for part in (", ", Argument(name), f"={getattr(self, name)!r}")]
                raise ConfigError(*parts[1:], " is not defined: ", *reason)

    @property
    def normalizes_attention(self) -> bool:
        """Whether outputs are divided by the sum of the attention weights."""
        return "attention" in str(self.normalize)

    @property
    def normalizes_sum(self) -> bool:
        """Whether the features of a query or key are divided by their sum."""
        return "sum" in str(self.normalize)

    @property
    def normalizes_unit(self) -> bool:
        """Whether the features of a query or key are scaled to unit length."""
        return self.normalize == "unit"

    @property
    def has_slots(self) -> bool:
        """Whether the state is a memory of m slots, each with a key and a value, instead of a matrix."""
        return self.rule in SLOT_RULES

    @property
    def shares_projections(self) -> bool:
        """Whether the state uses the window's queries, keys and values."""
        return self.projections == "shared"

    @property
    def spreads_gates(self) -> bool:
        """Whether the forget gates start with memory lengths that are spread logarithmically."""
        return self.gate_init != "uniform"

    @property
    def changes_layer(self) -> bool:
        """Whether an ablation changes what a layer computes, and not only how it starts."""
        return self.ablation not in (None, PRETRAINED_VALUES)

    def has_ablation(self, name: str) -> bool:
        """Whether the conversion has this ablation, alone or with another."""
        return name in str(self.ablation).split("+")

    def converts(self, layer_index: int) -> bool:
        """Whether the layer with this index is converted."""
        return self.layers is None or layer_index in self.layers

    def of_layer(self, layer_index: int) -> FastWeightsConfig:
        """The settings of one layer: with the window that it has, and without `wide_window` and `wide_layers`.

        Raises:
            ConfigError: There is a wide window, and the layers that have it are not chosen yet.
        """
        if not self.wide_window:
            return self
        if self.wide_layers is None:
            raise ConfigError(Argument("wide_layers"), " is missing: name the layers, or let `convert` choose them")
        window = self.wide_window if layer_index in self.wide_layers else self.window
        return replace(self, window=window, wide_window=0, wide_layers=None)

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON values. `from_dict` reverses it."""
        lists = {name: getattr(self, name) for name in LAYER_LISTS}
        return asdict(self) | {name: None if layers is None else list(layers) for name, layers in lists.items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> FastWeightsConfig:
        """The config with these settings; ConfigError names a setting that is unknown or wrong."""
        check_names(cls, sorted(values), ConfigError)
        return cls(**values)

    def to_json(self) -> str:
        """The settings as JSON text. `from_json` reverses it."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> FastWeightsConfig:
        """The config with the settings in a JSON text."""
        return cls.from_dict(json.loads(text))

    @classmethod
    def help(cls, name: str) -> str:
        """The description of a setting, with its choices."""
        return setting_help(cls, name)

    @classmethod
    def type_of(cls, name: str) -> Any:
        """The type of a field."""
        return get_type_hints(cls)[name]


def is_whole(value: Any) -> bool:
    """Whether a value is an integer, Python's or NumPy's. bool does not count."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a real number, Python's or NumPy's. bool does not count."""
    return isinstance(value, Real) and not isinstance(value, bool)
