"""Connections over real sockets: how many there may be, whose they are, and which one makes room for another."""

from __future__ import annotations

import asyncio
import json
import socket
from ipaddress import ip_network

import pytest
from anthropic.types.shared import ErrorResponse

from hackkv.tokenizer import Tokenizer
from router.api.connection import Census
from tests.router.api.sockets import BODY, REQUEST, asked, finish, head, ids, listening
from tests.router.conftest import LIMITS, make_served
from tests.router.runs import until
from tests.router.scripted import Cluster

DUAL = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")


async def test_a_connection_without_a_next_request_is_closed(cluster: Cluster, tokenizer: Tokenizer) -> None:
    async with listening(cluster, tokenizer, idle_s=0.05) as (port, refused):
        answer = await finish(*await asked(port))
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" not in answer
        assert not refused


@pytest.mark.parametrize("census", [Census(2, 100, ()), Census(100, 2, ())], ids=["all", "of an address"])
async def test_the_connection_that_waits_longest_for_a_request_makes_room(
    cluster: Cluster, tokenizer: Tokenizer, census: Census
) -> None:
    async with listening(cluster, tokenizer, census) as (port, refused):
        first, second = [await asked(port) for _ in range(2)]
        await first[0].readuntil(b"}}}")
        await second[0].readuntil(b"}}}")
        first[1].write(REQUEST)
        await first[0].readuntil(b"}}}")  # so `second` has waited longer
        third = await asked(port)
        await third[0].readuntil(b"}}}")
        assert await finish(*second) == b""
        first[1].write(REQUEST)  # is still there
        assert (await first[0].readuntil(b"}}}")).startswith(b"HTTP/1.1 200 ")
        for one in (first, third):
            one[1].close()
        assert not refused


async def test_connections_are_counted_by_address_but_not_those_of_proxies(
    cluster: Cluster, tokenizer: Tokenizer
) -> None:
    async with listening(cluster, tokenizer, Census(100, 1, ())) as (port, refused):
        first = await asyncio.open_connection("127.0.0.1", port)
        second = await asyncio.open_connection("127.0.0.1", port)
        answer = await finish(*second)
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert ids(answer)
        body = answer.partition(b"\r\n\r\n")[2]
        assert json.loads(body)["error"]["code"] == "too_many_connections"
        # The client has not said which API it speaks. Clients of both can read this error.
        assert ErrorResponse.model_validate_json(body).error.type == "rate_limit_error"
        first[1].write(REQUEST)
        assert (await first[0].readuntil(b"}}}")).startswith(b"HTTP/1.1 200")
        assert refused == [429]
        first[1].close()
    census = Census(3, 1, (ip_network("127.0.0.0/8"), ip_network("::1/128")))
    assert [census.enter(address) for address in ("127.0.0.1", "127.0.0.9", "::ffff:127.0.0.1")] == [None] * 3
    full = census.enter("127.0.0.1")
    assert full is not None
    assert full.status == 503


@pytest.mark.parametrize(("trusted", "dual"), [(True, False), (False, False), pytest.param(True, True, marks=DUAL)])
async def test_only_a_proxy_may_say_whose_turn_it_is(
    cluster: Cluster, tokenizer: Tokenizer, trusted: bool, dual: bool
) -> None:
    """Two clients of one proxy count as two: the bytes that one sends do not count against the other."""
    size = 60_000
    served = make_served(cluster, tokenizer, limits={**LIMITS, "max_buffered_bytes": 3 * size})
    proxies = (ip_network("127.0.0.0/8"),) if trusted else ()

    async def ask(port: int, address: str) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head(size, f"x-forwarded-for: {address}", "connection: close") + BODY.ljust(size))
        return await finish(reader, writer)

    async with listening(cluster, tokenizer, served=served, proxies=proxies, dual=dual) as (port, _):
        _, slow = await asyncio.open_connection("127.0.0.1", port)
        slow.write(head(size + 1, "x-forwarded-for: 192.0.2.1") + b" " * size)
        await until(lambda: served.bodies.held == size)
        assert (await ask(port, "192.0.2.1")).startswith(b"HTTP/1.1 429 ")  # more than half of all bytes
        assert (await ask(port, "192.0.2.2")).startswith(b"HTTP/1.1 200 " if trusted else b"HTTP/1.1 429 ")
        slow.close()
        await until(lambda: not served.bodies.held)
    await served.prompts.parsers.close()


def test_one_ipv6_network_is_one_client() -> None:
    census = Census(100, 1, ())
    assert census.enter("2001:db8::1") is None
    assert census.enter("2001:db8:0:1::1") is None
    assert census.enter("2001:db8::2%eth0") is not None
    for address in ("2001:db8::1", "2001:db8:0:1::1", "2001:db8::2%eth0"):
        census.leave(address)
    assert census.enter("2001:db8::2") is None
