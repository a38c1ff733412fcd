"""Requests, and the memory that they need on a decode node."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from hack_kernels import load

from hackkv.codec_footprint import footprint_of
from hackkv.codecs import make_codec
from hackkv.config import CodecConfig
from hackkv.footprint import Footprint
from hackkv.model.tiny import Tiny
from hackkv.types import KvLayout, KvShape

MODEL = Tiny(layers=4, hidden=256, heads=4, kv_heads=2, head_dim=128, ffn=768, max_context=1024)
SHAPE = KvShape(MODEL.layers, MODEL.kv_heads, MODEL.head_dim)
"""The model is so large that a step mostly computes, rather than starts operators: a batch of 90 saturates one core."""
MAX_BATCH = 256
LOAD = 3
"""Requests under way at any time, as a multiple of the largest batch."""
SHARE = 0.1
PROMPT_TOKENS, OUTPUT_TOKENS = (32, 160), (64, 384)
REQUESTS = 600
"""Number of different requests. Clients repeat them in a cycle."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request."""

    prompt: tuple[int, ...]
    output: int
    seed: int

    @property
    def tokens(self) -> int:
        """The most tokens in the request's cache: the last token is chosen but never run."""
        return len(self.prompt) + self.output - 1

    def body(self) -> bytes:
        """The body of the HTTP request. Every second request samples; the others are greedy."""
        chosen = {"temperature": 0.8 * (self.seed % 2), "seed": self.seed, "ignore_eos": True, "return_token_ids": True}
        return json.dumps({"prompt": self.prompt, "max_tokens": self.output, **chosen}).encode()


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a decode node: sealed pages, and slots. A slot is an open FP16 page per layer and KV head."""

    pages: int
    slots: int
    page_bytes: int
    slot_bytes: int

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.pages * self.page_bytes + self.slots * self.slot_bytes


def jobs(seed: int) -> list[Job]:
    """The requests of a run; equal seeds give equal requests."""
    rng = random.Random(seed)
    return [
        Job(tuple(rng.randrange(3, 500) for _ in range(rng.randint(*PROMPT_TOKENS))), rng.randint(*OUTPUT_TOKENS), i)
        for i in range(REQUESTS)
    ]


def ample(work: Sequence[Job], codec_name: str) -> Memory:
    """Memory for all requests of the load at their full length."""
    weighs = footprint(codec_name)
    pages = mean(weighs.sealed(job.tokens) for job in work)
    clients = LOAD * MAX_BATCH
    return Memory(round(clients * pages), clients, weighs.page_bytes, weighs.slot_bytes)


def footprint(codec_name: str) -> Footprint:
    """Pages and bytes of the model's sequences under a codec."""
    codec = make_codec(CodecConfig(name=codec_name), SHAPE, load("reference"))
    return footprint_of(codec, KvLayout(MODEL.layers, MODEL.kv_heads, MODEL.head_dim, codec.page_tokens))


def tight(work: Sequence[Job], codec_name: str) -> Memory:
    """A tenth of the ample memory, with as many slots as there are pages for sequences of mean length."""
    whole = ample(work, codec_name)
    sealed = footprint(codec_name).sealed
    steps = sum(job.output for job in work)
    held = sum(sealed(len(job.prompt) + step) for job in work for step in range(job.output)) / steps
    size = SHARE * whole.size
    slots = int(size / (whole.slot_bytes + held * whole.page_bytes))
    pages = int((size - slots * whole.slot_bytes) / whole.page_bytes)
    return Memory(pages, slots, whole.page_bytes, whole.slot_bytes)
