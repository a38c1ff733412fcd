"""`hackkv calibrate zack`: the rotations are those of a decomposition, and a codec reads the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hackkv.codecs.artifact import read_artifact
from hackkv.codecs.zack import SIDES, Projections
from hackkv.config import CodecConfig, ModelConfig
from hackkv.errors import CalibrationMismatch, ConfigError
from hackkv.model.tiny import Tiny, write_tiny
from hackkv.model.worker import plan_worker
from measure.accuracy.variants import SHARES, choose
from measure.calibrate.__main__ import main
from measure.calibrate.moments import Moments
from measure.calibrate.projections import project

ROWS, HIDDEN, DIM = 300, 96, 32
FP16 = CodecConfig(name="fp16")


@pytest.mark.parametrize("group", [1, 4, 7])
def test_rotations_are_those_of_the_stacked_rows(group: int) -> None:
    """Singular values, and rows without their last channels, agree with torch's decomposition of the rows themselves.
    Rows are near the span of half of the directions."""
    heads, generator = 2, torch.Generator().manual_seed(group)

    def near_half(*shape: int) -> torch.Tensor:
        x = torch.randn(*shape, DIM, generator=generator, dtype=torch.float64)
        spread = torch.cat((torch.ones(DIM // 2), torch.full((DIM // 2,), 0.02))).double()
        turn: torch.Tensor = torch.linalg.qr(torch.randn(DIM, DIM, generator=generator, dtype=torch.float64)).Q
        return x * spread @ turn

    q, k, v = near_half(heads, ROWS * group), near_half(heads, ROWS), near_half(heads, ROWS)
    out = torch.randn(HIDDEN, heads * group * DIM, generator=generator, dtype=torch.float64)
    mean = k.mean(1)
    covariance = (k - mean[:, None]).mT @ (k - mean[:, None]) / ROWS
    moments = Moments(mean, covariance, q.mT @ q / (ROWS * group), v.mT @ v / ROWS)
    found = project(moments, ROWS, out)
    for head in range(heads):
        slices = [out[:, (head * group + i) * DIM : (head * group + i + 1) * DIM] for i in range(group)]
        for side, stacked in zip(SIDES, (torch.cat((q[head], k[head])), torch.cat((v[head], *slices))), strict=True):
            values = torch.linalg.svdvals(stacked)
            assert torch.allclose(found[f"{side}_values"][head].double(), values, rtol=1e-5)
            rotation = found[side][head].double()
            assert torch.allclose(rotation.mT @ rotation, torch.eye(DIM, dtype=torch.float64), atol=1e-5)
            dropped = (stacked @ rotation)[:, DIM // 2 :].norm()
            assert torch.allclose(dropped, values[DIM // 2 :].norm(), rtol=1e-4)


def test_directions_that_no_row_has_count_for_nothing() -> None:
    zero = torch.zeros(1, DIM, DIM, dtype=torch.float64)
    one = zero.clone()
    one[0, 3, 3] = 4.0
    found = project(Moments(zero[:, 0], zero, one, one), 9, torch.zeros(HIDDEN, DIM))
    for side, value in zip(SIDES, (6.0, 6.0), strict=True):
        assert found[f"{side}_values"].tolist() == [[value, *[0.0] * (DIM - 1)]]
        assert float(found[side][0, 3, 0].abs()) == 1


@pytest.fixture(scope="module", name="checkpoint")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("projections"), Tiny(head_dim=64, max_context=512))


@pytest.fixture(scope="module", name="projections")
def make_projections(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out")
    (folder / "text.txt").write_text("".join(f"{i} is a number, and {i * i} another. " for i in range(99)))
    out = folder / "zack.safetensors"
    command = ["zack", str(checkpoint), "--text", str(folder / "text.txt"), "--tokens", "500", "--threads", "1"]
    assert main([*command, "--out", str(out)]) == 0
    again = folder / "again.safetensors"
    assert main([*command, "--out", str(again)]) == 0
    assert again.read_bytes() == out.read_bytes()
    return out


def test_what_is_left_at_some_rates_is_said(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.safetensors"
    assert main(["zack", str(checkpoint), "--tokens", "300", "--threads", "1", "--out", str(out)]) == 0
    found = Projections.of(read_artifact(out), plan_worker(ModelConfig(path=str(checkpoint)), FP16).spec.kv_shape)
    k, v = found.means(0.2)
    assert 20 < k < 64
    assert f"removal 20%: heads keep {k:.1f} of 64 channels of K and {v:.1f} of V\n" in capsys.readouterr().out


def test_the_file_serves_the_model_that_it_was_made_for(checkpoint: Path, projections: Path, tmp_path: Path) -> None:
    """The file's digest is in the fingerprint. Another model of the same shape and other kinds of codecs refuse it."""
    config = CodecConfig(name="zack", settings={"calibration": str(projections), "share": "75%"})
    planned = plan_worker(ModelConfig(path=str(checkpoint)), config)
    artifact = read_artifact(projections)
    said = dict(planned.fingerprint().fields)
    assert said["codec.calibration"] == artifact.digest
    assert [fmt.head_dim for fmt in planned.codec.formats] == [int(width) for width in said["codec.widths"].split(",")]
    assert 0.5 <= planned.share <= 0.75
    Projections.of(artifact, planned.spec.kv_shape)
    other = write_tiny(tmp_path / "other", Tiny(head_dim=64, max_context=512, seed=7))
    with pytest.raises(CalibrationMismatch, match=r"zack\.safetensors: made for \w+ \([0-9a-f]{12}\), not for other"):
        plan_worker(ModelConfig(path=str(other)), config)
    wrong = CodecConfig(name="rot-k4v4", settings={"calibration": str(projections)})
    with pytest.raises(
        ConfigError, match=r"zack\.safetensors: made by hackkv calibrate zack, not by hackkv calibrate rot"
    ):
        plan_worker(ModelConfig(path=str(checkpoint)), wrong)


def test_rows_of_the_accuracy_report_project_at_several_sizes(checkpoint: Path, projections: Path) -> None:
    """Each row can be planned, and is no larger than its name says. Without a file there is no such row."""
    rows = [row for row in choose([], projections, ablations=False) if row.codec.name == "zack"]
    assert [row.name for row in rows] == [f"zack-{of}-{share.removesuffix('%')}" for of, share in SHARES]
    for row, (_, share) in zip(rows, SHARES, strict=True):
        planned = plan_worker(ModelConfig(path=str(checkpoint)), row.codec)
        assert planned.share <= float(share.removesuffix("%")) / 100
    assert all(row.codec.name != "zack" for row in choose([]))


def test_other_text_finds_nearly_the_same_channels(checkpoint: Path, projections: Path, tmp_path: Path) -> None:
    """Lemma 3: the subspaces of the three quarters of channels that stay agree far more than random ones would."""
    out = tmp_path / "more.safetensors"
    assert main(["zack", str(checkpoint), "--tokens", "900", "--threads", "1", "--out", str(out)]) == 0
    first, second = (load_file(path) for path in (projections, out))
    for layer in range(2):
        a, b = (each[f"layers.{layer}.qk"][..., :48].double() for each in (first, second))
        common = torch.linalg.svdvals(a.mT @ b).square().mean(-1)
        assert bool((common > 0.82).all()), "0.75 by chance"
