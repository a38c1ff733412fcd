"""The rivals are correct: a benchmark against a wrong rival proves nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hack_kernels import cpu
from hack_kernels.base import BackendUnavailable, Pool, Rows, Spans
from hack_kernels.cpu.extension import supported_isas
from hack_kernels.hack_format import HackFormat
from torch import Tensor

from lab.rivals import ISAS, RIVALS, Rival, available, bf16_pages, read_all, run_dots
from tests.hack_kernels.pools import empty_pool, hack_kernels, random_rows

FMT = HackFormat(128, 64)
HEADS = 2


@pytest.fixture(params=RIVALS)
def rival(request: pytest.FixtureRequest) -> Rival:
    try:
        return Rival(request.param, threads=2)
    except BackendUnavailable as error:
        pytest.skip(str(error))


def pool_and_rows(rival: Rival, k: Tensor, v: Tensor) -> tuple[Pool, Tensor, Tensor]:
    """The pool for full pages of k, v [n, Hkv, D], and the FP32 rows that it stands for."""
    pi, full = FMT.page_tokens, k.shape[0] // FMT.page_tokens
    paged = [x[: full * pi].view(full, pi, HEADS, 128).transpose(1, 2) for x in (k, v)]
    kernels = hack_kernels(cpu.CpuBackend(threads=2), FMT)
    pool = empty_pool(kernels, FMT, full, HEADS)
    if rival.name == "bf16":
        return replace(pool, planes=bf16_pages(*paged)), k.bfloat16().float(), v.bfloat16().float()
    ids = torch.arange(full)
    kernels.seal(0, pool, ids, ids * pi, *paged)
    rows = [k.float(), v.float()]
    from_wire = kernels.export(pool, ids)
    for name, x in zip("kv", rows, strict=True):
        x[: full * pi] = dequantized(from_wire, name).transpose(0, 1)
    return pool, rows[0], rows[1]


def dequantized(wire: dict[str, Tensor], name: str) -> Tensor:
    """The dequantized rows [Hkv, P·Π, D] FP32 of K or V."""
    fields = torch.stack([(wire[f"{name}_codes"] >> (2 * i)) & 3 for i in range(4)], -1).float()
    scale, minimum = (wire[f"{name}_{part}"].float() for part in ("scale", "min"))
    if name == "k":  # [H, P, Π/4, D, 4] -> [H, P, Π, G, Z]
        codes = fields.transpose(-1, -2).flatten(2, 3).unflatten(-1, (2, 64))
        rows: Tensor = codes * scale[..., None] + minimum[..., None]
        return rows.flatten(-2).flatten(1, 2)
    codes = fields.flatten(-2)  # [H, P, D, Π]
    values: Tensor = codes * scale[..., None] + minimum[..., None]
    return values.transpose(-1, -2).flatten(1, 2)


def exact(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    group = q.shape[1] // HEADS
    keys, values = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
    scores = (q.transpose(0, 1) @ keys.transpose(1, 2)) / math.sqrt(128)
    seen = torch.arange(k.shape[0])[None] <= start + torch.arange(q.shape[0])[:, None]
    return (torch.softmax(scores.masked_fill(~seen, -math.inf), -1) @ values).transpose(0, 1)


def one_span(start: int, count: int, pages: int) -> Spans:
    zero = torch.tensor([0])
    return Spans(torch.tensor([start]), torch.tensor([count]), zero, torch.arange(pages)[None], zero)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_decode_equals_fp32_attention(rival: Rival, group: int) -> None:
    n = 1000
    k, v = (random_rows(seed, n, HEADS, 128).half() for seed in (1, 2))
    pool, keys, values = pool_and_rows(rival, k, v)
    first = (n - 1) // 64 * 64
    for open_rows, x in ((pool.open_k, k), (pool.open_v, v)):
        open_rows[0, :, : n - first] = x[first:].transpose(0, 1)
    keys[first:], values[first:] = k[first:].float(), v[first:].float()
    spans = one_span(n - 1, 1, n // 64)
    q = random_rows(3, 1, HEADS * group, 128)
    out = rival.attend(FMT, pool, spans, Rows(q))
    assert relative(out, exact(q, keys, values, n - 1)) < (6e-3 if rival.name == "bf16" else 1e-5)


def test_prefill_of_bf16_equals_fp32_attention() -> None:
    try:
        rival = Rival("bf16", threads=2)
    except BackendUnavailable as error:
        pytest.skip(str(error))
    n = 200
    k, v = (random_rows(seed, n, HEADS, 128).half() for seed in (4, 5))
    pool, _, _ = pool_and_rows(rival, k, v)
    spans = one_span(0, n, n // 64)
    q = random_rows(6, n, HEADS * 3, 128)
    out = rival.attend(FMT, pool, spans, Rows(q, k, v))
    assert relative(out, exact(q, k.float(), v.float(), 0)) < 6e-3


def test_settings_that_rivals_lack_are_refused(rival: Rival) -> None:
    fmt = HackFormat(96, 64)
    empty = torch.zeros(1)
    spans = Spans(empty, empty, empty, empty, empty)
    with pytest.raises(ValueError, match="multiples of 64"):
        rival.attend(fmt, Pool({}, empty, empty), spans, Rows(empty))


def test_unknown_rivals_are_refused() -> None:
    with pytest.raises(BackendUnavailable, match="'llama'"):
        Rival("llama", threads=1)


@pytest.mark.parametrize("isa", supported_isas())
def test_rivals_follow_the_instruction_set_in_use(isa: str) -> None:
    assert available(1, isa).keys() in ([set(RIVALS), set()] if isa in ISAS else [set()])
    if isa not in ISAS:
        with pytest.raises(BackendUnavailable, match=f"'bf16' with instruction set '{isa}'"):
            Rival("bf16", threads=1, isa=isa)


@pytest.mark.parametrize("isa", supported_isas())
def test_every_instruction_set_has_bare_dots(isa: str) -> None:
    assert run_dots(isa, rounds=10, threads=2) == 10 * 16 * 64 * 2
    with pytest.raises(BackendUnavailable, match="'sve9'"):
        run_dots("sve9", rounds=1, threads=1)


def test_memory_is_read_in_whole_slices() -> None:
    read_all(torch.zeros(2**18, dtype=torch.uint64), threads=2)
    with pytest.raises(ValueError, match="multiple of"):
        read_all(torch.zeros(5, dtype=torch.uint64), threads=2)
