"""One prefill pass: chunks of prompts in, frames and first tokens out. Runs in a thread of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from hackkv.codec import Span
from hackkv.errors import NonFiniteError
from hackkv.framing import FrameWriter
from hackkv.model.runner import ModelRunner
from hackkv.model.sampler import SamplerState, prompt_logprobs, sample
from hackkv.types import HandoffEnd, KvFrame, PrefillJob, Token
from prefill_node.host_pages import HostPages
from prefill_node.prefix_pool import Moves
from prefill_node.scheduler import Chunk

Emit = Callable[["Work", KvFrame | HandoffEnd], None]
"""Takes a frame of a job; called from the engine's thread."""


@dataclass(slots=True, eq=False)
class Work:
    """A job and what the engine remembers of it from pass to pass."""

    job: PrefillJob
    queued_at: float
    writer: FrameWriter = field(init=False)
    started_at: float | None = None
    finished_at: float = 0.0
    """When token 0 was chosen."""
    sent_pages: Counter[int] = field(default_factory=Counter)
    """Pages that have left, by layer; a repeated pass does not send them again."""
    quantize_s: float = 0.0
    prompt_logprobs: list[Token] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.writer = FrameWriter(self.job.transfer_id, self.job.epoch)


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A prompt is complete."""

    work: Work
    token: Token


class PrefillEngine:
    """Runs passes on one `ModelRunner`."""

    def __init__(self, runner: ModelRunner, host_pages: HostPages, emit: Emit) -> None:
        self._runner = runner
        self._host_pages = host_pages
        self._emit = emit

    @torch.inference_mode()
    def step(self, chunks: list[Chunk[Work]], moves: Moves) -> list[FirstToken]:
        """Run one pass, after `moves`. Raises `NonFiniteError` whose `span` is the index of the chunk at fault."""
        began = perf_counter()
        self._move(moves)
        quantized = self._runner.codec.quantize_s
        for chunk in chunks:
            work = chunk.prompt.owner
            work.started_at = began if work.started_at is None else work.started_at
        ids = [token for chunk in chunks for token in self._prompt_ids(chunk)]
        spans, wanted = [_span(chunk) for chunk in chunks], [_wanted(chunk) for chunk in chunks]
        hidden = self._runner.forward(spans, ids, lambda layer: self._ship(layer, chunks), wanted)
        # What can fail comes first: a pass that is repeated must find its works as they were.
        tokens = self._sample(chunks, hidden)
        for chunk, rows in _rows(chunks, hidden):
            work = chunk.prompt.owner
            work.quantize_s += self._runner.codec.quantize_s - quantized
            self._score_prompt(chunk, rows)
        return self._first_tokens(tokens)

    def _prompt_ids(self, chunk: Chunk[Work]) -> tuple[int, ...]:
        return chunk.prompt.owner.job.request.prompt_ids[chunk.start : chunk.start + chunk.count]

    def _move(self, moves: Moves) -> None:
        """Copy pages between the pools and host memory."""
        if moves.saves:
            self._host_pages.save(pages=list(moves.saves.values()), places=list(moves.saves))
        if moves.loads:
            self._host_pages.load(places=list(moves.loads.values()), pages=list(moves.loads))

    def _ship(self, layer: int, chunks: list[Chunk[Work]]) -> None:
        """Send what is sealed of one layer and has not left, and the open page of prompts that this pass completes."""
        codec, pool = self._runner.codec, self._runner.pools[layer]
        page_tokens = self._runner.layout.page_tokens
        for chunk in chunks:
            work = chunk.prompt.owner
            if not work.job.handoff:
                continue
            end = chunk.start + chunk.count
            first, last = work.sent_pages[layer], codec.sealed_pages(end)
            if last > first:
                planes = codec.to_wire(pool, torch.tensor(chunk.lease.pages[first:last]))
                self._send(work, work.writer.frames(layer, first, planes))
                work.sent_pages[layer] = last
            rows = end - last * page_tokens
            if chunk.is_last and rows > 0 and work.sent_pages[layer] == last:
                slot = chunk.lease.slot
                tail = {"open_k": pool.open_k[slot, :, None, :rows], "open_v": pool.open_v[slot, :, None, :rows]}
                self._send(work, work.writer.frames(layer, last, tail, rows))
                work.sent_pages[layer] = last + 1

    def _send(self, work: Work, frames: Iterator[KvFrame]) -> None:
        for frame in frames:
            self._emit(work, frame)

    def _score_prompt(self, chunk: Chunk[Work], rows: Tensor) -> None:
        """Log-probabilities of the prompt's own tokens, for requests that ask: row i predicts token i + 1."""
        request = chunk.prompt.owner.job.request
        top = request.sampling.prompt_logprobs
        if top is None:
            return
        targets = request.prompt_ids[chunk.start + 1 : chunk.start + chunk.count + 1]
        if targets:
            logits = self._runner.model.logits(rows[: len(targets)])
            chunk.prompt.owner.prompt_logprobs += prompt_logprobs(logits, chunk.start + 1, targets, top)

    def _sample(self, chunks: list[Chunk[Work]], hidden: Tensor) -> list[tuple[Work, Token]]:
        """Token 0 of every prompt that this pass completes."""
        complete = [(index, rows[-1]) for index, (chunk, rows) in enumerate(_rows(chunks, hidden)) if chunk.is_last]
        if not complete:
            return []
        eos_ids = self._runner.model.spec.eos_ids
        works = [chunks[index].prompt.owner for index, _ in complete]
        requests = [work.job.request for work in works]
        states = [SamplerState(request.sampling, request.prompt_ids, eos_ids) for request in requests]
        logits = self._runner.model.logits(torch.stack([row for _, row in complete]))
        try:
            tokens = sample(logits, states, self._runner.model.kernels)
        except NonFiniteError as error:
            raise NonFiniteError(str(error), span=complete[error.span][0]) from error
        return list(zip(works, tokens, strict=True))

    def _first_tokens(self, tokens: list[tuple[Work, Token]]) -> list[FirstToken]:
        now = perf_counter()
        for work, token in tokens:
            work.finished_at = now
            if work.job.handoff and token.finish is None:
                self._emit(work, work.writer.end(token.token_id))
        return [FirstToken(work, token) for work, token in tokens]


def _span(chunk: Chunk[Work]) -> Span:
    return Span(chunk.lease.slot, chunk.start, chunk.count, tuple(chunk.lease.pages))


def _wanted(chunk: Chunk[Work]) -> int:
    """How many of its last rows predict a token that somebody asks for."""
    if chunk.prompt.owner.job.request.sampling.prompt_logprobs is not None:
        return chunk.count
    return 1 if chunk.is_last else 0


def _rows(chunks: list[Chunk[Work]], hidden: Tensor) -> Iterator[tuple[Chunk[Work], Tensor]]:
    """Every chunk with the hidden states of its wanted rows."""
    parts = hidden.split([_wanted(chunk) for chunk in chunks])
    return zip(chunks, parts, strict=True)
