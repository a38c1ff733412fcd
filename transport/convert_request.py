"""A client's nouns <-> protobuf: sampling, requests, tokens."""

from __future__ import annotations

import math
from array import array
from typing import Any

from hackkv.logprobs import PromptLogprobs
from hackkv.types import MAX_GRAMMAR_CHARS, Finish, Logprob, Request, Sampling, Token
from transport.coder import (
    MAX_ALTERNATIVES,
    MAX_LOGIT_BIAS,
    MAX_PROMPT_TOKENS,
    MAX_STOP_TOKENS,
    Malformed,
    capped,
    not_nan,
    required,
    text,
    within,
)
from transport.pb import kv_pb2 as pb

MOST_ADDED = 1e30
MOST_FACTOR = 1e6
"""Samplers refuse larger biases, penalties and factors (`hack_kernels.choosing`). The API's limits are far lower."""

_FINISH_TO_PB = {None: pb.FINISH_UNSPECIFIED, Finish.STOP: pb.FINISH_STOP, Finish.LENGTH: pb.FINISH_LENGTH}
_FINISH_FROM_PB = {number: finish for finish, number in _FINISH_TO_PB.items()}


def _pack_sampling(sampling: Sampling) -> pb.Sampling:
    return pb.Sampling(
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=[pb.TokenBias(token_id=token_id, bias=bias) for token_id, bias in sampling.logit_bias],
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        grammar=sampling.grammar,
    )


def _unpack_sampling(message: pb.Sampling) -> Sampling:
    biases = capped("logit_bias", message.logit_bias, MAX_LOGIT_BIAS)
    return Sampling(
        seed=message.seed,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        temperature=within("temperature", message.temperature, 0),
        top_p=within("top_p", message.top_p, 0),
        top_k=message.top_k,
        min_p=within("min_p", message.min_p, 0, 1),
        presence_penalty=within("presence_penalty", message.presence_penalty, -MOST_ADDED, MOST_ADDED),
        frequency_penalty=within("frequency_penalty", message.frequency_penalty, -MOST_ADDED, MOST_ADDED),
        repetition_penalty=within("repetition_penalty", message.repetition_penalty, 1 / MOST_FACTOR, MOST_FACTOR),
        logit_bias=tuple((item.token_id, within("logit_bias", item.bias, -MOST_ADDED, MOST_ADDED)) for item in biases),
        stop_token_ids=tuple(capped("stop_token_ids", message.stop_token_ids, MAX_STOP_TOKENS)),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        grammar=capped("grammar", message.grammar, MAX_GRAMMAR_CHARS),
    )


def column(field: str, kind: str, data: bytes) -> array[Any]:
    """The numbers, of `array` type code `kind`, whose bytes in memory are `data`."""
    numbers = array(kind)
    if len(data) % numbers.itemsize:
        raise Malformed(field, f"{len(data)} bytes are no whole numbers")
    numbers.frombytes(data)
    return numbers


def pack_request(request: Request) -> pb.Request:
    """To protobuf."""
    return pb.Request(
        request_id=request.request_id,
        prompt_ids=array("I", request.prompt_ids).tobytes(),
        sampling=_pack_sampling(request.sampling),
        cache_salt=request.cache_salt,
    )


def unpack_request(message: pb.Request) -> Request:
    """From protobuf. Raises `Malformed`."""
    required("sampling", message)
    return Request(
        request_id=text("request_id", message.request_id),
        prompt_ids=tuple(capped("prompt_ids", column("prompt_ids", "I", message.prompt_ids), MAX_PROMPT_TOKENS)),
        sampling=_unpack_sampling(message.sampling),
        cache_salt=text("cache_salt", message.cache_salt),
    )


def pack_token(token: Token) -> pb.Token:
    """To protobuf."""
    return pb.Token(
        index=token.index,
        token_id=token.token_id,
        finish=_FINISH_TO_PB[token.finish],
        logprob=token.logprob,
        top=_pack_top(token.top) if token.top else None,
    )


def unpack_token(message: pb.Token) -> Token:
    """From protobuf. Raises `Malformed`."""
    if message.finish not in _FINISH_FROM_PB:
        raise Malformed("finish", f"{message.finish} is not a Finish")
    return Token(
        index=message.index,
        token_id=message.token_id,
        finish=_FINISH_FROM_PB[message.finish],
        logprob=not_nan("logprob", message.logprob) if message.HasField("logprob") else None,
        top=_unpack_top(message.top) if message.HasField("top") else (),
    )


def _pack_top(top: tuple[Logprob, ...]) -> pb.Candidates:
    return pb.Candidates(token_ids=[item.token_id for item in top], logprobs=[item.logprob for item in top])


def _unpack_top(message: pb.Candidates) -> tuple[Logprob, ...]:
    ids, logprobs = capped("top", message.token_ids, MAX_ALTERNATIVES), message.logprobs
    if len(ids) != len(logprobs):
        raise Malformed("top", f"{len(logprobs)} probabilities of {len(ids)} candidates")
    if any(map(math.isnan, logprobs)):
        raise Malformed("top", "must not be NaN")
    return tuple(map(Logprob, ids, logprobs))


def pack_prompt_logprobs(columns: PromptLogprobs) -> pb.PromptLogprobs:
    """To protobuf."""
    return pb.PromptLogprobs(own=columns.own.tobytes(), top_ids=columns.top_ids.tobytes(), top=columns.top.tobytes())


def unpack_prompt_logprobs(message: pb.PromptLogprobs) -> PromptLogprobs:
    """From protobuf. Raises `Malformed`."""
    columns = PromptLogprobs(
        column("own", "d", message.own), column("top_ids", "I", message.top_ids), column("top", "d", message.top)
    )
    capped("own", columns.own, MAX_PROMPT_TOKENS)
    width, alternatives = columns.width, len(columns.top)
    if not alternatives == len(columns.top_ids) == width * len(columns):
        raise Malformed("top", f"{alternatives} alternatives and {len(columns.top_ids)} ids of {len(columns)} tokens")
    if width > MAX_ALTERNATIVES:
        raise Malformed("top", f"{width} alternatives of a token, at most {MAX_ALTERNATIVES} are accepted")
    for name, numbers in (("own", columns.own), ("top", columns.top)):
        if math.isnan(sum(numbers)) and any(map(math.isnan, numbers)):  # a sum is quick and hides no NaN
            raise Malformed(name, "must not be NaN")
    return columns
