"""Checks of a model's files before transformers reads them, and one kind of error for whatever it raises.

Nothing that is loaded may run code: neither Python files of a model's folder or repository nor kernels of the hub. And
a small file may not ask for much memory: the sizes in config.json are compared with the tensors that are there.

torch and transformers are imported where they are needed: `check_source`, which the command line calls first, needs
neither.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fastweights.config import ConfigError
from fastweights.model_paths import ADAPTER, CONFIG, GGUF, locate, no_such_folder
from fastweights.utils.errors import Argument, CheckpointError, FastWeightsError
from fastweights.utils.gguf import read_metadata
from fastweights.utils.parsing import ParseError, read_json

HUB_TIMEOUT = 10.0  # seconds
# Arguments of every from_pretrained: no code of the folder or repository, and no objects from pickles.
WITHOUT_CODE = {"trust_remote_code": False, "weights_only": True}
# Fields of a config that may name kernels of the hub, and the values that are transformers' own code. Flash attention
# is not among them: transformers fetches it from the hub where it is not installed.
_IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
_BUILT_IN = (None, "eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")
# Quantization methods that transformers runs with kernels of the hub.
_HUB_QUANTIZATION = ("eetq", "fbgemm_fp8", "fp8", "metal", "mxfp4", "nvfp4")
# transformers makes lists of so many items while it reads a config, before any tensor could show that they are wrong.
_MAX_LAYERS, _MAX_LABELS = 1000, 1_000_000
_LIMITS = dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), _MAX_LAYERS) | {
    "num_labels": _MAX_LABELS,
    "window": 2**20,  # of a converted layer, which caches so many keys and values
    "wide_window": 2**20,
}
# A tensor may hold several quantized elements, and some checkpoints leave out what is tied.
_ELEMENTS_SLACK, _QUANTIZED_SLACK = 2, 32
# No format of llama.cpp takes less than a bit and a half for a weight.
_GGUF_ELEMENTS_A_BYTE = 8
# Buffers, such as causal masks, are in no file.
_MAX_BUFFERS = 2**28
_HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only", "subfolder", "force_download", "proxies")


def check_source(source: str | os.PathLike) -> None:
    """Refuse a model that is not there, or whose config or headers of tensors cannot be read.

    Args:
        source: what `load` takes. Of a GGUF file only the beginning is read. A hub id that is not in the cache is
            looked up.

    Raises:
        CheckpointError: names the path or the hub id, and the file.
    """
    folder, model_file = locate(source)
    if model_file is not None:
        if model_file.endswith(GGUF):
            with loading_errors(source, folder):
                check_gguf(Path(folder) / model_file)
        return
    if not Path(folder).is_dir():
        check_hub_id(folder)
        return
    check_config(folder)
    for file in sorted(Path(folder).glob("*.safetensors")):
        tensor_shapes(file)


def check_hub_id(name: str, **arguments: Any) -> None:
    """Refuse a hub id that is neither in the cache nor on the hub.

    transformers would try each of a model's files several times where the hub cannot be reached.

    Raises:
        CheckpointError: names the hub id and the reason.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    cache, revision = arguments.get("cache_dir"), arguments.get("revision")
    files = [os.path.join(arguments.get("subfolder", ""), file) for file in (CONFIG, ADAPTER)]
    try:
        cached = any(isinstance(try_to_load_from_cache(name, file, cache, revision), str) for file in files)
        if cached or arguments.get("local_files_only"):
            return
        HfApi(token=arguments.get("token")).model_info(name, revision=revision, timeout=HUB_TIMEOUT)
    except HFValidationError as error:
        raise no_such_folder(name) from error
    except RepositoryNotFoundError as error:
        reason = "the hub has no such model (a private one needs `hf auth login`)"
        raise CheckpointError(f"{name}: there is no such folder here, and {reason}") from error
    except Exception as error:  # the network has errors of many kinds
        reason = f"the hub cannot be reached: {' '.join(str(error).split()) or type(error).__name__}"
        raise CheckpointError(f"{name}: there is no such folder here, and {reason}") from error


def check_arguments(arguments: dict[str, Any]) -> None:
    """Refuse arguments that would let a model's files run code.

    Raises:
        ConfigError: names the argument.
    """
    for name, value in WITHOUT_CODE.items():
        if arguments.get(name, value) != value:
            reason = "fastweights runs no code of a model's folder; load such a model with transformers"
            raise ConfigError(Argument(name), f"={arguments[name]!r} is not supported: {reason}")


