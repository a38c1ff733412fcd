"""An internal port refuses strangers before it reads any of their data, and lets peers in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import pytest
import trustme

from hackkv.config import InternalConfig, TlsConfig
from hackkv.errors import ConfigError, HackkvError, NodeLost, Unauthorized
from hackkv.nodes import Lease, NodeInfo
from hackkv.types import Handoff, HandoffEnd, KvFrame, Receipt
from tests.transport import nouns
from transport import methods
from transport.channels import ChannelPool
from transport.closing import closing
from transport.grpc_wire import GrpcListener, GrpcSender
from transport.rpc_client import RegistryClient
from transport.rpc_server import RpcServer
from transport.trust import EVERYBODY, TOKEN_KEY, Tls, Trust, load_trust

TOKEN = "correct horse battery staple"


class Authority:
    """Signs certificates for 127.0.0.1, and for a cluster-wide name."""

    def __init__(self) -> None:
        self._ca = trustme.CA()

    def tls(self, name: str = "127.0.0.1", server_name: str = "") -> Tls:
        issued = self._ca.issue_cert(name)
        certificate = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
        return Tls(self._ca.cert_pem.bytes(), certificate, issued.private_key_pem.bytes(), server_name)


OURS, THEIRS = Authority(), Authority()


class AnyRegistry:
    async def register(self, info: NodeInfo) -> Lease:
        return Lease(3.5)


@dataclass(frozen=True)
class Port:
    """An internal port with all calls that a stranger might try."""

    address: str

    async def registers(self, trust: Trust) -> bool:
        channels = ChannelPool(trust=trust)
        try:
            return await RegistryClient(self.address, channels).register(nouns.node_info()) == Lease(3.5)
        finally:
            await channels.close()

    async def receives(self, trust: Trust) -> bool:
        sender = GrpcSender(trust=trust)
        try:
            return await sender.push(self.address, nouns.handoff(), nouns.frames(2)) == nouns.receipt()
        finally:
            await sender.close()


async def take(_: Handoff, frames: AsyncIterator[KvFrame | HandoffEnd]) -> Receipt:
    async with closing(frames):
        async for _item in frames:
            pass
    return nouns.receipt()


@asynccontextmanager
async def guarded(trust: Trust) -> AsyncIterator[Port]:
    server = RpcServer("127.0.0.1", 0, trust=trust)
    server.add_registry(AnyRegistry())
    listener = GrpcListener(server)
    try:
        yield Port(await listener.serve(take))
    finally:
        await listener.close()
        await server.close()


@pytest.mark.parametrize(
    ("ours", "peers"),
    [
        (Trust(TOKEN), Trust(TOKEN)),
        (Trust(tls=OURS.tls()), Trust(tls=OURS.tls())),
        (Trust(tls=OURS.tls("hackkv")), Trust(tls=OURS.tls("hackkv", server_name="hackkv"))),
        (Trust(TOKEN, OURS.tls()), Trust(TOKEN, OURS.tls())),
        (EVERYBODY, Trust(TOKEN)),
    ],
    ids=["token", "tls", "tls-cluster-name", "both", "open"],
)
async def test_peers_are_let_in(ours: Trust, peers: Trust) -> None:
    async with guarded(ours) as port:
        assert await port.registers(peers)
        assert await port.receives(peers)


@pytest.mark.parametrize(
    ("ours", "stranger", "refusal"),
    [
        (Trust(TOKEN), EVERYBODY, Unauthorized),
        (Trust(TOKEN), Trust(TOKEN + "r"), Unauthorized),
        (Trust(TOKEN), Trust(TOKEN[:-1]), Unauthorized),
        (Trust(TOKEN, OURS.tls()), Trust("", OURS.tls()), Unauthorized),
        (Trust(tls=OURS.tls()), EVERYBODY, NodeLost),
        (Trust(tls=OURS.tls()), Trust(tls=THEIRS.tls()), NodeLost),
        (Trust(tls=OURS.tls("elsewhere")), Trust(tls=OURS.tls()), NodeLost),
        (EVERYBODY, Trust(tls=OURS.tls()), NodeLost),
    ],
    ids=["no-token", "longer", "shorter", "tls-no-token", "plain", "other-authority", "other-name", "plain-server"],
)
async def test_strangers_are_turned_away(ours: Trust, stranger: Trust, refusal: type[HackkvError]) -> None:
    async with guarded(ours) as port:
        with pytest.raises(refusal):
            await port.registers(stranger)
        # The refusal may come while the sender writes. grpc.aio then hides the status behind the failed write.
        with pytest.raises((refusal, NodeLost)):
            await port.receives(stranger)


@pytest.mark.parametrize("method", [*methods.ALL, "/no.such/Method"])
async def test_a_stranger_is_answered_before_it_has_said_anything(method: str) -> None:
    """A stranger also cannot find out which methods exist."""
    async with guarded(Trust(TOKEN)) as port, grpc.aio.insecure_channel(port.address) as channel:
        call = channel.stream_stream(method, None, None)(None, metadata=((TOKEN_KEY, "guess"),))
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


def test_secrets_are_not_shown_in_logs() -> None:
    assert TOKEN not in f"{Trust(TOKEN, OURS.tls())!r}"


@dataclass(frozen=True)
class Files:
    """Certificates in files, as a configuration names them."""

    folder: Path

    def write(self, name: str, data: bytes) -> Path:
        path = self.folder / name
        path.write_bytes(data)
        return path

    def tls(self, **changes: bytes) -> TlsConfig:
        tls = OURS.tls()
        data = {"authority": tls.authority, "certificate": tls.certificate, "key": tls.key, **changes}
        files = {name: self.write(name, content) for name, content in data.items()}
        return TlsConfig(authority=files["authority"], certificate=files["certificate"], key=files["key"])


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_files_become_trust(files: Files) -> None:
    config = InternalConfig(token_file=files.write("token", f"{TOKEN}\n".encode()), tls=files.tls())
    trust = load_trust(config, "0.0.0.0")
    assert trust.token == TOKEN
    assert trust.tls is not None
    assert trust.tls.key == (files.folder / "key").read_bytes()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "[::1]", "localhost"])
def test_loopback_needs_no_secret(host: str) -> None:
    assert load_trust(InternalConfig(), host) == EVERYBODY


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.0.0.1", "decode-0"])
def test_a_port_that_others_reach_does_not_open_by_accident(host: str) -> None:
    with pytest.raises(ConfigError, match=r"internal\.token_file or internal\.tls"):
        load_trust(InternalConfig(), host)
    assert load_trust(InternalConfig(open=True), host) == EVERYBODY


WRONG: dict[str, tuple[Callable[[Files], InternalConfig], str]] = {
    "missing": (lambda files: InternalConfig(token_file=files.folder / "none"), r"internal\.token_file: .*none"),
    "empty": (lambda files: InternalConfig(token_file=files.write("t", b"")), r"internal\.token_file"),
    "short": (lambda files: InternalConfig(token_file=files.write("t", b"hunter2")), "at least 16"),
    "two-lines": (lambda files: InternalConfig(token_file=files.write("t", b"a" * 20 + b"\nb")), "printable"),
    "binary": (lambda files: InternalConfig(token_file=files.write("t", bytes(range(128, 160)))), "ASCII"),
    "huge": (lambda files: InternalConfig(token_file=files.write("t", bytes(2 << 20))), "1048576 bytes"),
    "no-authority": (lambda files: InternalConfig(tls=files.tls(authority=b"x")), r"internal\.tls\.authority"),
    "other-key": (lambda files: InternalConfig(tls=files.tls(key=THEIRS.tls().key)), r"internal\.tls\.key"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_named(case: str, files: Files) -> None:
    make, said = WRONG[case]
    with pytest.raises(ConfigError, match=said):
        load_trust(make(files), "127.0.0.1")
