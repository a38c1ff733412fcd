"""Layers that get more bits than the others: `hackkv calibrate --target-bytes`.

The cost of codes in one side (K or V) of one layer is measured. The model reads text with that side as codes and
everything else exact, and the cost is the KL of its predictions. One more bit removes three quarters of it, since
errors halve. A bit costs the same bytes everywhere, so each bit goes where most cost is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import torch
from hack_kernels.level_format import Feedback
from hack_kernels.reference.levels import dequantize, quantize_rows
from torch import Tensor

from hackkv.codecs import CODECS
from hackkv.codecs.hadamard import hadamard
from hackkv.codecs.rotated import LayerBits, RotatedSettings, make_rotated
from hackkv.errors import ConfigError
from hackkv.model.exact import causal
from hackkv.model.llama import Attend, Llama, flat_positions
from measure.tasks import Ids

TOKENS: Final = 1024
"""Tokens of a window that are read; fewer if it is shorter."""
PAGE: Final = 64
EXACT_BEFORE: Final = 1
"""Pages before a query's own that the query sees exactly, like the first page. A few bad rows there would hide the
rest."""
SCORED_STEP: Final = 4
"""Predictions are compared at every so many tokens of the second half."""
MOST_BITS: Final = 4

Solved = Mapping[str, Tensor]
"""Tensors of one layer, as `solve` gives them."""
OnTokens = Callable[[int], None]


def share(k_bits: float, v_bits: float, dim: int) -> float:
    """Bytes of a token's codes and scales, as a share of its bytes in FP16."""
    return (dim * (k_bits + v_bits) / 8 + 4) / (4 * dim)


def base_of(target: float, dim: int) -> LayerBits:
    """The largest preset within `target`, the same in all layers. Raises `ConfigError` if there is none."""
    found = [RotatedSettings.model_validate(p.settings) for p in CODECS.values() if p.make is make_rotated]
    fitting = [each for each in found if share(each.k_bits, each.v_bits, dim) <= target]
    if not fitting:
        least = min(share(each.k_bits, each.v_bits, dim) for each in found)
        raise ConfigError(f"--target-bytes: {target:.1%} of FP16 is too little; the smallest codec has {least:.1%}")
    best = max(fitting, key=lambda each: each.k_bits + each.v_bits)
    return LayerBits(k_bits=best.k_bits, v_bits=best.v_bits, k=(), v=())


def bases_of(targets: Sequence[float], dim: int) -> dict[float, LayerBits]:
    """Target -> its base (`base_of`). Raises `ConfigError` also if two targets have one base."""
    found = {target: base_of(target, dim) for target in targets}
    for base, count in Counter(found.values()).items():
        if count > 1:
            raise ConfigError(f"--target-bytes: {count} targets are for K in {base.k_bits} bits and V in {base.v_bits}")
    return found


def spend(base: LayerBits, losses: Tensor, target: float, dim: int) -> LayerBits:
    """Bits by layer within `target`. `losses` [2, layers] are those of K and of V with the base's bits."""
    layers = losses.shape[1]
    bits = torch.tensor([[base.k_bits], [base.v_bits]]).repeat(1, layers)
    left = losses.double().clone()
    while True:
        left[bits >= MOST_BITS] = -1
        place = int(left.argmax())
        more = bits.flatten().clone()
        more[place] += 1
        k, v = (float(each) for each in more.view(2, layers).double().mean(1))
        if float(left.max()) <= 0 or share(k, v, dim) > target:
            return base.model_copy(update={"k": tuple(bits[0].tolist()), "v": tuple(bits[1].tolist())})
        bits = more.view(2, layers)
        left.view(-1)[place] /= 4


def in_words(bits: LayerBits, dim: int) -> str:
    """A line for the user: the codec that the bits are for, its bytes, and the layers that have more."""
    k, v = (sum(each) / len(each) for each in (bits.k, bits.v))
    more = [
        f"{name} has {width} bits in layers {', '.join(str(i) for i, each in enumerate(widths) if each == width)}"
        for name, widths, least in (("K", bits.k, bits.k_bits), ("V", bits.v, bits.v_bits))
        for width in sorted(set(widths) - {least})
    ]
    size = f"for codec rot-k{bits.k_bits}v{bits.v_bits}: {share(k, v, dim):.1%} of FP16's bytes"
    return "; ".join((size, *more))