def check_config(source: str, **arguments: Any) -> None:
    """Refuse a config that asks for kernels of the hub or more layers than any model has, or with impossible values.

    Args:
        source: a folder or a hub id.
        **arguments: those of from_pretrained; the ones for the hub are used.

    Raises:
        CheckpointError: names the source, the field and its value.
    """
    options = {name: arguments[name] for name in _HUB_ARGUMENTS if name in arguments}
    if not Path(source).is_dir():
        check_hub_id(source, **options)
    _check_values(f"{source}: {CONFIG}", _json_object(source, CONFIG, options))
    if Path(source).is_dir():
        generation = "generation_config.json"
        _check_values(f"{source}: {generation}", _json_object(source, generation, options))
        _json_object(source, "tokenizer_config.json", options)
        for index in sorted(Path(source).glob("*.index.json")):
            _check_shards(source, index.name)
        return
    adapter = _json_object(source, ADAPTER, options).get("base_model_name_or_path")
    if isinstance(adapter, str) and adapter != source:  # transformers loads that model instead
        _check_values(f"{source}: its base {adapter}: {CONFIG}", _json_object(adapter, CONFIG, options))


def _check_shards(source: str, index: str) -> None:
    """Refuse an index whose files lie elsewhere: transformers would read them there."""
    shards = _json_object(source, index, {}).get("weight_map", {})
    for shard in set(shards.values()) if isinstance(shards, dict) else ():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{source}: {index} must name files of this folder, found {shard!r}")


def _json_object(source: str, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """A JSON file of a folder or repository; an empty object where it has none."""
    path: str | Path | None = Path(source) / name
    if not Path(source).is_dir():
        from transformers.utils import cached_file

        missing = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "gated_repo")}
        path = cached_file(source, name, **missing, _raise_exceptions_for_connection_errors=False, **options)
    if path is None or not Path(path).is_file():
        return {}
    try:
        values = read_json(path)
    except ParseError as error:
        raise CheckpointError(f"{source}: {name} {error}; copy or save it again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{source}: {name} must hold an object, found a {type(values).__name__}")
    return values


