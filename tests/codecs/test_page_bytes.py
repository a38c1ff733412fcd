"""The bytes of a page, exactly as the design counts them, and really allocated in that size."""

from __future__ import annotations

import pytest
import torch
from hack_kernels import AUTO, load
from hack_kernels.cpu.memory import LINE_BYTES

from hackkv.codec import KvCodec, fp16_page_bytes, planes_bytes
from hackkv.codecs import CODECS, make_codec
from hackkv.config import CodecConfig
from hackkv.types import KvShape
from tests.codecs.calibrations import calibration_file
from tests.pair import EVICTING


def make(name: str, head_dim: int, **settings: int | float | str | bool) -> KvCodec:
    return make_codec(CodecConfig(name=name, settings=settings), KvShape(1, 1, head_dim), load("reference"))


@pytest.mark.parametrize(
    ("name", "settings", "resident", "wire"),
    [
        ("hack", {}, 5120, 5120),
        ("hack-k4v2", {}, 7168, 7168),
        ("hack-paper", {}, 5376, 5120),
        ("hack-paper", {"send_sums": True}, 5376, 5376),
        ("hack-paper", {"stored_sums": False}, 5120, 5120),
        ("fp8", {}, 16392, 16392),
        ("mxfp8", {}, 264 * 64, 264 * 64),
        ("mxfp6", {}, 200 * 64, 200 * 64),
        ("mxfp6", {"element": "e3m2"}, 200 * 64, 200 * 64),
        ("mxfp4", {}, 136 * 64, 136 * 64),
        ("nvfp4", {}, 144 * 64 + 8, 144 * 64 + 8),
        ("kivi-4", {}, 160 * 64, 160 * 64),
        ("kivi-2", {}, 96 * 64, 96 * 64),
        ("kivi-2", {"group": 64}, 80 * 64, 80 * 64),
        ("kvquant-4", {}, 158 * 64, 158 * 64),
        ("kvquant-4", {"k_bits": 3, "v_bits": 3}, 126 * 64, 126 * 64),
        ("kvquant-2", {}, 94 * 64, 94 * 64),
        ("kvcomp", {}, 7160, 7160),
        ("kvcomp", {"k_room": 4.0, "v_room": 2.0}, 7160 + 256 - 896, 7160 + 256 - 896),
        ("kvcomp", {"k_unit": "channel", "k_scale": 0.25}, 6260, 6260),
        ("cachegen", {}, 164 * 64, 164 * 64),
        ("cachegen-eq86", {}, 132 * 64, 132 * 64),
        ("cachegen-fp16", {}, 32768, 164 * 64),
        ("cachegen-delta", {}, 11520, 11520),
        ("cachegen-delta", {"level": "eq86"}, 9472, 9472),
        ("toy-int8", {}, 16392, 16392),
        ("rot-k4v4", {}, 8448, 8448),
        ("rot-k4v4-window", {}, 8448, 8448),
        ("rot-k3v3", {}, 6400, 6400),
        ("rot-k3v2", {}, 5376, 5376),
        ("rot-k2v2", {}, 4352, 4352),
        ("fp16", {}, 32768, 32768),
        *((name, {}, 32768, 32768) for name in EVICTING if name != "mpcache"),
        ("mpcache", {"page_tokens": 64}, 32768 + 512, 32768 + 512),
        ("snapkv", {"of": "hack"}, 5120, 5120),
    ],
    ids=str,
)
def test_page_bytes_of_the_design(
    name: str, settings: dict[str, int | float | str | bool], resident: int, wire: int
) -> None:
    """Head_dim 128, Π 64, one KV head: design section 2."""
    codec = make(name, 128, **settings)
    assert codec.formats[0].page_bytes == resident
    assert planes_bytes(codec.wire_planes[0]) == wire
    assert fp16_page_bytes(codec.formats[0]) == 32768


@pytest.mark.parametrize(("name", "size"), [("kvquant-4", 150 * 64 + 4), ("kvquant-2", 86 * 64 + 4)])
def test_a_calibrated_page_says_its_first_row_in_place_of_ranges(name: str, size: int) -> None:
    codec = make(name, 128, calibration=str(calibration_file(1, 1, 128, "kvquant")))
    assert codec.formats[0].page_bytes == planes_bytes(codec.wire_planes[0]) == size


