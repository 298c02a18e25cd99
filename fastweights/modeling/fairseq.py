"""fairseq's files: checkpoints of language models with adaptive input, and the dictionaries of their words.

A checkpoint is a pickle. It is read with torch's `weights_only=True`; objects that are not tensors (the settings, and
what a trainer stores beside them) become inert stand-ins that only hold values, so no code of the file is run.

Shapes: D width, Vi and Di words and width of cluster i; projections of a tied output layer are stored as [D,Di], of an
untied one as [Di,D]
"""

from __future__ import annotations

import gzip
import lzma
import os
import pickle
import pickletools
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from fastweights.config import ConfigError
from fastweights.modeling.adaptive_input import AdaptiveInputConfig
from fastweights.modeling.source_files import empty_model
from fastweights.utils.errors import CheckpointError

# Words that every dictionary starts with. Its file does not list them.
SPECIAL_WORDS = ("<s>", "<pad>", "</s>", "<unk>")
PAD, EOS, UNKNOWN = SPECIAL_WORDS[1:]
# Packages whose objects may be in a checkpoint, as stand-ins.
_STAND_INS = (
    "_codecs",
    "argparse",
    "builtins",
    "collections",
    "enum",
    "fairseq",
    "numpy",
    "omegaconf",
    "pathlib",
    "typing",
)
_PREFIX = "decoder."
# Buffers that fairseq saves or does not save, depending on its version. They hold nothing that was learned.
_BUFFERS = re.compile(r"(.*\.)?(version|_float_tensor|embed_positions\.weights)")
# Names of earlier versions: a layer's two norms were numbered like the three of a decoder with an encoder.
_OLD_NORMS = {"layer_norms.0.": "self_attn_layer_norm.", "layer_norms.2.": "final_layer_norm."}
_PLAIN_SETTINGS = {  # what the architecture has, by the name of fairseq's option
    "decoder_normalize_before": True,
    "activation_fn": "relu",
    "no_scale_embedding": False,
    "no_token_positional_embeddings": False,
    "decoder_learned_pos": False,
    "character_embeddings": False,
}
# The older format begins with pickles: a magic number, a version, the system and the content.
_OLD_PICKLES = 4
# A compressed file of a few kilobytes may hold any number of characters. That of WikiText-103 has 3 million.
_LONGEST_DICTIONARY = 2**28
_MOST_NAMES = 6


class _StandIn:
    """Holds what a checkpoint says of an object, and does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.items: dict[Any, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.items = state if isinstance(state, dict) else {}

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value


def load_checkpoint(path: str | os.PathLike, dtype: Any = "auto") -> Any:
    """The language model in a fairseq checkpoint, in evaluation mode.

    Args:
        path: A `.pt` file that fairseq saved.
        dtype: A dtype or its name; "auto" for that of the file.

    Raises:
        CheckpointError: The file cannot be read, is not of this architecture, or tensors are missing.
    """
    config, tensors = _config_and_tensors(Path(path))
    dtype = getattr(torch, dtype) if isinstance(dtype, str) and dtype != "auto" else dtype
    own = tensors["model.embed_tokens.words.0.weight"].dtype if dtype in ("auto", None) else dtype
    config.dtype = own
    model = empty_model(config)
    layout = torch.contiguous_format
    copies = {name: tensor.to(own, copy=True, memory_format=layout) for name, tensor in tensors.items()}
    model.load_state_dict(copies, assign=True)
    model.tie_weights()
    model.config.architectures = [type(model).__name__]
    return model.requires_grad_(True).eval()


def read_config(path: str | os.PathLike) -> AdaptiveInputConfig:
    """The config of the model in a fairseq checkpoint. Its tensors are checked, too.

    Raises:
        CheckpointError: As for `load_checkpoint`.
    """
    return _config_and_tensors(Path(path))[0]


def _config_and_tensors(path: Path) -> tuple[AdaptiveInputConfig, dict[str, Tensor]]:
    """The config, and the model's tensors by their names in AdaptiveInputForCausalLM."""
    checkpoint = _read(path)
    settings, found = _settings(path, checkpoint), _decoder_tensors(path, checkpoint["model"])
    config = _config(path, settings, found)
    return config, _named(path, config, found)


