"""`hackkv calibrate --target-bytes` gives layers their bits, and a codec takes them from the file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hack_kernels import load
from hack_kernels.level_format import LevelFormat
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from hackkv.codecs import make_codec
from hackkv.codecs.artifact import METADATA
from hackkv.codecs.rotated import LayerBits
from hackkv.config import CodecConfig
from hackkv.errors import ConfigError
from hackkv.model.exact import causal
from hackkv.model.tiny import Tiny, write_tiny
from hackkv.types import KvShape
from measure.calibrate.__main__ import main
from measure.calibrate.bits import (
    EXACT_BEFORE,
    MOST_BITS,
    PAGE,
    base_of,
    bases_of,
    by_pages,
    losses_of,
    passes,
    share,
    spend,
)
from measure.calibrate.moments import gather
from measure.calibrate.solve import solve
from tests.pair import tiny_worker

TWO = LayerBits(k_bits=2, v_bits=2, k=(), v=())


@pytest.mark.parametrize(
    ("target", "bits"),
    [(0.141, (2, 2)), (0.171, (2, 2)), (0.172, (3, 2)), (0.204, (3, 3)), (0.27, (4, 4)), (1, (4, 4))],
)
def test_the_base_is_the_largest_preset_within_the_target(target: float, bits: tuple[int, int]) -> None:
    found = base_of(target, 64)
    assert (found.k_bits, found.v_bits) == bits
    assert share(*bits, 64) <= target


def test_a_target_below_every_codec_is_refused_with_the_smallest() -> None:
    with pytest.raises(ConfigError, match=r"--target-bytes: 14.0% of FP16 is too little; the smallest codec has 14.1%"):
        base_of(0.14, 64)


@settings(max_examples=60)
@given(
    losses=st.lists(st.floats(0, 1, width=32), min_size=8, max_size=8),
    target=st.floats(0.141, 0.3),
    dim=st.sampled_from([64, 128]),
)
def test_bits_stay_within_the_target_and_go_where_most_is_lost(losses: list[float], target: float, dim: int) -> None:
    table = torch.tensor(losses).view(2, 4)
    found = spend(TWO, table, target, dim)
    widths = torch.tensor([found.k, found.v])
    assert share(sum(found.k) / 4, sum(found.v) / 4, dim) <= max(target, share(2, 2, dim))
    assert bool(((widths >= 2) & (widths <= MOST_BITS)).all())
    left = table.double() / 4.0 ** (widths - 2)
    taken, open_ones = widths > 2, widths < MOST_BITS
    if bool(taken.any()) and bool(open_ones.any()):  # no bit would help more elsewhere
        assert float((left * 4)[taken].min()) >= float(left[open_ones].max())


def test_more_bits_are_not_spent_on_what_loses_nothing() -> None:
    found = spend(TWO, torch.tensor([[0.0, 0.5], [0.0, 0.0]]), 1.0, 64)
    assert (found.k, found.v) == ((2, 4), (2, 2))


def test_queries_see_the_first_page_and_the_near_ones_exactly() -> None:
    generator = torch.Generator().manual_seed(1)
    total = 5 * PAGE + 9
    q, k, v = (torch.randn(total, heads, 64, generator=generator) for heads in (4, 2, 2))
    sealed = k + 1, v - 1
    found = by_pages(q, (k, v), sealed)
    for at in (0, PAGE, 2 * PAGE + 5, 3 * PAGE - 1, 4 * PAGE, total - 1):
        page = torch.arange(at + 1) // PAGE
        coded = ((page > 0) & (page < at // PAGE - EXACT_BEFORE))[:, None, None]
        keys, values = (torch.where(coded, y[: at + 1], x[: at + 1]) for x, y in zip((k, v), sealed, strict=True))
        torch.testing.assert_close(found[at : at + 1], causal(q[at : at + 1], keys, values))


def test_every_side_of_every_layer_costs_something_and_less_with_more_bits() -> None:
    model = tiny_worker("fp16").model
    window = np.random.default_rng(1).integers(3, 500, 384)
    solved, seen = [solve(each) for each in gather(model, (window,), lambda count: None)], list[int]()
    low = losses_of(model, window, solved, TWO, seen.append)
    high = losses_of(model, window, solved, LayerBits(k_bits=4, v_bits=4, k=(), v=()), lambda count: None)
    assert low.shape == (2, model.spec.num_layers)
    assert sum(seen) == passes(model.spec.num_layers) * len(window)
    assert bool((low > 0).all())
    assert bool((high < low).all())


def test_the_file_brings_the_bits_of_every_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = write_tiny(tmp_path / "tiny", Tiny(head_dim=64, max_context=512)), tmp_path / "out.safetensors"
    arguments = [str(folder), "--tokens", "700", "--threads", "1", "--target-bytes", "15.7%", "--out", str(out)]
    assert main([*arguments, "--target-bytes", "18.8%"]) == 0
    said = capsys.readouterr().out
    assert "for codec rot-k2v2: 15.6% of FP16's bytes" in said
    assert "for codec rot-k3v2: 18.8% of FP16's bytes" in said
    with safe_open(out, "pt") as file:
        written, more = json.loads(file.metadata()[METADATA])["layer_bits"]
    assert sorted(written["k"] + written["v"]) == [2, 2, 2, 3]
    assert sum(more["k"] + more["v"]) == 11

    def codec_of(name: str, layers: int = 2) -> list[tuple[int, int]]:
        config = CodecConfig(name=name, settings={"calibration": str(out)})
        codec = make_codec(config, KvShape(layers, 2, 64), load("reference"))
        bits = [(fmt.k_bits, fmt.v_bits) for fmt in codec.formats if isinstance(fmt, LevelFormat)]
        said = dict(codec.fingerprint())
        if len({k for k, _ in bits}) > 1:
            assert said["codec.k_bits"] == ",".join(str(k) for k, _ in bits)
        if len({v for _, v in bits}) == 1:
            assert said["codec.v_bits"] == str(bits[0][1])
        return bits

    assert codec_of("rot-k2v2") == list(zip(written["k"], written["v"], strict=True))
    assert codec_of("rot-k3v2") == list(zip(more["k"], more["v"], strict=True))
    assert codec_of("rot-k3v3") == [(3, 3)] * 2


def test_two_targets_for_one_preset_are_refused() -> None:
    assert set(bases_of((0.145, 0.185, 0.21), 64)) == {0.145, 0.185, 0.21}
    with pytest.raises(ConfigError, match="--target-bytes: 2 targets are for K in 3 bits and V in 2"):
        bases_of((0.145, 0.18, 0.185), 64)


def test_a_wrong_percentage_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("14.5", "0%", "120%", "x%"):
        with pytest.raises(SystemExit):
            main(["--out", str(tmp_path / "out"), "--target-bytes", wrong])
        assert "--target-bytes" in capsys.readouterr().err
