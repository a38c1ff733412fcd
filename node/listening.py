"""A socket at an address of this machine."""

from __future__ import annotations

import socket

from hackkv.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """A socket at an address that nobody else has. It does not listen yet.

    The protocol is named because asyncio switches Nagle's algorithm off only for sockets that name TCP, and those of
    `socket.create_server` do not. Otherwise the end of every response would wait 40 ms for the client's delayed ACK.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    one = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind((host, port))
    except OSError as error:
        one.close()
        raise ConfigError(f"listen: cannot bind {host}:{port}: {error.strerror or error}") from error
    return one
