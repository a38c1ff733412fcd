"""The kinds of codecs: two of a kind differ in nothing that a node, a wire or a scheduler could notice."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import pytest
from hack_kernels import load

from hackkv.codecs import CODECS, make_codec
from hackkv.config import CodecConfig
from hackkv.defaults import DEFAULT_CODEC
from hackkv.types import KvShape

IN_A_CLUSTER = ("fp16", "hack-zstd", DEFAULT_CODEC)
"""Codecs whose whole clusters are quick tests: exact pages, a wire form of variable size, and the default."""


def in_a_cluster(codecs: Iterable[str]) -> list[str | pytest.ParameterSet]:
    """Parameters of a test that serves conversations from a cluster with each of `codecs`."""
    return [codec if codec in IN_A_CLUSTER else pytest.param(codec, marks=pytest.mark.slow) for codec in codecs]


def kind_of(value: object) -> object:
    """The kind of a codec that is given by name; any other value is its own kind."""
    return _kind_of(value) if isinstance(value, str) and value in CODECS else value


@cache
def _kind_of(codec: str) -> str:
    """The codec's maker, its page formats, and all that `KvCodec` lets others ask of it. The default codec is its own
    kind."""
    if codec == DEFAULT_CODEC:
        return codec
    made = make_codec(CodecConfig(name=codec, settings={"page_tokens": 32}), KvShape(2, 2, 64), load("reference"))
    eviction = made.eviction
    traits = (
        CODECS[codec].make.__qualname__,
        sorted({type(each).__name__ for each in made.formats}),
        len(set(made.formats)),
        any(plane.most_sum is not None for planes in made.wire_planes for plane in planes),
        sorted({str(getattr(each, "open_page", None)) for each in made.formats}),
        (bool(made.window.sink), bool(made.window.recent)),
        (made.wire_form.name, made.codes_where_it_pays),
        (made.prepares_weights, made.lossless, made.seals_open_page),
        (made.bytes_follow_tokens, made.decodes_as_prefill, eviction and type(eviction).__name__),
    )
    return repr(traits)
