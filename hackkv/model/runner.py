"""One forward pass of a model over a ragged batch, with its KV in a codec's pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from hackkv.codec import Batch, KvCodec, LayerPages, Span, int64
from hackkv.model.llama import Llama, flat_positions
from hackkv.types import KvLayout


class ModelRunner:
    """A model, a codec, and one pool of pages per layer."""

    def __init__(self, model: Llama, codec: KvCodec, num_pages: int, num_slots: int) -> None:
        spec = model.spec
        self.model = model
        self.codec = codec
        self.layout: KvLayout = spec.kv_layout(codec.format.page_tokens)
        self.pools: tuple[LayerPages, ...] = tuple(
            codec.new_layer(num_pages, num_slots, spec.num_kv_heads) for _ in range(spec.num_layers)
        )
        self._last: Batch | None = None

    def forward(
        self,
        spans: Sequence[Span],
        ids: Sequence[int],
        on_layer: Callable[[int], None] | None = None,
        wanted: Sequence[int] | None = None,
    ) -> Tensor:
        """Hidden states [T, hidden] of the rows that `spans` add, whose tokens are `ids`.

        `on_layer(i)` is called as soon as the KV of layer i is in its pages. With `wanted`, only the last `wanted[i]`
        rows of span i come back, which is cheaper. Raises `NonFiniteError` naming the span.
        """
        batch = Batch.of(spans, self.layout.page_tokens, self._last)
        self._last = batch

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = self.codec.attend(layer, self.pools[layer], batch, q, k, v)
            if on_layer is not None:
                on_layer(layer)
            return out

        device = self.model.device
        if batch.is_decode:
            positions = batch.where.starts.to(device)
        else:
            positions = flat_positions([(span.start, span.start + span.count) for span in spans], device)
        tokens = int64(ids).to(device)
        rows = None if wanted is None else _last_rows(spans, wanted).to(device)
        return self.model.forward(tokens, positions, attend, rows)


def _last_rows(spans: Sequence[Span], wanted: Sequence[int]) -> Tensor:
    """int64 [sum(wanted)]: where the last `wanted[i]` rows of each span stand in the batch."""
    ends = accumulate(span.count for span in spans)
    places = [row for end, count in zip(ends, wanted, strict=True) for row in range(end - count, end)]
    return torch.tensor(places, dtype=torch.int64)
