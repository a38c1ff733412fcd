"""A device that has shapes and no values: code that asks for a value on it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Series
from dataclasses import fields, replace
from typing import Any, cast

import torch
from hack_kernels.base import FormatT, KernelsT, PageFormat, Planes, Pool, RowKernels, Rows, Spans, Stopwatch
from hack_kernels.choosing import ChoiceInput, Scores
from hack_kernels.compiler import Compiler
from hack_kernels.level_format import Feedback
from hack_kernels.reference.wire_order import WireOrder
from hack_kernels.rowwise import Rowwise
from hack_kernels.stopwatch import HostStopwatch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from decode_node.engine import Sequence, StepPart
from hackkv.batch import Span
from hackkv.model.sampler import SamplerState
from tests.pair import PI, greedy, prompt

META = torch.device("meta")
_aten = torch.ops.aten
ARRIVING = (_aten.to, _aten._to_copy, _aten.lift_fresh, _aten.detach, _aten.detach_)
"""Operators that bring numbers of the host to the device."""
INTO_PLACE = (*ARRIVING, _aten.slice)
"""The operators of a step whose input has a fixed place. Such a step takes a slice of the host's numbers first."""


class MetaRows(Rowwise):
    """Row kernels whose methods that read values return constants, as a device returns numbers after a wait."""

    def choose(self, given: ChoiceInput) -> list[int]:
        assert given.faulty is not None
        assert given.faulty.shape == given.logits.shape[:1] == (len(given.choosers),)
        on_device(given.logits, given.faulty)
        return [7] * len(given.choosers)

    def score(self, logits: Tensor, ids: Series[int], tops: Series[int]) -> list[Scores]:
        on_device(logits)
        return [(-1.0, [(token_id, -1.0)] * top) for token_id, top in zip(ids, tops, strict=True)]

    def set_in(self, flags: Tensor) -> list[int]:
        return []


class MetaKernels:
    """Kernels for any format, which check that their arguments are on the device."""

    served_by = "meta"
    approximation_s = 0.0

    def __init__(self, fmt: PageFormat) -> None:
        self.fmt = fmt
        self.sealed = 0

    def new_planes(self, formats: Series[PageFormat], num_pages: int, num_kv_heads: int) -> tuple[Planes, ...]:
        return WireOrder(self.fmt, META).new_planes(formats, num_pages, num_kv_heads)

    def seal(self, layer: int, pool: Pool, page_ids: Tensor, starts: Tensor, k: Tensor, v: Tensor) -> None:
        on_device(page_ids, starts, k, v)
        self.sealed += page_ids.numel()

    def requantize(self, layer: int, pool: Pool, spans: Spans, k: Tensor, v: Tensor) -> None:
        on_device(*(getattr(spans, each.name) for each in fields(spans)), k, v)
        self.sealed += 1

    def set_feedback(self, layer: int, feedback: Feedback) -> None:
        on_device(feedback.gains, feedback.weights)

    def install(self, pool: Pool, page_ids: Tensor, planes: Planes) -> None:
        on_device(page_ids, *planes.values())

    def export(self, pool: Pool, page_ids: Tensor) -> Planes:
        on_device(page_ids)
        return {name: plane[page_ids].transpose(0, 1).contiguous() for name, plane in pool.planes.items()}

    def attend(self, layer: int, pool: Pool, spans: Spans, rows: Rows) -> Tensor:
        on_device(pool.open_k, pool.open_v, *(getattr(spans, each.name) for each in fields(spans)))
        on_device(*(x for x in (rows.q, rows.k, rows.v) if x is not None))
        return torch.empty_like(rows.q, memory_format=torch.contiguous_format)


class MetaBackend:
    """Implements `Backend` for a device without values."""

    name = isa = "meta"
    compiler: Compiler | None = None
    device = META

    def __init__(self) -> None:
        self.rows: RowKernels = MetaRows()
        self.made: list[MetaKernels] = []

    def kernels_for(self, fmt: FormatT, definition: Callable[[FormatT, torch.device], KernelsT]) -> KernelsT:
        self.made.append(MetaKernels(fmt))
        return cast(KernelsT, self.made[-1])

    def stopwatch(self) -> Stopwatch:
        return HostStopwatch()

    def xxh3_64(self, pieces: Series[Tensor], seed: int) -> list[int]:
        raise AssertionError("a device without values has no checksums")

    def use_threads(self, threads: int) -> None:
        torch.set_num_threads(threads)


def on_device(*tensors: Tensor) -> None:
    assert {tensor.device for tensor in tensors} == {META}


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in the arguments or results of an operator. `tree_flatten` would search many more containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each)


class NothingComesBack(TorchDispatchMode):
    """Refuses operators that give a value to the host, and operators that compute with a CPU tensor.

    Numbers of the host arrive in memory of their own. With `into_place` they may also be copied to existing memory of
    the device, and these copies are counted.
    """

    def __init__(self, *, into_place: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._into_place = into_place
        self.operators: list[str] = []
        """All operators that ran, in order."""
        self.brought = 0
        """The number of copies of the host's numbers to existing memory of the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.operators.append(str(func))
        given = [*tensors_in((args, *kwargs.values()))]
        name = func.overloadpacket
        assert name is not torch.ops.aten._local_scalar_dense, f"{func} asks for a value"
        out = func(*args, **kwargs)
        made = [*tensors_in(out)]
        if self._into_place and name is _aten.copy_ and [x.device.type for x in given] == ["meta", "cpu"]:
            self.brought += 1
        elif any(x.device == META for x in given):
            # A scalar that Python made, such as a number in a formula, is not a tensor that was left on the CPU.
            assert all(x.device == META or x.dim() == 0 for x in (*given, *made)), f"{func} mixes devices"
        elif given:
            arrives = name in (INTO_PLACE if self._into_place else ARRIVING)
            assert arrives, f"{func} computes on the processor"
        return out


def on_meta(value: Any, dtype: torch.dtype | None = None) -> Any:
    """A dataclass of weights whose tensors have no values; of `dtype`, if that is given."""
    return placed(value, META, dtype)


def placed(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """A dataclass of weights whose tensors are on `device`; of `dtype`, if that is given."""
    if isinstance(value, Tensor):
        return value.to(device, dtype)
    if isinstance(value, tuple):
        return tuple(placed(each, device, dtype) for each in value)
    if value is None:
        return None
    return replace(value, **{each.name: placed(getattr(value, each.name), device, dtype) for each in fields(value)})


def two_sequences() -> list[StepPart]:
    """Two parts of a step. One sequence fills a page with its second row and is greedy. The other is in the middle of a
    page and uses all settings of sampling."""
    parts = list[StepPart]()
    sampled = {"temperature": 0.7, "top_p": 0.9, "top_k": 9, "presence_penalty": 1.0, "logprobs": 2}
    cases: list[tuple[int, dict[str, object]]] = [(PI - 2, {}), (5, {**sampled, "repetition_penalty": 1.1})]
    for slot, (held, settings) in enumerate(cases):
        request = greedy("r", prompt(1, held), 9, **settings)
        sequence = Sequence([5], SamplerState(request.sampling, request.prompt_ids, ()), 0.0)
        parts.append(StepPart(sequence, Span(slot, held, 1, (2 * slot, 2 * slot + 1)), replay=False))
    return parts


def later(parts: Series[StepPart]) -> list[StepPart]:
    """The same sequences in the next step."""
    return [part._replace(span=replace(part.span, held=part.span.held + 1)) for part in parts]
