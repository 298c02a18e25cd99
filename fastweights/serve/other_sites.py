"""Web pages of other sites are kept out of a server without API keys: whoever visits such a page has a browser that can
reach the server, although the site cannot.
"""

from __future__ import annotations

import ipaddress
from typing import Any
from urllib.parse import urlsplit

from fastweights.serve.errors import ApiError

# What browsers say about requests of pages that are not the server's own.
_ELSEWHERE = (b"cross-site", b"same-site")


class OtherSites:
    """ASGI middleware that refuses requests of web pages of other sites.

    A site can also let its own name stand for 127.0.0.1, so that its page seems to be the server's (DNS rebinding). So
    who asks at an address of this machine must have asked for an address or for localhost, and not for another name.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1/"):
            try:
                _check(scope)
            except ApiError as error:
                await error.reply()(scope, receive, send)
                return
        await self.app(scope, receive, send)


def _check(scope: Any) -> None:
    headers = dict(scope["headers"])
    if headers.get(b"sec-fetch-site") in _ELSEWHERE:
        raise ApiError("web pages of other sites may not use this server", 403, code="other_site")
    host = headers.get(b"host", b"").decode("latin-1")
    server = _address((scope["server"] or ("",))[0])
    if server is not None and server.is_loopback and not _is_safe(host):
        message = f"a server without API keys is asked as localhost, found Host: {host[:80]}"
        raise ApiError(f"{message}; give it API keys, or let a proxy write this header", 403, code="other_site")


def _is_safe(host: str) -> bool:
    """Whether no site can own the name in a Host header."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return name == "localhost" or name.endswith(".localhost") or _address(name) is not None


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