def losses_of(model: Llama, window: Ids, solved: Sequence[Solved], base: LayerBits, on_tokens: OnTokens) -> Tensor:
    """KL in nats, float64 [2, layers], with K or V of one layer as codes of the base's bits."""
    ids = torch.from_numpy(window[:TOKENS]).to(model.device)
    exact = _predictions(model, ids, _attend(None))
    on_tokens(len(ids))
    found = torch.zeros(2, len(solved), dtype=torch.float64)
    for side, layer, rows in _sides(solved, base):
        other = _predictions(model, ids, _attend((side, layer, rows)))
        found[side, layer] = (exact.exp() * (exact - other)).sum(-1).mean().clamp(min=0)
        on_tokens(len(ids))
    return found


def passes(layers: int) -> int:
    """How often `losses_of` reads its text."""
    return 1 + 2 * layers


Coded = Callable[[Tensor], Tensor]
"""Rows [T, Hkv, D] -> the values that their codes stand for."""


def _sides(solved: Sequence[Solved], base: LayerBits) -> Iterator[tuple[int, int, Coded]]:
    for layer, each in enumerate(solved):
        yield 0, layer, partial(coded_keys, solved=each, bits=base.k_bits)
        yield 1, layer, partial(coded_values, bits=base.v_bits)


def coded_keys(k: Tensor, solved: Solved, bits: int) -> Tensor:
    """K [T, Hkv, D] after coding in the calibrated basis and decoding."""
    basis, mean = solved["basis"].double().to(k.device), solved["mean"].double().to(k.device)[:, None]
    rotated = ((k.double().transpose(0, 1) - mean) @ basis).half()
    feedback = Feedback(solved["gains"], solved["weights"]).to(k.device)
    coded = dequantize(bits, *quantize_rows(rotated, bits, feedback), torch.float64)
    back: Tensor = coded @ torch.linalg.inv(basis) + mean
    return back.transpose(0, 1).to(k.dtype)


def coded_values(v: Tensor, bits: int) -> Tensor:
    """V [T, Hkv, D] after coding rotated rows and decoding."""
    rotation = hadamard(v.shape[-1]).to(v.device)
    rotated = (v.double() @ rotation).half()
    back: Tensor = dequantize(bits, *quantize_rows(rotated, bits), torch.float64) @ rotation.mT
    return back.to(v.dtype)


def _attend(coded: tuple[int, int, Coded] | None) -> Attend:
    """Attention of one sequence, exact but for the sealed rows of one side of one layer."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if coded is None or coded[1] != layer:
            return causal(q, k, v)
        sides = [k, v]
        sides[coded[0]] = coded[2](sides[coded[0]])
        return by_pages(q, (k, v), (sides[0], sides[1]))

    return attend


def by_pages(q: Tensor, exact: tuple[Tensor, Tensor], sealed: tuple[Tensor, Tensor]) -> Tensor:
    """Causal attention. A query sees `sealed` rows in the pages between the first page and its near pages."""
    out = torch.empty_like(q)
    for start in range(0, q.shape[0], PAGE):
        rows, near = slice(start, start + PAGE), max(PAGE, start - EXACT_BEFORE * PAGE)
        keys, values = (
            torch.cat((x[:PAGE], y[PAGE:near], x[near : start + PAGE])) for x, y in zip(exact, sealed, strict=True)
        )
        out[rows] = causal(q[rows], keys[: start + PAGE], values[: start + PAGE])
    return out


def _predictions(model: Llama, ids: Tensor, attend: Attend) -> Tensor:
    """Log probabilities, float64 [R, vocab], at the tokens that are compared."""
    count = len(ids)
    scored = torch.arange(count // 2, count, SCORED_STEP, device=model.device)
    with torch.inference_mode():
        hidden = model.forward(ids, flat_positions([(0, count)], model.device), attend, rows=scored)
        return model.logits(hidden).double().log_softmax(-1)
