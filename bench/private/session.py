"""One prompt and its answers, step by step: the same program for numpy in the clear and for each party of a protocol.

The client is party 0 and owns the prompt; party 1 owns the weights. The prompt is computed once. Then each variant
answers from the KV of the prompt: from all rows, the rows that stay (MPCache §4.2), some clusters of all rows (§4.3),
or some clusters of the rows that stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import numpy as np

from bench.private.model import Shape, angles, attend, evicted, normed, prefill_layer, project, rest
from bench.private.rules import Array, Rules, bounds, chosen

Values = np.ndarray[Any, Any]
Function = Callable[..., Sequence[Array]]
"""Called with `xp` and arrays."""
CLIENT: Final = 0
OWNER: Final = 1
LAYER: Final = ("qkv", "o", "up", "down")


@dataclass(frozen=True, slots=True)
class Variant:
    """How an answer is decoded."""

    evicts: bool
    selects: bool
    gathers: bool = False
    """True: gather K and V of the selected clusters. False: gather scores and scatter weights."""


VARIANTS: Final[Mapping[str, Variant]] = {
    "full": Variant(False, False),
    "static": Variant(True, False),
    "dynamic": Variant(False, True),
    "mpcache": Variant(True, True),
    "mpcache-rows": Variant(True, True, gathers=True),
}


class Machine(Protocol):
    """A place for arrays and functions: numpy in the clear, or one party of a protocol."""

    def share(self, name: str, owner: int, value: Values | None, shape: tuple[int, ...]) -> None:
        """Make the secret `name` of `value` [*shape] float32, which party `owner` passes; others pass None."""

    def run(self, label: str, function: Function, inputs: Sequence[str | Values], outputs: Sequence[str]) -> None:
        """Compute the secrets `outputs` from secrets and public arrays."""

    def open(self, name: str) -> Values | None:
        """Return the secret `name` to the client; None to others."""


@dataclass(frozen=True, slots=True)
class Task:
    """The public part of a job."""

    shape: Shape
    rules: Rules
    sizes: Mapping[str, tuple[int, ...]]
    """Name -> shape of the weights."""
    tokens: int
    answer: int
    variants: tuple[str, ...]
    dealt: bool = False
    """Whether the prompt's KV is computed in the clear, so that only the answers run under the protocol."""

    def deals(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the dealt arrays: K, V and votes of each layer, and logits that choose the first token."""
        rows = (self.shape.kv_heads, self.tokens)
        sizes: dict[str, tuple[int, ...]] = {"logits": (1, self.sizes["embed"][0])}
        for layer in range(self.shape.layers):
            k = v = (*rows, self.shape.head_dim)
            sizes |= {f"k{layer}": k, f"v{layer}": v, f"votes{layer}": rows}
        return sizes


def respond(
    machine: Machine,
    task: Task,
    prompt: Sequence[int] | None,
    weights: Mapping[str, Values] | None,
    dealt: Mapping[str, Values] | None = None,
) -> dict[str, Any]:
    """The answer of each variant (`tokens`), and the prompt's rows that stayed in each choosing layer (`kept`).

    Only the client passes `prompt`, or `dealt`, and learns both results; only the owner passes `weights`.
    """
    for name, size in task.sizes.items():
        machine.share(name, OWNER, weights[name] if weights else None, size)
    if task.dealt:
        for name, size in task.deals().items():
            machine.share(name, CLIENT, dealt[name] if dealt else None, size)
    else:
        _prefill(machine, task, prompt)
    first = _greedy(machine.open("logits"))
    kept = _evict(machine, task) if any(VARIANTS[name].evicts for name in task.variants) else {}
    return {"tokens": {name: _answer(machine, task, name, first) for name in task.variants}, "kept": kept}


def _prefill(machine: Machine, task: Task, prompt: Sequence[int] | None) -> None:
    vocabulary, turn = task.sizes["embed"][0], angles(task.shape, 0, task.tokens)
    machine.share("x", CLIENT, _one_hot(prompt, vocabulary), (task.tokens, vocabulary))
    machine.run("embed", _product, ["x", "embed"], ["x"])
    for layer in range(task.shape.layers):
        into = ["x", *(f"{name}{layer}" for name in ("k", "v", "votes"))]
        machine.run("prefill", partial(_layer, task.shape, task.rules), ["x", *_weights(layer), *turn], into)
    machine.run("prefill head", _last, ["x", "head"], ["logits"])


class Counter:
    """A `Machine` that computes nothing and counts runs."""

    def __init__(self) -> None:
        self.runs = 0

    def share(self, name: str, owner: int, value: Values | None, shape: tuple[int, ...]) -> None:
        """Do nothing."""

    def run(self, label: str, function: Function, inputs: Sequence[str | Values], outputs: Sequence[str]) -> None:
        """Count the run."""
        self.runs += 1

    def open(self, name: str) -> None:
        """None, as for any party but the client."""


def runs(task: Task) -> int:
    """Number of runs of a task."""
    counter = Counter()
    respond(counter, task, None, None)
    return counter.runs


def _evict(machine: Machine, task: Task) -> dict[int, list[list[int]]]:
    """Make the secrets `kept k0` and so on from the rows that stay. They are opened only to compare them with a run in
    the clear."""
    opened = dict[int, list[list[int]]]()
    for chooser in sorted({task.rules.chooser(layer) for layer in range(task.shape.layers)}):
        followers = [layer for layer in range(task.shape.layers) if task.rules.chooser(layer) == chooser]
        rows = [f"{name}{layer}" for layer in followers for name in "kv"]
        into = ["kept", *(f"kept {name}" for name in rows)]
        machine.run("evict", partial(_stay, task.rules), [f"votes{chooser}", *rows], into)
        found = machine.open("kept")
        if found is not None:
            opened[chooser] = [np.flatnonzero(head).tolist() for head in found]
    return opened


def _answer(machine: Machine, task: Task, name: str, first: int | None) -> list[int]:
    """The tokens of a variant's answer. The first token comes from the prompt."""
    variant, shape, rules, vocabulary = VARIANTS[name], task.shape, task.rules, task.sizes["embed"][0]
    before, rows = ("kept ", rules.held(task.tokens)) if variant.evicts else ("", task.tokens)
    selects, room = variant.selects and rules.chooses(rows // rules.page_tokens), task.answer - 1
    for layer in range(shape.layers):
        for new in ("new k", "new v"):
            empty = np.zeros((shape.kv_heads, room, shape.head_dim), np.float32)
            machine.share(f"{new}{layer}", CLIENT, None if first is None else empty, empty.shape)
        if selects and rules.chooser(layer) == layer:
            machine.run(f"{name}: bounds", partial(_bounds, rules), [f"{before}k{layer}"], _ends(layer))
    answer = [first]
    for nth in range(room):
        here, seen = np.arange(room) == nth, np.arange(room) <= nth
        turn = angles(shape, task.tokens + nth, 1)
        machine.share("x", CLIENT, _one_hot(answer[-1:], vocabulary), (1, vocabulary))
        machine.run(f"{name}: embed", _product, ["x", "embed"], ["x"])
        for layer in range(shape.layers):
            grown = [f"new k{layer}", f"new v{layer}"]
            qkv, *others = _weights(layer)
            machine.run(f"{name}: project", partial(_project, shape), [here, "x", qkv, *grown, *turn], ["q", *grown])
            if selects and rules.chooser(layer) == layer:
                machine.run(f"{name}: choose", partial(_choose, rules), ["q", *_ends(layer)], ["choice"])
            held = [f"{before}k{layer}", f"{before}v{layer}"]
            read = ["choice"] if selects else []
            attending = partial(_attend, rules, variant.gathers)
            machine.run(f"{name}: attend", attending, [seen, "q", *held, *grown, *read], ["out"])
            machine.run(f"{name}: rest", _rest, ["x", "out", *others], ["x"])
        machine.run(f"{name}: head", _last, ["x", "head"], ["logits"])
        answer.append(_greedy(machine.open("logits")))
    return [token for token in answer if token is not None]


def _weights(layer: int) -> list[str]:
    return [f"{layer}.{name}" for name in LAYER]


def _ends(layer: int) -> list[str]:
    return [f"of pairs{layer}", f"of clusters{layer}"]


def _one_hot(tokens: Sequence[int | None] | None, vocabulary: int) -> Values | None:
    if tokens is None or None in tokens:
        return None
    rows: Values = np.asarray(tokens)[:, None] == np.arange(vocabulary)
    return rows.astype(np.float32)


def _greedy(logits: Values | None) -> int | None:
    return None if logits is None else int(logits[-1].argmax())


def _product(xp: Any, x: Array, matrix: Array) -> list[Array]:
    return [xp.matmul(x, matrix)]


def _last(xp: Any, x: Array, head: Array) -> list[Array]:
    return [xp.matmul(normed(xp, x[-1:]), head)]


def _layer(shape: Shape, rules: Rules, xp: Any, x: Array, *given: Array) -> Sequence[Array]:
    return prefill_layer(xp, shape, rules, x, given[:4], *given[4:])


def _stay(rules: Rules, xp: Any, votes: Array, *rows: Array) -> Sequence[Array]:
    kept, left = evicted(xp, rules, votes, rows)
    return [kept, *left]


def _bounds(rules: Rules, xp: Any, keys: Array) -> Sequence[Array]:
    return bounds(xp, rules, keys)


def _project(shape: Shape, xp: Any, *given: Array) -> Sequence[Array]:
    return project(xp, shape, *given)


def _choose(rules: Rules, xp: Any, *given: Array) -> Sequence[Array]:
    return [chosen(xp, rules, *given).astype(xp.float32)]


def _attend(rules: Rules, gathers: bool, xp: Any, *given: Array) -> Sequence[Array]:
    return [attend(xp, rules, gathers, *given)]


def _rest(xp: Any, x: Array, out: Array, *weights: Array) -> Sequence[Array]:
    return [rest(xp, x, out[:, :, None], *weights)]


class InTheClear:
    """A `Machine` that hides nothing: numpy in float64."""

    def __init__(self) -> None:
        self.arrays = dict[str, Values]()

    def share(self, name: str, owner: int, value: Values | None, shape: tuple[int, ...]) -> None:
        """Keep the value."""
        assert value is not None
        self.arrays[name] = value.astype(np.float64)

    def run(self, label: str, function: Function, inputs: Sequence[str | Values], outputs: Sequence[str]) -> None:
        """Call the function."""
        made = function(np, *(self.arrays[each] if isinstance(each, str) else each for each in inputs))
        self.arrays.update(zip(outputs, made, strict=True))

    def open(self, name: str) -> Values:
        """The value itself."""
        return self.arrays[name]
