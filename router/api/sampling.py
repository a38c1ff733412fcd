"""Sampling parameters of the sequences of one HTTP request."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

from hackkv.types import Sampling
from router.api.defaults import SamplingDefaults
from router.api.schema import Generate


def sampling_of(
    body: Generate,
    defaults: SamplingDefaults,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    grammar: str = "",
) -> Sampling:
    """Sampling parameters of a request; draws a seed if the client gave none, so that a retry repeats the draw."""

    def chosen(name: str) -> Any:
        given = getattr(body, name)
        return getattr(defaults, name) if given is None else given

    return Sampling(
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        max_tokens=max_tokens,
        min_tokens=min(body.min_tokens, max_tokens),
        temperature=chosen("temperature"),
        top_p=chosen("top_p"),
        top_k=max(0, chosen("top_k")),  # vLLM's -1 means off as well
        min_p=chosen("min_p"),
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=chosen("repetition_penalty"),
        logit_bias=body.logit_bias,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
    )


def nth_seed(sampling: Sampling, index: int) -> Sampling:
    """Sampling of choice `index`: the seed counts up, wrapping as a signed 64-bit number does."""
    seed = (sampling.seed + index + (1 << 63)) % (1 << 64) - (1 << 63)
    return replace(sampling, seed=seed)
