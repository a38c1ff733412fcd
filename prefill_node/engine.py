"""One prefill pass: it takes chunks of prompts and makes frames and first tokens. Runs in a thread of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from time import perf_counter

import torch
from torch import Tensor

from hackkv.batch import Span
from hackkv.choices import Eviction
from hackkv.errors import SequenceError
from hackkv.kv_memory import HostPages
from hackkv.lanes import Departures
from hackkv.model.runner import ModelRunner
from hackkv.model.sampler import SamplerState, sample
from hackkv.types import Token
from prefill_node.config import SCORED_ROWS
from prefill_node.host_places import Moves
from prefill_node.outgoing import Emit, OutgoingKv
from prefill_node.scheduler import Chunk
from prefill_node.work import FirstToken, Work


class PrefillEngine:
    """Runs passes on one `ModelRunner`."""

    def __init__(self, runner: ModelRunner, host_pages: HostPages, emit: Emit, frame_bytes: int) -> None:
        """`frame_bytes`: see `PrefillSettings`."""
        self._runner = runner
        self._host_pages = host_pages
        self._emit, self._frame_bytes = emit, frame_bytes

    @torch.inference_mode()
    def step(self, chunks: list[Chunk[Work]], moves: Moves) -> list[FirstToken]:
        """Run one pass, after `moves`. Raises `SequenceError` whose `span` is the index of the chunk at fault."""
        began, codec, memory = perf_counter(), self._runner.codec, self._runner.memory
        quantized = codec.quantize_s
        for chunk in chunks:
            work = chunk.prompt.owner
            work.started_at = began if work.started_at is None else work.started_at
        ids = [token for chunk in chunks for token in self._prompt_ids(chunk)]
        spans, wanted = [_span(chunk) for chunk in chunks], [_wanted(chunk) for chunk in chunks]
        with memory.lanes.computing(), Departures(memory.lanes) as departures:
            out = OutgoingKv(memory, codec, self._emit, self._frame_bytes, departures)
            self._move(moves)
            hidden = self._runner.forward(spans, ids, lambda layer: self._ship_layer(layer, chunks, out), wanted)
            # Sampling can fail. It comes before evictions and sums, which a repeated pass must not do twice.
            tokens = self._sample(chunks, hidden)
            if codec.eviction is not None:
                self._evict_and_ship(codec.eviction, chunks, out)
        out.send_rest()
        for chunk, rows in _rows(chunks, hidden):
            work = chunk.prompt.owner
            work.quantize_s += codec.quantize_s - quantized
            work.wire_encode_s += out.encode_s
            self._score_prompt(chunk, rows)
        return self._first_tokens(tokens)

    def forget_slots(self, slots: Iterable[int]) -> None:
        """Free the memory of slots that no prompt holds and from which the next pass does not copy. For use between
        passes."""
        self._runner.memory.forget_slots(slots)

    def _prompt_ids(self, chunk: Chunk[Work]) -> tuple[int, ...]:
        return chunk.prompt.owner.job.request.prompt_ids[chunk.start : chunk.start + chunk.count]

    def _move(self, moves: Moves) -> None:
        """Copy pages between the pools and host memory, exact rows from slot to slot, and write fetched pages."""
        if moves.saves:
            self._host_pages.save(pages=list(moves.saves.values()), places=list(moves.saves))
        if moves.loads:
            self._host_pages.load(places=list(moves.loads.values()), pages=list(moves.loads))
        memory = self._runner.memory
        for target, source in (*moves.slots.keeps.items(), *moves.slots.resumes.items()):
            memory.copy_rows(source.slot, target, source.pages * memory.footprint.page_tokens)
        for install in moves.installs:
            install.write(self._runner.memory)

    def _ship_layer(self, layer: int, chunks: list[Chunk[Work]], out: OutgoingKv) -> None:
        """Send a layer's sealed pages that have not left, and the exact rows of prompts that this pass completes."""
        if self._runner.codec.eviction is None:
            self._runner.memory.lanes.written()
            for chunk in chunks:
                out.ship(layer, chunk, chunk.start + chunk.count)

    def _evict_and_ship(self, eviction: Eviction, chunks: list[Chunk[Work]], out: OutgoingKv) -> None:
        """Evict rows of the prompts that this pass completes, then send their pages.

        The rows that stay are known only when all are computed. So no page of a prompt leaves before its last pass.
        """
        for chunk in chunks:
            if not chunk.is_last:
                continue
            whole = Span(chunk.grant.slot, 0, chunk.prompt.num_tokens, tuple(chunk.grant.pages))
            pools = self._runner.memory.pools
            for layer in range(len(pools)):
                eviction.evict(layer, pools, whole)
                self._runner.memory.lanes.written()
                out.ship(layer, chunk, eviction.rows_held(chunk.prompt.num_tokens))

    def _score_prompt(self, chunk: Chunk[Work], rows: Tensor) -> None:
        """Compute log-probabilities of the prompt's own tokens, if the request asks: row i predicts token i + 1."""
        request = chunk.prompt.owner.job.request
        top = request.sampling.prompt_logprobs
        if top is None:
            return
        scored = chunk.prompt.owner.prompt_logprobs
        scored.cut(chunk.start)  # a prompt that starts over has scored these rows before
        targets = request.prompt_ids[chunk.start + 1 : chunk.start + chunk.count + 1]
        model = self._runner.model
        for at in range(0, len(targets), SCORED_ROWS):
            some = targets[at : at + SCORED_ROWS]
            logits = model.logits(rows[at : at + len(some)])
            scored.extend(model.kernels.score(logits, some, [top] * len(some)))

    def _sample(self, chunks: list[Chunk[Work]], hidden: Tensor) -> list[tuple[Work, Token]]:
        """Token 0 of every prompt that this pass completes."""
        complete = [(index, rows[-1]) for index, (chunk, rows) in enumerate(_rows(chunks, hidden)) if chunk.is_last]
        if not complete:
            return []
        model = self._runner.model
        works = [chunks[index].prompt.owner for index, _ in complete]
        requests = [work.job.request for work in works]
        states = [
            SamplerState(
                request.sampling, request.prompt_ids, model.spec.eos_ids, kernels=model.kernels, guide=work.guide
            )
            for work, request in zip(works, requests, strict=True)
        ]
        logits = model.logits(torch.stack([row for _, row in complete]))
        try:
            tokens = sample(logits, states, model.kernels)
        except SequenceError as error:
            error.span = complete[error.span][0]
            raise
        return list(zip(works, tokens, strict=True))

    def _first_tokens(self, tokens: list[tuple[Work, Token]]) -> list[FirstToken]:
        now = perf_counter()
        for work, token in tokens:
            work.finished_at = now
            if work.job.handoff and token.finish is None:
                self._emit(work, work.writer.end(token.token_id))
        return [FirstToken(work, token) for work, token in tokens]


def _span(chunk: Chunk[Work]) -> Span:
    return Span(chunk.grant.slot, chunk.start, chunk.count, tuple(chunk.grant.pages), prompt=chunk.prompt.num_tokens)


def _wanted(chunk: Chunk[Work]) -> int:
    """The number of a chunk's last rows that predict a token which the request needs."""
    if chunk.prompt.owner.job.request.sampling.prompt_logprobs is not None:
        return chunk.count
    return 1 if chunk.is_last else 0


def _rows(chunks: list[Chunk[Work]], hidden: Tensor) -> Iterator[tuple[Chunk[Work], Tensor]]:
    """Every chunk with the hidden states of its wanted rows."""
    parts = hidden.split([_wanted(chunk) for chunk in chunks])
    return zip(chunks, parts, strict=True)
