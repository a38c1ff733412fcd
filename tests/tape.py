"""Records a pass as a CUDA graph would, to compare two passes and to replay one.

A graph keeps the order of operators and launches, every number of the host, and the address of all memory that existed
before the pass. Memory that the pass allocates belongs to the graph. So a tape names a tensor by its address if it
comes from outside, and by a number if an operator of the tape made it. Two passes with equal tapes are one graph.

A tape's replay does the same as a graph's: the same operators and launches with the same numbers on the same memory,
whatever the host knows by then. Before a replay, memory that the pass allocated is filled with rubbish, as if another
graph of the same pool had run.

Unlike a graph, a tape cannot see a copy to the host that torch makes without an operator, such as `Tensor.numpy`.
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
from hack_kernels import check
from hack_kernels.triton.launch import Launch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from hackkv.model import runner

aten = torch.ops.aten
WAITING = (aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal, aten.nonzero, aten._unique2)
"""Operators for which the host waits, because it needs a value or a shape."""


RUBBISH = 0x5A
"""The value of every byte of rubbish."""


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
    """The arguments: tensors as `Found` or `Made`, others unchanged."""
    makes: tuple[int, ...]


class Tape(TorchDispatchMode):
    """Records while it is entered, possibly several times. Tensors that it has seen stay in memory as long as the tape,
    so no later tensor gets the address of an earlier one by chance."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.acts: list[Act] = []
        self._numbers = dict[int, int]()
        self._next = count()
        self._kept: list[Tensor] = []
        self._own = dict[int, torch.UntypedStorage]()
        """Address -> memory that the pass allocated."""
        self._found = set[int]()
        """Addresses of other memory."""
        self._again: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in WAITING, f"{func} waits for the device"
        given, form = tree_flatten((args, kwargs or {}))
        named = self._named(given)
        out = func(*args, **(kwargs or {}))
        self._add((func, form), named, given, out)
        made = _tensors(out)

        def again() -> None:
            for there, new in zip(made, _tensors(func(*args, **(kwargs or {}))), strict=True):
                if new.data_ptr() != there.data_ptr():
                    there.copy_(new)

        self._again.append(again)
        return out

    def _add(self, what: object, named: tuple[object, ...], given: list[Any], out: Any) -> None:
        made = _tensors(out)
        self._found |= {x.untyped_storage().data_ptr() for x in _tensors(given)} - self._own.keys()
        for x in made:
            memory = x.untyped_storage()
            if memory.data_ptr() not in self._found:
                self._own[memory.data_ptr()] = memory
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
        """Record a launch, and run it. The interpreter's own operators are not recorded."""
        given = list(launch.arguments.values())
        what = (launch.kernel, launch.grid, tuple(launch.options.items()), tuple(launch.arguments))
        named = self._named(given)
        with _disable_current_modes():
            run(launch)
        self._add(what, named, given, None)
        self._again.append(lambda: run(launch))

    def replay(self) -> None:
        """Run the pass again."""
        for memory in self._own.values():
            torch.tensor([], dtype=torch.uint8).set_(memory).fill_(RUBBISH)
        for again in self._again:
            again()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record operators and launches."""
        run = Launch.run
        with pytest.MonkeyPatch.context() as patched, self:
            patched.setattr(Launch, "run", lambda launch: self.launch(launch, run))
            patched.setattr(
                check, "_page_ids", lambda pool, page_ids: None
            )  # the check reads only host memory, so it never runs on a GPU
            yield


class TapeRecorder:
    """Implements `Recorder` where there is no GPU."""

    queues = True

    def __init__(self) -> None:
        self.tapes: list[Tape] = []
        self.replays = 0

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        tape = Tape()
        with tape.recording():
            work()
        self.tapes.append(tape)

        def replay() -> None:
            self.replays += 1
            tape.replay()

        return replay


@contextmanager
def on_tape() -> Iterator[TapeRecorder]:
    """Let every new `ModelRunner` that records do so on tapes."""
    recorder = TapeRecorder()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runner, "recorder_on", lambda device, kernels: recorder)
        yield recorder


def differences(one: Tape, other: Tape) -> set[str]:
    """Why two passes are not one graph; empty if they are.

    `acts`: operators, launches or types differ. `numbers`: a number of the host, or the shape of a tensor from outside,
    differs. `places`: the address of a tensor from outside differs.
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


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_flatten(values)[0] if isinstance(x, Tensor)]
