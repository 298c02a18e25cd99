"""Keys of stored entries, and the search for the longest stored prefix of a list of tokens.

A key is a SHA-256 digest of the model, the tenant and either a response's id or the tokens of a prefix. Nothing from a
request is used in any other form. As nobody can find two lists of tokens with one digest, equal keys mean equal tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

import numpy as np


def owner_key(model: str, tenant: str) -> str:
    """The key of a tenant's entries for a model, which is given by its fingerprint."""
    return _digest("owner", model, tenant).hexdigest()


def response_key(owner: str, id: str) -> str:
    """The key of a response."""
    return _digest("response", owner, id).hexdigest()


def prefix_key(owner: str, tokens: Sequence[int]) -> str:
    """The key of a prefix that consists of `tokens`."""
    return prefix_keys(owner, tokens, [len(tokens)])[len(tokens)]


def prefix_keys(owner: str, tokens: Sequence[int], lengths: Collection[int]) -> dict[int, str]:
    """The keys of the prefixes of `tokens` that have these lengths. Every token is digested once."""
    data, digest, read = memoryview(np.asarray(tokens, dtype="<i8").tobytes()), _digest("prefix", owner), 0
    keys = {}
    for length in sorted(set(lengths)):
        digest.update(data[8 * read : 8 * length])
        keys[length], read = digest.copy().hexdigest(), length
    return keys


def stored_prefixes(owner: str, tokens: Sequence[int], stored: Collection[tuple[int, str]]) -> list[tuple[int, str]]:
    """Those of the stored prefixes that `tokens` begin with, as (length, key), the longest first."""
    keys = prefix_keys(owner, tokens, {length for length, _ in stored if length <= len(tokens)})
    return sorted((pair for pair in set(stored) if keys.get(pair[0]) == pair[1]), reverse=True)


def _digest(*parts: str) -> hashlib._Hash:
    """The digest of strings. Their lengths are digested, too: no two lists of strings look the same."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest
