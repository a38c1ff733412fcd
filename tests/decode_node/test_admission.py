"""Requests that a decode node takes, and the errors for those that it refuses."""

from __future__ import annotations

import pytest

from decode_node.config import DecodeSettings
from hackkv.errors import (
    HandshakeRefused,
    Overloaded,
    RequestError,
)
from hackkv.types import (
    DecodeJob,
    Reserved,
)
from tests.decode_node.calls import close, reserved
from tests.pair import PI, greedy, paired, tiny_worker


async def test_no_room_is_said_before_anything_is_held() -> None:
    async with paired(tiny_worker("hack"), num_pages=4, decoding=DecodeSettings(max_sequences=2)) as nodes:
        first = await reserved(nodes, "a", 4 * PI - 4, PI)
        named = "1 pages, 1 more to grow and a slot are needed; 1 pages and 1 slots are free"
        with pytest.raises(Overloaded, match=named):
            await reserved(nodes, "b", PI, PI)
        second = await reserved(nodes, "c", 1, 2)
        with pytest.raises(Overloaded, match="0 slots are free"):
            await reserved(nodes, "d", 1, 2)
        assert dict((await nodes.decode.describe()).stats)["hackkv_admission_refused_total"] == 2
        await close(first)
        await close(second)
        await nodes.assert_idle()


async def test_without_host_memory_all_that_a_request_may_come_to_is_kept() -> None:
    async with paired(tiny_worker("hack"), num_pages=4, decoding=DecodeSettings(host_bytes=0)) as nodes:
        first = await reserved(nodes, "a", 1, 3 * PI)
        with pytest.raises(Overloaded, match="64 tokens more may not fit into this node's device and host memory"):
            await reserved(nodes, "b", 1, 2 * PI)
        second = await reserved(nodes, "c", 1, 2 * PI - 1)
        await close(first)
        await close(second)
        await nodes.assert_idle()


@pytest.mark.parametrize(
    ("tokens", "named"), [(5 * PI + 1, "need 5 pages; this node has 4"), (1025, "exceed the model's 1024")]
)
async def test_requests_that_can_never_run_are_refused(tokens: int, named: str) -> None:
    async with paired(tiny_worker("hack"), num_pages=4) as nodes:
        events = nodes.decode.decode(DecodeJob(greedy("r", (5,) * (tokens - 2), 2), "r", 0))
        with pytest.raises(RequestError, match=named):
            await anext(events)
        await nodes.assert_idle()


@pytest.mark.parametrize(("prompt_tokens", "param"), [(1023, "max_tokens"), (1024, "prompt")])
async def test_what_exceeds_the_context_is_named(prompt_tokens: int, param: str) -> None:
    """A prompt that leaves room for a token is not at fault."""
    async with paired(tiny_worker("hack")) as nodes:
        events = nodes.decode.decode(DecodeJob(greedy("r", (5,) * prompt_tokens, 2), "r", 0))
        with pytest.raises(RequestError, match="exceed the model's 1024") as raised:
            await anext(events)
        assert raised.value.param == param


async def test_a_transfer_id_in_use_gives_its_pages_back() -> None:
    async with paired(tiny_worker("hack")) as nodes:
        job = DecodeJob(greedy("r", (5,), 2), "r", 0)
        first, second = nodes.decode.decode(job), nodes.decode.decode(job)
        assert await anext(first) == Reserved()
        held = (await nodes.decode.describe()).free_pages
        with pytest.raises(HandshakeRefused, match="r is in use"):
            await anext(second)
        assert (await nodes.decode.describe()).free_pages == held
        await close(first)
        await nodes.assert_idle()
