"""Names of sealed pages. A name covers every token up to the page's end, the codec and model, and the request's salt.

With the open-page rule the bytes of a page are a function of exactly these, whichever request and node computed it. So
nodes tell each other and the router by name what they hold.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Final

from hackkv.types import WIRE_FORM, Fingerprint

DIGEST_BYTES: Final = 16
MARK_BYTES: Final = 8
"""A page's *mark* is this many bytes of its digest. Nodes report by marks to the router what they hold."""
MOST_MARKS: Final = 4096
"""Marks in one report of a node."""


@dataclass(frozen=True, slots=True)
class PageName:
    """Name of the last page of a prefix. Equal digests are only a hint: tokens and salt are compared, page by page."""

    digest: bytes
    """BLAKE2b over the name of the page before and this page's tokens."""
    tokens: bytes
    """This page's token ids, uint32 little-endian."""
    salt: str


class Naming:
    """Names the pages of one model and codec. How KV is coded on the wire does not matter: pages rest uncoded."""

    def __init__(self, page_tokens: int, fingerprint: Fingerprint) -> None:
        self.page_tokens = page_tokens
        self._fields = sorted(field for field in fingerprint.fields if field[0] != WIRE_FORM)

    def names(self, ids: Sequence[int], salt: str, after: PageName | None = None) -> tuple[PageName, ...]:
        """The names of all full pages of `ids`, in order. With `after`, `ids` are the tokens that follow that page."""
        before = None if after is None else after.digest
        return tuple(PageName(digest, tokens, salt) for digest, tokens in self._pages(ids, salt, before))

    def marks(self, ids: Sequence[int], salt: str) -> list[bytes]:
        """The marks of all full pages of `ids`, in order."""
        return [digest[:MARK_BYTES] for digest, _ in self._pages(ids, salt)]

    def _pages(self, ids: Sequence[int], salt: str, before: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        packed = _packed(ids)
        page_bytes = 4 * self.page_tokens
        digest = before or _digest(repr((self._fields, salt)).encode())
        for end in range(page_bytes, len(packed) + 1, page_bytes):
            tokens = packed[end - page_bytes : end]
            digest = _digest(digest + tokens)
            yield digest, tokens


def pack_marks(digests: Iterable[bytes]) -> bytes:
    """The marks of the first `MOST_MARKS` pages of these digests, one after another."""
    return b"".join(digest[:MARK_BYTES] for digest in islice(digests, MOST_MARKS))


def _packed(ids: Sequence[int]) -> bytes:
    words = array("I", ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()
