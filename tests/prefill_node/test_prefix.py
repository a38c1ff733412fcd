"""A prompt whose beginning was computed before: equal bytes, equal tokens, less work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pytest
from hack_kernels.base import Pool
from torch import Tensor

from hackkv.batch import Batch
from hackkv.errors import HackkvError, NonFiniteError
from hackkv.expected import Expected
from hackkv.ledger import FrameLedger
from hackkv.model.generate import generate
from hackkv.nodes import NodeIdentity
from hackkv.types import Handoff, HandoffEnd, KvFrame, Prefilled, PrefillJob, Receipt, Token
from prefill_node.config import PrefillSettings
from prefill_node.service import PrefillService
from tests.pair import PI, SHARING, TIMEOUT_S, GatedCodec, greedy, paired, prompt, tiny_worker
from transport.closing import closing
from transport.wires import Loopback

HIT_LENGTHS = (PI - 1, PI, PI + 1, 2 * PI - 1, 2 * PI, 2 * PI + 1)
SETTINGS = [
    *((codec, {}) for codec in SHARING),
    ("hack", {"rounding": "stochastic"}),
    ("hack", {"open_page": "k_codes"}),
    ("hack-paper", {"send_sums": True}),
]


class Served(NamedTuple):
    """One prompt's outcome: token 0, how much was computed, and every plane of every page as it arrived."""

    token: Token
    computed_tokens: int
    planes: dict[tuple[int, int, int, str], bytes]
    """(layer, KV head, page, plane) -> bytes."""


class Bench:
    """A prefill node and a receiver that keeps what arrives."""

    def __init__(
        self,
        codec: str = "hack",
        *,
        num_pages: int = 16,
        chunk_pages: int = 2,
        host_bytes: int = 1 << 24,
        prefix_cache: bool = True,
        resume_points: int = 8,
        frame_bytes: int = 1 << 19,
        codec_object: GatedCodec | None = None,
        noted: Callable[[KvFrame], None] = lambda _: None,
        **settings: int | float | str | bool,
    ) -> None:
        """`noted` is called with every frame that arrives."""
        self.noted = noted
        self.worker = tiny_worker(codec, **settings)
        if codec_object:
            self.worker = replace(tiny_worker("fp16"), codec=codec_object)
        self.wire = Loopback("inproc", TIMEOUT_S)
        self.listener = self.wire.listener()
        self.planes: dict[str, dict[tuple[int, int, int, str], bytes]] = {}
        self.service = PrefillService(
            NodeIdentity("p", "p", "1"),
            self.worker,
            self.wire.sender(),
            num_pages,
            PrefillSettings(
                max_prompts=8,
                chunk_tokens=chunk_pages * PI,
                host_bytes=host_bytes,
                prefix_cache=prefix_cache,
                resume_points=resume_points,
                frame_bytes=frame_bytes,
            ),
        )
        self.count = 0

    async def __aenter__(self) -> Bench:
        self.address = await self.listener.serve(self.deliver)
        return self

    async def __aexit__(self, *_: object) -> None:
        info = await self.service.describe()
        assert (info.free_pages, info.running, info.waiting) == (info.total_pages, 0, 0)
        assert self.service.outbox.held_bytes == 0
        await self.service.close()
        await self.listener.close()

    async def deliver(self, handoff: Handoff, items: AsyncIterator[KvFrame | HandoffEnd]) -> Receipt:
        """Check everything, as a decode node does, and keep the bytes."""
        codec, tokens = self.worker.codec, handoff.num_tokens
        expected = Expected(self.worker.layout, codec.wire_planes, tokens, self.worker.footprint, codec.wire_form)
        ledger = FrameLedger(handoff.transfer_id, handoff.epoch, expected)
        planes = self.planes.setdefault(handoff.transfer_id, {})
        async for item in items:
            if isinstance(item, HandoffEnd):
                ledger.finish(item)
                continue
            self.noted(item)
            for layer, accepted in zip(item.layers, ledger.accept(item), strict=True):
                for (name, plane), head, page in product(
                    accepted.items(), range(item.head_count), range(item.page_count)
                ):
                    place = (layer, item.head_start + head, item.page_start + page, name)
                    planes[place] = plane[head, page].contiguous().numpy().tobytes()
        return Receipt(handoff.transfer_id, handoff.num_tokens, (), 0, 0, 0.0)

    async def serve(self, ids: tuple[int, ...], salt: str = "") -> Served:
        """Run a prompt up to its handoff."""
        self.count += 1
        name = f"r{self.count}"
        request = replace(greedy(name, ids, 4), cache_salt=salt)
        async with closing(self.service.prefill(PrefillJob(request, name, 0, self.address))) as events:
            prefilled = await anext(events)
            assert isinstance(prefilled, Prefilled)
            await anext(events)
        return Served(prefilled.token, prefilled.computed_tokens, self.planes.pop(name))

    async def stat(self, name: str) -> float:
        return dict((await self.service.describe()).stats)[name]


