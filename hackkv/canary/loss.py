"""The distance of a model with a codec from the same model with exact KV, in three numbers.

The codec's side runs as nodes run it: most of the text is prefilled in chunks, the rest decoded token by token on the
pages that prefill left. So both kinds of kernels are measured. If a codec evicts rows in between, half of the text is
decoded, and only that half counts, since prefill has all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final

import torch
import torch.nn.functional as F
from hack_kernels.compiler import Compiler
from torch import Tensor

from hackkv.batch import Span
from hackkv.codec import KvCodec
from hackkv.errors import NonFiniteError
from hackkv.model.exact import ExactKv, advance
from hackkv.model.llama import Llama
from hackkv.model.runner import ModelRunner
from hackkv.model.warm import now_and_then
from hackkv.nodes import CodecLoss

CHUNK_TOKENS: Final = 256
DECODED_TOKENS: Final = 32
"""Tokens at the end of the text that are decoded, unless the codec evicts rows (`_prompt_tokens`)."""
LOGIT_ROWS: Final = 64
"""Rows whose logits are held at once: a vocabulary has some 100,000 of them."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A text, and the hidden states that a model gives it with exact KV."""

    ids: tuple[int, ...]
    hidden: Tensor
    """[T, hidden], in the model's dtype, after the final norm."""


@dataclass(slots=True)
class Pace:
    """The duration of a codec's side of a measurement."""

    prefill_s: float = 0.0
    prefill_tokens: int = 0
    decode_s: float = 0.0
    decode_tokens: int = 0


@torch.inference_mode()
def read_exactly(model: Llama, ids: Sequence[int]) -> Reference:
    """Run `ids`, at least two, through `model` with its KV in the model's own dtype."""
    cache = ExactKv()
    chunks = (ids[start : start + CHUNK_TOKENS] for start in range(0, len(ids), CHUNK_TOKENS))
    return Reference(tuple(ids), torch.cat([advance(model, [(cache, chunk)]) for chunk in chunks]))


@torch.inference_mode()
def compile_for(
    model: Llama, codec: KvCodec, ids: Sequence[int], compiler: Compiler, say: Callable[[str], None]
) -> None:
    """Compile what `codec_loss` calls for the text `ids`. `say` gets the progress, from other threads."""
    with compiler.compiling(now_and_then(say)):
        _run(model, codec, ids, Pace())


@torch.inference_mode()
def codec_loss(model: Llama, codec: KvCodec, reference: Reference, pace: Pace | None = None) -> CodecLoss:
    """The loss of `codec` on the text of `reference`. The weights of `model` include what the codec folds into them.

    The time that the codec's side took is added to `pace`. KV that the codec cannot hold (`NonFiniteError`) is an
    infinite loss.
    """
    ids = reference.ids
    try:
        hidden = _run(model, codec, ids, pace or Pace())
    except NonFiniteError:
        return CodecLoss(math.inf, 0.0, math.inf, len(ids))
    truth = torch.tensor(ids[1:], device=hidden.device)
    kl, agreed, worse = 0.0, 0, 0.0
    first = 0 if codec.eviction is None else _prompt_tokens(codec, len(ids))
    for start in range(first, len(ids), LOGIT_ROWS):
        rows = slice(start, start + LOGIT_ROWS)
        exact, found = (F.log_softmax(model.logits(x[rows]).float(), -1) for x in (reference.hidden, hidden))
        kl += float(F.kl_div(found, exact, log_target=True, reduction="sum"))
        agreed += int((exact.argmax(-1) == found.argmax(-1)).sum())
        said = truth[rows, None]  # one row less than logits at the end: nothing follows the last token
        gap = exact[: len(said)].gather(1, said) - found[: len(said)].gather(1, said)
        worse += float(gap.sum())
    count = len(ids) - first
    return CodecLoss(kl / count, agreed / count, _exp(worse / max(1, len(truth) - first)), count)


def _prompt_tokens(codec: KvCodec, tokens: int) -> int:
    """The number of tokens of a text that are prefilled."""
    return max(1, tokens - DECODED_TOKENS if codec.eviction is None else tokens // 2)


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def _run(model: Llama, codec: KvCodec, ids: Sequence[int], pace: Pace) -> Tensor:
    """Hidden states [T, hidden] of all rows of `ids`."""
    pages = tuple(range(-(-len(ids) // codec.page_tokens)))
    runner = ModelRunner(model, codec, len(pages), 1)
    prompt = _prompt_tokens(codec, len(ids))
    hidden, began = list[Tensor](), perf_counter()
    for start in range(0, prompt, CHUNK_TOKENS):
        chunk = ids[start : min(start + CHUNK_TOKENS, prompt)]
        hidden.append(runner.forward([Span(0, start, len(chunk), pages, prompt=prompt)], chunk))
    pace.prefill_s, pace.prefill_tokens = pace.prefill_s + perf_counter() - began, pace.prefill_tokens + prompt
    began = perf_counter()
    held = runner.end_prompt(Span(0, 0, prompt, pages))
    for row, token in enumerate(ids[prompt:], held):
        hidden.append(runner.forward([Span(0, row, 1, pages, evicted=prompt - held)], [token]))
    pace.decode_s, pace.decode_tokens = pace.decode_s + perf_counter() - began, pace.decode_tokens + len(ids) - prompt
    return torch.cat(hidden)
