"""The address of a server. Importing this file does not import torch: an address that is in use is noticed at once."""

from __future__ import annotations

import socket

from fastweights.utils.errors import Argument, FastWeightsError

# A client that takes nothing of what was sent to it for so long is disconnected by the operating system.
STALLED_SECONDS = 60


class ServerError(FastWeightsError):
    """An address that a server cannot have."""


def bind(host: str, port: int) -> socket.socket:
    """Take an address, before anything that takes long. It does not listen yet.

    Raises:
        ServerError: The address is in use, or not of this machine.
    """
    try:
        ((family, kind, protocol, _, address), *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = " is not an address: give one of this machine, such as 127.0.0.1"
        raise ServerError(Argument("host"), f" {host}{reason}") from error
    taken = socket.socket(family, kind, protocol)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * STALLED_SECONDS)
        taken.bind(address)
    except OSError as error:
        taken.close()
        reason = f" {port} of {host} cannot be taken ({error.strerror}): choose another one, or 0 for any that is free"
        raise ServerError(Argument("port"), reason) from error
    return taken


def address_of(bound: socket.socket) -> str:
    """The URL of a server at a socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