@pytest.mark.grid(kinds=True)
@pytest.mark.parametrize("common", HIT_LENGTHS)
@pytest.mark.parametrize(("codec", "settings"), SETTINGS, ids=str)
async def test_a_hit_changes_no_byte_and_no_token(codec: str, settings: dict[str, Any], common: int) -> None:
    """Whole pages that two prompts have in common are computed once. If a codec needs exact rows beside them, the
    second prompt computes those pages too, and leaves the rows at the point where the two prompts part."""
    ids = prompt(1, common) + prompt(2, PI + 5)
    others = [prompt(1, common) + prompt(seed, 40) for seed in (3, 4)]
    shared = common // PI * PI
    async with Bench(codec, prefix_cache=False, **settings) as cold, Bench(codec, **settings) as warm:
        expected = await cold.serve(ids)
        assert expected.computed_tokens == len(ids)
        await warm.serve(others[0])
        second = await warm.serve(others[1])
        if warm.worker.codec.window.pages == 1:
            assert second.computed_tokens == len(others[1]) - shared
        found = await warm.serve(ids)
        assert found.computed_tokens == len(ids) - shared
        assert found.token == expected.token
        assert found.planes == expected.planes


@pytest.mark.parametrize("length", [PI - 1, PI, PI + 1, 2 * PI, 3 * PI + 7])
async def test_the_last_token_of_a_prompt_is_always_computed(length: int) -> None:
    """If the same prompt comes again, only its last page is computed, or the tokens after its last full page."""
    async with Bench() as bench:
        first, again = await bench.serve(prompt(1, length)), await bench.serve(prompt(1, length))
    assert first.computed_tokens == length
    assert again.computed_tokens == length - (length - 1) // PI * PI
    assert (again.token, again.planes) == (first.token, first.planes)


@pytest.mark.parametrize("codec", SHARING)
async def test_pages_go_to_host_memory_and_come_back_bit_equal(codec: str) -> None:
    """A pool of four pages, whose prefix is evicted by another prompt and then asked for again."""
    ids, other = prompt(1, 3 * PI + 9), prompt(2, 4 * PI)
    async with Bench(codec, num_pages=4) as bench:
        first = await bench.serve(ids)
        await bench.serve(other)
        assert await bench.stat("hackkv_prefix_evictions_total") == 3
        assert await bench.stat("hackkv_host_pool_prefix_bytes") == 3 * bench.worker.footprint.page_bytes
        again = await bench.serve(ids)
        assert again.computed_tokens == 9
        assert (again.token, again.planes) == (first.token, first.planes)
        assert await bench.stat("hackkv_prefix_hits_total") == 3 * PI
        assert await bench.stat("hackkv_prefix_queries_total") == 2 * len(ids) + len(other)