def _read(path: Path) -> dict[str, Any]:
    """The content of a checkpoint. Tensors of the newer format are mapped, not read: optimizers' are never needed."""
    if not path.is_file():
        raise CheckpointError(f"no fairseq checkpoint at {path}")
    is_zip = zipfile.is_zipfile(path)
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path) if is_zip else _globals_of_old(path)
        foreign = [name for name in names if name.partition(".")[0] not in _STAND_INS]
        if foreign:
            raise CheckpointError(f"{path} asks for {', '.join(sorted(foreign))}: no code of a checkpoint is run")
        stand_ins: list[Any] = [(_StandIn, name) for name in names]
        with torch.serialization.safe_globals(stand_ins):
            checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:  # torch's message advises to read the file without weights_only
        reason = "it is damaged, or holds objects that are neither tensors nor settings"
        raise CheckpointError(f"{path} cannot be read as a PyTorch checkpoint: {reason}") from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, IndexError, AttributeError) as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise CheckpointError(f"{path} cannot be read as a PyTorch checkpoint: {reason}") from error
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("model"), dict):
        names_found = _listed([str(name) for name in checkpoint]) if isinstance(checkpoint, dict) else "no dictionary"
        raise CheckpointError(
            f"{path} is not a checkpoint that fairseq saved: it has no entry 'model' with tensors, found {names_found}"
        )
    return checkpoint


def _globals_of_old(path: Path) -> list[str]:
    """The classes and functions that a checkpoint of the format before torch 1.6 names, but for torch's own: what
    `get_unsafe_globals_in_checkpoint` does for the newer one."""
    names = set()
    with path.open("rb") as file:
        for _ in range(_OLD_PICKLES):
            names |= {
                str(name).replace(" ", ".") for kind, name, _ in pickletools.genops(file) if kind.name == "GLOBAL"
            }
    return sorted(name for name in names if not name.startswith("torch."))


