"""Greedy answers through the C interface of llama.cpp and ik_llama.cpp: prompts in turn, then steps of all answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from bench.peers.systems.child import Answer, Job

CHUNK = 512
"""Prompt tokens per call: llama.cpp's own micro-batch."""


TYPES = {"f16": 1, "q4_0": 2, "q8_0": 8}
"""ggml's numbers of types; not every binding names them."""
SPARE_TOKENS = 256


class Batches:
    """A context with room for all sequences. The bindings' own classes know one sequence only.

    `api` has the functions `llama_*`. `flash` names its parameter for flash attention, and `clear` empties a context's
    KV. The job's `kv` is a type, with flash attention, or `f16-plain`.
    """

    def __init__(self, api: Any, job: Job, flash: str, clear: Callable[[Any], None], version: str) -> None:
        self.version = version
        self._api, self._clear = api, clear
        kind, _, attention = job.kv.partition("-")
        sequences = len(job.prompts) if job.together else 1
        api.llama_backend_init()
        model = api.llama_model_load_from_file(job.gguf.encode(), api.llama_model_default_params())
        params = api.llama_context_default_params()
        params.n_ctx = sequences * (max(map(len, job.prompts)) + job.tokens + SPARE_TOKENS)
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = job.threads
        params.type_k = params.type_v = TYPES[kind]
        setattr(params, flash, attention != "plain")
        self._context = api.llama_init_from_model(model, params)
        self._vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        self._batch = api.llama_batch_init(CHUNK, 0, 1)

    def answer(self, prompt: Sequence[int], tokens: int) -> Answer:
        """Compute the prompt and the first token, then the others."""
        self._clear(self._context)
        began = perf_counter()
        last = [self._prefill(0, prompt)]
        first = perf_counter()
        for nth in range(tokens - 1):
            last = self._step(last, len(prompt) + nth)
        return Answer(first - began, perf_counter() - first)

    def answer_all(self, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        """Compute the prompts in turn, then all answers together. The prompts have one length."""
        self._clear(self._context)
        last = [self._prefill(nth, prompt) for nth, prompt in enumerate(prompts)]
        for nth in range(tokens - 1):
            last = self._step(last, len(prompts[0]) + nth)

    def _prefill(self, sequence: int, prompt: Sequence[int]) -> int:
        for start in range(0, len(prompt), CHUNK):
            chunk = prompt[start : start + CHUNK]
            rows = [(token, start + nth, sequence, False) for nth, token in enumerate(chunk)]
            rows[-1] = (*rows[-1][:3], True)
            self._compute(rows)
        return self._chosen(len(rows) - 1)

    def _step(self, last: Sequence[int], position: int) -> list[int]:
        self._compute([(token, position, sequence, True) for sequence, token in enumerate(last)])
        return [self._chosen(sequence) for sequence in range(len(last))]

    def _compute(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """Compute rows of (token, position, sequence, whether logits are wanted)."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for nth, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[nth], batch.pos[nth] = token, position
            batch.n_seq_id[nth], batch.seq_id[nth][0] = 1, sequence
            batch.logits[nth] = wanted
        if said := self._api.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode: {said}")

    def _chosen(self, row: int) -> int:
        logits = self._api.llama_get_logits_ith(self._context, row)
        return int(np.argmax(np.ctypeslib.as_array(logits, (self._vocab,))))
