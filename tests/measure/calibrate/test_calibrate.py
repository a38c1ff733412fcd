"""`hackkv calibrate` from text to a file that a codec reads. The fitted constants make codes lose less."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copyfile

import numpy as np
import pytest
import torch
from hack_kernels import load
from hack_kernels.level_format import Feedback
from hack_kernels.reference.levels import dequantize, quantize_rows
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from hackkv.codecs import CALIBRATED, make_codec
from hackkv.codecs.artifact import METADATA, VERSION, read_artifact
from hackkv.codecs.hadamard import hadamard
from hackkv.config import CodecConfig, ModelConfig
from hackkv.errors import CalibrationMismatch, ConfigError, NonFiniteError
from hackkv.model import worker
from hackkv.model.exact import ExactKv, advance
from hackkv.model.identity import model_hash, source_hash
from hackkv.model.llama import rotation_table
from hackkv.model.tiny import Tiny, write_tiny
from hackkv.model.worker import load_worker, plan_worker
from hackkv.tokenizer import Tokenizer
from measure.accuracy.text import held_out, is_held_out, not_held_out
from measure.calibrate.__main__ import main, write_atomically
from measure.calibrate.moments import LEFT_OUT, POSITION_STEP, Moments, Sums, gather, rotated_back
from measure.calibrate.solve import feedback_by, solve
from measure.calibrate.windows import WINDOW_TOKENS, windows_of
from tests.pair import poisoned, tiny_worker

TOKENS = 700


@pytest.fixture(scope="module", name="checkpoint")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("calibrate"), Tiny(head_dim=64, max_context=512))


@pytest.fixture(scope="module", name="calibration")
def make_calibration(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "tiny.safetensors"
    assert main([str(checkpoint), "--tokens", str(TOKENS), "--threads", "1", "--out", str(out)]) == 0
    return out


def test_the_file_serves_and_says_what_it_is_of(checkpoint: Path, calibration: Path) -> None:
    config = CodecConfig(name="rot-k3v2", settings={"calibration": str(calibration)})
    codec = make_codec(config, load_worker(ModelConfig(path=str(checkpoint)), config).model.spec.kv_shape, load("auto"))
    assert dict(codec.fingerprint())["codec.calibration"] != "none"
    with safe_open(calibration, "pt") as file:
        about = json.loads(file.metadata()[METADATA])
        names = {f"layers.{layer}.{name}" for layer in range(2) for name in ("basis", "mean", "gains", "weights")}
        assert set(file.keys()) == names
    assert about["version"] == VERSION
    assert about["model_hash"] == model_hash(checkpoint)
    assert (about["tokens"], about["dtype"]) == (TOKENS, "float32")


def test_a_file_of_another_model_of_the_same_shape_is_refused(calibration: Path, tmp_path: Path) -> None:
    other = write_tiny(tmp_path / "other", Tiny(head_dim=64, max_context=512, seed=7))
    config = CodecConfig(name="rot-k3v2", settings={"calibration": str(calibration)})
    with pytest.raises(
        CalibrationMismatch, match=rf"{calibration.name}: made for \w+ \([0-9a-f]{{12}}\), not for other"
    ):
        plan_worker(ModelConfig(path=str(other)), config)


def test_a_file_that_ships_for_a_model_is_taken_unless_the_settings_say_otherwise(
    checkpoint: Path, calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copyfile(calibration, tmp_path / f"{source_hash(checkpoint)}.safetensors")
    monkeypatch.setattr(worker, "CALIBRATIONS", tmp_path)
    other = write_tiny(tmp_path / "other", Tiny(head_dim=64, max_context=512, seed=7))
    own = read_artifact(calibration).digest

    def digest(folder: Path, name: str, **settings: int | float | str | bool) -> str | None:
        planned = plan_worker(ModelConfig(path=str(folder)), CodecConfig(name=name, settings=settings))
        return dict(planned.fingerprint().fields).get("codec.calibration")

    for name in CALIBRATED:
        assert digest(checkpoint, name) == own
        assert digest(checkpoint, name, calibration="none") == "none"
        assert digest(other, name) == "none"
    assert digest(checkpoint, "hack") is None


def test_a_file_that_does_not_say_whose_it_is_is_refused(checkpoint: Path, calibration: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare.safetensors"
    save_file(load_file(calibration), bare, {METADATA: json.dumps({"version": VERSION})})
    config = CodecConfig(name="rot-k3v2", settings={"calibration": str(bare)})
    with pytest.raises(CalibrationMismatch, match=r"bare\.safetensors: does not say which model"):
        plan_worker(ModelConfig(path=str(checkpoint)), config)
    save_file(load_file(calibration), bare, {METADATA: "[]"})
    with pytest.raises(ConfigError, match=r"bare\.safetensors: metadata 'hackkv': no JSON object"):
        plan_worker(ModelConfig(path=str(checkpoint)), config)


def test_the_same_text_gives_the_same_bytes(checkpoint: Path, calibration: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.safetensors"
    assert main([str(checkpoint), "--tokens", str(TOKENS), "--threads", "1", "--out", str(again)]) == 0
    assert again.read_bytes() == calibration.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == [again.name]


def test_other_text_gives_other_tensors(checkpoint: Path, calibration: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out.safetensors"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 100, encoding="utf-8")
    assert main([str(checkpoint), "--text", str(text), "--tokens", "400", "--out", str(out)]) == 0
    assert not torch.equal(load_file(out)["layers.0.mean"], load_file(calibration)["layers.0.mean"])


def test_what_cannot_be_is_named_and_nothing_is_written(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short, binary, out = tmp_path / "short.txt", tmp_path / "binary", tmp_path / "out"
    short.write_text("word " * 20, encoding="utf-8")
    binary.write_bytes(b"ab\xff")
    for arguments, said in (
        ([str(tmp_path / "none")], "none: no such folder"),
        ([str(checkpoint), "--text", str(tmp_path / "none")], "none: No such file"),
        ([str(checkpoint), "--text", str(binary)], "binary: not UTF-8: invalid start byte at byte 2"),
        ([str(checkpoint), "--text", str(short)], "leave 0 rows to count; at least 64 are needed"),
        ([str(checkpoint), "--dtype", "int8"], "model.dtype: 'int8'"),
        ([str(checkpoint), "--out", str(tmp_path)], "is a folder"),
        ([str(checkpoint), "--out", str(tmp_path / "a" / "b")], "a: no such folder"),
    ):
        assert main(["--out", str(out), *arguments]) == 2
        assert said in capsys.readouterr().err
    assert not out.exists()


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_atomically(out, b"first")
    write_atomically(out, b"second")
    assert out.read_bytes() == b"second"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_default_text_is_none_that_is_scored(checkpoint: Path) -> None:
    documents = [document for document, _ in zip(not_held_out(), range(40), strict=False)]
    assert not any(is_held_out(document.name) for document in documents)
    scored = {document.text for document in held_out(checkpoint).documents}
    assert scored.isdisjoint(document.text for document in documents)


@pytest.mark.parametrize("longest", [300, 1 << 20])
def test_windows_hold_the_text_once(checkpoint: Path, tmp_path: Path, longest: int) -> None:
    text, tokenizer = tmp_path / "text.txt", Tokenizer(checkpoint)
    text.write_text("".join(f"{i} is a number. " for i in range(2000)), encoding="utf-8")
    stream = tokenizer.encode(text.read_text(encoding="utf-8"), add_special_tokens=False)
    found, prefix = windows_of(tokenizer, text, 5000, longest), tokenizer.encode("")
    assert all(window[: len(prefix)].tolist() == prefix for window in found.windows)
    assert max(map(len, found.windows)) == min(longest, WINDOW_TOKENS)
    assert np.concatenate([window[len(prefix) :] for window in found.windows]).tolist() == stream[:5000]
    assert windows_of(tokenizer, text, 4999, longest).digest != found.digest


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """Rows [.., D] by the rotary embedding `turns` [.., D]."""
    (low, high), (cos, sin) = x.chunk(2, -1), turns.double().chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def test_moments_are_those_of_the_rows_that_count_at_every_position() -> None:
    """The comparison uses rows of the model's own cache, over chunks and windows of different lengths."""
    model = tiny_worker("fp16").model
    turns = rotation_table(model.spec.rope, model.spec.max_context, model.device)
    generator = np.random.default_rng(1)
    windows = tuple(generator.integers(3, 500, count) for count in (400, LEFT_OUT, 90))
    keys = []
    for window in windows:
        cache = ExactKv()
        with torch.inference_mode():
            advance(model, [(cache, window.tolist())])
        keys.append(rotated_back(cache.keys[1][LEFT_OUT:].double(), turns[LEFT_OUT : len(window)]))
    k, seen = torch.cat(keys).transpose(0, 1), list[int]()
    everywhere = turned(k[:, :, None], turns[::POSITION_STEP]).flatten(1, 2)
    (_, found) = gather(model, windows, seen.append)
    assert sum(seen) == sum(map(len, windows))
    centred = everywhere - everywhere.mean(1, keepdim=True)
    assert torch.allclose(found.mean, everywhere.mean(1), atol=1e-5)
    assert torch.allclose(found.covariance, centred.mT @ centred / everywhere.shape[1], atol=1e-5)


