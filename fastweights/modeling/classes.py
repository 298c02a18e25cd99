"""Converted models as registered Hugging Face classes, made from each family's own classes.

A converted model is the pretrained class with some attention modules replaced: everything else (embeddings, losses,
sharding, checkpointing, generate) is inherited. Each family has a config class, the decoder that runs the layers, the
backbone (`AutoModel`), the causal language model and the sequence classifier.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, modeling_utils
from transformers.utils import logging

from fastweights.config import MODEL_TYPE_PREFIX, FastWeightsConfig
from fastweights.modeling.families import FAMILIES, Family
from fastweights.modeling.generation import FastWeightsGenerationMixin
from fastweights.modeling.initialization import initialize, initialize_missing, mark_initialized
from fastweights.modeling.inputs import Base, DecoderMixin
from fastweights.modeling.layer import FastWeightsAttention
from fastweights.utils.errors import CheckpointError
from fastweights.utils.files import atomic_folder, write_text

logger = logging.get_logger(__name__)

# Earlier versions saved empty planes, too; such a checkpoint has them, and the model has not.
EMPTY_PLANES = r"\.projections\.planes$"

# A module of every saved folder, which transformers runs only with trust_remote_code=True and only if this package was
# not imported before. It uses no name of this package that could change.
LOADER = "configuration_fastweights"
# The import is inside a try, because transformers would otherwise advise to install the package from PyPI, where it is
# not.
LOADER_CODE = '''"""This model needs the package fastweights.

