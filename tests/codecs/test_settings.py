"""Settings of codecs: their effect, refused values, and the fingerprint by which nodes notice a difference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hack_kernels import load

from hackkv.codec_footprint import footprint_of
from hackkv.codecs import make_codec
from hackkv.config import CodecConfig
from hackkv.errors import ConfigError
from hackkv.types import KvLayout, KvShape
from tests.codecs.cases import (
    HEADS,
    LAYER,
    TABLE,
    Case,
    Growing,
    advance,
    run,
)


def test_four_bits_for_k_are_closer_to_exact_than_two() -> None:
    """On keys with loud channels, `hack-k4v2` is closer to `fp16` than `hack` is, and neither is far off."""
    tokens = 7 * 32
    exact, two, four = (run(Case(name), tokens, [tokens])[2] for name in ("fp16", "hack", "hack-k4v2"))
    errors = [float((x - exact).norm() / exact.norm()) for x in (two, four)]
    assert errors[1] < errors[0] < 0.9


@pytest.mark.parametrize("arithmetic", ["symmetric", "asymmetric"])
def test_requantization_gives_every_row_to_the_codes(arithmetic: str) -> None:
    """In the ablation HACK/RQE, all pages travel as planes. Decode goes on where prefill ended, on either node."""
    case = Case("hack", settings={"open_page": "requantize", "arithmetic": arithmetic})
    codec, pi = case.codec, case.page_tokens
    tokens = pi + 9
    pool, sequence = codec.new_pools(4, 1, range(HEADS))[LAYER], Growing(case, codec, tokens + 3)
    advance(pool, [(sequence, tokens)])
    footprint = footprint_of(codec, KvLayout(len(codec.formats), HEADS, case.head_dim, pi))
    assert [footprint.sealed(n) for n in (1, pi, pi + 1, tokens)] == [1, 1, 2, 2]
    target = codec.new_pools(4, 1, range(HEADS))[LAYER]
    codec.from_wire(LAYER, target, torch.tensor([3, 1]), codec.to_wire(LAYER, pool, torch.tensor(sequence.pages[:2])))
    moved = replace_place(sequence, (3, 1))
    for _ in range(3):
        advance(pool, [(sequence, 1)])
        advance(target, [(moved, 1)])
        assert torch.equal(sequence.outputs[-1], moved.outputs[-1])
    exact = run(replace(case, name="fp16", settings={}), tokens + 3, [tokens + 3])[2]
    assert float((torch.cat(sequence.outputs) - exact).norm() / exact.norm()) < 0.9


def replace_place(sequence: Growing, pages: tuple[int, ...]) -> Growing:
    """The same sequence, at the same point, in other pages."""
    moved = object.__new__(Growing)
    moved.__dict__.update(sequence.__dict__, pages=pages, outputs=[])
    return moved


@pytest.mark.parametrize(
    ("name", "settings", "named"),
    [
        ("hakc", {}, "codec.name: 'hakc' is unknown; known: fp16"),
        ("hack", {"page_tokens": 48}, "page_tokens is 48"),
        ("hack", {"k_bits": 3}, "k_bits is 3"),
        ("hack", {"v_bits": "two"}, "codec.settings.v_bits"),
        ("hack", {"rounding": "up"}, "codec.settings.rounding"),
        ("hack", {"arithmetic": "fp8"}, "codec.settings.arithmetic"),
        ("hack", {"open_page": "none"}, "codec.settings.open_page"),
        ("hack", {"seed": -1}, "codec.settings.seed"),
        ("hack", {"seed": 2**64}, "codec.settings.seed"),
        ("hack", {"bits": 2}, "codec.settings.bits"),
        ("hack", {"send_sums": True}, "send_sums is set, but these settings keep no sums"),
        ("hack-paper", {"send_sums": True, "stored_sums": False}, "send_sums"),
        ("fp16", {"page_tokens": 0}, "codec.settings.page_tokens"),
        ("fp16", {"page_tokens": 9}, "codec.settings.page_tokens"),
        ("fp16", {"k_bits": 2}, "codec.settings.k_bits"),
    ],
)
def test_unknown_codecs_and_bad_settings_are_named(name: str, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_codec(CodecConfig(name=name, settings=settings), KvShape(2, HEADS, 128), load("reference"))
    assert named in str(caught.value)


def test_a_head_dim_without_kernels_is_named() -> None:
    with pytest.raises(ConfigError, match="head_dim is 80"):
        make_codec(CodecConfig(name="hack"), KvShape(2, HEADS, 80), load("reference"))


def test_fingerprints_differ_when_anything_that_matters_differs() -> None:
    """Fingerprints are equal for equal settings, on every backend."""
    cases = [
        *TABLE,
        *(Case("hack", settings={"k_bits": 4, **more}) for more in ({}, {"v_bits": 4}, {"seed": 1})),
        *(Case("hack", settings={"rounding": "stochastic", "seed": seed}) for seed in (0, 1)),
        Case("hack", page_tokens=64),
        Case("fp16", page_tokens=64),
        *(Case("hack", settings={"open_page": mode}) for mode in ("k_codes", "requantize")),
        *(Case("hack-paper", settings={key: key == "send_sums"}) for key in ("send_sums", "stored_sums")),
    ]
    prints = {frozenset(case.codec.fingerprint()) for case in cases}
    assert len(prints) == len({str(replace(case, backend="")) for case in cases})
    for case in cases:
        names = [name for name, _ in case.codec.fingerprint()]
        assert len(set(names)) == len(names)
        assert case.codec.fingerprint() == case.codec.fingerprint()
