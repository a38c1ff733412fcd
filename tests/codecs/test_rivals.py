"""The meaning of the rivals' settings. Other properties of rivals are in the tests of all codecs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hack_kernels import load
from hack_kernels.delta_format import DeltaFormat
from hack_kernels.group_format import GroupFormat
from hack_kernels.reference.groups import GroupReference

from hackkv.codec import KvCodec
from hackkv.codecs import CODECS, make_codec
from hackkv.codecs.paged import PagedCodec
from hackkv.config import CodecConfig
from hackkv.errors import ConfigError
from hackkv.types import KvShape
from tests.codecs.cases import Case, assert_same, rows, run

RIVALS = (
    "fp8",
    "mxfp8",
    "mxfp6",
    "mxfp4",
    "nvfp4",
    "kivi-4",
    "kivi-2",
    "kvquant-4",
    "kvquant-2",
    "kvcomp",
    "cachegen",
    "cachegen-eq86",
    "cachegen-delta",
)


def make(name: str, layers: int = 1, **settings: Any) -> KvCodec:
    return make_codec(CodecConfig(name=name, settings=settings), KvShape(layers, 2, 64), load("auto"))


@pytest.mark.parametrize("name", RIVALS)
def test_unfused_attention_has_the_same_bytes_and_nearly_the_same_outputs(name: str) -> None:
    """FP16 keeps 11 bits of a page's decoded values. Chunks come with and without decode steps."""
    pi, counts = 32, [40, 1, 60, 1]
    fused, unfused = (run(Case(name, pi, backend="cpu", settings={"unfused": on}), 102, counts) for on in (False, True))
    assert fused[0].keys() == unfused[0].keys()
    assert all(
        torch.equal(fused[0][plane].view(torch.uint8), unfused[0][plane].view(torch.uint8)) for plane in fused[0]
    )
    assert float((fused[2] - unfused[2]).norm() / fused[2].norm()) < 5e-3
    whole = run(Case(name, pi, backend="cpu", settings={"unfused": True}), 102, [102])
    assert_same(whole, unfused)


@pytest.mark.parametrize("name", RIVALS)
def test_settings_that_change_results_are_in_the_fingerprint(name: str) -> None:
    base = make(name)
    assert make(name).fingerprint() == base.fingerprint()
    for changed in ({"unfused": True}, {"page_tokens": 32}):
        assert make(name, **changed).fingerprint() != base.fingerprint()
    others = [make(other).fingerprint()[1:] for other in RIVALS if CODECS[other].make is CODECS[name].make]
    assert len(set(others)) == len(others)


def test_cachegen_gives_early_layers_more_bins() -> None:
    """Bins are the authors' levels, by layer. A page with fewer bins is smaller."""

    def bins(codec: KvCodec) -> list[tuple[int, int]]:
        formats = [fmt for fmt in codec.formats if isinstance(fmt, GroupFormat)]
        return [(2 * fmt.k.centre + 2, 2 * fmt.v.centre + 2) for fmt in formats]

    assert bins(make("cachegen", 24)) == [(32, 32)] * 2 + [(32, 16)] * 8 + [(16, 16)] * 14
    assert bins(make("cachegen", 24, level="1")) == [(16, 16)] * 2 + [(16, 12)] * 18 + [(12, 12)] * 4
    assert bins(make("cachegen", 3, level="3")) == [(32, 32)] * 3
    assert bins(make("cachegen-eq86", 3)) == [(8, 8)] * 3
    assert make("cachegen").wire_form.name == "zstd"


def test_cachegen_that_is_decoded_on_arrival_stands_for_the_same_numbers() -> None:
    """Rows are equal up to FP16 rounding, and the same codes travel."""
    counts = [40, 1, 60, 1]
    ints, decoded = (run(Case(name, 32, backend="cpu"), 102, counts) for name in ("cachegen", "cachegen-fp16"))
    assert float((ints[2] - decoded[2]).norm() / ints[2].norm()) < 5e-3
    assert make("cachegen-fp16").wire_planes == make("cachegen").wire_planes
    assert make("cachegen-fp16").fingerprint() != make("cachegen").fingerprint()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", ["cachegen", "cachegen-eq86"])
