"""The research on KV formats, without its model: quantizers, moments, the open-page rule, bytes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lab.frontier.calib import Moments, spread_positions
from lab.frontier.core import Kv, attend, rotate, rotation
from lab.frontier.formats import components, formats
from lab.frontier.lattice import Lattice, Vectors, d4, e8
from lab.frontier.quant import PAGE, Channel, Quantizer, Tok, hadamard, upper
from lab.frontier.run import main as run
from lab.frontier.store import cached, digest
from lab.frontier.summary import KEPT
from lab.frontier.summary import main as summary
from lab.frontier.texts import SCORED, calibration
from measure.calibrate.windows import DOCUMENT_TOKENS, WINDOW_TOKENS

LAYERS, HEADS, DIM = 30, 3, 64


def definite(generator: torch.Generator, count: int = 1) -> Tensor:
    """Positive definite matrices [count, HEADS, DIM, DIM] with large and small directions."""
    x = torch.randn(count, HEADS, DIM, 4 * DIM, generator=generator) * torch.linspace(0.2, 3, DIM)[:, None]
    return x @ x.mT / x.shape[-1]


@pytest.fixture(scope="module")
def table() -> dict[str, Kv]:
    """Every format of a model like SmolLM2, with random constants."""
    generator = torch.Generator().manual_seed(0)
    qq, kk, vv, oo = (definite(generator, LAYERS) for _ in range(4))
    k_mean, v_mean = torch.randn(2, LAYERS, HEADS, DIM, generator=generator)
    c = Moments(qq, kk, vv, k_mean, v_mean, oo)
    return {kv.name: kv for kv in formats(c, c)}


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_feedback_makes_the_error_that_counts_smaller(bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    metric = definite(generator)
    rows = torch.randn(HEADS, 128, DIM, generator=generator)
    h = hadamard(DIM)
    fed = Tok(bits, h, h, None, upper(h @ metric @ h, 0.1))

    def error(quantize: Quantizer) -> Tensor:
        e = quantize(0, rows) - rows
        return torch.einsum("htd,hde,hte->h", e, metric[0], e)

    plain, none, four = (error(x) for x in (replace(fed, feedback=None), replace(fed, passes=0), fed))
    assert bool((none < plain).all())
    assert bool((four < none).all())
    assert bool((error(replace(fed, sweeps=1)) < four).all())


@pytest.mark.parametrize("lattice", [d4(), e8()], ids=["D4", "E8"])
def test_a_vector_is_coded_as_its_nearest_point(lattice: Lattice) -> None:
    n = lattice.patterns.shape[1]
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * n)
    points = (signs[:, None] * lattice.patterns).flatten(0, 1)
    points = points[points.sum(-1) % 2 == 0]
    points = torch.cat([points + shift for shift in lattice.shifts])
    assert len(points.unique(dim=0)) == 2 ** (2 * n)
    assert lattice.bits == 2
    x = torch.randn(64, n, generator=torch.Generator().manual_seed(0)) * 1.5
    found = lattice.nearest(x)
    assert bool((found[:, None] == points).all(-1).any(-1).all())
    torch.testing.assert_close((x - found).norm(dim=-1), torch.cdist(x, points).amin(-1))


@pytest.mark.parametrize("lattice", [d4(), e8()], ids=["D4", "E8"])
def test_vectors_lose_less_than_levels_and_least_with_feedback(lattice: Lattice) -> None:
    generator = torch.Generator().manual_seed(0)
    metric = definite(generator)
    rows = torch.randn(HEADS, 128, DIM, generator=generator)
    h = hadamard(DIM)
    fed = Vectors(lattice, h, h, None, upper(h @ metric @ h, 0.1))

    def error(quantize: Quantizer) -> Tensor:
        e = quantize(0, rows) - rows
        return torch.einsum("htd,hde,hte->h", e, metric[0], e)

    levels, vectors = (error(x) for x in (Tok(2, h, h), replace(fed, feedback=None)))
    assert bool((vectors < levels).all())
    assert bool((error(fed) < vectors).all())


def test_components_apart_lose_less() -> None:
    generator = torch.Generator().manual_seed(0)
    kk, qq = definite(generator), definite(generator)
    mean = torch.zeros(1, HEADS, DIM)
    rows = torch.randn(HEADS, 128, DIM, generator=generator) @ torch.linalg.cholesky(kk[0]).mT
    errors = [
        (quantize(0, rows) - rows).norm() for quantize in (components(kk, qq, mean, count, 2) for count in (1, 8, 32))
    ]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("reach", [1, 8, 512])
def test_spread_positions_are_those_of_brute_force(reach: int) -> None:
    generator = torch.Generator().manual_seed(reach)
    turns, at = rotation(DIM, 10000.0), torch.tensor([64, 65, 66, 64, 65, 900])
    rows = torch.randn(HEADS, 6, DIM, generator=generator)
    mean, second = spread_positions(rotate(rows, turns[at]), at, turns, reach)
    everywhere = torch.cat([rotate(rows, turns[p : p + 1].expand(6, -1)).double() for p in range(0, reach, 7)], 1)
    torch.testing.assert_close(mean.double(), everywhere.mean(1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(second.double(), everywhere.mT @ everywhere / everywhere.shape[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("sink", "recent"), [(1, 1), (1, 2), (2, 0), (0, 1)])
def test_open_page_sink_and_recent_pages_are_exact(sink: int, recent: int) -> None:
    generator = torch.Generator().manual_seed(0)
    t = 5 * PAGE
    q = torch.randn(2 * HEADS, t, DIM, generator=generator)
    k, v = (torch.randn(HEADS, t, DIM, generator=generator) for _ in range(2))
    kv = Kv("", Channel(3), Tok(2, hadamard(DIM), hadamard(DIM)), sink, recent)
    assert kv.k is not None
    assert kv.v is not None
    page = torch.arange(t) // PAGE
    quantized = (page[None] >= sink) & (page[None] < page[:, None] - recent)
    every = [
        (torch.where(quantized[:, :, None], lossy[:, None], exact[:, None]).repeat_interleave(2, 0))
        for exact, lossy in ((k, kv.k(0, k)), (v, kv.v(0, v)))
    ]
    scores = torch.einsum("htd,htsd->hts", q, every[0]) / math.sqrt(DIM)
    weights = scores.masked_fill(torch.ones(t, t).triu(1).bool(), -torch.inf).softmax(-1)
    expected = torch.einsum("hts,htsd->thd", weights, every[1]).flatten(1)
    torch.testing.assert_close(attend(0, q, k, v, kv), expected, rtol=1e-4, atol=1e-5)


def test_exact_attention_is_torch_s_and_rounding_changes_little(table: dict[str, Kv]) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(HEADS, 4 * PAGE, DIM, generator=generator)
    k, v = (torch.randn(HEADS, 4 * PAGE, DIM, generator=generator) for _ in range(2))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
    torch.testing.assert_close(attend(0, q, k, v, Kv("", None, None)), expected, rtol=1e-4, atol=1e-5)
    plain, rounded = (attend(0, q, k, v, table[name]) for name in ("S-K3V3-r1", "S-K3V3-r1-int8"))
    assert not torch.equal(plain, rounded)
    assert (rounded - plain).norm() < (plain - expected).norm()


def test_bytes_per_token(table: dict[str, Kv]) -> None:
    expected = {
        "exact/rot2": 128 + 18,
        "chan3/rot2": 46,
        "a0.1": 36,
        "S-K2V2-r2": 36,
        "S-K2+V2-r2": 36 + 8 * 4 / 30,
        "S-K3V2-r1": 44,
        "S-K3V2+late-r2": 44 + 8 * 12 / 30,
        "S-K3V3-r2-int8": 52,
        "S-K4V4-r1": 68,
        "d4-K2V2-r2": 36,
        "e8-K2V2-r2": 36,
        "pc8-K2V2-r2": 46,
    }
    for name, size in expected.items():
        assert table[name].token_bytes(LAYERS, DIM) == pytest.approx(size), name


def test_every_kept_result_has_its_format(table: dict[str, Kv], capsys: pytest.CaptureFixture[str]) -> None:
    summary([])
    printed = capsys.readouterr().out.splitlines()[2:]
    assert len(printed) == len(KEPT.read_text().splitlines())
    for line in printed:
        assert line.split("|")[1].strip() in table


def test_texts() -> None:
    def letters(text: str) -> Tensor:
        return torch.tensor([ord(letter) for letter in text])

    assert {name: len(window.ids(letters)) for name, window in SCORED.items()} == {
        "data": 2048,
        "news": 2048,
        "long": 8192,
    }
    windows = calibration(letters, 3)
    assert [len(ids) for ids in windows] == [WINDOW_TOKENS] * 3
    assert not torch.equal(windows[0][:DOCUMENT_TOKENS], windows[0][DOCUMENT_TOKENS:])


def test_cache_is_made_once(tmp_path: Path) -> None:
    def fail() -> dict[str, Tensor]:
        raise AssertionError

    with torch.inference_mode():
        made = {"x": torch.arange(6.0).view(2, 3).mT}
    file = tmp_path / "folder" / f"{digest([torch.arange(3)])}.safetensors"
    torch.testing.assert_close(cached(file, lambda: made), made)
    torch.testing.assert_close(cached(file, fail), made)
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert digest([torch.arange(3)]) != digest([torch.arange(2), torch.arange(2, 3)])


def test_run_names_its_windows(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["K2V2-r2", "--windows", "paper"])
    assert "paper" in capsys.readouterr().err