@pytest.mark.parametrize("resume_points", [1, 3])
async def test_a_node_goes_on_with_as_many_conversations_as_it_has_resume_points(resume_points: int) -> None:
    """Second turns come in the order of the first. With a point for each, a turn computes only its new tokens. With
    fewer points, each point is gone by the time its turn comes."""
    turns = [prompt(seed, 2 * PI) for seed in range(3)]
    async with Bench("rot-window", resume_points=resume_points) as bench:
        for turn in turns:
            await bench.serve(turn)
        again = [(await bench.serve(turn + prompt(9, 7))).computed_tokens for turn in turns]
    assert again == [7 if resume_points == len(turns) else 2 * PI + 7] * len(turns)


async def test_a_prompt_goes_on_after_a_pass_of_another_and_after_its_end() -> None:
    """With exact pages, a prompt can go on where a pass ended and where the prompt ended, not between."""
    first = prompt(1, 5 * PI)
    async with Bench("rot-window", chunk_pages=2) as bench:
        assert (await bench.serve(first)).computed_tokens == 5 * PI
        assert (await bench.serve(first + prompt(2, 7))).computed_tokens == 7
        assert (await bench.serve(first[: 4 * PI] + prompt(3, 7))).computed_tokens == 7
        assert (await bench.serve(first[: 3 * PI] + prompt(4, 7))).computed_tokens == PI + 7
        assert (await bench.serve(first[: 3 * PI] + prompt(5, 7))).computed_tokens == 7


