"""Rows of training tokens and the weight of each token in the loss.

Kinds: `text` (real text), `copy`, `recall` and `needle` (the tasks of bench.tasks, several to a row, with every
distance the row allows) and `chat`. Random material weighs nothing where it is stated, because nothing can predict it,
and weighs `RECALL_WEIGHT` where it is recalled.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench import tasks
from bench.tasks import Encode, Ids, Phrases

Weights = npt.NDArray[np.float32]
Row = tuple[Ids, Weights]
Rng = np.random.Generator

RECALL_WEIGHT = 2.0


@dataclass(frozen=True)
class Material:
    """What rows are made of."""

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
    """Items told and asked at random places of real text; in half of the rows everything is told before the rest."""
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
    return _fit([ids for ids, _ in out], [w for _, w in out], length)


def _fit(ids: list[Ids], weights: list[Weights], length: int) -> Row:
    return tasks.join(*ids)[:length], np.concatenate(weights)[:length]


def _chat(rng: Rng, m: Material, length: int) -> Row:
    """One or more turns whose answers are real text or were told by the user, then real text to the end."""
    parts: list[Row] = []
    size = 0
    while size < length // 2:
        turn = _turn(rng, m, int(rng.integers(32, max(33, (length - size) * 2 // 3))))
        parts.append(turn)
        size += len(turn[0])
    parts.append(_weighted((tasks.cut(rng, m.text, max(0, length - size)), 1.0)))
    return _fit([ids for ids, _ in parts], [w for _, w in parts], length)


def _turn(rng: Rng, m: Material, length: int) -> Row:
    """A question and its answer: repeat, continue, or tell what a note said."""
    user, assistant, end = (np.array(m.encode(t)) for t in ("<|user|>\n", "<|assistant|>\n", "<|end|>\n"))
    kind = rng.integers(3)
    text = tasks.cut(rng, m.text, length)
    if kind == 0:
        half = text[: max(16, length // 2)]
        ask = _weighted((np.array(m.encode("Repeat this text:\n")), 0.2), (half, 1.0))
        answer = _weighted((half[:1], 0.5), (half[1:], 1.0))
    elif kind == 1:
        begin = length // 2
        ask = _weighted((np.array(m.encode("Continue this text:\n")), 0.2), (text[:begin], 1.0))
        answer = _weighted((text[begin:], 1.0))
    else:
        item = _recall_item(rng, m, length)
        place = int(rng.integers(0, length))
        key = item.told[0][len(m.phrases.note) : len(m.phrases.note) + tasks.KEY_WORDS]
        ask_ids, again = np.array(m.encode("\nWhat is the note")), tasks.note(m.phrases, key)[len(m.phrases.note) :]
        head, tail = _weighted((text[:place], 1.0)), _weighted((text[place:], 1.0), (ask_ids, 0.2), (key, 0.0))
        asked = _weighted((np.array(m.encode("?")), 0.2))
        ask = _fit([head[0], item.told[0], tail[0], asked[0]], [head[1], item.told[1], tail[1], asked[1]], 1 << 30)
        value = item.asked[0][len(m.phrases.note) + len(again) :][: tasks.VALUE_WORDS]
        answer = _weighted((m.phrases.note[1:], 0.5), (key, RECALL_WEIGHT), (m.phrases.equals, 0.5), (value, 2.0))
    ids = [user, ask[0], end, assistant, answer[0], end]
    ones = [np.full(len(x), 0.5, np.float32) for x in ids]
    return _fit(ids, [ones[0], ask[1], ones[2], ones[3], answer[1], ones[5]], 1 << 30)


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
