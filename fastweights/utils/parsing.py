"""Reading JSON and YAML that someone else may have written or damaged.

Size, nesting, aliases and whole numbers are limited, so that a small file cannot take much time or memory. YAML tags
never construct Python objects. Whatever the parsers raise becomes a ParseError, one line long.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml

from fastweights.utils.errors import FastWeightsError

MAX_JSON_BYTES = 64 * 2**20
MAX_YAML_BYTES = 2**18
MAX_DEPTH = 64
# Nodes of a YAML file with every alias written out.
MAX_YAML_NODES = 100_000
# Larger whole numbers are no floats. transformers writes 10^30 where a length has no limit.
MAX_DIGITS = 300


class ParseError(FastWeightsError):
    """A file or string that is not valid JSON or YAML, or that exceeds a limit. The message is a predicate, such as
    "is not JSON: line 1: …", so that a caller puts the name of the file before it."""


def read_json(path: str | os.PathLike, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read a JSON file.

    Raises:
        ParseError: It is not JSON or exceeds a limit.
        OSError: The file cannot be opened.
    """
    return parse_json(_text(Path(path), max_bytes))


def parse_json(text: str) -> Any:
    """Parse JSON. NaN and Infinity are allowed, as Python writes them.

    Raises:
        ParseError: It is not JSON, is nested too deeply, or has a whole number of too many digits.
    """
    try:
        value = json.loads(text, parse_int=_integer)
    except json.JSONDecodeError as error:
        raise ParseError(f"is not JSON: line {error.lineno}: {error.msg}") from error
    except RecursionError as error:
        raise ParseError(_too_deep()) from error
    _check_depth(value)
    return value


def read_yaml(path: str | os.PathLike) -> Any:
    """Read a YAML file.

    Raises:
        ParseError: It is not YAML, has a name twice in one mapping, or exceeds a limit.
        OSError: The file cannot be opened.
    """
    return parse_yaml(_text(Path(path), MAX_YAML_BYTES))


def parse_yaml(text: str) -> Any:
    """Parse YAML; see `read_yaml`."""
    try:
        return yaml.load(text, _LimitedLoader)
    except ParseError:
        raise
    except RecursionError as error:
        raise ParseError(_too_deep()) from error
    except Exception as error:  # besides YAMLError, wrong tags raise what int(), strptime and others raise
        raise ParseError(f"is not YAML: {_yaml_reason(error)}") from error


class _LimitedLoader(yaml.SafeLoader):
    """YAML's safe loader with limits on nesting, aliases and whole numbers.

    It refuses two values of one name, of which YAML would take the last.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._depth = 0
        # With every alias written out. The nodes themselves are held, so that no id is used twice.
        self._sizes: dict[int, tuple[yaml.Node, int]] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        is_alias = self.check_event(yaml.AliasEvent)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ParseError(_too_deep())
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is None:
            return None
        if is_alias and id(node) not in self._sizes:
            raise ParseError("is not YAML: an alias refers to a value that contains it")
        if not is_alias:
            size = 1 + sum(self._sizes[id(child)][1] for child in _children(node))
            if size > MAX_YAML_NODES:
                raise ParseError(f"is too large: more than {MAX_YAML_NODES:,} values with its aliases written out")
            self._sizes[id(node)] = (node, size)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in names:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is given twice", problem_mark=key.start_mark)
            names.add(str(key.value))
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: Any) -> int:
        if len(str(node.value)) > MAX_DIGITS:
            raise ParseError(_too_large(str(node.value)))
        return super().construct_yaml_int(node)


_LimitedLoader.add_constructor("tag:yaml.org,2002:int", _LimitedLoader.construct_yaml_int)


def _yaml_reason(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem and error.problem_mark:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return " ".join(str(error).split()) or type(error).__name__


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [child for pair in node.value for child in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _text(path: Path, max_bytes: int) -> str:
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ParseError(f"is too large: more than {max_bytes:,} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ParseError("is not text: it is not UTF-8") from error


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ParseError(_too_large(text))
    return int(text)


def _check_depth(value: Any) -> None:
    """Refuse nested values that would exceed Python's recursion limit later."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise ParseError(_too_deep())
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [child for items in inner for child in items if isinstance(child, dict | list)]


def _too_deep() -> str:
    return f"is nested too deeply: at most {MAX_DEPTH} levels are read"


def _too_large(text: str) -> str:
    return f"has a whole number of more than {MAX_DIGITS} digits: {text[:20]}…"