@pytest.mark.parametrize("prefix_cache", [False, True])
async def test_a_pass_that_failed_for_another_is_not_repeated_on_rows_that_it_has_overwritten(
    monkeypatch: pytest.MonkeyPatch, prefix_cache: bool
) -> None:
    """The last layer fails one of two prompts in their second pass. The other prompt has overwritten rows of the first
    layer that a repeated pass would read. So it starts over, and its bytes are the same as when it runs alone."""
    ids, bad, failed = prompt(1, 7 * PI + 3), prompt(2, 3 * PI), list[int]()
    async with Bench("rot-window", prefix_cache=False) as cold:
        expected = await cold.serve(ids)
    async with Bench("rot-window", chunk_pages=4, prefix_cache=prefix_cache) as bench:
        codec, last = bench.worker.codec, bench.worker.layout.num_layers - 1
        attend = codec.attend

        def failing(layer: int, pool: Pool, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if layer == last and not failed and len(batch.spans) == 2 and batch.spans[0].held:
                failed.append(batch.spans[0].count)
                raise NonFiniteError("K is inf", 1)
            return attend(layer, pool, batch, q, k, v)

        monkeypatch.setattr(codec, "attend", failing)
        found, broken = await asyncio.gather(bench.serve(ids), bench.serve(bad), return_exceptions=True)
        assert failed == [3 * PI]
        assert isinstance(broken, NonFiniteError)
        assert isinstance(found, Served)
        assert (found.token, found.planes) == (expected.token, expected.planes)


async def test_without_room_in_host_memory_pages_are_dropped() -> None:
    ids, other = prompt(1, 3 * PI), prompt(2, 4 * PI)
    async with Bench(num_pages=4) as bench:
        host_bytes = 4 * bench.worker.footprint.page_bytes
    async with Bench(num_pages=4, host_bytes=host_bytes) as bench:
        await bench.serve(ids)
        held = bench.service.prefill(PrefillJob(greedy("waits", other, 4), "waits", 0))
        async with closing(held):
            assert isinstance(await anext(held), Prefilled)
            assert bench.service.outbox.held_bytes == host_bytes
            assert await bench.stat("hackkv_host_pool_prefix_bytes") == 0
        assert (await bench.serve(ids)).computed_tokens == len(ids)


async def test_a_salt_separates_tenants() -> None:
    ids = prompt(1, 2 * PI + 3)
    async with Bench() as bench:
        served = [await bench.serve(ids, salt) for salt in ("", "a", "b", "a", "")]
    assert [each.computed_tokens for each in served] == [len(ids)] * 3 + [3, 3]
    assert all(each.planes == served[0].planes for each in served)


async def test_prompts_that_share_a_prefix_which_is_just_being_computed() -> None:
    """Each prompt computes pages that were not sealed when it started. All get the same bytes, and one copy stays."""
    common, ends = prompt(1, 5 * PI), [prompt(seed, 10 + seed) for seed in range(2, 8)]
    async with Bench(prefix_cache=False) as cold, Bench(num_pages=64, chunk_pages=2) as warm:
        expected = [await cold.serve(common + end) for end in ends]
        found = await asyncio.gather(*(warm.serve(common + end) for end in ends))
        for one, other in zip(found, expected, strict=True):
            assert (one.token, one.planes) == (other.token, other.planes)
        assert await warm.stat("hackkv_prefix_pages") == 5
        assert (await warm.serve(common + prompt(9, 4))).computed_tokens == 4


async def test_a_prompt_joins_what_another_has_sealed_so_far() -> None:
    codec = GatedCodec()
    async with Bench(chunk_pages=1, codec_object=codec) as bench:
        first = asyncio.create_task(bench.serve(prompt(1, 4 * PI)))
        codec.permits.release(2)  # one page: two layers
        for _ in range(3):
            await asyncio.to_thread(codec.reached)
        second = asyncio.create_task(bench.serve(prompt(1, 2 * PI)))
        await asyncio.sleep(0)
        codec.open()
        assert (await first).computed_tokens == 4 * PI
        assert (await second).computed_tokens == PI


async def test_where_pages_depend_on_how_a_prompt_was_cut_nothing_is_shared() -> None:
    """HACK/RQE quantizes a page again with each token."""
    ids = prompt(1, 3 * PI)
    async with Bench(open_page="requantize") as bench:
        assert [(await bench.serve(ids)).computed_tokens for _ in range(2)] == [len(ids)] * 2
        assert await bench.stat("hackkv_prefix_queries_total") == 0


async def test_prompt_logprobs_need_every_token() -> None:
    ids = prompt(1, 2 * PI + 3)
    async with Bench() as bench:
        await bench.serve(ids)
        job = PrefillJob(greedy("scored", ids, 1, prompt_logprobs=0), "scored", 0, handoff=False)
        async with closing(bench.service.prefill(job)) as events:
            prefilled = await anext(events)
        assert isinstance(prefilled, Prefilled)
        assert prefilled.computed_tokens == len(ids)
        assert len(prefilled.prompt_logprobs) == len(ids) - 1


@pytest.mark.grid(kinds=True)
@pytest.mark.parametrize("codec", SHARING)
async def test_a_decode_node_goes_on_from_a_hit(codec: str) -> None:
    worker = tiny_worker(codec)
    common = prompt(1, 2 * PI)
    async with paired(worker) as nodes:
        await nodes.serve(greedy("first", common + prompt(2, 9), 4))
        request = greedy("second", common + prompt(3, 21), 6)
        served = await nodes.serve(request)
        assert served.prefilled.computed_tokens == 21
        assert served.tokens == generate(worker, request)
        await nodes.assert_idle()


async def test_after_a_pass_that_broke_nothing_is_believed(caplog: pytest.LogCaptureFixture) -> None:
    """The content of the pages is then in doubt, so the prefix is computed again."""

    class Breaking(GatedCodec):
        broken = False

        def attend(self, layer: int, pool: Pool, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if self.broken:
                raise RuntimeError("boom")
            return super().attend(layer, pool, batch, q, k, v)

    codec = Breaking()
    codec.open()
    ids = prompt(1, 3 * PI)
    async with Bench(codec_object=codec) as bench:
        first = await bench.serve(ids)
        codec.broken = True
        with pytest.raises(HackkvError, match="boom"):
            await bench.serve(ids)
        codec.broken = False
        again = await bench.serve(ids)
        assert (again.computed_tokens, again.planes) == (len(ids), first.planes)
    assert "a prefill pass failed" in caplog.text
