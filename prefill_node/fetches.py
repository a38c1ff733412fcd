"""Fetches pages that a prompt lacks here from the decode node that holds them, where that is faster than computing.

The decode node of a job has a reservation for it, which holds the pages of the prompt that the node has kept. The node
lends them over its data plane. A fetch never fails a prompt: after any error, the prompt computes the pages that it
lacks. The prompt waits for the fetch outside the queue and holds no page meanwhile, so fetches block no other prompt.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hackkv.errors import FrameRefused, HackkvError, Overloaded
from hackkv.expected import Expected, expected_of
from hackkv.held import HeldKv
from hackkv.ledger import FrameLedger
from hackkv.model.worker import Worker
from hackkv.types import WIRE_FORM, Fingerprint, Handoff, HandoffEnd, PrefillJob
from hackkv.wire_form import wire_form
from prefill_node.config import PrefillSettings
from prefill_node.fetch_choice import Estimate, FetchSpeed, PassSpeed, PrefixFetch
from prefill_node.fetched import Fetched, Part
from prefill_node.host_pool import HostPool
from prefill_node.links import Links
from transport.base import KvSender
from transport.closing import closing

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlannedFetch:
    """One fetch that was chosen."""

    address: str
    handoff: Handoff
    estimate: Estimate
    fetched: Fetched
    """Takes the frames."""
    spared_tokens: int
    """Tokens that the prompt need not compute after the fetch."""
    then_tokens: int
    """Tokens that the prompt must still compute after the fetch."""


class Fetches:
    """Chooses, fetches and counts. Belongs to the event loop's thread."""

    def __init__(
        self, worker: Worker, sender: KvSender, links: Links, host: HostPool, settings: PrefillSettings
    ) -> None:
        """`links` has measured pushes to the same peers."""
        self._worker, self._sender, self._links, self._host = worker, sender, links, host
        self._setting, self._most_s = settings.prefix_fetch, settings.fetch_s
        self._loop = asyncio.get_running_loop()
        self.passes = PassSpeed(settings.assumed_tokens_per_s)
        self._speed = FetchSpeed(settings.assumed_bytes_per_s)
        self._last = Estimate(0.0, 0.0)
        self._seconds = 0.0
        self._under_way: set[PlannedFetch] = set()
        self._counts: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        """Failed fetches, by the code of the error."""

    @property
    def queued_tokens(self) -> int:
        """Tokens that prompts compute after the fetches for which they wait."""
        return sum(ask.then_tokens for ask in self._under_way)

    def wanted(self, job: PrefillJob, known: int, resumable: int) -> PlannedFetch | None:
        """The fetch for a prompt whose first `known` pages are here and that can go on after `resumable` of them; None
        if there is none to make, or computing is chosen."""
        footprint = self._worker.footprint
        page_tokens, num_tokens = footprint.page_tokens, len(job.request.prompt_ids)
        end = min(job.held.pages, (num_tokens - 1) // page_tokens)
        if self._setting is PrefixFetch.NEVER or not job.decode_address or not resumable < end:
            return None
        held, rows = HeldKv(min(known, end)), end * page_tokens
        num_bytes = footprint.wire_bytes(rows, held)
        pushes = self._links.rates[job.decode_address]
        estimate = self._last = Estimate(
            self._speed.seconds(job.decode_address, num_bytes, pushes, self._loop.time()),
            self.passes.seconds(resumable * page_tokens, rows),
        )
        self._counts["chosen" if estimate.chosen(self._setting) else "declined"] += 1
        if not estimate.chosen(self._setting):
            return None
        form = self._links.fetch_form(job.decode_address)
        handoff = Handoff(job.transfer_id, job.epoch, _in_form(self._worker.fingerprint, form.name), rows, held)
        return PlannedFetch(
            job.decode_address,
            handoff,
            estimate,
            Fetched(held.pages, end, num_bytes),
            rows - resumable * page_tokens,
            num_tokens - rows,
        )

    async def run(self, ask: PlannedFetch) -> None:
        """Fetch, and fill `ask.fetched`, which the caller releases. After an error it stays empty."""
        fetched, began = ask.fetched, self._loop.time()
        self._under_way.add(ask)
        try:
            async with asyncio.timeout(ask.estimate.patience_s(self._setting, self._most_s)):
                await self._receive(ask, began)
        except TimeoutError:
            now = self._loop.time()
            self._speed.gave_up(ask.address, fetched.received_bytes, now - began, now)
            self._failed(ask, "slow", "it took longer than computing would have")
        except HackkvError as error:
            self._failed(ask, error.code, str(error))
        except Exception as error:  # a wire's bug must not lose the prompt, which can be computed
            log.exception("a fetch from %s", ask.address)
            self._failed(ask, "internal", type(error).__name__)
        else:
            now = self._loop.time()
            self._speed.fetched(ask.address, fetched.received_bytes, fetched.wait_s, now - began, now)
            self._counts["pages"] += fetched.end - fetched.first
        finally:
            self._under_way.discard(ask)
            fetched.seconds = self._loop.time() - began
            self._seconds += fetched.seconds
            self._counts["bytes"] += fetched.received_bytes

    def stats(self) -> Iterator[tuple[str, float]]:
        """Counters and gauges for the metrics page."""
        for name in ("chosen", "declined"):
            yield f"hackkv_fetch_{name}_total", float(self._counts[name])
        for name in ("pages", "bytes"):
            yield f"hackkv_fetched_{name}_total", float(self._counts[name])
        yield "hackkv_fetch_seconds_total", self._seconds
        yield "hackkv_fetch_estimate_seconds", self._last.fetch_s
        yield "hackkv_fetch_compute_estimate_seconds", self._last.compute_s
        yield "hackkv_fetch_failed_total", float(self.failures.total())
        for code, count in sorted(self.failures.items()):
            yield f"hackkv_fetch_failed_{code}_total", float(count)

    async def _receive(self, ask: PlannedFetch, began: float) -> None:
        fetched, parts = ask.fetched, list[Part]()
        if not fetched.claim_room(self._host):
            raise Overloaded("host memory has no room for pages that are fetched", 0.0)
        ledger = FrameLedger(ask.handoff.transfer_id, ask.handoff.epoch, self._expected(ask.handoff))
        async with closing(self._sender.fetch(ask.address, ask.handoff)) as items:
            async for item in items:
                if fetched.pushed_out:
                    raise Overloaded("pages that were fetched had to leave host memory", 0.0)
                fetched.wait_s = fetched.wait_s or self._loop.time() - began
                if isinstance(item, HandoffEnd):
                    ledger.finish(item)
                    fetched.parts = tuple(parts)
                    return
                layers = await asyncio.to_thread(ledger.check(item).open)
                parts.append((replace(item, payload=b""), layers))
                fetched.received_bytes += len(item.payload)
        raise FrameRefused("the stream ended before its end frame", "truncated")

    def _expected(self, handoff: Handoff) -> Expected:
        worker, form = self._worker, wire_form(handoff.fingerprint.wire_form)
        return expected_of(worker.codec, worker.layout, handoff.num_tokens, form, handoff.held)

    def _failed(self, ask: PlannedFetch, code: str, why: str) -> None:
        self.failures[code] += 1
        log.debug("pages of %s are computed, not fetched: %s", ask.handoff.transfer_id, why)


def _in_form(fingerprint: Fingerprint, form: str) -> Fingerprint:
    """The fingerprint, with `form` as its wire form."""
    return Fingerprint((*(field for field in fingerprint.fields if field[0] != WIRE_FORM), (WIRE_FORM, form)))
