"""`hackkv calibrate kvquant` from text to a file that a codec reads, and the constants that it finds."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hack_kernels import load
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from hackkv.codecs import make_codec
from hackkv.codecs.artifact import KVQUANT, METADATA, ZACK
from hackkv.config import CodecConfig, ModelConfig
from hackkv.errors import ConfigError
from hackkv.model.generate import generate
from hackkv.model.tiny import Tiny, write_tiny
from hackkv.model.worker import load_worker
from hackkv.types import KvShape
from measure.accuracy import variants
from measure.calibrate.__main__ import main
from measure.calibrate.levels import BINS, LEFT_ASIDE, SENSITIVITY, Seen, Sensitivity, histogram, means
from tests.pair import greedy, paired, prompt

TOKENS = 400


@pytest.fixture(scope="module", name="checkpoint")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("levels"), Tiny(head_dim=64, max_context=512))


@pytest.fixture(scope="module", name="calibration")
def make_calibration(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "tiny.safetensors"
    assert main(["kvquant", str(checkpoint), "--tokens", str(TOKENS), "--out", str(out)]) == 0
    return out


def test_the_file_serves_all_widths_and_says_what_it_is_of(checkpoint: Path, calibration: Path) -> None:
    with safe_open(calibration, "pt") as file:
        about = json.loads(file.metadata()[METADATA])
    assert (about["codec"], about["tokens"]) == ("kvquant", TOKENS)
    for bits in (2, 3, 4):
        settings: dict[str, int | float | str | bool] = {
            "k_bits": bits,
            "v_bits": bits,
            "calibration": str(calibration),
            "page_tokens": 32,
        }
        worker = load_worker(ModelConfig(path=str(checkpoint)), CodecConfig(name="kvquant-4", settings=settings))
        assert dict(worker.codec.fingerprint())["codec.calibration"] != "none"
        assert len(generate(worker, greedy("r", prompt(2, 70), 40))) == 40


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [("kvquant-2", {}), ("snapkv", {"of": "kvquant-4", "budget": 64}), ("mpcache", {"of": "kvquant-2", "budget": 128})],
)
async def test_the_cluster_says_what_one_process_says(
    checkpoint: Path, calibration: Path, name: str, settings: dict[str, Any]
) -> None:
    """Calibrated pages travel and replay. After an eviction, rows rotate by other positions. Selections find pages by
    number."""
    settings = {**settings, "calibration": str(calibration), "page_tokens": 32}
    worker = load_worker(ModelConfig(path=str(checkpoint), dtype="float32"), CodecConfig(name=name, settings=settings))
    requests = [greedy(f"r{i}", prompt(i, 70 + 60 * i), 30) for i in range(3)]
    wanted = [generate(worker, request) for request in requests]
    async with paired(worker, chunk_pages=1) as nodes:
        served = await asyncio.gather(*(nodes.serve(request) for request in requests))
        assert [each.tokens for each in served] == wanted
        emitted = tuple(token.token_id for token in wanted[1][:9])
        rest = await nodes.serve(requests[1], "again", emitted=emitted)
        assert rest.tokens == wanted[1][9:]
        await nodes.assert_idle()


def test_files_of_other_codecs_are_refused_by_name(checkpoint: Path, calibration: Path, tmp_path: Path) -> None:
    other = tmp_path / "rot.safetensors"
    assert main([str(checkpoint), "--tokens", str(TOKENS), "--out", str(other)]) == 0
    for name, file, said in (("rot-k4v4", calibration, "kvquant, not by"), ("kvquant-2", other, "rot, not by")):
        with pytest.raises(ConfigError, match=f"{file.name}: made by hackkv calibrate {said} hackkv calibrate"):
            make_codec(CodecConfig(name=name, settings={"calibration": str(file)}), KvShape(2, 2, 64), load("auto"))


def test_rows_of_kvquant_are_added_for_its_file(calibration: Path) -> None:
    added = variants.choose(["kvquant-2-calibrated", "kvquant-3-calibrated"], calibration)
    assert [row.codec.settings["calibration"] for row in added[1:]] == [str(calibration)] * 2
    with pytest.raises(ConfigError, match="rot-k3v2-calibrated"):
        variants.choose(["rot-k3v2-calibrated"], calibration)


@pytest.mark.slow
def test_the_same_text_gives_the_same_bytes(checkpoint: Path, calibration: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.safetensors"
    assert main(["kvquant", str(checkpoint), "--tokens", str(TOKENS), "--out", str(again)]) == 0
    assert again.read_bytes() == calibration.read_bytes()


@pytest.mark.slow
def test_levels_go_by_the_gradient_unless_told_otherwise(
    checkpoint: Path, calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file names the sensitivity. Ranges do not depend on it."""
    args = ["kvquant", str(checkpoint), "--tokens", str(TOKENS), "--out", str(tmp_path / "out.safetensors")]
    found = {Path(calibration): SENSITIVITY}
    for sensitivity in Sensitivity:
        out = tmp_path / f"{sensitivity}.safetensors"
        assert main([*args[:-1], str(out), "--sensitivity", sensitivity]) == 0
        found[out] = sensitivity
    for file, sensitivity in found.items():
        with safe_open(file, "pt") as opened:
            assert json.loads(opened.metadata()[METADATA])["sensitivity"] == sensitivity
    fisher, alike = (load_file(tmp_path / f"{sensitivity}.safetensors") for sensitivity in Sensitivity)
    assert not torch.equal(fisher["layers.0.v_poles_2"], alike["layers.0.v_poles_2"])
    assert torch.allclose(fisher["layers.0.k_range"], alike["layers.0.k_range"], atol=2e-3)
    with pytest.raises(SystemExit, match="2"):
        main([*args, "--sensitivity", "hessian"])
    assert "--sensitivity: invalid Sensitivity value: 'hessian'" in capsys.readouterr().err