def test_queries_count_for_the_kv_head_that_they_ask() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 50, 6, 64, generator=generator, dtype=torch.float64)
    angles = torch.rand(50, 32, generator=generator)
    turns = 1.5 * torch.cat((angles.cos(), angles.sin()), -1)  # an embedding may scale, too
    sums = Sums(2, 64, torch.device("cpu"))
    for part in (slice(0, 1), slice(1, 30), slice(30, 50)):
        sums.add(turned(q[part], turns[part, None]), turned(k[part, :2], turns[part, None]), k[part, 2:4], turns[part])
    for head in range(2):
        asked = turned(q[:, 3 * head : 3 * head + 3].flatten(0, 1), turns[:1])
        assert torch.allclose(sums.moments(turns[:1]).queries[head], asked.T @ asked / 150)
        assert torch.allclose(sums.moments(turns[:1]).values[head], k[:, 2 + head].T @ k[:, 2 + head] / 50)


def test_keys_that_are_not_finite_are_named() -> None:
    with pytest.raises(NonFiniteError, match="layer 0: a key or query"):
        gather(poisoned(tiny_worker("fp16"), 501).model, (np.full(100, 501),), lambda count: None)


def loud_rows(seed: int, rows: int, dim: int) -> tuple[Tensor, Tensor]:
    """Keys with a mean and a few large directions, and queries with a few other large directions."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    loud, cared = torch.exp(normal(dim)), torch.exp(normal(dim))
    return normal(rows, dim) * loud + 5 * normal(dim), normal(rows, dim) * cared @ torch.linalg.qr(normal(dim, dim)).Q


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("dim", [64, 96])
def test_what_is_solved_lowers_the_error_of_scores(bits: int, dim: int) -> None:
    """On unseen rows the error is far below that of a plain rotation, and each part of the solution helps."""
    k, q = loud_rows(dim, 4000, dim)
    seen, k, q = (k[:3000], q[:3000]), k[3000:], q[3000:]
    mean = seen[0].mean(0)
    centred = seen[0] - mean
    queries = (seen[1].T @ seen[1] / 3000)[None]
    moments = Moments(mean[None], (centred.T @ centred / 3000)[None], queries, torch.zeros_like(queries))
    found = solve(moments)
    basis, centre = found["basis"][0].double(), found["mean"][0].double()

    def error(basis: Tensor, centre: Tensor, feedback: Feedback | None) -> float:
        turned = ((k - centre) @ basis).half()[None]
        back = dequantize(bits, *quantize_rows(turned, bits, feedback), torch.float64)[0] @ torch.linalg.inv(basis)
        return float((q[:200] @ (k - centre - back).T).norm())

    rotated = error(hadamard(dim), torch.zeros(dim), None)
    centred_only = error(hadamard(dim), mean, None)
    whitened = error(basis, centre, None)
    fed = error(basis, centre, Feedback(found["gains"], found["weights"]))
    assert fed < whitened < centred_only < rotated


def test_moments_of_nothing_are_solved_too() -> None:
    """Such a head has constant keys, or no queries."""
    zero = torch.zeros(2, 64, 64, dtype=torch.float64)
    found = solve(Moments(zero[:, 0], zero, zero, zero))
    assert all(bool(tensor.isfinite().all()) for tensor in found.values())
    assert float(torch.linalg.cond(found["basis"]).max()) < 1.01
    assert not bool(found["gains"].any())
    assert bool((found["weights"] == 1).all())


def test_gains_that_no_kernel_takes_are_made_smaller() -> None:
    """Nearly equal queries give such gains."""
    asked = torch.full((1, 64, 64), 50.0, dtype=torch.float64)
    asked[0, 0, :] = asked[0, :, 0] = 3000.0
    asked[0, 0, 0] = 180000.0
    feedback = feedback_by(asked + 0.01 * torch.eye(64, dtype=torch.float64))
    feedback.check(64)
