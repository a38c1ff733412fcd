"""Log-probabilities of a long prompt travel in parts that fit one another, and arrive as the event that was sent."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hackkv.errors import TransferError
from hackkv.logprobs import PromptLogprobs
from hackkv.types import HandedOff, HandoffFailed, Prefilled, PrefillEvent, Token
from tests.transport import nouns
from tests.transport.fakes import FakePrefill
from transport import prefill_parts
from transport.channels import ChannelPool
from transport.convert import PREFILL_EVENT, PREFILL_JOB, PrefillPart
from transport.outbox import MESSAGE_BYTES
from transport.prefill_parts import PART_BYTES, PrefillCall, in_parts
from transport.rpc_client import PrefillClient
from transport.rpc_server import RpcServer
from transport.trunk import Body, Trunk

FAILED = HandoffFailed(0, "node_lost", "d-1 went away")


def columns(rows: int, width: int) -> PromptLogprobs:
    return PromptLogprobs(
        array("d", (-float(row) for row in range(rows))),
        array("I", range(rows * width)),
        array("d", (-float(nth) for nth in range(rows * width))),
    )


def prefilled(rows: int, width: int) -> Prefilled:
    return Prefilled(Token(0, 11), 0.1, 0.2, 0.05, rows + 1, columns(rows, width))


class Played(Trunk):
    """A stream on which a node answers with these parts at once."""

    def __init__(self, parts: Iterable[PrefillPart]) -> None:
        self.parts, self.left = parts, list[int]()

    def begin(self, job: bytes, take: Callable[[Body], None]) -> int:
        for part in self.parts:
            take(PREFILL_EVENT.encode(part))
        take(None)
        return 1

    def leave(self, number: int) -> None:
        self.left.append(number)


def call(trunk: Trunk) -> PrefillCall:
    async def find() -> Trunk:
        return trunk

    return PrefillCall(find, nouns.prefill_job(), PREFILL_JOB, PREFILL_EVENT)


async def read(parts: Iterable[PrefillPart]) -> list[PrefillEvent]:
    return [event async for event in call(Played(parts))]


@given(rows=st.integers(0, 40), width=st.integers(0, 5), part_bytes=st.integers(1, 500), followed=st.booleans())
async def test_parts_become_the_event_again(rows: int, width: int, part_bytes: int, followed: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_parts, "PART_BYTES", part_bytes)
        events: list[PrefillEvent] = [prefilled(rows, width)]
        events += [FAILED] * followed
        parts = [part for event in events for part in in_parts(event)]
    assert await read(parts) == events
    sent = [
        part if isinstance(part, PromptLogprobs) else part.prompt_logprobs
        for part in parts
        if not isinstance(part, HandedOff | HandoffFailed)
    ]
    row_bytes = 8 + 12 * width
    assert all(len(one) * row_bytes <= max(part_bytes, row_bytes) for one in sent)
    assert len(sent) == max(1, -(-rows // max(1, part_bytes // row_bytes)))


async def test_a_long_prompt_goes_through_a_real_server(server: RpcServer, channels: ChannelPool) -> None:
    node, event = FakePrefill(), prefilled(30_000, 20)  # 7 MiB
    node.events = [event, FAILED]
    server.add_prefill(node)
    client = PrefillClient(await server.start(), channels)
    assert [event async for event in client.prefill(nouns.prefill_job())] == [event, FAILED]
    # Two parts fit into a message with others, so that nothing waits behind a large one.
    assert max(len(PREFILL_EVENT.encode(part)) for part in in_parts(event)) <= PART_BYTES + 100 < MESSAGE_BYTES


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([columns(3, 2), FAILED], "prompt_logprobs before a HandoffFailed"),
        ([columns(3, 2), prefilled(1, 3)], "1 tokens with 3 alternatives each after those of 3 with 2"),
        ([columns(3, 2), columns(0, 0), prefilled(1, 2)], "0 tokens with 0 alternatives"),
        ([columns(3, 2), prefilled(0, 0)], "0 tokens with 0 alternatives"),
        ([columns(3, 0), columns(99_998, 0), prefilled(1, 0)], "at most 800000 bytes"),
    ],
)
async def test_parts_that_do_not_fit_end_the_call(
    parts: list[PrefillPart], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_parts, "MAX_REPLY_BYTES", 800_000)
    trunk = Played(parts)
    events = call(trunk)
    with pytest.raises(TransferError, match=why):
        await anext(events)
    assert trunk.left == [1]
    with pytest.raises(StopAsyncIteration):
        await anext(events)


async def test_a_call_that_ends_after_a_part_has_no_event() -> None:
    with pytest.raises(StopAsyncIteration):
        await anext(call(Played([columns(3, 2)])))


def test_what_is_small_travels_as_it_is() -> None:
    event = prefilled(10, 2)
    (part,) = in_parts(event)
    assert part is event
    assert list(in_parts(FAILED)) == [FAILED]
