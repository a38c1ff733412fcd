"""Names of sealed pages. A name covers every token up to the page's end, the codec and model, and the request's salt.

With the open-page rule the bytes of a page are a function of exactly these, whichever request computed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from hackkv.types import Fingerprint

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class PageName:
    """Name of the last page of a prefix. Equal digests are only a hint: tokens and salt are compared, page by page."""

    digest: bytes
    """BLAKE2b over the name of the page before and this page's tokens."""
    tokens: bytes
    """This page's token ids, uint32 little-endian."""
    salt: str


def page_names(ids: Sequence[int], page_tokens: int, fingerprint: Fingerprint, salt: str) -> tuple[PageName, ...]:
    """The names of all full pages of a prompt, in order."""
    packed = np.asarray(ids, dtype="<u4").tobytes()
    page_bytes = 4 * page_tokens
    digest = _digest(repr((sorted(fingerprint.fields), salt)).encode())
    names = []
    for end in range(page_bytes, len(packed) + 1, page_bytes):
        tokens = packed[end - page_bytes : end]
        digest = _digest(digest + tokens)
        names.append(PageName(digest, tokens, salt))
    return tuple(names)


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()
