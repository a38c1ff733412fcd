"""A prompt goes on where an earlier answer ended, since the decode node has its pages. Tokens do not change.

Every test compares with the tokens of one process that serves the prompt alone, from the beginning.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from hackkv.errors import HackkvError
from hackkv.held import HeldKv
from hackkv.model.generate import generate
from hackkv.model.worker import Worker
from hackkv.nodes import NodeInfo
from hackkv.page_names import MARK_BYTES, Naming
from hackkv.types import (
    DecodeJob,
    HandedOff,
    Prefilled,
    PrefillJob,
    Receipt,
    Request,
    Reserved,
    Token,
)
from tests.codecs.examples import SelectingCodec, worker_of
from tests.decode_node.calls import begun_together, close, held_up, landed
from tests.pair import DECODING, PI, SHARING, TIMEOUT_S, Pair, Served, greedy, paired, prompt, tiny_worker
from tests.polling import POLL_S
from transport.closing import closing

TURNS = 3


async def turn(nodes: Pair, ids: tuple[int, ...], name: str, tokens: int = PI + 7, **sampling: object) -> Served:
    """One turn of a conversation."""
    return await nodes.serve(greedy(name, ids, tokens, ignore_eos=True, **sampling))


def answer(served: Served) -> tuple[int, ...]:
    return tuple(token.token_id for token in served.tokens)


def receipt(served: Served) -> Receipt:
    assert served.handed_off is not None
    return served.handed_off.receipt


def sent_bytes(served: Served) -> int:
    return sum(size for _, size in receipt(served).bytes_by_plane)


async def stat(nodes: Pair, name: str) -> float:
    return dict((await nodes.decode.describe()).stats)[name]


def marks_of(info: NodeInfo) -> set[bytes]:
    packed = info.marks or b""
    return {packed[at : at + MARK_BYTES] for at in range(0, len(packed), MARK_BYTES)}


def cold(worker: Worker, ids: tuple[int, ...], tokens: int = PI + 7) -> list[Token]:
    return generate(worker, greedy("cold", ids, tokens, ignore_eos=True))


@pytest.mark.grid(kinds=True)
@pytest.mark.parametrize("codec", SHARING)
async def test_a_conversation_sends_what_is_new_and_says_what_a_cold_run_says(codec: str) -> None:
    """The bytes that travel are less than the new tokens and a page take in FP16."""
    worker = tiny_worker(codec)
    ids = prompt(1, 2 * PI + 5)
    async with paired(worker) as nodes:
        before = 0
        for number in range(TURNS):
            served = await turn(nodes, ids, f"t{number}")
            assert served.tokens == cold(worker, ids)
            assert receipt(served).held_tokens == before // PI * PI
            sizes, pages = worker.footprint, before // PI
            assert sent_bytes(served) <= sizes.wire_bytes(len(ids), HeldKv(pages, pages))
            assert sent_bytes(served) <= (len(ids) - before + PI) * sizes.row_bytes
            # The last token of an answer was chosen but never run.
            before = len(ids) + len(served.tokens) - 1
            ids += answer(served) + prompt(10 + number, 11)
        assert await stat(nodes, "hackkv_held_hits_total") > 0
        await nodes.assert_idle()


@pytest.mark.grid(kinds=True)
@pytest.mark.parametrize("codec", SHARING)
async def test_pages_come_back_from_host_memory_bit_equal(codec: str) -> None:
    """In a pool of eight pages, other requests push the conversation out. Its later turn brings it back."""
    worker = tiny_worker(codec)
    ids = prompt(1, 4 * PI + 5)
    async with paired(worker, num_pages=8) as nodes:
        first = await turn(nodes, ids, "first")
        async with asyncio.timeout(TIMEOUT_S):
            while await stat(nodes, "hackkv_held_host_pages") < 5:  # noqa: ASYNC110  # no event reports a copy's end
                await asyncio.sleep(POLL_S)
        for number in range(4):
            await turn(nodes, prompt(20 + number, 4 * PI + 1), f"other{number}", tokens=2)
        assert await stat(nodes, "hackkv_held_evictions_total") > 5
        ids += answer(first) + prompt(2, 9)
        second = await turn(nodes, ids, "second")
        assert second.tokens == cold(worker, ids)
        assert receipt(second).held_tokens == 5 * PI
        await nodes.assert_idle()


async def test_without_host_memory_pages_that_leave_are_gone() -> None:
    worker = tiny_worker()
    ids = prompt(1, 4 * PI + 5)
    async with paired(worker, num_pages=8, decoding=DECODING.model_copy(update={"prefix_host_bytes": 0})) as nodes:
        await turn(nodes, ids, "first")
        await turn(nodes, prompt(2, 6 * PI + 1), "other")
        again = await turn(nodes, ids, "again")
        assert receipt(again).held_tokens < 4 * PI
        assert again.tokens == cold(worker, ids)


async def test_a_node_that_keeps_nothing_is_sent_everything() -> None:
    worker = tiny_worker()
    ids = prompt(1, 3 * PI + 5)
    alone = cold(worker, ids)
    async with paired(worker, decoding=DECODING.model_copy(update={"prefix_cache": False})) as nodes:
        for name in "ab":
            served = await turn(nodes, ids, name)
            assert (receipt(served).held_tokens, served.tokens) == (0, alone)
        assert await stat(nodes, "hackkv_held_pages") == 0


@pytest.mark.grid(kinds=True)
@pytest.mark.parametrize("codec", SHARING)
async def test_nodes_report_the_marks_of_what_they_keep(codec: str) -> None:
    """The router makes the same marks from tokens. A prefill node with exact pages reports where a prompt can go on."""
    worker, ids = tiny_worker(codec), prompt(1, 3 * PI + 5)
    naming = Naming(PI, worker.fingerprint)
    async with paired(worker, chunk_pages=3) as nodes:
        assert (await nodes.prefill.describe()).marks == (await nodes.decode.describe()).marks == b""
        served = await turn(nodes, ids, "a")
        prefill, decode = [marks_of(await node.describe()) for node in (nodes.prefill, nodes.decode)]
        assert decode == set(naming.marks((*ids, *answer(served)[:-1]), ""))
        asked = naming.marks(ids, "")
        assert prefill == set(asked if worker.codec.window.pages == 1 else asked[-1:])
    async with paired(worker, decoding=DECODING.model_copy(update={"prefix_cache": False})) as nodes:
        assert (await nodes.decode.describe()).marks is None


async def test_where_pages_depend_on_more_than_tokens_nothing_is_held() -> None:
    worker = tiny_worker(open_page="requantize")
    async with paired(worker) as nodes:
        for name in "ab":
            assert receipt(await turn(nodes, prompt(1, 3 * PI), name)).held_tokens == 0


async def test_where_decode_reads_some_pages_only_a_prompts_own_pages_are_held() -> None:
    """With such a codec, rows of generated tokens differ from those of a prompt."""
    worker = worker_of(SelectingCodec(0.5))
    ids = prompt(1, 3 * PI + 5)
    async with paired(worker) as nodes:
        first = await turn(nodes, ids, "a", tokens=2 * PI)
        ids += answer(first)
        second = await turn(nodes, ids, "b")
        assert receipt(second).held_tokens == 3 * PI
        assert second.tokens == cold(worker, ids)


async def test_a_salt_separates_tenants() -> None:
    ids = prompt(1, 3 * PI + 5)
    async with paired(tiny_worker()) as nodes:
        held = []
        for number, salt in enumerate(("", "a", "b", "a", "")):
            served = await nodes.serve(replace(greedy(f"r{number}", ids, 5), cache_salt=salt))
            held.append(receipt(served).held_tokens)
    assert held == [0, 0, 0, 3 * PI, 3 * PI]


@pytest.mark.grid(kinds=True)
@pytest.mark.parametrize("codec", SHARING)
async def test_a_prompt_that_is_held_to_its_last_token(codec: str) -> None:
    """Only exact rows are left to send. If there are none, a handoff has no frames."""
    worker = tiny_worker(codec)
    ids = prompt(1, 3 * PI)
    alone = cold(worker, ids)
    async with paired(worker) as nodes:
        for name in "ab":
            served = await turn(nodes, ids, name)
            assert served.tokens == alone
        assert receipt(served).held_tokens == 3 * PI
        assert sent_bytes(served) == worker.footprint.wire_bytes(3 * PI, HeldKv(3))


@pytest.mark.grid(kinds=True)
@pytest.mark.parametrize("codec", SHARING)
async def test_requests_that_begin_alike_share_pages_while_they_are_swapped(codec: str) -> None:
    """Four requests with one system prompt need 11 pages of the node's 8; without sharing they would need 20. All have
    landed before any runs, so some have to leave and come back."""
    worker, common = tiny_worker(codec), prompt(1, 3 * PI)
    requests = [greedy(f"r{i}", common + prompt(10 + i, 5 + i), 2 * PI - 4, ignore_eos=True) for i in range(4)]
    decode, begin = held_up(worker)
    begin.set()
    async with paired(worker, decode, num_pages=8) as nodes:
        await turn(nodes, (*common, 7), "warm", tokens=2)
        begin.clear()
        served = await begun_together(nodes, begin, requests)
        for one, request in zip(served, requests, strict=True):
            assert one.tokens == generate(worker, request)
            assert receipt(one).held_tokens == 3 * PI
        assert await stat(nodes, "hackkv_swap_out_total") > 0
        await nodes.assert_idle()


async def test_equal_requests_at_once_leave_one_copy_of_each_page() -> None:
    worker, ids = tiny_worker(), prompt(1, 2 * PI + 3)
    async with paired(worker) as nodes:
        served = await asyncio.gather(*(turn(nodes, ids, f"r{i}", tokens=2 * PI) for i in range(5)))
        assert all(one.tokens == cold(worker, ids, 2 * PI) for one in served)
        assert await stat(nodes, "hackkv_held_pages") == (2 * PI + 3 + 2 * PI - 1) // PI
        await nodes.assert_idle()


@pytest.mark.parametrize("codec", SHARING)
async def test_another_decode_node_that_holds_more_is_sent_less_of_frames_that_are_there(codec: str) -> None:
    """No node had room when the prompt was computed, so the frames have all of it. The node named later has two
    pages."""
    worker = tiny_worker(codec)
    ids = prompt(1, 5 * PI + 3)
    async with paired(worker, chunk_pages=3) as nodes:
        await turn(nodes, (*ids[: 2 * PI], 9), "warm", tokens=2)
        request = greedy("r", ids, 6)
        async with closing(nodes.prefill.prefill(PrefillJob(request, "t", 0))) as events:
            prefilled = await anext(events)
            assert isinstance(prefilled, Prefilled)
            async with closing(nodes.decode.decode(DecodeJob(request, "t", 0))) as decoding:
                reserved = await anext(decoding)
                assert isinstance(reserved, Reserved)
                assert reserved.held.pages == 2
                await nodes.prefill.assign("t", 0, nodes.address, reserved.held)
                fate = await anext(events)
                assert isinstance(fate, HandedOff), fate
                due = worker.footprint.wire_bytes(len(ids), reserved.held)
                assert sum(size for _, size in fate.receipt.bytes_by_plane) <= due
                tokens = [prefilled.token] + [event async for event in decoding if isinstance(event, Token)]
        assert tokens == generate(worker, request)
        await nodes.assert_idle()


async def test_a_decode_node_that_holds_less_than_the_first_cannot_be_served() -> None:
    """The router learns that the KV is gone, and must have the prompt computed again."""
    worker, ids = tiny_worker(), prompt(1, 3 * PI + 3)
    async with paired(worker) as nodes:
        request = greedy("r", ids, 6)
        job = PrefillJob(request, "t", 0, "inproc://nowhere", held=HeldKv(2))
        async with closing(nodes.prefill.prefill(job)) as events:
            assert isinstance(await anext(events), Prefilled)
            with pytest.raises(HackkvError, match="the KV of transfer t is gone"):
                await nodes.prefill.assign("t", 1, nodes.address, HeldKv(1))
        await nodes.assert_idle()


@pytest.mark.parametrize("held_pages", [0, 2])
async def test_both_ends_have_to_agree_on_what_is_held(held_pages: int) -> None:
    ids = prompt(1, 3 * PI + 3)
    async with paired(tiny_worker()) as nodes:
        await turn(nodes, ids, "warm", tokens=2)
        decoding = nodes.decode.decode(DecodeJob(greedy("r", ids, 4), "r", 0))
        assert await anext(decoding) == Reserved(HeldKv(3))
        job = PrefillJob(greedy("r", ids, 4), "r", 0, nodes.address, held=HeldKv(held_pages))
        async with closing(nodes.prefill.prefill(job)) as events:
            assert isinstance(await anext(events), Prefilled)
            with pytest.raises(
                HackkvError, match=f"{held_pages} pages and the exact rows of 0 are held, it says; here are 3"
            ):
                await anext(decoding)
        await close(decoding)
        await nodes.assert_idle()


async def test_more_pages_than_the_prompt_fills_are_refused_by_name() -> None:
    async with paired(tiny_worker()) as nodes:
        job = PrefillJob(greedy("r", prompt(1, PI + 3), 4), "r", 0, nodes.address, held=HeldKv(2))
        with pytest.raises(HackkvError, match="2 pages are more than the prompt fills"):
            await anext(nodes.prefill.prefill(job))


@pytest.mark.parametrize("cut", [1, PI, 2 * PI + 3])
async def test_a_replay_goes_on_from_pages_that_are_held(cut: int) -> None:
    worker, ids = tiny_worker(), prompt(1, 2 * PI + 9)
    request: Request = greedy("r", ids, cut + 5, ignore_eos=True)
    whole = generate(worker, request)
    async with paired(worker) as nodes:
        await turn(nodes, ids, "warm", tokens=PI)
        emitted = tuple(token.token_id for token in whole[:cut])
        served = await nodes.serve(request, epoch=1, emitted=emitted)
        assert (served.tokens, receipt(served).held_tokens) == (whole[cut:], 2 * PI)
        await nodes.assert_idle()


async def test_what_a_client_left_unfinished_is_held_too() -> None:
    """The router finds a stop string and closes the call in the middle."""
    worker, ids = tiny_worker(), prompt(1, PI + 3)
    async with paired(worker) as nodes:
        events = await landed(nodes, greedy("r", ids, 4 * PI, ignore_eos=True))
        said = [generate(worker, greedy("r", ids, 1))[0].token_id]
        async for event in events:
            assert isinstance(event, Token)
            said.append(event.token_id)
            if len(said) == 2 * PI:
                break
        await close(events)
        ids += tuple(said)
        served = await turn(nodes, ids, "next")
        assert receipt(served).held_tokens >= 2 * PI
        assert served.tokens == cold(worker, ids)
        await nodes.assert_idle()


async def test_a_handoff_that_fails_leaves_nothing_that_could_be_found() -> None:
    """Landed frames are not used before the last one has landed."""
    ids = prompt(1, 3 * PI + 3)
    async with paired(tiny_worker()) as nodes:
        decoding = nodes.decode.decode(DecodeJob(greedy("r", ids, 4), "r", 0))
        assert await anext(decoding) == Reserved()
        await close(decoding)
        assert await stat(nodes, "hackkv_held_pages") == 0
