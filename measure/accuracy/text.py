"""Held-out text, and the rest of Python's library for fits that must not see the text that is scored.

The held-out text is what the shipped model's trainer kept back, in a file beside the model (`held_out.jsonl`). Without
that file, the same split of the library's own sources serves. A file is held out if the hash of its name falls below a
bound, so the split needs no list and is the same on every machine. `tools/train_small/corpus.py` decides with the same
rule; a test compares them.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hackkv.packaged import SHIPPED

FILE = "held_out.jsonl"
HELD_OUT_SHARE = 0.03
MIN_CHARS = 400
SKIPPED = frozenset(
    (
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idle_test",
        "__pycache__",
        "lib2to3",
        "encodings",
        "pydoc_data",
    )
) | frozenset(("idlelib", "turtledemo", "config-3.11-x86_64-linux-gnu", "_pydecimal.py", "_osx_support.py"))
CODE_SUFFIX = ".py"


@dataclass(frozen=True, slots=True)
class Document:
    """A file: its name inside its source, and its text."""

    name: str
    text: str

    @property
    def is_code(self) -> bool:
        """Whether it is Python."""
        return self.name.endswith(CODE_SUFFIX)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Documents that no trainer of ours saw, and a description of where they come from."""

    documents: tuple[Document, ...]
    source: str


def held_out(model: Path) -> HeldOut:
    """The text kept beside the model or beside the shipped one, else the held-out part of the library."""
    for path in (model / FILE, SHIPPED / FILE):
        if path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines()
            records = [json.loads(line) for line in lines]
            documents = tuple(Document(record["name"], record["text"]) for record in records)
            return HeldOut(documents, f"{path.parent.name}/{FILE}, {len(documents)} files that the trainer held out")
    documents = tuple(_library(Path(sysconfig.get_paths()["stdlib"])))
    return HeldOut(documents, f"{len(documents)} files of this Python's library that the trainer holds out by name")


def not_held_out() -> Iterator[Document]:
    """The files of this Python's library that no trainer of ours holds out, so nothing is scored on them.

    They come in an order that mixes packages, the same on every machine with this Python.
    """
    files = _files(Path(sysconfig.get_paths()["stdlib"]))
    named = {name: path for name, path in files if not is_held_out(name)}
    for name in sorted(named, key=_digest):
        yield from _read(name, named[name])


def is_held_out(name: str) -> bool:
    """The trainer's rule: whether a file of this name is held out."""
    return int(_digest(name)[:8], 16) / 2**32 < HELD_OUT_SHARE


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def _library(root: Path) -> Iterator[Document]:
    for name, path in _files(root):
        if is_held_out(name):
            yield from _read(name, path)


@cache
def _files(root: Path) -> tuple[tuple[str, Path], ...]:
    """Names and paths of the files of code below `root`, in order. A library does not change while it is read."""
    named = ((path.relative_to(root).as_posix(), path) for path in sorted(root.rglob(f"*{CODE_SUFFIX}")))
    return tuple((name, path) for name, path in named if SKIPPED.isdisjoint(name.split("/")))


def _read(name: str, path: Path) -> Iterator[Document]:
    """The document of a file; nothing if the file is short."""
    text = path.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n").expandtabs(8)
    if len(text) >= MIN_CHARS:
        yield Document(name, text)
