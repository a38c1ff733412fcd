"""Packed weights in a whole model: the setting packs the right matrices and changes little, and a cluster agrees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from hack_kernels.block_weight import BlockWeight, as_numbers
from torch import Tensor

from hackkv.config import CodecConfig, ModelConfig
from hackkv.errors import CheckpointError, ConfigError
from hackkv.model import Llama, find_model, load_model
from hackkv.model.config import FAMILIES
from hackkv.model.exact import ExactKv, advance
from hackkv.model.generate import generate
from hackkv.model.packing import packing_of
from hackkv.model.tiny import Tiny
from hackkv.model.worker import Worker, load_worker
from tests.model.gguf.writing import KINDS, write_gguf
from tests.pair import PI, greedy, paired, prompt

MakeTiny = Callable[[Tiny], Path]
TINY = Tiny(layers=2, max_context=512)
PACKED = {"int8": {8}, "int4": {4, 8}}
"""Setting -> bits of the matrices of a checkpoint whose weights are numbers."""
CLOSE = 1e-3
"""A bound on the norm of the differences that rounded rows cause in logits, relative to the norm of the logits."""
CODECS = ["fp16", "hack", "rot-k4v4"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this test its own folder of converted files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def numbers(model: Llama) -> Llama:
    """The same model with its weights unpacked to numbers."""

    def plain(value: object) -> object:
        if isinstance(value, BlockWeight):
            return value.unpacked(model.dtype)
        if isinstance(value, tuple):
            return tuple(map(plain, value))
        if value is None or isinstance(value, Tensor):
            return value
        return replace(value, **{each.name: plain(getattr(value, each.name)) for each in fields(value)})  # type: ignore[arg-type, type-var]

    return Llama(model.spec, plain(model.weights), kernels=model.kernels)  # type: ignore[arg-type]


def logits(model: Llama) -> Tensor:
    return model.logits(advance(model, [(ExactKv(), prompt(1, 60))])).float()


def worker(path: Path, weights: str, codec: str = "hack", **changes: object) -> Worker:
    changes = {"dtype": "float32", **changes}
    return load_worker(
        ModelConfig.model_validate({"path": str(path), "weights": weights, **changes}),
        CodecConfig(name=codec, settings={"page_tokens": PI}),
    )


@pytest.mark.parametrize("weights", PACKED)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_near_those_of_the_numbers(weights: str, family: str, make_tiny: MakeTiny) -> None:
    model = load_model(make_tiny(Tiny(family)), "float32", packing=packing_of(weights, "float32"))
    assert model.weights.packed_bits == PACKED[weights]
    found, wanted = logits(model), logits(numbers(model))
    assert 0 < float((found - wanted).norm() / wanted.norm()) < CLOSE


@pytest.mark.parametrize("rows", [0, 8])
def test_many_rows_may_go_to_the_library(rows: int, make_tiny: MakeTiny) -> None:
    """The library has unpacked weights and rounds no rows. Fewer rows are multiplied as before."""
    model = load_model(make_tiny(TINY), "float32", packing=packing_of("int8", "float32"))
    before, wanted = logits(model), logits(numbers(model))
    model.unpack_rows = {8: rows}
    assert torch.allclose(logits(model), wanted, atol=1e-4)
    model.unpack_rows = {8: 61}
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("kind", [KINDS.Q8_0, KINDS.Q4_0, KINDS.Q4_1], ids=lambda kind: kind.name)
def test_what_a_gguf_file_has_packed_stays_exactly_so(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", TINY, kind)
    exact = load_model(find_model(str(path), "float32").path, "float32").weights
    kept = load_model(find_model(str(path), "bfloat16", "int8").path).weights
    assert kept.packed_bits == {8 if kind is KINDS.Q8_0 else 4}
    assert not exact.packed_bits
    for ours, theirs in zip(kept.layers, exact.layers, strict=True):
        for name in ("qkv", "out", "gate_up", "down"):
            packed = getattr(ours, name)
            assert isinstance(packed, BlockWeight), name
            assert torch.equal(as_numbers(packed), getattr(theirs, name)), name
    assert isinstance(kept.embed, BlockWeight)
    assert torch.equal(as_numbers(kept.embed), as_numbers(exact.embed))


def test_packed_rows_in_several_blocks_of_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "model.gguf", Tiny(heads=8, kv_heads=4), KINDS.Q4_1)
    whole = logits(load_model(find_model(str(path), "bfloat16", "int8").path))
    monkeypatch.setattr("hackkv.model.gguf.tensors.BLOCK_VALUES", 3 * 256)  # rows that fill no tile of 16
    monkeypatch.setattr("hackkv.model.gguf.cache.VERSION", 0)
    assert torch.equal(logits(load_model(find_model(str(path), "bfloat16", "int8").path)), whole)


@pytest.mark.parametrize(
    ("kind", "weights", "bits"),
    [
        (KINDS.Q4_0, "int8", {4}),
        (KINDS.Q8_0, "int4", {4, 8}),
        (KINDS.F16, "int8", {8}),
        (KINDS.Q4_0, "bf16", set[int]()),
        (KINDS.Q4_0, "auto", {4}),
        (KINDS.Q8_0, "auto", {8}),
        (KINDS.F16, "auto", set[int]()),
    ],
)
def test_what_has_more_bits_than_asked_for_is_packed_anew(
    kind: GGMLQuantizationType, weights: str, bits: set[int], tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "model.gguf", TINY, kind)
    found = load_model(find_model(str(path), "bfloat16", weights).path).weights
    assert found.packed_bits == bits


@pytest.mark.parametrize(("dtype", "device"), [("float32", "cpu"), ("bfloat16", "cuda")])
def test_auto_takes_numbers_where_codes_cost_something(dtype: str, device: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", TINY, KINDS.Q4_0)
    assert not load_model(find_model(str(path), dtype, device=device).path, dtype).weights.packed_bits


def test_matrices_whose_rows_are_no_whole_blocks_stay_numbers(make_tiny: MakeTiny) -> None:
    model = load_model(
        make_tiny(Tiny(hidden=64, heads=2, kv_heads=1, ffn=172)), "float32", packing=packing_of("int8", "float32")
    )
    layer = model.weights.layers[0]
    assert isinstance(layer.gate_up, BlockWeight)
    assert isinstance(layer.down, Tensor)


@pytest.mark.parametrize(
    ("weights", "dtype", "said"),
    [
        ("fp32", "bfloat16", "fp32 needs model.dtype float32"),
        ("bf16", "float32", "bf16 needs model.dtype bfloat16"),
        ("int3", "float32", "'int3' is not one of auto, fp32, bf16, int8, int4"),
    ],
)
def test_what_the_setting_cannot_mean_is_refused(weights: str, dtype: str, said: str, make_tiny: MakeTiny) -> None:
    with pytest.raises(ConfigError, match=rf"model\.weights: {said}"):
        worker(make_tiny(TINY), weights, dtype=dtype)


def test_codes_of_another_shape_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", TINY, KINDS.Q8_0)
    folder = find_model(str(path), "bfloat16", "int8").path
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 256', '"intermediate_size": 224'))
    with pytest.raises(CheckpointError, match=r"gate_up.*codes of \[448, "):
        load_model(folder)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("weights", [*PACKED, "kept"])
async def test_a_cluster_says_what_one_process_says(
    weights: str, codec: str, make_tiny: MakeTiny, tmp_path: Path
) -> None:
    if weights == "kept":
        path = write_gguf(tmp_path / "model.gguf", TINY, KINDS.Q4_1)
        found = worker(path, "int8", codec, dtype="bfloat16", batch_invariant=True)
    else:
        found = worker(make_tiny(TINY), weights, codec)
    assert "weights int" in found.kernels
    async with paired(found) as pair:
        for length in (5, 3 * PI, 3 * PI + 7):
            request = greedy(f"r{length}", prompt(length, length), 12)
            assert (await pair.serve(request)).tokens == generate(found, request)


def test_peers_with_other_weights_do_not_agree(make_tiny: MakeTiny) -> None:
    first, second = (worker(make_tiny(TINY), weights).fingerprint for weights in ("int8", "int4"))
    assert "float32,int8" in str(first.mismatch(second))
