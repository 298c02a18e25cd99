"""API keys. Each key is a tenant of its own: what one stores does not exist for another."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from pathlib import Path
from typing import Any

from fastweights.config import ConfigError
from fastweights.serve.errors import ApiError
from fastweights.utils.errors import Argument

VARIABLE = "FASTWEIGHTS_API_KEYS"
# The tenant of all requests where there are no keys.
EVERYONE = ""
_SCHEME = b"bearer "
_COMMENT = re.compile(r"(?:^|\s)#")


def read_keys(path: Path | None) -> list[str]:
    """The API keys in a file, one in each line, or those in the environment, with commas between.

    A # at the beginning of a line or after a space begins a comment. Inside a key it is a character like any other.

    Raises:
        ConfigError: The file has no key, or a key that a header cannot carry.
    """
    if path is None:
        lines = os.environ.get(VARIABLE, "").split(",")
    else:
        lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    keys = [key for line in lines if (key := _COMMENT.split(line)[0].strip())]
    if path is not None and not keys:
        raise ConfigError(Argument("api_keys"), f" {path} has no key in it: write one in each line")
    for number, key in enumerate(keys, 1):
        if not (key.isascii() and key.isprintable() and " " not in key):
            where = VARIABLE if path is None else path
            raise ConfigError(f"key {number} of {where} must have printable ASCII characters only, without spaces")
    return keys


class Keys:
    """The keys that are accepted, as digests."""

    def __init__(self, keys: list[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def tenant(self, authorization: bytes | None) -> str:
        """The tenant that an Authorization header belongs to.

        Raises:
            ApiError: 401, there is no key or a wrong one.
        """
        if not self._digests:
            return EVERYONE
        if authorization is None or authorization[: len(_SCHEME)].lower() != _SCHEME:
            raise _refused("give an API key: Authorization: Bearer KEY", "missing_api_key")
        given = _digest(authorization[len(_SCHEME) :].strip())
        # All digests are compared, each in constant time: the time tells nothing about the keys.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if not any(matches):
            raise _refused("this API key is not known to the server", "invalid_api_key")
        return given[:32]


def _digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def _refused(message: str, code: str) -> ApiError:
    return ApiError(message, 401, code=code, headers={"WWW-Authenticate": "Bearer"})


class Authentication:
    """ASGI middleware that finds out whose request it is, before anything else of it is read.

    `scope["tenant"]` is set for paths that need a key.
    """

    def __init__(self, app: Any, keys: Keys) -> None:
        self.app, self.keys = app, keys

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1/"):
            try:
                scope["tenant"] = self.keys.tenant(dict(scope["headers"]).get(b"authorization"))
            except ApiError as error:
                await error.reply()(scope, receive, send)
                return
        await self.app(scope, receive, send)
