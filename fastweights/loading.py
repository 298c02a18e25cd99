"""Loading models and tokenizers from hub ids, folders, GGUF files and checkpoints of fairseq, and saving them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from fastweights.config import ConfigError
from fastweights.conversion import drop_gguf_quantizer
from fastweights.model_paths import FAIRSEQ, damage_of_model, dictionary_beside, locate, new_model_folder
from fastweights.modeling import fairseq
from fastweights.modeling.classes import check_tensors, keep_softcap
from fastweights.modeling.source_files import (
    WITHOUT_CODE,
    check_arguments,
    check_config,
    check_gguf,
    check_weight_sizes,
    loading_errors,
)
from fastweights.tokenization import set_special_tokens
from fastweights.utils.errors import Argument, CheckpointError
from fastweights.utils.gguf import read_metadata

# BPE vocabularies (`tokenizer.ggml.pre`) whose texts start with bos, unless a GGUF file says otherwise. llama.cpp has
# the same list.
_BPE_WITH_BOS = {
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    *("tekken", "chameleon"),
}


def load(source: str | os.PathLike, **kwargs: Any) -> Any:
    """Load a causal language model, converted or not. No code of the model's folder or repository is run.

    Args:
        source: a hub id, a folder that `save_pretrained` wrote, a GGUF file, a checkpoint of fairseq's language model
            with adaptive input (.pt), or the folder of a training run, which stands for its best checkpoint.
        **kwargs: arguments of transformers' `from_pretrained`, such as `dtype` or `device_map`; of a fairseq checkpoint
            only `dtype`.

    Returns:
        The model, in evaluation mode.

    Raises:
        CheckpointError: if the model cannot be found or read, asks for code of its own, or its tensors do not fit its
            config. The message names the file.
        ConfigError: if `trust_remote_code` or `weights_only` asks for code to be run.
    """
    folder, file = locate(source)
    if file is not None and file.endswith(FAIRSEQ):
        check_arguments(kwargs)
        others = sorted(set(kwargs) - {"dtype", *WITHOUT_CODE})
        if others:
            raise ConfigError(Argument(others[0]), f": a fairseq checkpoint is loaded with dtype alone, {source}")
        with loading_errors(source, folder):
            return fairseq.load_checkpoint(Path(folder) / file, kwargs.get("dtype", "auto"))
    model, info = _load(
        AutoModelForCausalLM, source, **kwargs | {"output_loading_info": True, "ignore_mismatched_sizes": True}
    )
    mismatch_is_error = not kwargs.get("ignore_mismatched_sizes", False)
    check_tensors(source, info, extra_is_error=False, mismatch_is_error=mismatch_is_error)
    drop_gguf_quantizer(model)
    keep_softcap(model.config)
    return model


def load_tokenizer(source: str | os.PathLike) -> Any:
    """Load the tokenizer of a model. No code of the model's folder or repository is run.

    Args:
        source: a hub id, a folder, a GGUF file, a fairseq checkpoint with its dictionary beside it (dict.txt), or the
            folder of a training run.

    Returns:
        The tokenizer, or None if there is none.

    Raises:
        CheckpointError: if the tokenizer exists and cannot be read, or asks for code of its own. Also if a fairseq
            checkpoint has no dictionary, or another model's.
    """
    folder, file = locate(source)
    if file is not None and file.endswith(FAIRSEQ):
        return _fairseq_tokenizer(Path(folder) / file)
    if file:
        return _gguf_tokenizer(folder, file)
    if Path(folder).is_dir() and not any(Path(folder).glob("*tokenizer*")):
        return None
    try:
        tokenizer = _load(AutoTokenizer, source)
        with loading_errors(source, folder):
            tokenizer("a")  # some settings of a wrong type are only used here
        return tokenizer
    except CheckpointError as error:
        raise CheckpointError(f"the tokenizer of {error}") from error


def require_tokenizer(tokenizer: Any, source: str | os.PathLike = "the model's folder") -> Any:
    """Return `tokenizer`, or raise an error that says how to add one to `source` if it is None.

    Raises:
        CheckpointError: if `tokenizer` is None.
    """
    if tokenizer is None:
        how = "AutoTokenizer.from_pretrained(BASE).save_pretrained(FOLDER)"
        raise CheckpointError(f"{source} has no tokenizer: save the base model's there with {how}")
    return tokenizer


def _fairseq_tokenizer(checkpoint: Path) -> Any:
    """The tokenizer of the dictionary beside a checkpoint, which must have as many words as the model."""
    dictionary = dictionary_beside(checkpoint)
    if dictionary is None:
        raise CheckpointError(f"{checkpoint} has no dictionary beside it: put fairseq's dict.txt into the same folder")
    with loading_errors(checkpoint, str(checkpoint.parent)):
        return fairseq.dictionary_tokenizer(dictionary, fairseq.read_config(checkpoint).vocab_size)


def _gguf_tokenizer(folder: str, gguf: str) -> Any:
    """The tokenizer inside a GGUF file; None if it has none, or one that transformers cannot build."""
    try:
        with loading_errors(gguf, folder):
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf, trust_remote_code=False)
            _apply_gguf_settings(tokenizer, read_metadata(Path(folder) / gguf))
            return tokenizer
    except CheckpointError:
        return None


def _apply_gguf_settings(tokenizer: Any, metadata: dict[str, Any]) -> None:
    """Give a tokenizer the bos and eos settings of its GGUF file, which transformers leaves out."""

    def setting(name: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{name}", default)

    for name in ("bos", "eos"):
        token = setting(f"{name}_token_id")
        if token is not None:
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(token))
    is_sentencepiece = setting("model") == "llama"
    adds_bos = setting("add_bos_token", is_sentencepiece or setting("pre") in _BPE_WITH_BOS)
    set_special_tokens(tokenizer, bos=adds_bos, eos=setting("add_eos_token", False))


def _load(kind: Any, source: str | os.PathLike, **kwargs: Any) -> Any:
    folder, gguf = locate(source)
    check_arguments(kwargs)
    with loading_errors(source, folder):
        if gguf:
            check_gguf(Path(folder) / gguf)
            kwargs["gguf_file"] = gguf
        else:
            check_config(folder, **kwargs)
            if kind is AutoModelForCausalLM:
                _check_undamaged(Path(folder))
                check_weight_sizes(folder)
        return kind.from_pretrained(folder, **kwargs | WITHOUT_CODE)


def _check_undamaged(folder: Path) -> None:
    """Refuse a damaged checkpoint of a training run. Other folders have no checksums."""
    damage = damage_of_model(folder)
    if damage is not None:
        raise CheckpointError(f"{folder} is damaged: {damage}; restore it, or use another checkpoint of the run")


def save(model: Any, folder: str | os.PathLike, tokenizer: Any = None, overwrite: bool = False) -> None:
    """Save a model, and its tokenizer if there is one, completely or not at all.

    Args:
        model: a transformers model, converted or not.
        folder: the folder to write. It must be new or empty, unless `overwrite` is set.
        tokenizer: saved in the same folder. None: no tokenizer is saved.
        overwrite: replace `folder` if it holds a saved model.

    Raises:
        CheckpointError: if the folder must not be replaced or cannot be written.
    """
    with new_model_folder(folder, overwrite) as temporary:
        model.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