@pytest.mark.parametrize("family", [KVQUANT, ZACK])
def test_bits_by_layer_are_for_other_codecs(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    out = tmp_path / "out.safetensors"
    with pytest.raises(SystemExit, match="2"):
        main([family, str(checkpoint), "--target-bytes", "18%", "--out", str(out)])
    assert "unrecognized arguments: --target-bytes 18%" in capsys.readouterr().err
    assert not out.exists()


def test_ranges_leave_out_half_a_percent_at_each_end() -> None:
    rows, heads, dim = 2001, 2, 4
    k = torch.stack([torch.randperm(rows, generator=torch.Generator().manual_seed(i)) for i in range(heads * dim)], 1)
    k = (k.float() - 1000).view(rows, heads, dim)
    seen, still = Seen(torch.device("cpu")), torch.zeros(rows, dim // 2)
    for part in zip(k.split(700), k.split(700), (still + 1).split(700), still.split(700), strict=True):
        seen.add(*part)
    low, high = seen.tables()["k_range"]
    aside = int(LEFT_ASIDE * (rows - 1))
    assert torch.equal(low, torch.full((heads, dim), aside - 1000.0))
    assert torch.equal(high, -low)


def test_levels_are_means_of_what_is_nearest() -> None:
    def of(x: Tensor, groups: int) -> Tensor:
        return means(histogram(x, torch.zeros(()), torch.ones(())), groups)

    clusters = torch.tensor([-0.75, -0.5, 0.25, 0.5])
    found = of(clusters.repeat_interleave(torch.tensor([5, 1, 3, 7])), 4)
    assert float((found - clusters).abs().max()) <= 2 / BINS
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(1)).clamp(-4, 4) / 4
    for groups in (4, 8, 16):
        poles = of(x, groups).float()
        nearest = (x[:, None] - poles).abs().argmin(-1)
        mean = torch.zeros(groups).index_add(0, nearest, x) / torch.bincount(nearest, minlength=groups)
        assert float((mean - poles).abs().max()) < 0.01
    assert float(of(torch.tensor([2.0, float("nan")]), 4).abs().max()) <= 1


@pytest.mark.slow
@given(seed=st.integers(0, 2**31), groups=st.sampled_from([4, 8, 16]))
def test_a_weight_counts_as_often_as_it_says(seed: int, groups: int) -> None:
    """An integer weight acts like copies, within any range. A common factor of all weights changes nothing."""
    draw = torch.Generator().manual_seed(seed)
    x, weights = torch.rand(200, generator=draw) * 4 - 2, torch.randint(0, 5, (200,), generator=draw)
    middle, reach = torch.tensor(0.25), torch.tensor(1.5)
    copies = histogram(x.repeat_interleave(weights), middle, reach)
    assert torch.equal(histogram(x, middle, reach, weights.float()), copies)
    assert torch.equal(means(histogram(x, middle, reach, 8 * weights.float()), groups), means(copies, groups))


def test_rows_weigh_by_the_square_of_what_the_loss_feels() -> None:
    """Keys are rotated back, and their gradients with them. An unrotated key weighs by its own gradient."""
    k = torch.linspace(-1, 1, 400)[:, None, None].expand(400, 1, 4).contiguous()
    still = torch.zeros(400, 2)
    felt = torch.where(k.abs() < 0.5, 10.0, 0.01)

    def poles(gradients: tuple[Tensor, Tensor] | None) -> Tensor:
        seen = Seen(torch.device("cpu"))
        seen.add(k, k, still + 1, still, gradients)
        return seen.tables()["k_poles_4"]

    assert int((poles(None).abs() < 0.5).sum()) == 8
    assert int((poles((felt, felt)).abs() < 0.51).sum()) == 16


def test_ranges_are_of_keys_before_the_rotary_embedding(checkpoint: Path, calibration: Path) -> None:
    """The file's frequencies are the model's."""
    worker = load_worker(ModelConfig(path=str(checkpoint)), CodecConfig(name="fp16"))
    found = load_file(calibration)
    assert found["frequencies"].tolist() == pytest.approx(worker.model.spec.rope.inv_freq)
