"""The health service, asked in the way of any gRPC prober and of the containers' health check."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
import trustme
import yaml

from hackkv.config import InternalConfig
from transport.health import main, probe
from transport.rpc_server import RpcServer
from transport.trust import Trust, load_trust

NAME = "a-name-that-nobody-dials"


def write_role(folder: Path, server_name: str = NAME) -> tuple[Path, Trust]:
    """A role's configuration with token and mutual TLS, and the `Trust` that it makes."""
    authority = trustme.CA()
    issued = authority.issue_cert(NAME)
    authority.cert_pem.write_to_path(str(folder / "authority.pem"))
    issued.cert_chain_pems[0].write_to_path(str(folder / "certificate.pem"))
    issued.private_key_pem.write_to_path(str(folder / "key.pem"))
    (folder / "token").write_text("correct horse battery staple", encoding="ascii")
    tls = {name: str(folder / f"{name}.pem") for name in ("authority", "certificate", "key")}
    internal = {"token_file": str(folder / "token"), "tls": {**tls, "server_name": server_name}}
    config = folder / "prefill.yaml"
    config.write_text(yaml.safe_dump({"router": "router:8001", "internal": internal}), encoding="utf-8")
    return config, load_trust(InternalConfig.model_validate(internal), "127.0.0.1")


async def test_a_server_is_healthy_without_a_token() -> None:
    server = RpcServer("127.0.0.1", 0, trust=Trust("a-token-that-the-prober-lacks"))
    address = await server.start()
    try:
        assert await probe(address) == "SERVING"
        assert await asyncio.to_thread(main, [address]) == 0
    finally:
        await server.close()
    assert await asyncio.to_thread(main, [address]) == 1


async def test_mutual_tls_takes_the_roles_own_configuration(tmp_path: Path) -> None:
    config, trust = write_role(tmp_path)
    server = RpcServer("127.0.0.1", 0, trust=trust)
    address = await server.start()
    try:
        assert await asyncio.to_thread(main, [address, "--config", str(config)]) == 0
        assert await asyncio.to_thread(main, [address]) == 1  # no certificate
        write_role(tmp_path)  # a certificate, but of another authority
        assert await asyncio.to_thread(main, [address, "--config", str(config)]) == 1
    finally:
        await server.close()


async def test_a_port_where_nobody_answers_is_said_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert (await probe(address, timeout_s=0.2)).startswith(address)


def test_a_wrong_command_line_or_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    config, _ = write_role(tmp_path)
    (tmp_path / "key.pem").unlink()
    assert main(["127.0.0.1:1", "--config", str(config)]) == 2
    assert "internal.tls.key" in capsys.readouterr().err
