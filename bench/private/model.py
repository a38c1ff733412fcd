"""A Llama's prefill and decode over arrays of any library with numpy's names, with MPCache's choices among its rows.

Like `rules.py` it runs on numpy in the clear and on secret shares. The owner of the weights first folds them, alone:
norms and 1/√D go into the matrices after them. Everything that depends only on lengths and positions is public.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from bench.private.rules import Array, Rules, kept_rows, packed

BLOCK: Final = 128
"""Queries of a prompt that are attended to at once. A block skips the keys after it."""
HIDDEN: Final = -120.0
"""The score of a row that a query does not see; far below every real score."""

EPSILON: Final = 1e-5
"""Epsilon of norms. The checkpoint's 1e-6 is less than one unit of 18 fraction bits; mean squares exceed 10 here."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a model; public."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    theta: float

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads


def folded(shape: Shape, tensors: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """A checkpoint's tensors in the form of the functions below, float32."""
    out = {"embed": tensors["model.embed_tokens.weight"]}
    out["head"] = (tensors["model.embed_tokens.weight"] * tensors["model.norm.weight"]).T
    for layer in range(shape.layers):
        of = {name.partition(f"layers.{layer}.")[2].removesuffix(".weight"): x for name, x in tensors.items()}
        norm = of["input_layernorm"]
        q, k, v = (of[f"self_attn.{name}_proj"] * norm for name in "qkv")
        out[f"{layer}.qkv"] = np.concatenate((q / np.sqrt(shape.head_dim), k, v)).T
        out[f"{layer}.o"] = of["self_attn.o_proj"].T
        up = np.concatenate((of["mlp.gate_proj"], of["mlp.up_proj"]))
        out[f"{layer}.up"] = (up * of["post_attention_layernorm"]).T
        out[f"{layer}.down"] = of["mlp.down_proj"].T
    return {name: np.ascontiguousarray(x, np.float32) for name, x in out.items()}


def angles(shape: Shape, start: int, count: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """cos and sin [count, D] of the positions from `start` on (rotary embedding, in halves)."""
    inverse = shape.theta ** (-np.arange(0, shape.head_dim, 2) / shape.head_dim)
    turned = np.tile(np.outer(np.arange(start, start + count), inverse), 2)
    return np.cos(turned).astype(np.float32), np.sin(turned).astype(np.float32)


def prefill_layer(
    xp: Any, shape: Shape, rules: Rules, x: Array, weights: Sequence[Array], cos: Array, sin: Array
) -> tuple[Array, Array, Array, Array]:
    """(x [T, hidden] after a layer, its K, its V [Hkv, T, D], votes [Hkv, T] of the last queries)."""
    qkv, o, up, down = weights
    tokens, kv = x.shape[0], shape.kv_heads
    q, k, v = _projected(xp, shape, x, qkv, cos, sin)
    voters = tokens - rules.voters_of(tokens)
    rows, votes = [], xp.zeros((kv, tokens), dtype=xp.float32)
    for start in range(0, tokens, BLOCK):
        end = min(start + BLOCK, tokens)
        part = q[:, :, start:end].reshape(kv, -1, shape.head_dim)
        scores = xp.matmul(part, xp.swapaxes(k[:, :end], 1, 2)).reshape(kv, shape.group, end - start, end)
        seen = xp.arange(end) <= xp.arange(start, end)[:, None]
        p = softmax(xp, xp.where(seen, scores, HIDDEN))
        rows.append(xp.matmul(p.reshape(kv, -1, end), v[:, :end]).reshape(kv, shape.group, end - start, -1))
        if end > voters:
            counted = xp.sum(p[:, :, max(voters - start, 0) :], axis=(1, 2))
            votes = votes + xp.pad(counted, ((0, 0), (0, tokens - end)))
    return rest(xp, x, xp.concatenate(rows, 2), o, up, down), k, v, votes


def evicted(xp: Any, rules: Rules, votes: Array, rows: Sequence[Array]) -> tuple[Array, list[Array]]:
    """(the rows that stay by `votes` [Hkv, T], what is left of `rows`: K and V of the layers that share the choice)."""
    tokens = votes.shape[-1]
    kept, held = kept_rows(xp, rules, votes), rules.held(tokens)
    first, last = min(rules.first, held), min(rules.last, held - min(rules.first, held))
    move = packed(xp, kept[:, first : tokens - last], held - first - last).astype(xp.float32)

    def stay(each: Array) -> Array:
        middle = xp.matmul(move, each[:, first : tokens - last])
        return xp.concatenate((each[:, :first], middle, each[:, tokens - last :]), 1)

    return kept, [stay(each) for each in rows]


def project(
    xp: Any, shape: Shape, here: Array, x: Array, qkv: Array, new_k: Array, new_v: Array, cos: Array, sin: Array
) -> tuple[Array, Array, Array]:
    """(q [Hkv, G, D] of the row x [1, hidden], new_k, new_v [Hkv, room, D] with that row added).

    `here` [room] marks the place of the row among the answer's rows; cos and sin are [1, D].
    """
    q, k, v = _projected(xp, shape, x, qkv, cos, sin)
    put = here[None, :, None]
    return q[:, :, 0], xp.where(put, k, new_k), xp.where(put, v, new_v)


def attend(
    xp: Any,
    rules: Rules,
    gathers: bool,
    seen: Array,
    q: Array,
    k: Array,
    v: Array,
    new_k: Array,
    new_v: Array,
    choice: Array | None = None,
) -> Array:
    """Attention of q [Hkv, G, D] over the answer's rows, and over the prompt's rows k, v or their clusters `choice`."""
    if choice is None:
        p = softmax(xp, xp.concatenate((xp.matmul(q, xp.swapaxes(k, 1, 2)), _own(xp, q, new_k, seen)), -1))
        return xp.matmul(p, xp.concatenate((v, new_v), 1))
    attended = _attend_gathered if gathers else _attend_scattered
    return attended(xp, rules, seen, q, k, v, new_k, new_v, choice)


def _own(xp: Any, q: Array, new_k: Array, seen: Array) -> Array:
    return xp.where(seen, xp.matmul(q, xp.swapaxes(new_k, 1, 2)), HIDDEN)


def _attend_gathered(
    xp: Any, rules: Rules, seen: Array, q: Array, k: Array, v: Array, new_k: Array, new_v: Array, choice: Array
) -> Array:
    """Gather K and V of the chosen clusters first, as the paper does (Algorithm 2)."""
    size, (heads, _, dim) = rules.page_tokens, k.shape

    def read(rows: Array) -> Array:
        middle = xp.matmul(choice, rows[:, size:-size].reshape(heads, -1, size * dim)).reshape(heads, -1, dim)
        return xp.concatenate((rows[:, :size], middle, rows[:, -size:]), 1)

    return attend(xp, rules, True, seen, q, read(k), read(v), new_k, new_v)


def _attend_scattered(
    xp: Any, rules: Rules, seen: Array, q: Array, k: Array, v: Array, new_k: Array, new_v: Array, choice: Array
) -> Array:
    """Gather scores of the chosen clusters, and scatter their weights back: K and V stay in place.

    With three parties a product costs as many bytes as its result has elements, and there are far fewer scores than
    elements of K and V.
    """
    size, (heads, group, _) = rules.page_tokens, q.shape

    def turned(each: Array, last: int) -> Array:
        """[Hkv, a, b, c] as [Hkv, b, a * c], or back."""
        return each.swapaxes(1, 2).reshape(heads, each.shape[2], last)

    scores = xp.matmul(q, xp.swapaxes(k, 1, 2))
    middle = turned(scores[:, :, size:-size].reshape(heads, group, -1, size), group * size)
    few = turned(xp.matmul(choice, middle).reshape(heads, -1, group, size), choice.shape[1] * size)
    p = softmax(xp, xp.concatenate((scores[:, :, :size], few, scores[:, :, -size:], _own(xp, q, new_k, seen)), -1))
    end = size + choice.shape[1] * size
    of_few = turned(p[:, :, size:end].reshape(heads, group, -1, size), group * size)
    back = xp.matmul(xp.swapaxes(choice, 1, 2), of_few).reshape(heads, -1, group, size)
    spread = xp.concatenate((p[:, :, :size], turned(back, choice.shape[2] * size), p[:, :, end:]), -1)
    return xp.matmul(spread, xp.concatenate((v, new_v), 1))


def softmax(xp: Any, scores: Array) -> Array:
    """Softmax over the last axis, with one reciprocal per row."""
    e = exp(xp, scores - xp.max(scores, axis=-1, keepdims=True))
    return e * (1 / xp.sum(e, axis=-1, keepdims=True))


def exp(xp: Any, x: Array) -> Array:
    """e^x for x from -256 to 0, by products alone: (1 + u + u²/2)^256 with u = x / 256; relative error x³ / 393216.

    PUMA (arXiv 2307.12533) has 1 + u, which makes weights 12% too small at -8. The run in the clear uses it too.
    """
    u = x * (1 / 256)
    y = 1 + u + 0.5 * u * u
    for _ in range(8):
        y = y * y
    return y


def _projected(xp: Any, shape: Shape, x: Array, qkv: Array, cos: Array, sin: Array) -> tuple[Array, Array, Array]:
    """q [Hkv, G, n, D] and k, v [Hkv, n, D] of rows x [n, hidden]; q and k are rotated."""
    made = xp.matmul(normed(xp, x), qkv).reshape(x.shape[0], -1, shape.head_dim).swapaxes(0, 1)
    turning = made[: shape.heads + shape.kv_heads]
    half = shape.head_dim // 2
    turned = turning * cos + xp.concatenate((-turning[..., half:], turning[..., :half]), -1) * sin
    q = turned[: shape.heads].reshape(shape.kv_heads, shape.group, x.shape[0], shape.head_dim)
    return q, turned[shape.heads :], made[shape.heads + shape.kv_heads :]


def rest(xp: Any, x: Array, out: Array, o: Array, up: Array, down: Array) -> Array:
    """x [n, hidden] after the rest of a layer; `out` [Hkv, G, n, D] is the output of attention."""
    heads = out.reshape(-1, x.shape[0], out.shape[-1])
    x = x + xp.matmul(heads.swapaxes(0, 1).reshape(x.shape[0], -1), o)
    both = xp.matmul(normed(xp, x), up)
    gate, straight = both[:, : both.shape[1] // 2], both[:, both.shape[1] // 2 :]
    return x + xp.matmul(_silu(xp, gate) * straight, down)


def normed(xp: Any, x: Array) -> Array:
    """Root mean square norm without weights, which are folded into the next matrix."""
    return x * (1 / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + EPSILON))


def _silu(xp: Any, x: Array) -> Array:
    """x / (1 + e^-x) from e^-|x|, so that nothing overflows. The reciprocal is Newton's, by products alone."""
    negative = x < 0
    e = exp(xp, xp.where(negative, x, -x))
    y = 1.457 - 0.5 * e - 0.5
    for _ in range(3):
        y = y * (2 - (1 + e) * y)
    return x * xp.where(negative, 1 - y, y)
