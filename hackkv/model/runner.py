"""One forward pass of a model over a ragged batch, with its KV in a codec's pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from hack_kernels.choosing import FAULTY, ChosenIds
from hack_kernels.device_choosing import brought
from torch import Tensor

from hackkv.batch import Batch, Span, non_finite
from hackkv.codec import KvCodec, rows_held
from hackkv.errors import NonFiniteError
from hackkv.kv_memory import KvMemory
from hackkv.model.graphs import Graphs, recordable, recorder_on
from hackkv.model.llama import Attend, Llama
from hackkv.model.sampler import SamplerState, accept, choosing, no_choice
from hackkv.step_input import Spare
from hackkv.types import KvLayout, Token


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedStep:
    """A step that the device was given."""

    logits: Tensor
    """[B, vocab]"""
    choice: ChosenIds


class ModelRunner:
    """A model, a codec, and the KV of all sequences on this node."""

    def __init__(
        self,
        model: Llama,
        codec: KvCodec,
        num_pages: int,
        num_slots: int,
        *,
        prompts: bool = True,
        recorded: int = 0,
    ) -> None:
        """`prompts` says whether whole prompts are computed here. `record` records steps of up to `recorded` sequences,
        where the device and the codec can."""
        spec = model.spec
        self.model = model
        self.codec = codec
        self.layout: KvLayout = spec.kv_layout(codec.page_tokens)
        recorder = recorder_on(model.device, model.kernels) if recorded else None
        takes = recorder is not None and recordable(codec, model.dtype, queues=recorder.queues)
        self._recorder = recorder if takes else None
        spare = 1 if self._recorder is not None and self._recorder.queues else 0
        self.memory = KvMemory(codec, self.layout, num_pages + spare, num_slots + spare, prompts=prompts)
        self._graphs: Graphs | None = None
        if self._recorder is not None:
            self._graphs = Graphs(model, codec, self.memory, Spare(num_pages, num_slots), recorded)
        self._last: Batch | None = None
        # Without evictions and choices of pages a row sees the same in the cache as within its prompt.
        self._ends_alone = codec.bytes_follow_tokens and codec.decodes_as_prefill

    def record(self) -> None:
        """Record decode steps if this runner was told to, before it serves anybody. Raises `ConfigError`."""
        if self._graphs is not None and self._recorder is not None:
            self._graphs.record(self._recorder)

    def forward(
        self,
        spans: Sequence[Span],
        ids: Sequence[int],
        on_layer: Callable[[int], None] | None = None,
        wanted: Sequence[int] | None = None,
    ) -> Tensor:
        """Hidden states [T, hidden] of the rows that `spans` add, whose tokens are `ids`.

        `on_layer(i)` is called as soon as the KV of layer i is in its pages. With `wanted`, only the last `wanted[i]`
        rows of span i are returned, which is cheaper. Raises `NonFiniteError` naming the span. The host asks once, when
        all layers are done. Until then KV of a span at fault is undefined in `on_layer`; that of other spans is right.
        """
        batch = self._lay_out(spans, ids, wanted)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = self.codec.attend(layer, self.memory.pools[layer], batch, q, k, v)
            if on_layer is not None:
                on_layer(layer)
            return out

        hidden = self._run(batch, attend)
        if faulty := self.model.kernels.set_in(batch.faulty):
            raise self._named(batch, faulty[0])
        return hidden

    def choose(self, spans: Sequence[Span], ids: Sequence[int], states: Sequence[SamplerState]) -> list[Token]:
        """Run one row of each sequence and choose the token after it: the host waits for the device once.

        Raises `NonFiniteError` naming the first span at fault, after the others have advanced. Raises `GuideError`
        before any sequence has advanced.
        """
        found = self.end(self.begin(spans, ids, states), range(len(spans)), spans, ids, states)
        for error in found:
            if isinstance(error, NonFiniteError):
                raise error
        return [token for token in found if isinstance(token, Token)]

    def looks_ahead(self, spans: Sequence[Span]) -> bool:
        """Whether `begin_after` takes these spans. Such a step does not wait for the host."""
        return self._graphs is not None and self._graphs.queues and self._graphs.takes(spans)

    def begin(self, spans: Sequence[Span], ids: Sequence[int], states: Sequence[SamplerState]) -> LaunchedStep:
        """Give the device a step of `choose`. Raises `GuideError` naming the span."""
        return self._begin(self._step(spans, ids), states)

    def begin_after(
        self, spans: Sequence[Span], before: Sequence[tuple[LaunchedStep, int]], states: Sequence[SamplerState]
    ) -> LaunchedStep:
        """Give the device the step after one that is under way and whose tokens the host has not seen. Span i takes the
        token that `before[i]`, a row of a step, will choose. Needs `looks_ahead`, and `foresees` of all states.

        The pages that the step fills stay open and need not be in the spans: `end_after` follows before the next step.
        """
        assert self._graphs is not None
        chosen = list(dict.fromkeys(begun.choice.there for begun, _ in before))
        firsts = dict(zip(chosen, accumulate(map(len, chosen), initial=0), strict=False))
        rows = [firsts[begun.choice.there] + row for begun, row in before]
        tokens = chosen[0] if len(chosen) == 1 else torch.cat(chosen)
        if rows != list(range(len(tokens))):
            tokens = tokens[brought(rows, self.model.device)]
        return self._begin(self._graphs.run(spans, [0] * len(spans), tokens), states, later=True)

    def end_after(self, spans: Sequence[Span]) -> None:
        """Seal the pages that a step of `begin_after` has filled. `spans` are those of its rows that count."""
        assert self._graphs is not None
        self._graphs.seal(spans)

    def end(
        self,
        begun: LaunchedStep,
        rows: Sequence[int],
        spans: Sequence[Span],
        ids: Sequence[int],
        states: Sequence[SamplerState],
    ) -> list[Token | NonFiniteError]:
        """Wait for the choices of `rows` of a step, to which `spans`, `ids` and `states` belong. A choice is a token,
        by which its state advances, or an error that names the span by its index in `spans`."""
        every = begun.choice.ids()
        found: list[Token | NonFiniteError | None] = [
            self._fault(at, every[row], spans[at], ids[at]) for at, row in enumerate(rows)
        ]
        sound = [at for at, error in enumerate(found) if error is None]
        chosen = {rows[at]: every[rows[at]] for at in sound}
        tokens = accept(chosen, begun.logits, [states[at] for at in sound], self.model.kernels)
        for at, token in zip(sound, tokens, strict=True):
            found[at] = token
        return [each for each in found if each is not None]

    def _fault(self, at: int, found: int, span: Span, token_id: int) -> NonFiniteError | None:
        """The error of a row whose choice is `found`; None if that is a token. If K or V is at fault, this row alone is
        computed again to find the value: a step under way may have written to the slots of other rows by now."""
        if found >= 0:
            return None
        error = self._named(self._lay_out([span], [token_id]), 0) if found == FAULTY else no_choice(at, found)
        error.span = at
        return error

    def _begin(
        self, step: tuple[Tensor, Tensor], states: Sequence[SamplerState], *, later: bool = False
    ) -> LaunchedStep:
        hidden, faulty = step
        logits = self.model.logits(hidden)
        return LaunchedStep(logits, choosing(logits, states, self.model.kernels, faulty, later=later))

    def end_prompt(self, span: Span) -> int:
        """Evict the rows of a computed prompt that the codec does not keep. Returns the number of rows that stay."""
        if self.codec.eviction is not None:
            for layer in range(len(self.memory.pools)):
                self.codec.eviction.evict(layer, self.memory.pools, span)
        return rows_held(self.codec, span.count)

    def _step(self, spans: Sequence[Span], ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Hidden states [B, hidden] of a row of each sequence, and which sequences are at fault, [B] bool."""
        if self._graphs is not None and self._graphs.takes(spans):
            return self._graphs.run(spans, ids)
        batch = self._lay_out(spans, ids)
        return self._run(batch, partial(self._attend, batch)), batch.faulty

    def _lay_out(self, spans: Sequence[Span], ids: Sequence[int], wanted: Sequence[int] | None = None) -> Batch:
        """A batch with the inputs of the model: tokens, positions, and the wanted rows unless all are wanted."""
        more, positions = [ids], _positions(spans)
        if positions or wanted is not None:
            more.append(positions)
        if wanted is not None:
            more.append(_last_rows(spans, wanted))
            more.append([at for at, count in enumerate(wanted) if count])
        batch = Batch.of(spans, self.layout.page_tokens, self.model.device, self._last, more)
        if wanted is not None and max(wanted) <= 1 and self._ends_alone and not batch.is_decode:
            _, _, rows, ending = batch.more
            batch = batch.ending(ending, rows)
        self._last = batch
        return batch

    def _attend(self, batch: Batch, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.codec.attend(layer, self.memory.pools[layer], batch, q, k, v)

    def _named(self, batch: Batch, first: int) -> NonFiniteError:
        """The error of a batch whose first faulty sequence is `first`; repeats the pass up to the layer at fault."""
        batch.faulty.zero_()

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = self._attend(batch, layer, q, k, v)
            if self.model.kernels.set_in(batch.faulty):
                raise non_finite(layer, batch, k, v)
            return out

        try:
            self._run(batch, attend)
        except NonFiniteError as error:
            return error
        return NonFiniteError("K or V is not finite", first)

    def _run(self, batch: Batch, attend: Attend) -> Tensor:
        ids, *rest = batch.more
        positions = rest[0] if rest and rest[0].numel() else batch.where.starts
        return self.model.forward(ids, positions, attend, rest[1] if len(rest) > 1 else None)


def _positions(spans: Sequence[Span]) -> list[int]:
    """The positions of all rows. Empty if each span has one row and lost none: then its start is its position."""
    if all(span.count == 1 and not span.evicted for span in spans):
        return []
    return [at for span in spans for at in range(span.position, span.position + span.count)]


def _last_rows(spans: Sequence[Span], wanted: Sequence[int]) -> list[int]:
    """[sum(wanted)]: indices in the batch of the last `wanted[i]` rows of each span."""
    ends = accumulate(span.count for span in spans)
    return [row for end, count in zip(ends, wanted, strict=True) for row in range(end - count, end)]
