"""Requests, and the memory that they want of a decode node."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from hack_kernels import load

from hackkv.codec import FP16_BYTES
from hackkv.codecs import make_codec
from hackkv.config import CodecConfig
from hackkv.model.tiny import Tiny

MODEL = Tiny(layers=4, hidden=256, heads=4, kv_heads=2, head_dim=128, ffn=768, max_context=1024)
"""Large enough that a step computes rather than starts operators: a batch of 90 saturates one core."""
MAX_BATCH = 256
LOAD = 3
"""Requests that are there at any time, in batches."""
SHARE = 0.1
PROMPT_TOKENS, OUTPUT_TOKENS = (32, 160), (64, 384)
REQUESTS = 600
"""Different requests; they come round again."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request, as HTTP has it."""

    prompt: tuple[int, ...]
    output: int
    seed: int

    @property
    def tokens(self) -> int:
        """The most that are in its cache: the last token is chosen but never run."""
        return len(self.prompt) + self.output - 1

    def body(self) -> bytes:
        """Every second one samples."""
        chosen = {"temperature": 0.8 * (self.seed % 2), "seed": self.seed, "ignore_eos": True, "return_token_ids": True}
        return json.dumps({"prompt": self.prompt, "max_tokens": self.output, **chosen}).encode()


@dataclass(frozen=True, slots=True)
class Memory:
    """What a decode node has: sealed pages, and slots, each of them an open FP16 page per layer and KV head."""

    pages: int
    slots: int
    page_bytes: int
    slot_bytes: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.pages * self.page_bytes + self.slots * self.slot_bytes


def jobs(seed: int) -> list[Job]:
    """The requests."""
    rng = random.Random(seed)
    return [
        Job(tuple(rng.randrange(3, 500) for _ in range(rng.randint(*PROMPT_TOKENS))), rng.randint(*OUTPUT_TOKENS), i)
        for i in range(REQUESTS)
    ]


def ample(work: Sequence[Job], codec_name: str) -> Memory:
    """All that the load would hold if every request of it were there at its full length."""
    codec = make_codec(CodecConfig(name=codec_name), MODEL.head_dim, load("reference"))
    page_tokens, heads = codec.format.page_tokens, MODEL.layers * MODEL.kv_heads
    pages = mean(codec.sealed_pages(job.tokens) for job in work)
    row_bytes = 2 * FP16_BYTES * MODEL.head_dim
    clients = LOAD * MAX_BATCH
    return Memory(round(clients * pages), clients, codec.format.resident_bytes * heads, page_tokens * row_bytes * heads)


def tight(work: Sequence[Job], codec_name: str) -> Memory:
    """A tenth of it, with as many slots as there are pages for sequences of mean age."""
    whole = ample(work, codec_name)
    sealed = make_codec(CodecConfig(name=codec_name), MODEL.head_dim, load("reference")).sealed_pages
    steps = sum(job.output for job in work)
    held = sum(sealed(len(job.prompt) + step) for job in work for step in range(job.output)) / steps
    size = SHARE * whole.size
    slots = int(size / (whole.slot_bytes + held * whole.page_bytes))
    pages = int((size - slots * whole.slot_bytes) / whole.page_bytes)
    return Memory(pages, slots, whole.page_bytes, whole.slot_bytes)
