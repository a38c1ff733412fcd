"""What a pass does, recorded as a CUDA graph records it, to compare two passes.

A graph keeps the order of operators and launches, every number of the host, and the place of all memory that the pass
found; memory that the pass takes for itself is the graph's own. So a tape names a tensor by its place if it comes from
outside, and by a number if an operator of the tape made it. Two passes with equal tapes are one graph.

Unlike a graph it cannot see a copy to the host that torch makes without an operator, such as `Tensor.numpy`:
`tests/meta.py` refuses those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pytest
import torch
from hack_kernels.triton.launch import Launch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

WAITING = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten._unique2)
"""Operators for whose result the host waits, to have a value or to know a shape."""


@dataclass(frozen=True, slots=True)
class Found:
    """A tensor that the pass did not make."""

    place: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that the pass made."""

    number: int


@dataclass(frozen=True, slots=True)
class Act:
    """An operator or a launch."""

    what: object
    """The operator, or kernel, grid and options."""
    given: tuple[object, ...]
    """Tensors as `Found` or `Made`, all else as it is."""
    makes: tuple[int, ...]


class Tape(TorchDispatchMode):
    """Records while it is entered, which may be several times. What it saw stays in memory as long as the tape, so no
    later tensor lies in the place of an earlier one by chance."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.acts: list[Act] = []
        self._numbers = dict[int, int]()
        self._next = count()
        self._kept: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in WAITING, f"{func} waits for the device"
        given, form = tree_flatten((args, kwargs or {}))
        named = self._named(given)
        out = func(*args, **(kwargs or {}))
        self._add((func, form), named, given, out)
        return out

    def _add(self, what: object, named: tuple[object, ...], given: list[Any], out: Any) -> None:
        made = [x for x in tree_flatten(out)[0] if isinstance(x, Tensor)]
        for x in made:
            if id(x) not in self._numbers and not any(x is y for y in given):
                self._numbers[id(x)] = next(self._next)
        self._kept += [*made, *(x for x in given if isinstance(x, Tensor))]
        self.acts.append(Act(what, named, tuple(self._numbers.get(id(x), -1) for x in made)))

    def _named(self, given: list[Any]) -> tuple[object, ...]:
        return tuple(self._name(x) if isinstance(x, Tensor) else x for x in given)

    def _name(self, x: Tensor) -> Found | Made:
        if id(x) in self._numbers:
            return Made(self._numbers[id(x)])
        return Found(x.data_ptr(), tuple(x.shape), x.stride(), x.dtype)

    def launch(self, launch: Launch, run: Callable[[Launch], None]) -> None:
        """Record a launch, and run it: what the interpreter does for it is not on the tape."""
        given = list(launch.arguments.values())
        what = (launch.kernel, launch.grid, tuple(launch.options.items()), tuple(launch.arguments))
        named = self._named(given)
        with _disable_current_modes():
            run(launch)
        self._add(what, named, given, None)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record operators and launches."""
        run = Launch.run
        with pytest.MonkeyPatch.context() as patched, self:
            patched.setattr(Launch, "run", lambda launch: self.launch(launch, run))
            yield


def differences(one: Tape, other: Tape) -> set[str]:
    """Why two passes are not one graph; empty if they are.

    `acts`: other operators or launches, or for other types. `numbers`: a number of the host, or the shape of a tensor
    that was found, is another. `places`: a tensor that was found lies elsewhere.
    """
    if [act.what for act in one.acts] != [act.what for act in other.acts]:
        return {"acts"}
    pairs = [
        pair
        for act, its in zip(one.acts, other.acts, strict=True)
        for pair in zip(act.given, its.given, strict=True)
        if pair[0] != pair[1]
    ]
    return {_difference(*pair) for pair in pairs} | (
        {"acts"} if [a.makes for a in one.acts] != [a.makes for a in other.acts] else set()
    )


def _difference(one: object, other: object) -> str:
    if isinstance(one, Made) or isinstance(other, Made):
        return "acts"
    if isinstance(one, Found) and isinstance(other, Found) and replace(one, place=other.place) == other:
        return "places"
    return "numbers"
