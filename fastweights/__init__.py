"""fastweights: pretrained Transformers into recurrent models.

Importing this package is cheap. What needs torch or transformers is loaded when it is used, and converted models become
known to transformers' Auto classes when one is looked up.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fastweights.config import ADAPTIVE_INPUT, MODEL_TYPE_PREFIX

if TYPE_CHECKING:
    from fastweights import ops as ops
    from fastweights.config import FastWeightsConfig as FastWeightsConfig
    from fastweights.conversion import convert as convert
    from fastweights.conversion import lora_modules as lora_modules
    from fastweights.decode.conversation import Conversation as Conversation
    from fastweights.decode.engine import Engine as Engine
    from fastweights.decode.sampling import Sampling as Sampling
    from fastweights.loading import load as load
    from fastweights.modeling.cache import FastWeightsCache as FastWeightsCache

__version__ = "0.1.0"

_PUBLIC = {
    "Conversation": "fastweights.decode.conversation",
    "Engine": "fastweights.decode.engine",
    "FastWeightsCache": "fastweights.modeling.cache",
    "FastWeightsConfig": "fastweights.config",
    "Sampling": "fastweights.decode.sampling",
    "convert": "fastweights.conversion",
    "load": "fastweights.loading",
    "lora_modules": "fastweights.conversion",
}
_CONFIG_TABLE = "transformers.models.auto.configuration_auto"

__all__ = [*_PUBLIC, "ops"]


def __getattr__(name: str) -> Any:
    if name == "ops":
        return importlib.import_module("fastweights.ops")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fastweights' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _ConvertedModels(dict):
    """transformers' table of registered configurations.

    Ours are registered when one is first looked up. An earlier import would be circular where the table is imported by
    a model's own module.
    """

    def __contains__(self, model_type: object) -> bool:
        is_ours = model_type == ADAPTIVE_INPUT or str(model_type).startswith(MODEL_TYPE_PREFIX)
        if is_ours and not super().__contains__(model_type):
            importlib.import_module("fastweights.modeling.classes")
        return super().__contains__(model_type)


def _extend_table(module: ModuleType) -> None:
    table = module.CONFIG_MAPPING
    table._extra_content = _ConvertedModels(table._extra_content)


class _AfterTransformers(MetaPathFinder):
    """Extend the table right after transformers has imported it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != _CONFIG_TABLE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_extend(module: ModuleType) -> None:
            execute(module)
            _extend_table(module)

        spec.loader.exec_module = execute_and_extend  # type: ignore[method-assign]
        return spec


if _CONFIG_TABLE in sys.modules:
    _extend_table(sys.modules[_CONFIG_TABLE])
else:
    sys.meta_path.insert(0, _AfterTransformers())
