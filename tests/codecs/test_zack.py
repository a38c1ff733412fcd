"""Codec `zack`: lemmas 1 and 2 of the paper, Eq. 6 and F_p, fewer bytes, and refused settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hack_kernels import load
from hack_kernels.base import DEFINITION
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hackkv.batch import Span
from hackkv.codec import KvCodec, fp16_page_bytes, planes_bytes
from hackkv.codec_footprint import footprint_of
from hackkv.codecs import make_codec
from hackkv.codecs.hadamard import hadamard
from hackkv.codecs.rotated import RotatedCodec
from hackkv.codecs.zack import Projections
from hackkv.config import CodecConfig, ModelConfig
from hackkv.errors import ConfigError
from hackkv.model.generate import generate
from hackkv.model.runner import ModelRunner
from hackkv.model.tiny import Tiny, write_tiny
from hackkv.model.worker import Worker, load_worker
from hackkv.types import HandedOff, KvLayout, KvShape
from tests.codecs.calibrations import calibration_file, projection_file, projection_tensors, save_calibration
from tests.codecs.cases import HEADS, LAYER, Case, assert_same, run
from tests.pair import PI, greedy, paired, prompt, tiny_worker

OF = (
    "fp16",
    "fp8",
    "mxfp4",
    "kivi-2",
    "kvquant-4",
    "cachegen",
    "cachegen-fp16",
    "cachegen-delta",
    "hack",
    "hack-k4v2",
    "rot-k4v4",
    "rot-k3v2",
)
"""Codecs whose pages get projected rows in these tests: one for each kind of page."""


def make(layers: int = 2, head_dim: int = 64, backend: str = "reference", **settings: Any) -> KvCodec:
    return make_codec(CodecConfig(name="zack", settings=settings), KvShape(layers, HEADS, head_dim), load(backend))


def worker_of(folder: Path, weights: str = "auto", **settings: Any) -> Worker:
    name = "zack" if settings else "fp16"
    config = CodecConfig(name=name, settings={"page_tokens": PI, **settings})
    return load_worker(ModelConfig(path=str(folder), dtype="float32", weights=weights), config)


def logits_and_pages(worker: Worker, ids: tuple[int, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of the last row of a one-page prompt, and the second layer's planes [Hkv, Π, channels]."""
    runner = ModelRunner(worker.model, worker.codec, 1, 1)
    with torch.inference_mode():
        logits = worker.model.logits(runner.forward([Span(0, 0, PI, (0,))], ids))
    return logits, {name: plane[0].double() for name, plane in runner.memory.pools[1].planes.items()}


@pytest.mark.parametrize(
    "tiny",
    [
        Tiny(max_context=256, head_dim=64),
        Tiny("Qwen2ForCausalLM", max_context=256, head_dim=64, heads=2, kv_heads=2),
        Tiny("Qwen3ForCausalLM", max_context=256, head_dim=64, heads=7, kv_heads=1, hidden=448),
    ],
    ids=["group 2", "bias of V", "norms of Q and K, group 7"],
)
def test_with_all_channels_the_model_computes_what_it_did(tmp_path: Path, tiny: Tiny) -> None:
    """Lemmas 1 and 2 with p = 0: the rotation cancels. Tolerances are FP16's rounding."""
    folder, ids = write_tiny(tmp_path / "model", tiny), prompt(1, PI)
    exact, projected = worker_of(folder), worker_of(folder, removal="0%")
    (wanted, plain), (found, pages) = (logits_and_pages(each, ids) for each in (exact, projected))
    assert float((found - wanted).norm() / wanted.norm()) < 2e-3
    assert float((pages["v"] - plain["v"]).norm() / plain["v"].norm()) > 0.5
    request = greedy("r", prompt(2, PI + 7), 12)
    assert generate(projected, request) == generate(exact, request)


def test_packed_weights_stay_as_they_are_and_v_is_rotated_at_run_time(tmp_path: Path) -> None:
    """With the first channels of V, results equal those of folded weights. With all channels, answers stay the same."""
    folder, ids = write_tiny(tmp_path / "model", Tiny(max_context=256)), prompt(1, PI)
    exact, projected = worker_of(folder, "int8"), worker_of(folder, "int8", removal="0%")
    wanted, found = (logits_and_pages(each, ids)[0] for each in (exact, projected))
    assert float((found - wanted).norm() / wanted.norm()) < 2e-3
    narrow, folded = (logits_and_pages(worker_of(folder, form, removal="5%"), ids) for form in ("int8", "auto"))
    assert narrow[1]["v"].shape == (2, PI, 32)
    assert float((narrow[0] - folded[0]).norm() / folded[0].norm()) < 0.05


