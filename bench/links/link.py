"""A link of a given rate inside a network namespace of its own, and a measurement of its real rate."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import threading
from collections.abc import Sequence
from time import perf_counter
from typing import Final

from hackkv.errors import ConfigError

FREE: Final = "none"
DECODE_HOST: Final = "127.0.0.2"
"""The decode node listens here. Only packets to this address pass the link."""

_UNITS: Final = {"mbit": 1e6, "gbit": 1e9}
_PACKET: Final = 65536
"""Bytes of the largest packet of loopback."""
_EARLY_S: Final = 0.0005
"""Size of the token bucket as a time: how early the link may deliver. With smaller ones, fast links miss their rate."""
_PROBE_S: Final = 0.3
_PROBE_BYTES: Final = 256 << 20
"""A measurement sends as much as the link carries in `_PROBE_S`, at most this. Over the free link it sends all this."""
_PIECE: Final = 1 << 20


def bits_per_s(link: str) -> float:
    """The rate of a name such as 200mbit or 10gbit, in bits per second. Raises `ConfigError` for other names."""
    found = re.fullmatch(r"([1-9]\d*)(mbit|gbit)", link)
    if found is None:
        raise ConfigError(f"--links: {link!r}: expected a rate such as 200mbit or 10gbit, or {FREE}")
    return int(found[1]) * _UNITS[found[2]]


def apart(command: Sequence[str]) -> list[str]:
    """`command` in a network namespace of its own, which has only loopback. Needs root."""
    return ["unshare", "--net", "sh", "-c", f"ip link set lo up && exec {shlex.join(command)}"]


def shaping(link: str) -> list[list[str]]:
    """The commands that send packets to `DECODE_HOST` over the link, in a namespace without a link so far."""
    if link == FREE:
        return []
    burst = max(_PACKET, round(bits_per_s(link) / 8 * _EARLY_S))
    # Without a default class, packets that match no filter are not shaped.
    steps = (
        "tc qdisc add dev lo root handle 1: htb",
        f"tc class add dev lo parent 1: classid 1:1 htb rate {link} burst {burst} cburst {burst} quantum {_PACKET}",
        f"tc filter add dev lo parent 1: protocol ip u32 match ip dst {DECODE_HOST}/32 flowid 1:1",
    )
    return [step.split() for step in steps]


def shape(link: str) -> None:
    """Replace the link of this namespace by `link`. Raises `subprocess.CalledProcessError`."""
    subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], stderr=subprocess.DEVNULL, check=False)
    for step in shaping(link):
        subprocess.run(step, check=True)


def measure(link: str) -> float:
    """Bits per second of the link of this namespace, measured by sending over it."""
    size = _PROBE_BYTES if link == FREE else min(_PROBE_BYTES, round(bits_per_s(link) / 8 * _PROBE_S))
    with socket.create_server((DECODE_HOST, 0)) as server:
        reader = threading.Thread(target=_drain, args=(server, size))
        reader.start()
        with socket.create_connection(server.getsockname()) as sender:
            began = perf_counter()
            for start in range(0, size, _PIECE):
                sender.sendall(bytes(min(_PIECE, size - start)))
            sender.recv(1)
            took = perf_counter() - began
        reader.join()
    return 8 * size / took


def _drain(server: socket.socket, size: int) -> None:
    connection, _ = server.accept()
    with connection:
        room = bytearray(_PIECE)
        while size > 0:
            size -= connection.recv_into(room)
        connection.sendall(b".")