def test_every_codec_of_the_table_is_pinned() -> None:
    """A new codec must be entered above. `zack` and the tests' own entries use pages of other codecs."""
    hack = {"hack", "hack-k4v2", "hack-paper"}
    rotated = {"rot-k4v4", "rot-k4v4-window", "rot-k3v3", "rot-k3v2", "rot-k2v2"}
    floats, groups = {"fp8", "mxfp8", "mxfp6", "mxfp4", "nvfp4"}, {"kivi-4", "kivi-2", "kvquant-4", "kvquant-2"}
    evicting = {"streamingllm", "snapkv", "h2o", "mpcache"}
    assert evicting == set(EVICTING)
    cachegen = {"cachegen", "cachegen-eq86", "cachegen-fp16", "cachegen-delta"}
    known = {*hack, *rotated, *floats, *groups, *evicting, *cachegen, "fp16", "kvcomp", "zack"}
    assert set(CODECS) - {"hack-zstd", "toy-layers", "toy-int8", "rot-window", "rot-exact-layer"} == known


@pytest.mark.parametrize(
    ("head_dim", "page_tokens", "wire", "with_sums"),
    [(128, 32, 96, 104), (128, 64, 80, 84), (128, 128, 72, 76), (64, 32, 48, 52), (64, 64, 40, 42), (64, 128, 38, 40)],
)
def test_bytes_per_token(head_dim: int, page_tokens: int, wire: int, with_sums: int) -> None:
    """The table of kv-compression.md section 3. Sums take one byte wherever the largest sum fits."""
    symmetric = make("hack", head_dim, page_tokens=page_tokens)
    paper = make("hack-paper", head_dim, page_tokens=page_tokens)
    assert planes_bytes(symmetric.wire_planes[0]) == planes_bytes(paper.wire_planes[0]) == wire * page_tokens
    assert symmetric.formats[0].page_bytes == wire * page_tokens
    assert paper.formats[0].page_bytes == with_sums * page_tokens


@pytest.mark.grid
@pytest.mark.parametrize("backend", sorted(AUTO))
@pytest.mark.parametrize("name", sorted(CODECS))
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("page_tokens", [32, 64, 128])
def test_pools_and_wire_tensors_have_exactly_that_size(
    name: str, head_dim: int, page_tokens: int, backend: str
) -> None:
    """The test measures storage on every backend, so a wider type that only counts as packed would fail."""
    pages, slots, heads = 3, 2, 2
    codec = make_codec(
        CodecConfig(name=name, settings={"page_tokens": page_tokens}), KvShape(1, heads, head_dim), load(backend)
    )
    pool = codec.new_pools(pages, slots, range(heads))[0]
    storages = {plane.untyped_storage().data_ptr(): plane.untyped_storage() for plane in pool.planes.values()}
    resident = sum(storage.nbytes() for storage in storages.values())
    if len(storages) > 1:
        assert resident == pages * heads * codec.formats[0].page_bytes
    else:  # a record for each page, in which every plane begins at a cache line
        sizes = [heads * plane.page_bytes for plane in codec.formats[0].planes]
        assert resident == pages * sum(-(-size // LINE_BYTES) * LINE_BYTES for size in sizes)
    for rows in (pool.open_k, pool.open_v):
        assert (
            rows.untyped_storage().nbytes()
            == slots * heads * codec.window.pages * fp16_page_bytes(codec.formats[0]) // 2
        )
    wire = codec.to_wire(0, pool, torch.tensor([2, 0]))
    assert list(wire) == [plane.name for plane in codec.wire_planes[0]]
    for plane in codec.wire_planes[0]:
        assert wire[plane.name].shape == (heads, 2, *plane.shape)
        assert wire[plane.name].dtype is plane.dtype
        assert wire[plane.name].is_contiguous()
        assert wire[plane.name].nbytes == 2 * heads * plane.page_bytes
    assert sum(plane.untyped_storage().nbytes() for plane in wire.values()) == 2 * heads * planes_bytes(
        codec.wire_planes[0]
    )