def test_what_rests_is_the_first_channels_of_rotated_rows(tmp_path: Path) -> None:
    """Lemma 1: E (W_V R_p) = (E W_V) R_p, in the first layer whose input is exact; and K R_p after the embedding."""
    folder, ids = write_tiny(tmp_path / "model", Tiny(layers=1, max_context=256)), prompt(1, PI)
    tensors = projection_tensors(1, 2, 64)
    pages = []
    for worker in (worker_of(folder), worker_of(folder, removal="5%")):
        runner = ModelRunner(worker.model, worker.codec, 1, 1)
        with torch.inference_mode():
            runner.forward([Span(0, 0, PI, (0,))], ids)
        pages.append({name: plane[0].double() for name, plane in runner.memory.pools[0].planes.items()})
    plain, narrow = pages
    for plane, side in (("k", "qk"), ("v", "vw")):
        wanted = plain[plane] @ tensors[f"layers.0.{side}"].double()[..., :48] @ hadamard(48)
        assert narrow[plane].shape == (2, PI, 48)
        assert float((narrow[plane] - wanted).norm() / wanted.norm()) < 2e-3


def test_what_scores_lose_is_no_more_than_dropped_channels_weigh() -> None:
    """Lemma 2: |q·k - q'·k'| <= |q dropped| |k dropped|, by the codec's own rotations."""
    codec = make(layers=1)
    assert isinstance(codec, RotatedCodec)
    rotations, rotation = codec._rotations[0], projection_tensors(1, HEADS, 64)["layers.0.qk"].double()
    q, k = torch.randn(2, HEADS, 50, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scores = (q @ rotations.query.mT.double()) @ (k @ rotations.key.mT.double()).mT / 48**0.5 * 64**0.5
    lost = (scores - q @ k.mT).abs()
    gone = [(x @ rotation[..., 48:]).norm(dim=-1) for x in (q, k)]
    assert bool((lost <= gone[0][..., None] * gone[1][:, None] + 1e-4).all())
    assert float(lost.max()) > 0.1


@given(
    values=st.lists(st.integers(0, 1000), min_size=4, max_size=40).filter(any),
    removal=st.floats(0, 0.99),
)
def test_ranks_fulfil_equation_6(values: list[int], removal: float) -> None:
    """The last channel that stays, j, is the one at which the tail's share of the sum crosses r."""
    sorted_values = torch.tensor(sorted(values, reverse=True), dtype=torch.float64)
    tails = sorted_values.flip(0).cumsum(0).flip(0) / sorted_values.sum()
    (rank,) = Projections({}, tails[None, None]).ranks(removal)
    j, total = rank - 1, float(sum(values))
    after, at = (float(sorted_values[i:].sum()) / total for i in (j + 1, j))
    assert after <= removal < at


def test_f_p_finds_the_least_removal_within_a_size() -> None:
    """Small channels are removed first, then those that weigh least in all heads of a layer. At least 16 stay."""
    for share, widths in (("100%", "64,64"), ("99%", "48,48"), ("75%", "48,48"), ("70%", "48,32"), ("60%", "32,32")):
        codec = make(share=share)
        assert dict(codec.fingerprint())["codec.widths"] == widths, share
        used = sum(fmt.page_bytes for fmt in codec.formats)
        assert used <= float(share.removesuffix("%")) / 100 * 2 * 4 * 64 * 64
    with pytest.raises(ConfigError, match=r"share: 10\.0% of FP16 is too little; the least is 25\.0%"):
        make(share="10%")


@pytest.mark.parametrize("of", OF)
def test_fewer_bytes_rest_and_travel(of: str) -> None:
    """Sealed pages and exact rows keep three quarters in layer 0 and half in other layers, as far as scales allow."""
    layers, pi, dim = 3, 64, 256
    narrow, wide = make(layers, dim, of=of), make(layers, dim, of=of, removal="0%")
    assert [fmt.head_dim for fmt in narrow.formats] == (
        [192, 128, 128] if of[:4] not in ("hack", "rot-") else [256, 128, 128]
    )
    for layer in (1, 2):
        fewer, more = (each.formats[layer].page_bytes for each in (narrow, wide))
        assert fewer < 0.6 * more
        sent, before_sent = (planes_bytes(each.wire_planes[layer]) for each in (narrow, wide))
        assert sent < fewer if of == "cachegen-fp16" else sent == fewer
        assert sent < 0.6 * before_sent
        assert fewer <= 0.5 * fp16_page_bytes(wide.formats[layer])
    layout = KvLayout(layers, HEADS, dim, pi)
    sizes, before = (footprint_of(each, layout) for each in (narrow, wide))
    for rows in (1, pi, 5 * pi + 3):
        assert sizes.wire_bytes(rows) < 0.8 * before.wire_bytes(rows)
        assert sizes.resting_bytes(rows) < 0.8 * before.resting_bytes(rows)
    pools = narrow.new_pools(4, 2, range(HEADS))
    for pool, fmt in zip(pools, narrow.formats, strict=True):
        assert pool.open_k.shape[-1] == pool.open_v.shape[-1] == fmt.head_dim
        assert sum(plane.nbytes for plane in pool.planes.values()) == 4 * HEADS * fmt.page_bytes


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("of", OF)
def test_the_pages_of_other_codecs_keep_the_open_page_rule(of: str, backend: str) -> None:
    """Chunks, decode steps and all at once give the same bytes and outputs, over layers of different widths."""
    case = Case("zack", head_dim=128, backend=backend, settings={"of": of})
    assert case.codec.formats[LAYER].head_dim == 64
    served = {"cachegen-fp16": [backend, DEFINITION]}
    assert case.codec.served_by == ", ".join(dict.fromkeys(served.get(of, [backend])))
    tokens = 2 * case.page_tokens + 9
    assert_same(
        run(case, tokens, [case.page_tokens + 5, 1, tokens - case.page_tokens - 6]), run(case, tokens, [tokens])
    )


@pytest.mark.parametrize("of", ["fp16", "rot-k3v2"])
async def test_a_cluster_says_what_one_process_says_and_sends_narrow_rows(of: str) -> None:
    """Sealed pages, exact pages and the open page are all sent narrow."""
    worker, plain = tiny_worker("zack", of=of), tiny_worker(of)
    request = greedy("r", prompt(1, 7 * PI + 11), 2 * PI, ignore_eos=True)
    async with paired(worker) as nodes:
        served = await nodes.serve(request)
        await nodes.assert_idle()
    assert served.tokens == generate(worker, request)
    assert isinstance(served.handed_off, HandedOff)
    sent = sum(count for _, count in served.handed_off.receipt.bytes_by_plane)
    tokens = len(request.prompt_ids)
    assert sent == worker.footprint.wire_bytes(tokens) < 0.65 * plain.footprint.wire_bytes(tokens)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"calibration": "none"},
            "calibration: projections are fitted to a model; hackkv calibrate zack writes the file",
        ),
        ({"calibration": "/nowhere"}, "/nowhere: No such file"),
        ({"removal": "100%"}, "codec.settings.removal"),
        ({"removal": 5}, "codec.settings.removal: Value error, 5 is no percentage"),
        ({"share": "0%"}, "codec.settings.share"),
        ({"of": "snapkv"}, "codec.settings.of: 'snapkv' is not a codec with pages of its own"),
        ({"of": "zack"}, "codec.settings.of: 'zack' is not a codec with pages of its own"),
        ({"of": "hack", "open_page": "requantize"}, "of: open pages of projected rows stay in FP16"),
        ({"of": "fp16", "k_bits": 2}, "codec.settings.k_bits"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**settings)
    assert said in str(caught.value)


