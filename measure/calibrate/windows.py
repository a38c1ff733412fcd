"""The text of a calibration, as windows of tokens.

By default it is code and documentation of this Python's library: the files that our trainers do not hold out, so that
`hackkv eval` scores none of them. The first tokens of many files tell more than all tokens of a few.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from hackkv.errors import ConfigError
from hackkv.tokenizer import Tokenizer
from measure.accuracy.text import not_held_out
from measure.tasks import Ids, join

WINDOW_TOKENS: Final = 2048
DOCUMENT_TOKENS: Final = 1024
"""The most tokens of one file of the default text."""


@dataclass(frozen=True, slots=True)
class TokenWindows:
    """Tokens that the model reads, window by window, each from an empty cache."""

    windows: tuple[Ids, ...]
    source: str
    """A description of where the text comes from."""
    digest: str
    """SHA-256 of all tokens, little-endian int64, in hexadecimal digits."""

    @property
    def tokens(self) -> int:
        """Tokens in all windows."""
        return sum(map(len, self.windows))


def windows_of(tokenizer: Tokenizer, file: Path | None, tokens: int, longest: int) -> TokenWindows:
    """The first `tokens` tokens of `file` or of the default text, or all if there are fewer, in windows of `longest`.

    Raises `ConfigError` naming the file if it cannot be read as UTF-8.
    """
    prefix = np.array(tokenizer.encode(""), np.int64)
    if file is None:
        parts, source = _default(tokenizer, tokens), "files of this Python's library that no trainer holds out"
    else:
        parts, source = iter([_encode(tokenizer, _read(file))]), file.name
    stream = _first(parts, tokens)
    size = min(WINDOW_TOKENS, longest) - len(prefix)
    windows = tuple(join(prefix, stream[start : start + size]) for start in range(0, len(stream), size))
    digest = hashlib.sha256(b"".join(window.astype("<i8").tobytes() for window in windows)).hexdigest()
    return TokenWindows(windows, source, digest)


def _default(tokenizer: Tokenizer, tokens: int) -> Iterator[Ids]:
    for document in not_held_out():
        yield _encode(tokenizer, document.text)[:DOCUMENT_TOKENS]


def _first(parts: Iterator[Ids], tokens: int) -> Ids:
    """The first `tokens` of all parts; makes no more parts than they need."""
    taken, count = [np.array([], np.int64)], 0
    for part in parts:
        taken.append(part[: tokens - count])
        count += len(taken[-1])
        if count == tokens:
            break
    return join(*taken)


def _encode(tokenizer: Tokenizer, text: str) -> Ids:
    return np.array(tokenizer.encode(text, add_special_tokens=False), np.int64)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8: {error.reason} at byte {error.start}") from error