def _plain(value: Any) -> Any:
    """Settings without their stand-ins: of argparse, or of omegaconf, whose objects have a value or a content."""
    if isinstance(value, _StandIn):
        inner = value.items
        return _plain(inner["_content"] if "_content" in inner else inner.get("_val", inner))
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _settings(path: Path, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The model's settings: `args` of older versions, or `cfg.model`."""
    args, config = (_plain(checkpoint.get(name)) for name in ("args", "cfg"))
    settings = args if args is not None else (config or {}).get("model")
    if not isinstance(settings, dict):
        raise CheckpointError(f"{path} has neither settings in 'args' nor in 'cfg': save it with fairseq again")
    return settings


def _decoder_tensors(path: Path, model: dict[str, Any]) -> dict[str, Tensor]:
    """The decoder's tensors under their newest names, without buffers."""
    if any(name.startswith("encoder.") for name in model):
        raise CheckpointError(f"{path} has an encoder: only language models are imported")
    if "decoder.embed_tokens.weight" in model:
        raise CheckpointError(
            f"{path} has one embedding table (decoder.embed_tokens.weight): only language models with adaptive input "
            "are imported, such as those of the architecture transformer_lm_wiki103"
        )
    found: dict[str, Tensor] = {}
    for full_name, tensor in model.items():
        name = full_name.removeprefix(_PREFIX)
        if _BUFFERS.fullmatch(name) or not isinstance(tensor, Tensor):
            continue
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():  # one number, repeated
            raise CheckpointError(f"{path}: {full_name} has {tensor.numel():,} elements, and the file holds fewer")
        for old, new in _OLD_NORMS.items():
            name = name.replace(old, new)
        layer, packed, kind = name.partition("in_proj_")
        if packed:
            for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                found[f"{layer}{part}_proj.{kind}"] = piece
        else:
            found[name] = tensor
    return found


def _config(path: Path, settings: dict[str, Any], found: dict[str, Tensor]) -> AdaptiveInputConfig:
    """Sizes come from the tensors; only what they do not show comes from the settings."""
    for name, expected in _PLAIN_SETTINGS.items():
        value = settings.get(name)
        if value is not None and value != expected:
            raise CheckpointError(f"{path} was trained with {name}={value!r}: only {expected!r} is supported")
    heads = settings.get("decoder_attention_heads")
    if not isinstance(heads, int):
        raise CheckpointError(f"{path}: its settings have no decoder_attention_heads, which no tensor shows")
    words = _in_order(found, "embed_tokens.embeddings.{}.0.weight")
    if not words:
        raise CheckpointError(
            f"{path} has no tensor decoder.embed_tokens.embeddings.0.0.weight: it is not a whole model"
        )
    layers = _in_order(found, "layers.{}.fc1.weight")
    width = words[0].shape[1]
    factor = width // max(1, words[1].shape[1]) if len(words) > 1 else 1
    dropout = {name: float(settings.get(name) or 0) for name in ("dropout", "attention_dropout", "activation_dropout")}
    dropout["activation_dropout"] = dropout["activation_dropout"] or float(settings.get("relu_dropout") or 0)
    sizes = torch.tensor([len(table) for table in words]).cumsum(0).tolist()
    tied = "adaptive_softmax.head.word_proj.weight" in found
    projection = found.get("adaptive_softmax.tail.0.0.weight")
    try:
        return AdaptiveInputConfig(
            vocab_size=sizes[-1],
            hidden_size=width,
            num_hidden_layers=len(layers),
            num_attention_heads=heads,
            intermediate_size=len(layers[0]) if layers else width,
            cutoffs=sizes[:-1],
            factor=factor,
            softmax_dropout=float(settings.get("adaptive_softmax_dropout") or 0),
            tie_word_embeddings=tied,
            # a projection of its own is a Linear, [Di,D]
            tie_projections=tied and projection is not None and len(projection) == width,
            **dropout,
        )
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error.message()}") from error


def _in_order(found: dict[str, Tensor], pattern: str) -> list[Tensor]:
    """The tensors of a pattern with a number, from 0 on."""
    tensors: list[Tensor] = []
    while (name := pattern.format(len(tensors))) in found:
        tensors.append(found[name])
    return tensors


