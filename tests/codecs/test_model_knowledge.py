"""Codecs may depend on the model: by formats for each layer, by prepared weights, by a calibration file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hack_kernels import load
from safetensors.torch import save_file

from hackkv.batch import Span
from hackkv.codec import planes_bytes
from hackkv.codecs import CODECS, Preset, make_codec
from hackkv.codecs.artifact import read_artifact
from hackkv.config import CodecConfig, ModelConfig
from hackkv.errors import ConfigError
from hackkv.model.generate import generate
from hackkv.model.runner import ModelRunner
from hackkv.model.tiny import Tiny, write_tiny
from hackkv.model.worker import Worker, load_worker
from hackkv.types import KvShape
from tests.pair import PI, greedy, prompt, tiny_worker
from tests.toys import RotatedCodec, hadamard, make_rotated

LAYERS, HEAD_DIM = 2, 64


@pytest.fixture
def rotations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of Hadamard rotations, different in each layer. Meanwhile `toy-rotated` is a codec of the table."""
    monkeypatch.setitem(CODECS, "toy-rotated", Preset(make_rotated))
    signs = torch.randint(0, 2, (LAYERS, HEAD_DIM), generator=torch.Generator().manual_seed(1)) * 2.0 - 1
    path = tmp_path / "rotations.safetensors"
    save_file({f"layers.{i}.rotation": signs[i, :, None] * hadamard(HEAD_DIM) for i in range(LAYERS)}, path)
    return path


def rotated(folder: Path, rotations: Path, dtype: str) -> Worker:
    settings: dict[str, Any] = {"page_tokens": PI, "rotations": str(rotations)}
    return load_worker(ModelConfig(path=str(folder), dtype=dtype), CodecConfig(name="toy-rotated", settings=settings))


def plain(folder: Path, dtype: str) -> Worker:
    codec = CodecConfig(name="fp16", settings={"page_tokens": PI})
    return load_worker(ModelConfig(path=str(folder), dtype=dtype), codec)


def test_formats_differ_by_layer_and_sizes_are_sums_over_them() -> None:
    worker = tiny_worker("toy-layers", layers=3)
    codec, runner = worker.codec, ModelRunner(worker.model, worker.codec, 4, 1)
    four, two, also_two = (sum(plane.nbytes for plane in pool.planes.values()) for pool in runner.memory.pools)
    assert four > two == also_two
    assert four + 2 * two == 4 * worker.footprint.page_bytes
    heads = worker.layout.num_kv_heads
    assert worker.footprint.wire_page_bytes == heads * sum(map(planes_bytes, codec.wire_planes))
    assert worker.pages_in(10 * worker.footprint.page_bytes) == 10


def test_whoever_serves_is_named_once() -> None:
    for backend in ("cpu", "reference"):
        codec = make_codec(CodecConfig(name="toy-layers"), KvShape(3, 2, HEAD_DIM), load(backend))
        assert codec.served_by == backend


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-3), ("bfloat16", 6e-2)])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_a_rotation_that_is_folded_into_weights_changes_pages_and_not_the_model(
    tmp_path: Path, rotations: Path, dtype: str, tolerance: float, architecture: str
) -> None:
    """Models have or lack a bias of V and packed weights (BF16). Tolerances are the rounding of FP16 and BF16."""
    folder = write_tiny(tmp_path / "model", Tiny(architecture, layers=LAYERS, head_dim=HEAD_DIM, max_context=256))
    workers = plain(folder, dtype), rotated(folder, rotations, dtype)
    ids, logits, values = prompt(1, PI), [], []
    for worker in workers:
        runner = ModelRunner(worker.model, worker.codec, 1, 1)
        with torch.inference_mode():
            logits.append(worker.model.logits(runner.forward([Span(0, 0, PI, (0,))], ids)).float())
        values.append(runner.memory.pools[0].planes["v"][0].float())
    codec = workers[1].codec
    assert isinstance(codec, RotatedCodec)
    expected = values[0] @ codec.rotations[0]
    assert float((values[1] - expected).norm() / expected.norm()) < tolerance
    assert float((values[1] - values[0]).norm() / values[0].norm()) > 0.5
    assert float((logits[1] - logits[0]).norm() / logits[0].norm()) < tolerance
    if dtype == "float32":
        request = greedy("r", prompt(2, PI + 7), 20)
        assert generate(workers[0], request) == generate(workers[1], request)


def test_the_fingerprint_has_the_digest_and_not_the_path(tmp_path: Path, rotations: Path) -> None:
    folder = write_tiny(tmp_path / "model", Tiny(layers=LAYERS, head_dim=HEAD_DIM, max_context=256))
    elsewhere = tmp_path / "elsewhere.safetensors"
    elsewhere.write_bytes(rotations.read_bytes())
    first, second = (rotated(folder, path, "float32").fingerprint for path in (rotations, elsewhere))
    assert first.mismatch(second) is None
    assert str(tmp_path) not in repr(first)
    save_file({f"layers.{i}.rotation": torch.eye(HEAD_DIM) for i in range(LAYERS)}, elsewhere)
    third = rotated(folder, elsewhere, "float32").fingerprint
    assert "codec.rotations" in str(first.mismatch(third))


def test_a_calibration_file_that_is_wrong_is_named_with_its_tensor(tmp_path: Path, rotations: Path) -> None:
    def refusal(path: Path) -> str:
        config = CodecConfig(name="toy-rotated", settings={"rotations": str(path)})
        with pytest.raises(ConfigError) as caught:
            make_codec(config, KvShape(LAYERS, 2, HEAD_DIM), load("reference"))
        return str(caught.value)

    good = {f"layers.{i}.rotation": torch.eye(HEAD_DIM) for i in range(LAYERS)}
    name, bad = "layers.1.rotation", tmp_path / "bad.safetensors"
    for tensor, said in (
        (torch.eye(32), f"{name}: shape [32, 32], expected [64, 64]"),
        (torch.eye(HEAD_DIM).to(torch.int8), f"{name}: dtype torch.int8"),
        (torch.full((HEAD_DIM, HEAD_DIM), torch.nan), f"{name}: a value is not finite"),
    ):
        save_file({**good, name: tensor}, bad)
        assert f"codec.settings: {bad}: {said}" in refusal(bad)
    save_file({"layers.0.rotation": good["layers.0.rotation"]}, bad)
    assert f"{bad}: {name}: missing tensor" in refusal(bad)
    bad.write_bytes(rotations.read_bytes()[:-1])
    assert f"{bad}: truncated or not a safetensors file" in refusal(bad)
    assert f"{tmp_path / 'none'}: No such file" in refusal(tmp_path / "none")
    assert f"{tmp_path}: Is a directory" in refusal(tmp_path)


def test_no_file_is_read_beyond_the_cap(rotations: Path) -> None:
    size = rotations.stat().st_size
    assert read_artifact(rotations, size).digest
    with pytest.raises(ValueError, match=f"larger than {size - 1} bytes"):
        read_artifact(rotations, size - 1)