def _check_values(place: str, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if name.strip("_").removesuffix("_internal") in _IMPLEMENTATIONS:
            for item in value.values() if isinstance(value, dict) else (value,):
                if item not in _BUILT_IN:
                    known = ", ".join(str(known) for known in _BUILT_IN[1:])
                    reason = f"that may be code of the hub, which is never run; a config may name {known}"
                    raise CheckpointError(f"{place} asks for {name}={item!r}: {reason}")
        if name == "quant_method" and value in _HUB_QUANTIZATION:
            raise CheckpointError(f"{place} asks for {name}={value!r}: it needs code of the hub, which is never run")
        if name in _LIMITS and isinstance(value, int | float) and not value <= _LIMITS[name]:
            raise CheckpointError(f"{place}: {name} must be at most {_LIMITS[name]:,}, found {value}")
        if name.endswith("_token_id") and not _is_token_id(value):
            raise CheckpointError(f"{place}: {name} must be a token id or a list of them, found {value!r}")
        if isinstance(value, float) and math.isnan(value):
            raise CheckpointError(f"{place}: {name} is NaN")
        if isinstance(value, dict):
            _check_values(place, value)


def _is_token_id(value: Any) -> bool:
    values = value if isinstance(value, list) else [0 if value is None else value]
    return all(isinstance(item, int) and -(2**63) <= item < 2**63 for item in values)


def read_config(source: str, **arguments: Any) -> Any:
    """The config of a model as transformers has it. Runs no code of the model's."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(source, trust_remote_code=False, **arguments)


def empty_model(config: Any) -> Any:
    """The causal language model that a config describes, without weights (on the meta device)."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def check_weight_sizes(folder: str) -> None:
    """Compare the size of the model that config.json describes with the tensors in a folder.

    Raises:
        CheckpointError: the model would be far larger.
    """
    if not Path(folder).is_dir():
        return
    tensors, elements = _stored(Path(folder))
    config = read_config(folder)
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if tensors is not None and layers > tensors:
        raise CheckpointError(f"{folder}: {CONFIG} describes {layers:,} layers, and its files hold {tensors:,} tensors")
    model = empty_model(config)
    quantized = getattr(config, "quantization_config", None) is not None
    limit = elements * (_QUANTIZED_SLACK if quantized else _ELEMENTS_SLACK)
    parameters, buffers = (sum(x.numel() for x in group) for group in (model.parameters(), model.buffers()))
    if parameters > limit or buffers > limit + _MAX_BUFFERS:
        size = f"{parameters:,} parameters and {buffers:,} elements of buffers"
        raise CheckpointError(
            f"{folder}: {CONFIG} describes a model of {size}, and its files hold {elements:,} elements"
        )


def check_gguf(path: Path) -> None:
    """Compare the size of the model that a GGUF file's header describes with the size of the file.

    Raises:
        CheckpointError: the model would be far larger, or has more layers than any model.
    """
    values = read_metadata(path)
    architecture = values.get("general.architecture")

    def size(name: str) -> int:
        value = values.get(f"{architecture}.{name}")
        return value if isinstance(value, int) else 0

    layers, width = size("block_count"), size("embedding_length")
    if layers > _MAX_LAYERS:
        raise CheckpointError(f"{path}: {architecture}.block_count must be at most {_MAX_LAYERS:,}, found {layers:,}")
    widest = max(size("feed_forward_length"), size("attention.head_count") * size("attention.key_length"), 1)
    limit = _GGUF_ELEMENTS_A_BYTE * path.stat().st_size
    if layers * width * widest > limit or size("vocab_size") * width > limit:
        sizes = f"{layers:,} layers of width {width:,} and {widest:,}"
        raise CheckpointError(f"{path}: its header describes a model of {sizes}, too large for the size of the file")


def _stored(folder: Path) -> tuple[int | None, int]:
    """How many tensors and elements the files of a folder hold: of pickles, only a bound of the elements is known."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None, sum(file.stat().st_size for file in folder.glob("*.bin"))
    shapes = [shape for file in files for shape in tensor_shapes(file).values()]
    return len(shapes), sum(math.prod(shape) for shape in shapes)


def tensor_shapes(file: Path) -> dict[str, list[int]]:
    """The shapes of a safetensors file's tensors, from its header alone.

    Raises:
        CheckpointError: the file is damaged.
    """
    try:
        with safe_open(file, framework="np") as opened:
            return {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(f"{file.parent}: {file.name} cannot be read ({error}); copy or save it again") from error


@contextmanager
def loading_errors(source: str | os.PathLike, folder: str, what: str = "it cannot be loaded") -> Iterator[None]:
    """Whatever transformers, tokenizers and torch raise for a model's files becomes a CheckpointError.

    Args:
        source: what the user named, for the message.
        folder: the folder that is read, or a hub id.
        what: what could not be done.
    """
    try:
        yield
    except ConfigError as error:
        raise CheckpointError(f"{source}: {CONFIG}: {error.message()}") from error  # a field is no flag
    except FastWeightsError:
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        where = "" if Path(folder).is_dir() else "there is no such folder here, and from the hub "
        raise CheckpointError(f"{source}: {where}{_reason(error, folder, what)}") from error


def _reason(error: BaseException, folder: str, what: str) -> str:
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return f"it asks for code of its own{_named_code(folder)}, which fastweights never runs"
    damaged = _damaged_file(folder)
    if damaged is not None:
        return damaged
    known = isinstance(error, OSError | ValueError | ImportError | RuntimeError) and text
    return f"{what}: {text if known else f'{type(error).__name__}: {text}'}"


def _named_code(folder: str) -> str:
    """The code that the files of a folder name."""
    named = []
    for file in ("config.json", "tokenizer_config.json"):
        path = Path(folder) / file
        codes = _json_object(folder, file, {}).get("auto_map") if path.is_file() else None
        if codes:
            shown = str(codes)
            named.append(f"{file}: auto_map {shown if len(shown) < 200 else shown[:200] + '…'}")
    return f" ({'; '.join(named)})" if named else ""


def _damaged_file(folder: str) -> str | None:
    """The first JSON or safetensors file of a folder that cannot be parsed, and why."""
    for file in sorted(Path(folder).glob("*.safetensors")):
        try:
            tensor_shapes(file)
        except CheckpointError as error:
            return str(error).removeprefix(f"{folder}: ")
    for file in sorted(Path(folder).glob("*.json")):
        try:
            read_json(file)
        except ParseError as error:
            return f"{file.name} {error}; copy or save it again"
        except OSError:
            continue
    return None
