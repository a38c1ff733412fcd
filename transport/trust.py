"""How the processes of one cluster authenticate on their internal ports: by a shared token, mutual TLS, or both.

The token travels with every call and is compared before a message is read. Without TLS it is only as secret as the
network that carries it. With TLS both ends show a certificate of the cluster's own authority. A port that other
machines can reach needs a token or TLS, unless the configuration sets `internal.open`.
"""

from __future__ import annotations

import hmac
import ipaddress
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from hackkv.config import InternalConfig, TlsConfig
from hackkv.errors import ConfigError

TOKEN_KEY = "hackkv-token"
MIN_TOKEN_CHARS = 16
MAX_FILE_BYTES = 1 << 20
"""The largest file that is read: more than any token, key or chain of certificates takes."""

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, repr=False)
class Tls:
    """PEM bytes: the authority both ends trust, and this process's own certificate and key."""

    authority: bytes
    certificate: bytes
    key: bytes
    server_name: str = ""
    """The name in peers' certificates, if it differs from the host that is dialled."""


@dataclass(frozen=True, slots=True, repr=False)
class Trust:
    """What a process shows its peers and asks of them. Without token and TLS, every caller is a peer."""

    token: str = ""
    tls: Tls | None = None

    @property
    def metadata(self) -> Metadata:
        """The metadata of every call."""
        return ((TOKEN_KEY, self.token),) if self.token else ()

    def knows(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Whether a call shows the token, compared in constant time. TLS has checked the certificate before."""
        if not self.token:
            return True
        shown = next((value for key, value in metadata if key == TOKEN_KEY), "")
        return hmac.compare_digest(shown.encode() if isinstance(shown, str) else shown, self.token.encode())

    def dial(self, address: str, options: list[tuple[str, int]]) -> grpc.aio.Channel:
        """A channel to a peer."""
        if self.tls is None:
            return grpc.aio.insecure_channel(address, options=options)
        name = [("grpc.ssl_target_name_override", self.tls.server_name)] if self.tls.server_name else []
        credentials = grpc.ssl_channel_credentials(self.tls.authority, self.tls.key, self.tls.certificate)
        return grpc.aio.secure_channel(address, credentials, options=[*options, *name])

    def bind(self, server: grpc.aio.Server, address: str) -> int:
        """Open a port for peers and return its number. Raises `RuntimeError` if it cannot be bound."""
        if self.tls is None:
            return server.add_insecure_port(address)
        pair = (self.tls.key, self.tls.certificate)
        credentials = grpc.ssl_server_credentials([pair], self.tls.authority, require_client_auth=True)
        return server.add_secure_port(address, credentials)


EVERYBODY = Trust()
"""No token and no TLS: for ports that only this machine reaches."""


def load_trust(config: InternalConfig, host: str) -> Trust:
    """Read the files that `config` names. Raises `ConfigError` naming the setting and the file.

    `host` is where this process listens for peers. If other machines can reach it, a port without token and TLS needs
    `internal.open`.
    """
    token, tls = "", None
    if config.token_file is not None:
        token = _read(config.token_file, "internal.token_file").decode("ascii", "replace").strip()
        if len(token) < MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable():
            raise ConfigError(
                f"internal.token_file: {config.token_file} must hold at least {MIN_TOKEN_CHARS} printable ASCII "
                "characters; `openssl rand -hex 32` makes a good one"
            )
    if config.tls is not None:
        tls = Tls(
            _read(config.tls.authority, "internal.tls.authority"),
            _read(config.tls.certificate, "internal.tls.certificate"),
            _read(config.tls.key, "internal.tls.key"),
            config.tls.server_name,
        )
        _check_pair(config.tls)
    if not (token or tls or config.open or is_loopback(host)):
        raise ConfigError(
            f"other machines can reach {host or 'all addresses'}: set internal.token_file or internal.tls, "
            "or internal.open: true if the network itself is trusted"
        )
    return Trust(token, tls)


def _check_pair(config: TlsConfig) -> None:
    """Load the files with OpenSSL to learn which one is wrong. gRPC would only say that a handshake failed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(config.authority)
    except ssl.SSLError as error:
        raise ConfigError(f"internal.tls.authority: {config.authority}: {error}") from error
    try:
        context.load_cert_chain(config.certificate, config.key)
    except ssl.SSLError as error:
        raise ConfigError(f"internal.tls.key: {config.key} and {config.certificate} are no pair: {error}") from error


def _read(path: Path, setting: str) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{setting}: {path}: {error.strerror or error}") from error
    if not 0 < len(data) <= MAX_FILE_BYTES:
        raise ConfigError(f"{setting}: {path}: must hold 1 to {MAX_FILE_BYTES} bytes")
    return data


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