def test_faithful_cachegen_has_one_scale_for_all_heads(name: str, backend: str) -> None:
    """Pages do not depend on chunks. If heads are alike, one scale is as good as a scale of each head."""
    case = Case(name, 32, backend=backend, settings={"faithful": True})
    found, whole = run(case, 102, [40, 1, 60, 1]), run(case, 102, [102])
    assert_same(whole, found)
    for plane in ("k_scale", "v_scale"):
        scales, own = found[0][plane], run(Case(name, 32, backend=backend), 102, [102])[0][plane]
        assert torch.equal(scales, scales[:1].expand_as(scales))
        assert torch.equal(scales[0], own.amax(0))


def test_a_scale_of_all_heads_needs_all_heads() -> None:
    codec = make("cachegen", faithful=True)
    (pool,) = codec.new_pools(1, 1, range(2))
    k, v = torch.randn(2, 1, 1, 64, 64).half()
    assert isinstance(codec, PagedCodec)
    with pytest.raises(ValueError, match="1 of 2 KV heads"):
        codec.layers[0].kernels.seal(0, pool.heads(1, 1), torch.tensor([0]), torch.tensor([0]), k, v)


def test_cachegen_errors_are_at_most_half_a_bin() -> None:
    fmt = make("cachegen").formats[0]
    assert isinstance(fmt, GroupFormat)
    kernels = GroupReference(fmt, torch.device("cpu"))
    x = rows(1, 64, 1, 64).half().transpose(0, 1)[None]
    error = (kernels.dequantize("k", kernels.quantize("k", x)) - x.float()).abs()
    assert bool((error <= x.float().abs().amax(-1, keepdim=True) / (2 * 15) * (1 + 1e-5)).all())


def test_deltas_have_the_bins_of_the_level_and_planes_of_their_own() -> None:
    """Anchors and deltas travel apart, each with its own table."""
    codec = make("cachegen-delta", 24)
    formats = [fmt for fmt in codec.formats if isinstance(fmt, DeltaFormat)]
    bins = [(2 * fmt.k.centre + 2, 2 * fmt.v.centre + 2) for fmt in formats]
    assert bins == [(32, 32)] * 2 + [(32, 16)] * 8 + [(16, 16)] * 14
    names = [plane.name for plane in codec.wire_planes[-1]]
    assert names == ["k_anchor", "k_codes", "k_scale", "v_anchor", "v_codes", "v_scale"]
    assert make("cachegen", 24, delta=True).fingerprint()[1:] == codec.fingerprint()[1:]


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("fp8", {"element": "e5m2"}, "codec.settings.element"),
        ("mxfp4", {"scaling": "block"}, "codec.settings.scaling"),
        ("kivi-2", {"k_bits": 3}, "codec.settings.k_bits"),
        ("kivi-2", {"group": 48}, "groups of 48 do not divide page_tokens, which is 64"),
        ("kvquant-4", {"k_bits": 5}, "codec.settings.k_bits"),
        ("kvquant-4", {"calibration": "nowhere"}, "nowhere: No such file"),
        ("kvcomp", {"k_unit": "row"}, "codec.settings.k_unit"),
        ("kvcomp", {"v_scale": 0.6}, "codec.settings.v_scale"),
        ("cachegen", {"level": "4"}, "codec.settings.level"),
        ("cachegen", {"wire_form": "auto?"}, "codec.settings.wire_form"),
        ("cachegen", {"resident": "fp8"}, "codec.settings.resident"),
        ("cachegen-fp16", {"unfused": True}, "decoded already"),
        ("cachegen-fp16", {"faithful": True}, "for codes that rest"),
        ("cachegen-fp16", {"delta": True}, "do not become the same deltas again"),
        ("cachegen-delta", {"faithful": True}, "has no deltas"),
        ("cachegen-delta", {"delta": 3}, "codec.settings.delta"),
    ],
)
def test_wrong_settings_are_named(name: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
        make(name, **settings)
