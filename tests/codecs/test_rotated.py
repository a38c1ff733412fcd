"""Codecs `rot-*`: rotated rows stand for the same values, with and without a calibration file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hack_kernels import AUTO, load
from hack_kernels.level_format import HEAD_DIMS, LevelFormat
from hack_kernels.reference.levels import dequantize, unpack_codes
from hack_kernels.window import Window
from safetensors.torch import load_file, save_file
from torch import Tensor

from hackkv.batch import Batch, Span, non_finite
from hackkv.codec import KvCodec
from hackkv.codecs import make_codec
from hackkv.codecs.artifact import METADATA
from hackkv.codecs.hadamard import hadamard
from hackkv.config import CodecConfig, ModelConfig
from hackkv.errors import ConfigError
from hackkv.model.generate import generate
from hackkv.model.identity import source_hash
from hackkv.model.runner import ModelRunner
from hackkv.model.tiny import Tiny, write_tiny
from hackkv.model.worker import Worker, load_worker
from hackkv.types import KvShape
from tests.codecs.calibrations import calibration_file, calibration_tensors, save_calibration
from tests.codecs.cases import CODED, HEADS, LAYER, Case, Growing, assert_same, run
from tests.pair import PI, greedy, prompt

LAYERS, HEAD_DIM = 2, 64


@pytest.mark.parametrize("order", [1, 2, 12, 20, *HEAD_DIMS])
def test_hadamard_matrices_are_orthonormal_and_flat(order: int) -> None:
    matrix = hadamard(order)
    assert torch.allclose(matrix @ matrix.mT, torch.eye(order, dtype=torch.float64), atol=1e-12)
    assert bool((matrix.abs() == matrix.abs()[0, 0]).all())


@pytest.mark.parametrize("order", [0, -2, 3, 36, 60])
def test_other_orders_are_refused(order: int) -> None:
    with pytest.raises(ValueError, match=f"order {order} "):
        hadamard(order)


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "chunks"), [("homomorphic", [40, 24, 1, 36]), ("dense", [40, 24, 37])])
def test_a_cache_on_triton_does_not_depend_on_chunking(
    prefill: str, chunks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are rotated, sealed with feedback and read with a window, by kernels that Triton interprets here. One row is
    decoded with a query of 8 bits, as in homomorphic prompts; queries of dense prompts have 11."""
    pytest.importorskip("triton")
    monkeypatch.setenv("HACKKV_TRITON_PREFILL", prefill)
    case = Case("rot-k3v2", backend="triton", settings={"sink": 1, "recent": 1}, calibrated=True)
    assert case.codec.served_by == "triton"
    assert_same(run(case, 101, chunks), run(case, 101, [101]))


WINDOWS = [(0, 0), (1, 0), (2, 1), (1, 2)]
"""(sink, recent)."""


