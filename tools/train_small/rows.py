"""Rows of training tokens and the weight of each token in the loss.

Kinds: `text` (real text), `copy`, `recall` and `needle` (the tasks of measure.tasks, several to a row, at every
distance that the row allows) and `chat`. Random material has weight 0 where it is stated, because no model can predict
it, and weight `RECALL_WEIGHT` where it is recalled.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from measure import tasks
from measure.tasks import Encode, Ids, Phrases

Weights = npt.NDArray[np.float32]
Row = tuple[Ids, Weights]
Rng = np.random.Generator

RECALL_WEIGHT = 2.0


@dataclass(frozen=True)
class Material:
    """The material of rows: text, phrases of the tasks, and the tokenizer's `encode`."""

    text: Ids
    phrases: Phrases
    encode: Encode


@dataclass(frozen=True)
class _Item:
    """A statement and, somewhere later in the row, its recall."""

    told: Row
    asked: Row


def _weighted(*parts: tuple[Ids, float]) -> Row:
    ids = tasks.join(*(p for p, _ in parts))
    return ids, np.concatenate([np.full(len(p), w, np.float32) for p, w in parts])


def _copy_item(rng: Rng, m: Material, length: int) -> _Item:
    size = int(rng.integers(16, min(100, length // 5) + 1))
    body = tasks.random_segment(rng, m.phrases, size)
    return _Item(_weighted((body, 0.0)), _weighted((body[:1], 0.0), (body[1:], RECALL_WEIGHT)))


def _recall_item(rng: Rng, m: Material, length: int) -> _Item:
    key = tasks.random_words(rng, m.phrases, tasks.KEY_WORDS)
    value = tasks.random_words(rng, m.phrases, tasks.VALUE_WORDS)
    p = m.phrases
    told = _weighted((p.note, 0.2), (key, 0.0), (p.equals, 0.2), (value, 0.0), (p.line_end, 0.2))
    asked = _weighted((p.note, 0.2), (key, 0.0), (p.equals, 0.2), (value, RECALL_WEIGHT), (p.line_end, 0.2))
    return _Item(told, asked)


def _needle_item(rng: Rng, m: Material, length: int) -> _Item:
    key = tasks.random_words(rng, m.phrases, tasks.KEY_WORDS)
    secret = tasks.random_words(rng, m.phrases, tasks.SECRET_WORDS)
    p = m.phrases
    told = _weighted((tasks.fact(p, key, secret), 0.0))
    again = tasks.join(key, p.verb, secret, p.stop, p.line_end)
    asked = _weighted((p.question, 0.2), (key, 0.0), (p.reply, 0.2), (again, RECALL_WEIGHT))
    return _Item(told, asked)


_ITEMS: dict[str, Callable[[Rng, Material, int], _Item]] = {
    "copy": _copy_item,
    "recall": _recall_item,
    "needle": _needle_item,
}


def _scattered(rng: Rng, m: Material, length: int, make: Callable[[Rng, Material, int], _Item]) -> Row:
    """A row of real text with items stated and recalled at random places. In half of the rows every statement comes
    before any recall."""
    share = rng.uniform(0.15, 0.75)
    items: list[_Item] = []
    room = int(length * share)
    while not items or room > 0:
        items.append(make(rng, m, length))
        room -= len(items[-1].told[0]) + len(items[-1].asked[0])
    if len(items) > 1 and room < -length // 8:
        items.pop()
    order = rng.permutation(np.repeat(np.arange(len(items)), 2))
    if rng.random() < 0.5:
        order = tasks.join(rng.permutation(len(items)), rng.permutation(len(items)))
    told: set[int] = set()
    parts: list[Row] = []
    for i in order.tolist():
        parts.append(items[i].asked if i in told else items[i].told)
        told.add(i)
    text = tasks.cut(rng, m.text, max(0, length - sum(len(ids) for ids, _ in parts)))
    places = np.sort(rng.integers(0, len(text) + 1, len(parts)))
    pieces = np.split(text, places)
    out: list[Row] = [_weighted((pieces[0], 1.0))]
    for part, piece in zip(parts, pieces[1:], strict=True):
        out += [part, _weighted((piece, 1.0))]
    return _fit(out, length)


def _fit(parts: list[Row], length: int | None = None) -> Row:
    """The parts one after another, cut to `length`."""
    return tasks.join(*(ids for ids, _ in parts))[:length], np.concatenate([w for _, w in parts])[:length]


def _chat(rng: Rng, m: Material, length: int) -> Row:
    """One or more turns, then real text to the end. An answer is real text, or stated by the user before."""
    parts: list[Row] = []
    size = 0
    while size < length // 2:
        parts.append(_turn(rng, m, int(rng.integers(32, max(33, (length - size) * 2 // 3)))))
        size += len(parts[-1][0])
    parts.append(_weighted((tasks.cut(rng, m.text, max(0, length - size)), 1.0)))
    return _fit(parts, length)


def _turn(rng: Rng, m: Material, length: int) -> Row:
    """A turn: the user asks about `length` tokens of text, and the assistant answers."""
    user, assistant, end = (np.array(m.encode(t)) for t in ("<|user|>\n", "<|assistant|>\n", "<|end|>\n"))
    ask, answer = _TURNS[rng.integers(len(_TURNS))](rng, m, tasks.cut(rng, m.text, length))
    return _fit([_weighted((user, 0.5)), ask, _weighted((end, 0.5), (assistant, 0.5)), answer, _weighted((end, 0.5))])


def _repeat(rng: Rng, m: Material, text: Ids) -> tuple[Row, Row]:
    half = text[: max(16, len(text) // 2)]
    ask = _weighted((np.array(m.encode("Repeat this text:\n")), 0.2), (half, 1.0))
    return ask, _weighted((half[:1], 0.5), (half[1:], 1.0))


def _continue(rng: Rng, m: Material, text: Ids) -> tuple[Row, Row]:
    begin = len(text) // 2
    ask = _weighted((np.array(m.encode("Continue this text:\n")), 0.2), (text[:begin], 1.0))
    return ask, _weighted((text[begin:], 1.0))


def _what_note(rng: Rng, m: Material, text: Ids) -> tuple[Row, Row]:
    p = m.phrases
    key = tasks.random_words(rng, p, tasks.KEY_WORDS)
    value = tasks.random_words(rng, p, tasks.VALUE_WORDS)
    place = int(rng.integers(0, len(text)))
    what, mark = np.array(m.encode("\nWhat is the note")), np.array(m.encode("?"))
    told = tasks.join(tasks.note(p, key), value, p.line_end)
    ask = _weighted((text[:place], 1.0), (told, 0.0), (text[place:], 1.0), (what, 0.2), (key, 0.0), (mark, 0.2))
    return ask, _weighted((p.note[1:], 0.5), (key, RECALL_WEIGHT), (p.equals, 0.5), (value, RECALL_WEIGHT))


_TURNS = (_repeat, _continue, _what_note)


def make_row(rng: Rng, material: Material, kind: str, length: int) -> Row:
    """A row of exactly `length` tokens of one kind."""
    if kind == "text":
        return _weighted((tasks.cut(rng, material.text, length), 1.0))
    if kind == "chat":
        return _chat(rng, material, length)
    return _scattered(rng, material, length, _ITEMS[kind])


def batch(rng: Rng, material: Material, mix: dict[str, float], length: int, rows: int) -> Row:
    """`rows` rows of kinds drawn from `mix`, stacked."""
    kinds, weights = list(mix), np.array(list(mix.values()))
    drawn = rng.choice(len(kinds), rows, p=weights / weights.sum())
    made = [make_row(rng, material, kinds[k], length) for k in drawn.tolist()]
    return np.stack([ids for ids, _ in made]), np.stack([w for _, w in made])
