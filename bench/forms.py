"""The cost of 8-bit Q and P in accuracy, in both forms of the arithmetic: `python -m bench.forms`.

Homomorphic decode is compared with FP64 attention on the same dequantized pages, so that only the rounding of Q and P
shows. The table also has the error of the 2-bit pages themselves. Backend `reference`; random rows, a few seconds.
"""

from __future__ import annotations

from typing import Final

import torch
from hack_kernels.base import Rows, Spans
from hack_kernels.hack_format import Arithmetic, HackFormat
from hack_kernels.philox import Coordinates
from hack_kernels.pools import new_pool
from hack_kernels.quantize import quantize_k, quantize_v
from hack_kernels.reference.hack import HackReference
from torch import Tensor

TOKENS: Final = 1024
QUERIES: Final = 16
HEAD_DIM: Final = 128
SHARPNESS: Final = {"flat": 0.0, "random": 1.0, "peaked": 6.0}
"""Name -> factor on the queries: 0 weighs all keys alike, 6 puts most weight on few keys."""


def main() -> None:
    """Print one line per kind of rows and page size."""
    print(f"{TOKENS} tokens, {QUERIES} queries, head_dim {HEAD_DIM}: relative error of the outputs")
    print(f"{'Π':>4} {'attention':>10} {'K':>10} {'2-bit K, V':>12} {'symmetric':>11} {'asymmetric':>11}")
    for page_tokens in (32, 64, 128):
        for attention, sharpness in SHARPNESS.items():
            for kind in ("normal", "outliers"):
                pages, *forms = errors(page_tokens, sharpness, outliers=kind == "outliers")
                line = f"{page_tokens:>4} {attention:>10} {kind:>10} {pages:>12.1e}"
                print(line + "".join(f" {error:>11.1e}" for error in forms))


def errors(page_tokens: int, sharpness: float, *, outliers: bool) -> tuple[float, float, float]:
    """(error of the pages alone, error of the symmetric form against the pages, error of the asymmetric form)."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(TOKENS, 1, HEAD_DIM, generator=generator) for _ in range(2))
    q = torch.randn(1, QUERIES, HEAD_DIM, generator=generator) * sharpness
    if outliers:
        k[:, :, :4] = k[:, :, :4] * 4 + 8  # channels with an offset, as keys of real models have
    k, v = k.half(), v.half()
    exact = attention(q[0], k[:, 0], v[:, 0])
    fmt = HackFormat(HEAD_DIM, page_tokens)
    on_pages = attention(q[0], *reconstructed(fmt, k, v))
    symmetric, asymmetric = (
        relative(decode(HackFormat(HEAD_DIM, page_tokens, arithmetic=form), q, k, v), on_pages) for form in Arithmetic
    )
    return relative(on_pages, exact), symmetric, asymmetric


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FP64 softmax(q k^T / sqrt(D)) v."""
    scores = q.double() @ k.double().T / HEAD_DIM**0.5
    return torch.softmax(scores, dim=-1) @ v.double()


def reconstructed(fmt: HackFormat, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """K^ and V^ [TOKENS, D] FP64. The last page stays exact, since it is the query's own page."""
    rows_k, rows_v = k[:, 0].double(), v[:, 0].double()
    for start in range(0, TOKENS - 1, fmt.page_tokens):
        page = slice(start, start + fmt.page_tokens)
        if start + fmt.page_tokens <= TOKENS - fmt.page_tokens:
            where = Coordinates(0, 0, torch.arange(start, start + fmt.page_tokens))
            rows_k[page] = quantize_k(fmt, where, k[page]).dequantize(torch.float64).flatten(1)
            rows_v[page] = quantize_v(fmt, where, v[page]).dequantize(torch.float64)[0].T
    return rows_k, rows_v


def decode(fmt: HackFormat, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Homomorphic decode of QUERIES heads over one KV head; the last page is open."""
    cpu, pi = torch.device("cpu"), fmt.page_tokens
    kernels, sealed = HackReference(fmt, cpu), TOKENS // pi - 1
    pool = new_pool(fmt, kernels, cpu, sealed, 1, range(1))
    pool.open_k[0], pool.open_v[0] = (x[sealed * pi :].transpose(0, 1) for x in (k, v))
    blocks = (x[: sealed * pi].view(sealed, pi, 1, HEAD_DIM).transpose(1, 2) for x in (k, v))
    kernels.seal(0, pool, torch.arange(sealed), torch.arange(sealed) * pi, *blocks)
    zero = torch.zeros(1, dtype=torch.int64)
    spans = Spans(zero + TOKENS - 1, zero + 1, zero, torch.arange(sealed)[None], zero)
    return kernels.attend(0, pool, spans, Rows(q))[0]


def relative(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference, relative to the norm of `expected`."""
    return float((found.double() - expected).norm() / expected.norm())


if __name__ == "__main__":
    main()