def unturned(case: Case, sealed: dict[str, Tensor], exact_rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """FP64 K and V [n, Hkv, D] for which the cache stands at the sequence's next query, in the model's channels."""
    codec = case.codec
    fmt = codec.formats[LAYER]
    assert isinstance(fmt, LevelFormat)
    parts = []
    for name, bits, exact in (("k", fmt.k_bits, exact_rows[0]), ("v", fmt.v_bits, exact_rows[1])):
        rows = dequantize(bits, unpack_codes(name, bits, sealed), sealed[f"{name}_scale"], torch.float64)
        page = sealed["k_scale"].shape[1]
        coded, first = fmt.window.coded(page), fmt.window.coded(page).start * fmt.page_tokens
        mixed = (exact[:, :first].double(), rows[:, coded.start : coded.stop].flatten(1, 2), exact[:, first:].double())
        parts.append(torch.cat(mixed, 1).transpose(0, 1))
    k, v = parts
    if not case.calibrated:
        return k @ hadamard(fmt.head_dim).mT, v
    tensors = load_file(calibration_file(LAYER + 1, HEADS, fmt.head_dim))
    basis, mean = (tensors[f"layers.{LAYER}.{name}"].double() for name in ("basis", "mean"))
    return torch.einsum("nhi,hij->nhj", k, torch.linalg.inv(basis)) + mean, v


@pytest.mark.grid
@pytest.mark.parametrize("backend", AUTO)
@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize(("head_dim", "group"), [(64, 2), (80, 2), (96, 3), (128, 1)])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("name", ["rot-k4v4", "rot-k2v2"])
def test_attention_is_that_over_the_rows_that_codes_stand_for(
    name: str, window: tuple[int, int], head_dim: int, group: int, calibrated: bool, backend: str
) -> None:
    """The expected result is the last row's query over its coded pages, dequantized and rotated back, and its exact
    pages, in FP64 without rounding of queries and weights. The mean is in these keys and not in the codec's keys, which
    does not change the result."""
    settings = dict(zip(("sink", "recent"), window, strict=True))
    case = Case(name, head_dim=head_dim, group=group, backend=backend, calibrated=calibrated, settings=settings)
    tokens = 5 * case.page_tokens + 9
    sealed, exact_rows, outputs = run(case, tokens, [tokens - 1, 1])
    k, v = unturned(case, sealed, exact_rows)
    q = Growing(case, case.codec, tokens).q[-1].double() / math.sqrt(head_dim)  # [Hq, D]
    keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
    weights = torch.softmax(torch.einsum("hd,nhd->hn", q, keys), -1)
    wanted = torch.einsum("hn,nhd->hd", weights, values)
    assert float((outputs[-1].double() - wanted).norm() / wanted.norm()) < 0.05


@pytest.mark.parametrize("backend", AUTO)
def test_a_layer_that_is_left_exact_keeps_rows_as_fp16_does(backend: str) -> None:
    """Prompts come in chunks and single steps, for any number of rows that the window keeps beside the open page."""
    tokens, counts = 5 * 32 + 9, [70, 58, 40, 1]
    sealed, _, outputs = run(Case("fp16", backend=backend), tokens, counts)
    for sink, recent in WINDOWS:
        settings = {"sink": sink, "recent": recent, "exact_layers": "-1"}
        found, _, attended = run(Case("rot-k3v2", backend=backend, settings=settings), tokens, counts)
        assert all(torch.equal(found[name], plane) for name, plane in sealed.items())
        assert float((attended - outputs).norm() / outputs.norm()) < 1e-6


def test_layers_left_exact_count_in_bytes_and_in_the_fingerprint() -> None:
    file = str(calibration_file(3, 2, HEAD_DIM))

    def made(**settings: int | float | str | bool) -> KvCodec:
        return make_codec(CodecConfig(name="rot-k3v2", settings=settings), KvShape(3, 2, HEAD_DIM), load("reference"))

    whole, coded = made(exact_layers="0,1,2").formats[0].page_bytes, made().formats[0].page_bytes
    for settings, exact in (({"exact_layers": 0}, {0}), ({"exact_layers": "-1, 1", "calibration": file}, {1, 2})):
        codec = made(**settings)
        assert [fmt.page_bytes for fmt in codec.formats] == [whole if i in exact else coded for i in range(3)]
        assert {fmt.window for fmt in codec.formats} == {codec.window} == {Window(1, 2)}
        bits = dict(codec.fingerprint())["codec.k_bits"].split(",")
        assert bits == ["16" if i in exact else "3" for i in range(3)]


def test_scales_in_fp8_count_in_bytes_and_in_the_fingerprint() -> None:
    """They save a byte for K and for V of each row. Without them, the fingerprint is as before they were added."""
    every: list[dict[str, int | float | str | bool]] = [{"scales": "fp8"}, {"scales": "fp16"}, {}]
    configs = (CodecConfig(name="rot-k3v2", settings=settings) for settings in every)
    made = [make_codec(config, KvShape(2, 2, HEAD_DIM), load("reference")) for config in configs]
    narrow, wide, silent = ([fmt.page_bytes for fmt in codec.formats] for codec in made)
    assert wide == silent == [each + 2 * 64 for each in narrow]
    assert [dict(codec.fingerprint()).get("codec.scales") for codec in made] == ["fp8", None, None]


@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_a_model_all_of_whose_layers_are_left_exact_says_what_it_says_with_fp16(tmp_path: Path, weights: str) -> None:
    """Nothing is rotated, and nothing is folded into the weights."""
    folder = write_tiny(tmp_path, Tiny(layers=LAYERS, head_dim=64, max_context=256))
    exact = (
        loaded(folder, "float32", weights, "fp16"),
        loaded(folder, "float32", weights, "rot-k2v2", exact_layers="0,1"),
    )
    request = greedy("r", prompt(2, 5 * PI + 3), 2 * PI)
    assert generate(exact[0], request) == generate(exact[1], request)


def test_more_bits_are_closer_to_exact() -> None:
    tokens = 7 * 32
    exact, *found = (
        run(Case(name, settings=settings), tokens, [tokens])[2]
        for name, settings in (("fp16", {}), ("rot-k2v2", CODED), ("rot-k3v2", CODED), ("rot-k4v4", {}))
    )
    two, mixed, four = (float((x - exact).norm() / exact.norm()) for x in found)
    assert four < mixed < two < 0.9


def test_a_row_whose_rotation_is_beyond_fp16_is_named_though_fp16_holds_it() -> None:
    """All channels add up in the first one. The error names the tokens in prefill, and the token in decode."""
    case = Case("rot-k4v4")
    codec = case.codec
    pool = codec.new_pools(2, 2, range(HEADS))[LAYER]
    sequence = Growing(case, codec, 4)
    q, k, v = sequence.q, sequence.k.clone(), sequence.v
    k[1, 1] = 3e4
    prompt = Batch.of([Span(0, 0, 4, (0,))], case.page_tokens)
    codec.attend(LAYER, pool, prompt, q, k, v)
    assert prompt.faulty.tolist() == [True]
    error = non_finite(LAYER, prompt, k, v)
    said = f"layer {LAYER}: K or V is beyond FP16 at one of tokens 0 to 3 in the form that rests"
    assert (str(error), error.span) == (said, 0)
    decode = Batch.of([Span(0, 0, 1, (0,)), Span(1, 0, 1, (1,))], case.page_tokens)
    codec.attend(LAYER, pool, decode, q[:2], k[:2], v[:2])
    assert decode.faulty.tolist() == [False, True]
    error = non_finite(LAYER, decode, k[:2], v[:2])
    assert (str(error), error.span) == (f"layer {LAYER}: K or V is beyond FP16 at token 0 in the form that rests", 1)


def loaded(folder: Path, dtype: str, weights: str, name: str, **settings: Any) -> Worker:
    codec = CodecConfig(name=name, settings={"page_tokens": PI, **settings})
    return load_worker(ModelConfig(path=str(folder), dtype=dtype, weights=weights), codec)


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize(
    ("dtype", "weights", "tolerance"),
    [("float32", "auto", 2e-3), ("bfloat16", "auto", 6e-2), ("float32", "int8", 2e-3), ("bfloat16", "int4", 6e-2)],
)
@pytest.mark.parametrize(
    ("architecture", "head_dim"), [("LlamaForCausalLM", 64), ("Qwen2ForCausalLM", 64), ("Qwen3ForCausalLM", 96)]
)
def test_rotated_rows_do_not_change_the_model(
    tmp_path: Path, architecture: str, head_dim: int, dtype: str, weights: str, tolerance: float, calibrated: bool
) -> None:
    """Models have or lack a bias of V and packed weights, which stay as they are. All rows are in the open page, which
    is exact."""
    folder = write_tiny(tmp_path, Tiny(architecture, layers=LAYERS, head_dim=head_dim, max_context=256))
    settings = dict[str, Any]()
    if calibrated:
        file = tmp_path / "calibration.safetensors"
        save_calibration(calibration_tensors(LAYERS, 2, head_dim), file, model_hash=source_hash(folder))
        settings["calibration"] = str(file)
    workers = loaded(folder, dtype, weights, "fp16"), loaded(folder, dtype, weights, "rot-k2v2", **CODED, **settings)
    assert workers[1].model.weights.packed_bits == workers[0].model.weights.packed_bits
    assert bool(workers[1].model.weights.packed_bits) == (weights != "auto")
    ids, logits, values = prompt(1, PI - 1), [], []
    for worker in workers:
        runner = ModelRunner(worker.model, worker.codec, 1, 1)
        with torch.inference_mode():
            logits.append(worker.model.logits(runner.forward([Span(0, 0, PI - 1, (0,))], ids)).float())
        values.append(runner.memory.pools[0].open_v[0].float())
    expected = values[0] @ hadamard(head_dim).float()
    assert float((values[1] - expected).norm() / expected.norm()) < tolerance
    assert float((values[1] - values[0]).norm() / values[0].norm()) > 0.5
    assert float((logits[1] - logits[0]).norm() / logits[0].norm()) < tolerance
    if dtype == "float32":
        request = greedy("r", prompt(2, 5), PI - 6)
        assert generate(workers[0], request) == generate(workers[1], request)


def test_the_fingerprint_has_the_digest_and_not_the_path(tmp_path: Path) -> None:
    path, elsewhere = calibration_file(LAYERS, 2, HEAD_DIM), tmp_path / "elsewhere.safetensors"
    elsewhere.write_bytes(path.read_bytes())
    shape = KvShape(LAYERS, 2, HEAD_DIM)

    def fingerprint(**settings: int | float | str | bool) -> tuple[tuple[str, str], ...]:
        return make_codec(CodecConfig(name="rot-k3v2", settings=settings), shape, load("reference")).fingerprint()

    first = fingerprint(calibration=str(path))
    assert first == fingerprint(calibration=str(elsewhere))
    assert str(path.parent) not in repr(first)
    save_calibration(calibration_tensors(LAYERS, 2, HEAD_DIM, seed=1), elsewhere)
    assert first != fingerprint(calibration=str(elsewhere))
    assert dict(fingerprint())["codec.calibration"] == "none"


def test_a_calibration_file_that_is_wrong_is_named_with_its_tensor(tmp_path: Path) -> None:
    def refusal(path: Path) -> str:
        config = CodecConfig(name="rot-k3v2", settings={"calibration": str(path)})
        with pytest.raises(ConfigError) as caught:
            make_codec(config, KvShape(LAYERS, 2, HEAD_DIM), load("reference"))
        return str(caught.value)

    good, bad = calibration_tensors(LAYERS, 2, HEAD_DIM), tmp_path / "bad.safetensors"
    flat, steep = good["layers.1.basis"].clone(), good["layers.1.basis"].clone()
    flat[1, :, 3], steep[0, :, 3] = 0, steep[0, :, 3] * 1e7
    low, fine, large, zero = (good[f"layers.0.{name}"].clone() for name in ("gains", "gains", "gains", "weights"))
    low[1, 3, 3], fine[0, 3, 5], large[0, 3, 4:12], zero[1, 7] = 1e-3, 0.1, 7.99609375, 0
    for name, tensor, said in (
        ("layers.1.basis", torch.eye(HEAD_DIM), "shape [64, 64], expected [2, 64, 64]"),
        ("layers.1.mean", good["layers.1.mean"] * torch.nan, "a value is not finite"),
        ("layers.1.basis", flat, "KV head 1 has condition number"),
        ("layers.1.basis", steep, "KV head 0 has condition number"),
        ("layers.0.basis", flat * 0, "KV head 0 has condition number inf, more than 10000"),
        ("layers.0.gains", low, "a value on or below the diagonal is not 0"),
        ("layers.1.gains", good["layers.1.gains"].mT.contiguous(), "a value on or below the diagonal is not 0"),
        ("layers.0.gains", low.to(torch.int8), "dtype torch.int8"),
        ("layers.0.gains", fine, "a value is no multiple of 0.000976562 below 8"),
        ("layers.0.gains", large, "or those of a channel are more than 63 together"),
        ("layers.0.weights", zero, "a value is not positive and finite"),
    ):
        save_calibration({**good, name: tensor}, bad)
        assert refusal(bad).startswith(f"codec.settings: {bad}: {name}: ")
        assert said in refusal(bad)
    for name in ("basis", "mean", "gains", "weights"):
        save_calibration({key: x for key, x in good.items() if key != f"layers.1.{name}"}, bad)
        assert f"{bad}: layers.1.{name}: missing tensor" in refusal(bad)
    for metadata, said in (
        (None, "a calibration file of version 1, expected 3; make it anew with hackkv calibrate"),
        ({METADATA: '{"model": "tiny"}'}, "a calibration file of version 1, expected 3"),
        ({METADATA: '{"version": 4}'}, "a calibration file of version 4, expected 3"),
        ({METADATA: "version"}, "metadata 'hackkv': no JSON"),
        ({METADATA: "[2]"}, "metadata 'hackkv': no JSON object"),
    ):
        save_file(good, bad, metadata)
        assert f"codec.settings: {bad}: {said}" in refusal(bad)
    bits = {"k_bits": 3, "v_bits": 2, "k": [3, 2], "v": [2, 2]}
    for layer_bits, said in (
        ({**bits, "k": [3]}, "layer_bits: 1 layers of K and 2 of V; the model has 2"),
        ({**bits, "v": "22"}, "layer_bits.1.v: "),
        ({**bits, "more": 1}, "layer_bits.1.more: "),
        ([3, 2], "layer_bits.1: "),
    ):
        save_calibration(good, bad, layer_bits=[{**bits, "k_bits": 4}, layer_bits])
        assert f"codec.settings: {bad}: {said}" in refusal(bad)
    save_calibration(good, bad, layer_bits=[{**bits, "k": [3, 5]}])
    assert "k_bits is 5" in refusal(bad)
    bad.write_bytes(calibration_file(LAYERS, 2, HEAD_DIM).read_bytes()[:-1])
    assert f"{bad}: truncated or not a safetensors file" in refusal(bad)
    assert f"{tmp_path / 'none'}: No such file" in refusal(tmp_path / "none")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"k_bits": 5}, "k_bits is 5"),
        ({"page_tokens": 48}, "page_tokens is 48"),
        ({"sink": 3}, "sink is 3"),
        ({"sink": 2, "recent": 2}, "sink + recent is 4"),
        ({"recent": -1}, "recent is -1"),
        ({"v_bits": "two"}, "codec.settings.v_bits"),
        ({"rounding": "nearest"}, "codec.settings.rounding"),
        ({"calibration": 7}, "codec.settings.calibration"),
        ({"scales": "e4m3"}, "codec.settings.scales: Input should be 'fp16' or 'fp8'"),
        ({"exact_layers": 1}, "exact_layers: '1' is no layer of a model of 1"),
        ({"exact_layers": "0,-2"}, "exact_layers: '-2' is no layer of a model of 1"),
        ({"exact_layers": "last"}, "exact_layers: 'last' is no layer"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_codec(CodecConfig(name="rot-k4v4", settings=settings), KvShape(1, 1, 64), load("reference"))
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["hack", "fp8", "fp16"])
def test_codecs_without_windows_refuse_the_setting(name: str) -> None:
    with pytest.raises(ConfigError, match=r"codec\.settings\.recent: "):
        make_codec(CodecConfig(name=name, settings={"recent": 1}), KvShape(1, 1, 64), load("reference"))