After `import fastweights`, transformers loads this folder without running this file. Otherwise pass
trust_remote_code=True: transformers then runs this file, which imports the package.
"""

from transformers import CONFIG_MAPPING

try:
    import fastweights  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        "this model needs the package fastweights, which is not on PyPI: install it from a checkout of its repository"
    ) from error

Config = CONFIG_MAPPING["{model_type}"]
'''


def new_layer(
    family: Family, old: nn.Module, model_config: Any, settings: FastWeightsConfig, index: int
) -> FastWeightsAttention:
    """The layer that replaces an attention module, with weights made from it (none yet on the meta device)."""
    shape = family.shape(old, model_config)
    layer = FastWeightsAttention(shape, settings, index)
    if not next(old.parameters()).is_meta:
        initialize(layer, family.weights(old, shape))
        mark_initialized(layer)
    return layer


def check_tensors(source: Any, info: dict[str, Any], extra_is_error: bool, mismatch_is_error: bool = True) -> None:
    """Refuse a checkpoint from which transformers could not fill a model (it would leave random weights there).

    Args:
        source: the checkpoint, for the message.
        info: what transformers' from_pretrained reports with output_loading_info.
        extra_is_error: whether tensors that the model does not have are an error.
        mismatch_is_error: whether tensors of another shape are an error.

    Raises:
        CheckpointError: names all tensors that do not fit.
    """
    problems = [
        f"{what}: {', '.join(sorted(map(str, info[key])))}"
        for what, key, is_error in (
            ("missing tensors", "missing_keys", True),
            ("tensors the model does not have", "unexpected_keys", extra_is_error),
            ("tensors of another shape", "mismatched_keys", mismatch_is_error),
            ("tensors that could not be converted", "error_msgs", True),
        )
        if is_error and info.get(key)
    ]
    if problems:
        raise CheckpointError(f"the checkpoint {source} does not fit its config.json; {'; '.join(problems)}")


def keep_softcap(config: Any) -> None:
    """Use eager attention where logits are capped: transformers 5.17 chooses SDPA for Gemma 2, which has no cap."""
    if getattr(config, "attn_logit_softcapping", None) and config._attn_implementation == "sdpa":
        config._attn_implementation = "eager"


class FastWeightsMixin(Base):
    """What all classes of converted models share: building, initializing and loading converted layers."""

    family: Family
    config: Any
    _is_stateful = True
    _supports_context_parallel = False  # the state is not exchanged between ranks

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        keep_softcap(config)
        settings = FastWeightsConfig.from_dict(config.fastweights)
        for index, block in enumerate(self.family.blocks(self)):
            old = self.family.attention_of(block)
            if settings.converts(index) and not isinstance(old, FastWeightsAttention):
                setattr(block, self.family.attention, new_layer(self.family, old, config, settings, index))
        use_converted_classes(self)

    @classmethod
    def from_pretrained(
        cls, *args: Any, output_loading_info: bool = False, ignore_mismatched_sizes: bool = False, **kwargs: Any
    ) -> Any:
        """As in transformers, but a missing, extra or misshapen tensor is an error.

        The backbone and the classifier may be loaded from a causal language model: the head of one is not expected in
        the other. A misshapen tensor is initialized anew with `ignore_mismatched_sizes=True`.
        """
        options = kwargs | {"output_loading_info": True, "ignore_mismatched_sizes": True}
        model, info = super().from_pretrained(*args, **options)
        source = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        required = {
            key: [name for name in info[key] if model._is_required(str(name))]
            for key in ("missing_keys", "unexpected_keys")
        }
        check_tensors(source, info | required, True, mismatch_is_error=not ignore_mismatched_sizes)
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory: str | os.PathLike, is_main_process: bool = True, **kwargs: Any) -> None:
        """As in transformers, with a module that imports this package for readers who have not done so.

        A folder that is new is written completely or not at all. Into a folder that exists, files are written one by
        one: what else is in it stays.
        """
        self.config.auto_map = {"AutoConfig": f"{LOADER}.Config"}
        target = Path(save_directory)
        if is_main_process and not os.path.lexists(target):
            if kwargs.get("push_to_hub"):
                kwargs.setdefault("repo_id", target.name)  # by default that of the folder which is written
            with atomic_folder(target) as temporary:
                self._save_files(temporary, is_main_process, **kwargs)
        else:
            self._save_files(target, is_main_process, **kwargs)

    def _save_files(self, folder: Path, is_main_process: bool, **kwargs: Any) -> None:
        if is_main_process:
            write_text(folder / f"{LOADER}.py", LOADER_CODE.format(model_type=self.config.model_type))
        super().save_pretrained(folder, is_main_process=is_main_process, **kwargs)

    def train(self, mode: bool = True) -> Any:
        """As in torch, with a warning about weights whose training would end in NaN."""
        if mode and any(p.dtype == torch.float16 and p.requires_grad for p in self.parameters()):
            logger.warning_once(
                "train() was called on a model with trainable float16 weights: small updates are lost, and gradients "
                "overflow and become NaN. Load it with dtype=torch.float32, also for mixed precision "
                "(fp16=True or bf16=True of TrainingArguments), or with dtype=torch.bfloat16."
            )
        return super().train(mode)

    def _is_required(self, tensor: str) -> bool:
        """Whether a checkpoint and the model must agree on having a tensor of this name: all tensors of the backbone,
        and the head of a causal language model."""
        backbone = [name for name, _ in self.base_model.named_children()]
        return self.can_generate() or tensor.removeprefix(f"{self.base_model_prefix}.").split(".")[0] in backbone

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """As in transformers, converted layers included: those get the start that a conversion would give them."""
        for layer in self.modules():
            if isinstance(layer, FastWeightsAttention) and not getattr(layer, "_is_hf_initialized", False):
                initialize_missing(layer, self._initial_std)
        super().initialize_weights()

    @property
    def _initial_std(self) -> float:
        """Standard deviation of new projections: OPT calls it init_std."""
        return float(getattr(self.config, "initializer_range", None) or getattr(self.config, "init_std", None) or 0.02)


def use_converted_classes(model: nn.Module) -> None:
    """Give a converted model and the modules inside it their converted classes, and a tensor-parallel plan without the
    projections that are gone: converted layers are replicated, the rest is sharded as before."""
    module: Any
    for module in model.modules():
        converted = CONVERTED.get(type(module), type(module))
        if issubclass(converted, FastWeightsMixin):
            module.__class__ = converted
            module._tp_plan = _without_attention(converted.family, getattr(module, "_tp_plan", None))
            if "base_model_tp_plan" in vars(module.config):  # some configs of transformers 5.17 have one of their own
                plan = _without_attention(converted.family, module.config.base_model_tp_plan)
                module.config.base_model_tp_plan = plan


def _without_attention(family: Family, plan: dict[str, Any] | None) -> dict[str, Any]:
    """A parallel plan less the entries for attention."""
    return {name: style for name, style in (plan or {}).items() if f".{family.attention}." not in name}


def _with_prepared_inputs(base_forward: Any) -> Any:
    """A forward with the same signature that prepares its inputs first; generate reads the signature."""
    names = list(inspect.signature(base_forward).parameters)[1:]

    @functools.wraps(base_forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._run(base_forward, dict(zip(names, args, strict=False)) | kwargs)

    return forward


def _make_config(family: Family, base: Any) -> Any:
    attributes = {
        "model_type": MODEL_TYPE_PREFIX + family.name,
        "base_model_tp_plan": _without_attention(family, base.base_model_tp_plan),
        # transformers would copy the module of the class into saved folders
        "register_for_auto_class": classmethod(lambda cls, auto_class="AutoConfig": None),
        "__module__": __name__,
    }
    return type(f"FastWeights{base.__name__}", (base,), attributes)


def _make_class(family: Family, config_class: Any, base: Any, *mixins: Any) -> Any:
    attributes = {
        "config_class": config_class,
        "family": family,
        "__module__": __name__,
        "_keys_to_ignore_on_load_unexpected": [*(base._keys_to_ignore_on_load_unexpected or ()), EMPTY_PLANES],
    }
    if DecoderMixin in mixins:
        attributes["forward"] = _with_prepared_inputs(base.forward)
    made = type(f"FastWeights{base.__name__}", (FastWeightsMixin, *mixins, base), attributes)
    # transformers enters a class here when it makes a model, and a converted model may only have changed its class
    modeling_utils._CAN_RECORD_REGISTRY[str(made)] = base._can_record_outputs
    return made


def _make_classes(family: Family) -> tuple[Any, Any]:
    """Make and register the classes of a family; returns the config's and the causal language model's."""
    causal_lm: Any = family.pretrained_class
    base_config = causal_lm.config_class
    backbone, classifier = (
        auto._model_mapping[base_config] for auto in (AutoModel, AutoModelForSequenceClassification)
    )
    config_class = _make_config(family, base_config)
    decoder = getattr(sys.modules[backbone.__module__], family.decoder_class or backbone.__name__)
    CONVERTED[decoder] = _make_class(family, config_class, decoder, DecoderMixin)
    if backbone is not decoder:
        CONVERTED[backbone] = _make_class(family, config_class, backbone)
    CONVERTED[causal_lm] = _make_class(family, config_class, causal_lm, FastWeightsGenerationMixin)
    CONVERTED[classifier] = _make_class(family, config_class, classifier)
    AutoConfig.register(config_class.model_type, config_class)
    for auto, base in (
        (AutoModel, backbone),
        (AutoModelForCausalLM, causal_lm),
        (AutoModelForSequenceClassification, classifier),
    ):
        auto.register(config_class, CONVERTED[base])
    return config_class, CONVERTED[causal_lm]


# The converted class of each pretrained class.
CONVERTED: dict[type, Any] = {}
# The config class and the causal language model class of each family.
CLASSES: dict[str, tuple[Any, Any]] = {name: _make_classes(family) for name, family in FAMILIES.items()}

for _class in (*CONVERTED.values(), *(config_class for config_class, _ in CLASSES.values())):
    globals()[_class.__name__] = _class  # pickle looks classes up by name
    if isinstance(_class, type) and issubclass(_class, FastWeightsMixin):
        # `transformers serve` looks an architecture up as an attribute of the package
        setattr(transformers, _class.__name__, _class)