def _named(path: Path, config: AdaptiveInputConfig, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by their names in our model, complete and of the right shapes."""
    expected = {name: tensor.shape for name, tensor in empty_model(config).state_dict().items()}
    sources = {name: _source(name, config) for name in expected}
    known = {source for names in sources.values() for source in names}
    missing = [source for names in sources.values() for source in names if source not in found]
    extra = [name for name in found if name not in known]
    problems = [
        f"{what}: {_listed([_PREFIX + name for name in sorted(set(names))])}"
        for what, names in (("missing tensors", missing), ("tensors that this architecture does not have", extra))
        if names
    ]
    if problems:
        raise CheckpointError(f"{path} is not a whole language model with adaptive input; {'; '.join(problems)}")
    tensors = {name: _assembled(name, config, found) for name in expected}
    wrong = [
        f"{_PREFIX}{sources[name][0]} is {list(tensor.shape)}, expected {list(expected[name])}"
        for name, tensor in tensors.items()
        if tensor.shape != expected[name]
    ]
    if wrong:
        raise CheckpointError(f"{path} has tensors of wrong shapes: {_listed(wrong)}")
    for target, source in empty_model(config).all_tied_weights_keys.items():
        if not torch.equal(tensors[target], tensors[source]):
            names = " and ".join(_PREFIX + sources[name][0] for name in (target, source))
            raise CheckpointError(f"{path}: {names} are tied, and they differ: the file is damaged")
    return tensors


def _source(name: str, config: AdaptiveInputConfig) -> list[str]:
    """fairseq's names, without the prefix, of what one of our tensors is made of."""
    module, _, rest = name.partition(".")
    parts = rest.split(".")
    if module == "model":
        if parts[0] != "embed_tokens":
            return [rest]
        return [f"embed_tokens.embeddings.{parts[2]}.{int(parts[1] == 'projections')}.weight"]
    head = "adaptive_softmax."
    if parts[0] == "projections":
        return [f"{head}tail.{parts[1]}.0.weight"]
    if parts[0] == "words" and parts[1] != "0":
        return [f"{head}tail.{int(parts[1]) - 1}.2.weight"]
    if not config.tie_word_embeddings:
        return [f"{head}head.weight"]
    return [f"{head}head.{'word' if parts[0] == 'words' else 'class'}_proj.weight"]


def _assembled(name: str, config: AdaptiveInputConfig, found: dict[str, Tensor]) -> Tensor:
    """One of our tensors. An untied head is one matrix, and a projection that is not tied is stored transposed."""
    tensor = found[_source(name, config)[0]]
    if name.startswith("lm_head.projections.") and not config.tie_projections:
        return tensor.mT
    if not config.tie_word_embeddings and name in ("lm_head.words.0.weight", "lm_head.tails.weight"):
        first = config.bounds[1]
        return tensor[:first] if name == "lm_head.words.0.weight" else tensor[first:]
    return tensor


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


# Dictionaries


def read_dictionary(path: str | os.PathLike) -> list[str]:
    """The words of a fairseq dictionary by their numbers, the four special ones included.

    Args:
        path: A text file, maybe compressed (.xz, .gz), with a word and its count on every line.

    Raises:
        CheckpointError: It names the file and the line.
    """
    path = Path(path)
    opener: Any = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    try:
        with opener(path, "rt", encoding="utf-8", newline="\n") as file:
            text = file.read(_LONGEST_DICTIONARY + 1)
    except (OSError, UnicodeDecodeError, lzma.LZMAError, zlib.error, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(f"the dictionary {path} cannot be read: {reason}") from error
    if len(text) > _LONGEST_DICTIONARY:
        raise CheckpointError(f"the dictionary {path} is too large: more than {_LONGEST_DICTIONARY:,} characters")
    words, known = list(SPECIAL_WORDS), set(SPECIAL_WORDS)
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        line = line.rstrip()
        replaces = line.endswith(" #fairseq:overwrite")
        word, _, count = line.removesuffix(" #fairseq:overwrite").rpartition(" ")
        if not word or not count.isdigit():
            raise CheckpointError(
                f"{path}, line {number}: a dictionary of fairseq (dict.txt) has a word and its count on every line, "
                f"found {line[:40]!r}"
            )
        if word in known and not replaces:
            raise CheckpointError(f"{path}, line {number}: the word {word!r} was there before")
        words.append(word)
        known.add(word)
    return words


def dictionary_tokenizer(path: str | os.PathLike, vocab_size: int | None = None) -> Any:
    """The word-level tokenizer of a fairseq dictionary: words are what white space separates, and every line ends with
    </s>. A word that is not in the dictionary becomes <unk>.

    Args:
        path: As for `read_dictionary`.
        vocab_size: Words of the model that the dictionary is for, to be checked.

    Raises:
        CheckpointError: The dictionary cannot be read, or is another model's.
    """
    words = read_dictionary(path)
    if vocab_size is not None and len(words) != vocab_size:
        special = len(SPECIAL_WORDS)
        raise CheckpointError(
            f"the dictionary {path} has {len(words) - special:,} words and {special} special ones, {len(words):,} in "
            f"all, and the model {vocab_size:,}: it is another model's"
        )
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Replace(Regex(r"\r\n|\r|\n"), f" {EOS} ")
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=UNKNOWN, pad_token=PAD, eos_token=EOS)