def test_a_file_that_is_wrong_is_named_with_its_tensor(tmp_path: Path) -> None:
    good, bad = projection_tensors(2, HEADS, 64), tmp_path / "bad.safetensors"
    rotated = good["layers.1.vw"].clone()
    rotated[1, :, 5] = rotated[1, :, 4]
    climbing = good["layers.0.qk_values"].flip(-1).contiguous()
    for name, tensor, said in (
        ("layers.1.vw", rotated, "layers.1.vw: the columns of KV head 1 are not orthonormal"),
        ("layers.1.qk", torch.eye(32), "layers.1.qk: shape [32, 32], expected [2, 64, 64]"),
        ("layers.0.qk_values", climbing, "layers.0.qk_values: singular values do not fall from large to 0"),
        ("layers.0.vw", torch.full((HEADS, 64, 64), torch.nan), "layers.0.vw: a value is not finite"),
    ):
        save_calibration({**good, name: tensor}, bad, codec="zack")
        with pytest.raises(ConfigError) as caught:
            make(calibration=str(bad))
        assert f"{bad}: {said}" in str(caught.value)
    save_calibration({name: tensor for name, tensor in good.items() if "layers.1" not in name}, bad, codec="zack")
    with pytest.raises(ConfigError, match=r"layers\.1\.qk: missing tensor"):
        make(calibration=str(bad))
    with pytest.raises(ConfigError, match="made by hackkv calibrate rot, not by hackkv calibrate zack"):
        make(calibration=str(calibration_file(2, HEADS, 64)))


def test_the_fingerprint_has_the_digest_and_the_widths_and_not_the_path(tmp_path: Path) -> None:
    file = projection_file(2, HEADS, 64)
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(file.read_bytes())
    assert make(calibration=str(copy)).fingerprint() == make(calibration=str(file)).fingerprint()
    save_calibration(projection_tensors(2, HEADS, 64, seed=1), copy, codec="zack")
    prints = [make(), make(calibration=str(copy)), make(of="fp8"), make(share="50%")]
    assert len({each.fingerprint() for each in prints}) == 4
    assert str(tmp_path) not in repr([each.fingerprint() for each in prints])
