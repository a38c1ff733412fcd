"""The single-process reference that the cluster must equal: one request, one codec, no wire, no batch neighbours."""

from __future__ import annotations

from hackkv.batch import Span
from hackkv.model.runner import ModelRunner
from hackkv.model.sampler import SamplerState, sample
from hackkv.model.worker import Worker
from hackkv.types import Request, Token


def generate(worker: Worker, request: Request, *, chunk_pages: int = 4) -> list[Token]:
    """All output tokens of `request`: prefill in chunks of `chunk_pages` pages, then decode one by one.

    It runs the nodes' own model, codec and sampler, on a fresh pool of just enough pages. Raises `SequenceError`.
    Prompt log-probabilities are not computed.
    """
    ids, layout = request.prompt_ids, worker.layout
    num_pages = layout.pages(len(ids) + request.sampling.max_tokens)
    model, grammar = worker.model, request.sampling.grammar
    runner = ModelRunner(model, worker.codec, num_pages, 1)
    guide = worker.guides.open(grammar) if grammar else None
    state = SamplerState(request.sampling, ids, model.spec.eos_ids, kernels=model.kernels, guide=guide)
    pages = tuple(range(num_pages))
    chunk_tokens = chunk_pages * layout.page_tokens
    for start in range(0, len(ids), chunk_tokens):
        chunk = ids[start : start + chunk_tokens]
        wanted = [int(start + len(chunk) == len(ids))]
        hidden = runner.forward([Span(0, start, len(chunk), pages, prompt=len(ids))], chunk, wanted=wanted)
    held = runner.end_prompt(Span(0, 0, len(ids), pages))
    tokens = sample(model.logits(hidden), [state], model.kernels)
    while tokens[-1].finish is None:
        span = Span(0, held + len(tokens) - 1, 1, pages, evicted=len(ids) - held)
        tokens += runner.choose([span], [tokens[-1].token_id], [state])
    return tokens
