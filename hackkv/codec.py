"""The protocol of codecs. A codec is the form in which KV rests, travels and is attended to.

A codec owns three things: the format of a sealed page (`hack_kernels.base.PageFormat`, one for each of the model's
layers), what a batch does to pages (`attend`), and which planes travel (`to_wire`, `from_wire`). Schedulers, pools,
wires and engines see pages only as planes of bytes, so a new codec plugs in by entering the `CODECS` table.

All codecs share the life of a page: rows collect as FP16 in the sequence's *slot* of a `Pool`, and a full page is
sealed. The slot keeps rows that later queries see exactly (`Window`). Letters: T rows, B sequences, N pages, S slots,
Π page_tokens, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hack_kernels.base import PageFormat, Plane, Planes, Pool
from hack_kernels.window import Window
from torch import Tensor

from hackkv.batch import Batch, Fills
from hackkv.choices import Eviction
from hackkv.wire_form import WireForm

FP16_BYTES = 2


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """The weights around a layer's attention: matrices [out, in], of the model's dtype."""

    qkv: Tensor
    """[(Hq + 2 Hkv) * D, hidden]: the rows of Q, then K, then V."""
    qkv_bias: Tensor | None
    """[(Hq + 2 Hkv) * D]"""
    qk_norm: Tensor | None
    """[Hq + Hkv, D]: the norm weight of each query head, then of each KV head."""
    out: Tensor
    """[hidden, Hq * D]"""
    packed: bool = False
    """Whether some matrices rest as codes, and these are their values. A matrix returned unchanged stays codes."""


def rows_held(codec: KvCodec, tokens: int) -> int:
    """The number of rows that the cache holds of a prompt of `tokens` tokens, once it is computed."""
    return tokens if codec.eviction is None else codec.eviction.rows_held(tokens)


@dataclass(frozen=True, slots=True)
class Origin:
    """The model that a codec's calibration file was made for, as the file says."""

    path: Path
    """The calibration file."""
    model: str
    """The model's name."""
    model_hash: str
    """`hackkv.model.identity.source_hash` of its checkpoint; empty if the file does not say."""


class KvCodec(Protocol):
    """One way to keep a KV cache. Implementations are stateless but for timers: pools are passed in."""

    name: str
    page_tokens: int
    """Π, the same in all layers."""
    window: Window
    """The rows that queries see exactly, the same in all layers."""
    wire_form: WireForm
    """The form of planes on the wire. `hackkv.framing` applies it, not the codec."""
    codes_where_it_pays: bool
    """Whether a sender codes planes only where that saves time (`hackkv.wire_choice`); if not, it always does."""
    prepares_weights: bool
    """Whether `prepare_weights` changes anything; if not, codecs may share the weights of one model."""
    origin: Origin | None
    """The model that the codec's calibration was made for; None for a codec that has none, which serves any model."""
    lossless: bool
    """Whether KV rests as exactly as FP16 holds it, so that nobody has to measure what the codec costs."""

    @property
    def formats(self) -> tuple[PageFormat, ...]:
        """The format of a sealed page, by layer."""
        ...

    @property
    def wire_planes(self) -> tuple[tuple[Plane, ...], ...]:
        """The planes of a sealed page that travel, in wire order, by layer."""
        ...

    @property
    def quantize_s(self) -> float:
        """Seconds spent sealing so far."""
        ...

    @property
    def attend_s(self) -> float:
        """Seconds spent in attention so far."""
        ...

    @property
    def seals_open_page(self) -> bool:
        """Whether the open page rests as planes too, however few rows it holds."""
        ...

    @property
    def eviction(self) -> Eviction | None:
        """The choice of a prompt's rows that stay once it is computed; None if all stay."""
        ...

    @property
    def bytes_follow_tokens(self) -> bool:
        """Whether a sealed page's bytes depend on the tokens up to its end alone: if so, prompts share prefixes."""
        ...

    @property
    def decodes_as_prefill(self) -> bool:
        """Whether generated rows get the K and V of prompt rows. They do not if decode reads only some of the pages."""
        ...

    @property
    def approximation_s(self) -> float:
        """Seconds within `attend_s` spent on correction terms or on dequantizing, where they can be told apart."""
        ...

    @property
    def served_by(self) -> str:
        """The name of what computes on sealed pages: the backend's, or "reference" for a format that the backend has
        no kernels for. Commas separate the names where formats differ."""
        ...

    def fingerprint(self) -> tuple[tuple[str, str], ...]:
        """Every setting that changes bytes or results, as named fields for the handshake."""
        ...

    def prepare_weights(self, layer: int, weights: AttentionWeights) -> AttentionWeights:
        """The weights of a layer with what the codec folds into them, such as a rotation of V.

        Called once for each layer when the model is loaded. Shapes and dtypes stay.
        """
        ...

    def new_pools(self, num_pages: int, num_slots: int, heads: range, *, prompts: bool = False) -> tuple[Pool, ...]:
        """An empty pool of KV heads `heads` for each layer; with `prompts`, for nodes that compute whole prompts."""
        ...

    def attend(self, layer: int, pool: Pool, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append k, v [T, Hkv, D] to the cache and return the attention of q [T, Hq, D] over it, causal, in q's dtype.
        If the batch has `ends`, the last layer's result has these rows alone, [R, Hq, D].

        Full pages are sealed into `pool`, exact rows go to the slots. Repeating a call with the same batch and rows
        writes the same bytes, unless a span overwrites rows of its slot that it needs. That happens if it starts inside
        a page and ends in a later one or, with recent pages, if it starts behind row 0 and has rows of several pages.

        A row that is not finite in FP16 sets its sequence in `batch.faulty`. In decode the row is not written, in
        prefill zeros are. The sequence's output is undefined; others are served. The call does not wait for the device.
        """
        ...

    def to_wire(self, layer: int, pool: Pool, page_ids: Tensor) -> Planes:
        """Planes of a layer that travel, in wire order: name -> [Hkv, P, *plane shape], contiguous."""
        ...

    def seal_held(self, layer: int, pool: Pool, fills: Fills) -> None:
        """Seal pages whose rows all stand in slots. Any thread may call this. It neither waits for the device nor asks
        the host about pages."""
        ...

    def from_wire(self, layer: int, pool: Pool, page_ids: Tensor, planes: Planes) -> None:
        """Install pages that `to_wire` of an equal codec produced for the same layer, bit-exact."""
        ...


def planes_bytes(planes: Iterable[Plane]) -> int:
    """Bytes of these planes in one page of one layer and KV head."""
    return sum(plane.page_bytes for plane in planes)


def fp16_page_bytes(fmt: PageFormat) -> int:
    """Bytes of a page's rows of K and V of one layer and KV head, uncompressed."""
    return 2 * FP16_BYTES * fmt.page_tokens * fmt.head_dim
